"""The arguments that an operator writes in place, found by its name and by the effect."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.utils._pytree import tree_leaves

_DUNDERS = {"__setitem__", "__iadd__", "__isub__", "__imul__", "__itruediv__", "__idiv__", "__ifloordiv__", "__imod__"}
_DUNDERS |= {"__ipow__", "__iand__", "__ior__", "__ixor__", "__ilshift__", "__irshift__", "__set__"}
_CHANGES_NO_VALUE = {"requires_grad_", "share_memory_", "rename_"}
_STATISTICS = (  # and the place of running_mean and running_var; then 5 says whether they are updated
    (F.batch_norm, 1),
    (F.instance_norm, 1),
    (torch.batch_norm, 3),
    (torch.instance_norm, 3),
    (torch.native_batch_norm, 3),
)


def written(function: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    """Yields the tensors that a function writes, by its name, before it runs."""
    name = getattr(function, "__name__", "")
    in_place = name.endswith("_") and not name.endswith("__") and name not in _CHANGES_NO_VALUE
    targets: list[Any] = [kwargs.get("out")]
    if in_place or name in _DUNDERS:
        targets.append(args[0] if args else (kwargs.get("self"), kwargs.get("input")))
    for norm, place in _STATISTICS:
        if function is norm and (
            args[5] if len(args) > 5 else kwargs.get("training", kwargs.get("use_input_stats", norm is F.instance_norm))
        ):
            targets += [*args[place : place + 2], kwargs.get("running_mean"), kwargs.get("running_var")]
    for leaf in tree_leaves(targets):
        if isinstance(leaf, Tensor):
            yield leaf


def _has_version(x: Tensor) -> bool:
    return not x.is_inference() and not is_functorch_wrapped_tensor(x)


class Unwritten:
    """Tensors that an operator must not write. Shows writes that no name says, such as ``max_norm`` of an embedding.

    Neither torch.compile nor the transforms of ``torch.func`` follow versions, so it sees none there.
    """

    def __init__(self, tensors: Iterable[Tensor]) -> None:
        seen = [] if torch.compiler.is_compiling() else [one for one in tensors if _has_version(one)]
        self._before = [(one, one._version, one.untyped_storage()._cdata) for one in seen]

    def intact(self) -> bool:
        """Returns whether all are as they were."""
        return all(one._version == version for one, version, _ in self._before)

    def seen_through(self, result: object) -> bool:
        """Returns whether a result is a view of one of them, through which it could be written later."""
        if not self._before or not isinstance(result, Tensor) or is_functorch_wrapped_tensor(result):
            return False
        return result.untyped_storage()._cdata in [storage for _, _, storage in self._before]
