"""A model with the first of equal layers alone, whose values stand for all of them."""

from __future__ import annotations

import re
from collections.abc import Callable

from torch import nn

from tp_ext.auto.proof.copies import copy_of_structure

KEPT = 2  # of equal layers: the second receives what a layer makes, the first what the embedding makes
ENUMERATES = re.compile(r"(^|_)(i|n|idx|id|index|layer|number|depth|name)($|_)")  # attributes that number layers


def shortened(model: nn.Module, kept: int | None = KEPT, edits_in: Callable[[str], str] = lambda _: "") -> nn.Module:
    """A copy without the weights, in which lists of layers have the first ``kept`` of each kind; None: all. Layers in
    which ``edits_in`` finds other edits of a plan are of other kinds."""
    copy = copy_of_structure(model)
    for path, module in list(copy.named_modules()):
        if not isinstance(module, nn.ModuleList | nn.Sequential):
            continue
        seen: dict[str, int] = {}
        for name, child in list(module._modules.items()):
            kind = _kind(child) + edits_in(f"{path}.{name}".lstrip(".")) if child is not None else ""
            seen[kind] = seen.get(kind, 0) + 1
            if child is not None and kept and seen[kind] > kept and any(True for _ in child.parameters()):
                del module._modules[name]  # the others keep their names
    return copy


def _kind(layer: nn.Module) -> str:
    """Classes, shapes and settings of a layer, without the numbers of layers."""
    rows = []
    for name, module in layer.named_modules():
        settings = {
            key: value
            for key, value in vars(module).items()
            if isinstance(value, bool | int | float | str) and not ENUMERATES.search(key)
        }
        shapes = {key: tuple(t.shape) for key, t in module._parameters.items() if t is not None}
        rows.append((name, type(module).__qualname__, sorted(settings.items()), shapes))
    return repr(rows)
