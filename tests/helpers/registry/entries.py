"""The kinds of entries of the registry of layers, and the sizes of the layers in its cases."""

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from torch import nn

import tp_ext

HIDDEN, FFN, VOCAB, BATCH, SEQ = 8, 10, 13, 2, 3
TOKENS = BATCH * SEQ
TOTAL = {"total_tokens": TOKENS}  # what forward is called with: most layers
SEQUENCES = {"batch_size": BATCH, **TOTAL}  # and those of sequences


@dataclass(frozen=True)
class Case:
    """A small layer: ``kind(*sizes, **options)``, kind being its public name, and how it is called.

    takes: "tokens", "features" (sharded) or "ids"; gives: "tokens" or "features"; call: keywords of forward; dropout:
    it draws masks; keeps_dtype: the result has x's dtype under autocast, too. The row in docs/develop/rules.md is that
    of the first case of a kind. collectives: the numbers that its types need without and with sequence parallelism,
    each of forward with its conjugate of backward; unseen: indices of those without which the types are the same under
    SP; full_types: the types of full tensors are checked, too.
    """

    kind: str
    sizes: tuple[int | float, ...] = ()
    options: dict[str, Any] = field(default_factory=dict)
    takes: str = "tokens"
    gives: str = "tokens"
    call: dict[str, int] = field(default_factory=lambda: TOTAL)
    dropout: bool = False
    keeps_dtype: bool = False
    collectives: tuple[int, int] | None = None
    unseen: tuple[int, ...] = ()
    full_types: bool = True

    def make(self, kit: ModuleType = tp_ext, **changes: Any) -> nn.Module:
        """Makes the layer of tp_ext, or of plain torch (tests.fuzz.plain)."""
        return getattr(kit, self.kind)(*self.sizes, **self.options | changes)


@dataclass(frozen=True)
class Kind:
    """A kind of block of the fuzzer's models. ``draw(r, p, dropout)`` returns its options, ``make(options, config,
    place)`` a module that returns its result and a bias not yet added, ``valid(options, p, config)`` whether the
    library takes them; it may raise ValueError for no."""

    draw: Callable[[random.Random, int, float], dict[str, Any]]
    make: Callable[[dict, dict, Any], nn.Module]
    valid: Callable[[dict, int, dict], bool] = lambda options, p, config: True


@dataclass(frozen=True)
class Variant:
    """A layer in place of that of a kind of block: its options are ``block[name]``, None where it is not used.

    ``draw(r, layout, embedding)`` has random numbers of its own, so that a new variant leaves all other draws as they
    were; ``make`` is as that of a ``Kind``, and ``valid(options, p, config)`` gets the options of the variant alone.
    """

    of: str
    draw: Callable[[random.Random, dict, dict | None], dict[str, Any] | None]
    make: Callable[[dict, dict, Any], nn.Module]
    valid: Callable[[dict, int, dict], bool] = lambda options, p, config: True
