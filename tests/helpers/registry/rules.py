"""Layers and functions that tests/repo/test_rules.py compares: on a rank of a group, and unsharded."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import tp_ext
from tests.helpers.registry.entries import FFN, HIDDEN, Case

TOKENS, HEADS, VOCAB = 4, 2, 6
Maker = Callable[[Any], Callable[[Tensor], Tensor]]


@dataclass(frozen=True)
class Subject:
    """``make(group) -> f``; x is a full tensor of ``shape``, of which f is given the shard along ``x_dim`` (None: all
    of it), and the result is sharded along ``y_dim``. At p = 1 f is the unsharded function; ``times_p``: f sums its
    replicated input.
    """

    make: Maker
    shape: tuple[int, ...] = (TOKENS, HIDDEN)
    x_dim: int | None = None
    y_dim: int | None = None
    times_p: bool = False


def key(group: Any) -> str | None:
    """The group as modules hold it: name, rank and size. A ProcessGroup would be the one of today."""
    return tp_ext.ParallelModule(group).tp_group.name or None


def module(make: Callable[..., nn.Module], **call: Any) -> Maker:
    def build(group: Any) -> Callable[[Tensor], Tensor]:
        torch.manual_seed(5)
        module = make(group).double()

        def f(x: Tensor) -> Tensor:
            torch.manual_seed(6)
            if any(q.dtype != x.dtype for q in module.parameters()):
                module.to(x.dtype)  # not under a transform, whose tensors it would put into the module
            return module(x, **call)

        f.module = module  # type: ignore[attr-defined]
        return f

    return build


def layer(case: Case) -> Subject:
    """A small layer as a function of its input."""
    dims = [-1 if sharded_by == "features" else None for sharded_by in (case.takes, case.gives)]
    call = {name: value for name, value in case.call.items() if name != "total_tokens"}
    make = module(lambda group: case.make(group=group), **call)
    return Subject(make, (TOKENS, FFN if case.takes == "features" else HIDDEN), *dims)
