"""A guard against optimizers whose update of an element depends on other elements of the tensor: on a shard they
compute another update than on the full tensor, without an error, and training depends on the number of ranks.

Importing tp_ext registers one global hook of ``torch.optim`` (:func:`refuse_on_shards`), which looks at each optimizer
in its first step; afterwards it costs one lookup a step. It knows the layouts that parameters carry. FSDP2 does not
keep those: ``tp_ext.debug.check(model, optimizer=optimizer)`` takes the layouts from the model.
"""

import math
import re
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tp_ext.nn.fqn import layouts
from tp_ext.sharding import Layout

_FAMILIES = re.compile(r"muon|adafactor|lamb(?!da)|lars|shampoo|soap", re.IGNORECASE)
_checked: "weakref.WeakSet[Optimizer]" = weakref.WeakSet()


def beyond_elements(optimizer: Optimizer) -> str:
    """Returns the name of a class of the optimizer whose updates look beyond an element; empty if there is none. Ours
    compute with full matrices."""
    kinds = [kind for kind in type(optimizer).__mro__ if kind is not Optimizer]
    if any(kind.__module__.startswith("tp_ext.") for kind in kinds):
        return ""
    return next((kind.__name__ for kind in kinds if _FAMILIES.search(kind.__name__)), "")


def find_beyond_elements(model: nn.Module, optimizer: Optimizer) -> Iterator[str]:
    """Yields a sentence if such an optimizer holds parameters that are sharded. Communicates nothing."""
    inner = getattr(optimizer, "optim", None)  # of ZeroRedundancyOptimizer
    kind = beyond_elements(inner if isinstance(inner, Optimizer) else optimizer)
    if kind:
        held = {param for group in optimizer.param_groups for param in group["params"]}
        params = dict(model.named_parameters())
        yield from _sentence(kind, ((name, layout) for name, layout in layouts(model) if params[name] in held))


def refuse_on_shards(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
    """Raises, as a global hook, in the first step of such an optimizer over parameters with the layout of a shard.

    Raises:
        ValueError: on every rank that holds a shard; nothing has been communicated or updated.
    """
    if optimizer in _checked:
        return
    kind = beyond_elements(optimizer)
    if kind:
        params = (param for group in optimizer.param_groups for param in group["params"])
        carried = ((f"a parameter of shape {tuple(p.shape)}", getattr(p, "tp_layout", None)) for p in params)
        for sentence in _sentence(kind, ((name, layout) for name, layout in carried if layout is not None)):
            raise ValueError(sentence)
    _checked.add(optimizer)


register_optimizer_step_pre_hook(refuse_on_shards)


def _sentence(kind: str, table: Iterable[tuple[str, Layout]]) -> Iterator[str]:
    for name, layout in table:
        p = math.prod(layout.sizes)
        if p > 1:
            yield (
                f"optimizer: {kind} must not update {name}, which is sharded over {p} ranks: it computes with whole "
                "tensors, and would with each shard; take tp_ext.optim.Muon, or an optimizer of single elements, such "
                "as torch.optim.AdamW"
            )
            return
