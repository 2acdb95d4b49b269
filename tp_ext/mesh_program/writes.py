"""What an operator writes in place: which of its arguments, by its name and by the effect."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._pytree import tree_leaves

_DUNDERS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__", "__imod__"}
_DUNDERS |= {"__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__set__"}
_CHANGES_NO_VALUE = {"requires_grad_", "share_memory_", "rename_"}
_STATISTICS = (F.batch_norm, F.instance_norm)  # (x, running_mean, running_var, weight, bias, whether to update them)


def written(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields the tensors that a function writes, by its name, before it runs."""
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") and name not in _CHANGES_NO_VALUE
    targets: list[Any] = [kwargs.get("out")]
    if in_place or name in _DUNDERS:
        targets.append(args[0] if args else (kwargs.get("self"), kwargs.get("input")))
    if function in _STATISTICS and (args[5] if len(args) > 5 else kwargs.get("training", kwargs.get("use_input_stats"))):
        targets += [*args[1:3], kwargs.get("running_mean"), kwargs.get("running_var")]
    for leaf in tree_leaves(targets):
        if isinstance(leaf, Tensor):
            yield leaf


class Unwritten:
    """Tensors that an operator must not write. Shows writes that no name says, such as ``max_norm`` of an embedding.

    torch.compile follows no versions, so it sees none.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        seen = () if torch.compiler.is_compiling() else [one for one in tensors if not one.is_inference()]
        self._before = [(one, one._version, one.untyped_storage()._cdata) for one in seen]

    def intact(self) -> bool:
        """Returns whether all are as they were."""
        return all(one._version == version for one, version, _ in self._before)

    def seen_through(self, result: object) -> bool:
        """Returns whether a result is a view of one of them, through which it could be written later."""
        if not self._before or not isinstance(result, Tensor):
            return False
        return result.untyped_storage()._cdata in [storage for _, _, storage in self._before]
