"""Arguments of a call with other tensors in them, and the modes of the caller in which a model is not run."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from tp_ext.auto.record.machinery import FUNCTIONS

DEVICES = ("cpu", "cuda")
KEPT = (nn.Module, torch.SymInt, torch.SymFloat, torch.SymBool, *FUNCTIONS)  # symbols have their comparisons


def with_tensors(value: Any, function: Callable[[Tensor], Any], memo: dict[int, Any] | None = None) -> Any:
    """Returns a nested structure with the function's result in place of each tensor: one for a tensor that comes twice.

    Containers and objects are copied, since a forward may write to them: to a cache, say."""
    memo = {} if memo is None else memo
    if id(value) in memo:
        return memo[id(value)][0]
    # Containers come before the kept types, and unknown objects last: a deep copy of them would copy their tensors
    if isinstance(value, Tensor):
        result = function(value)
    elif isinstance(value, list):
        result = copy.copy(value)
        result[:] = [with_tensors(item, function, memo) for item in value]
    elif isinstance(value, tuple):
        items = [with_tensors(item, function, memo) for item in value]
        result = type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    elif isinstance(value, Mapping):
        items_by_key = {key: with_tensors(item, function, memo) for key, item in value.items()}
        try:
            result = copy.copy(value)
            for key, item in items_by_key.items():
                result[key] = item  # type: ignore[index]
        except TypeError:  # a view that takes no items
            result = items_by_key
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        result = copy.copy(value)
        for field in dataclasses.fields(value):
            if hasattr(value, field.name):
                item = with_tensors(getattr(value, field.name), function, memo)
                object.__setattr__(result, field.name, item)
    elif isinstance(value, KEPT):
        return value
    else:
        try:
            result = copy.deepcopy(value)
        except Exception:  # of any type: of locks, of tensors in a graph
            return value
    memo[id(value)] = result, value  # with the original, so that no id comes again
    return result


def with_strides_of(tensor: Tensor, value: Tensor) -> Tensor:
    """Returns a value with the strides of a tensor of its shape, as far as that can be written to: code asks whether a
    tensor is contiguous."""
    if tensor.layout != torch.strided or value.stride() == tensor.stride():
        return value
    result = torch.empty_strided(tensor.shape, tensor.stride(), dtype=value.dtype, device=value.device)
    row = result
    for dim, stride in enumerate(tensor.stride()):
        if stride == 0 and tensor.shape[dim]:  # an expanded dim
            row, value = row.narrow(dim, 0, 1), value.narrow(dim, 0, 1)
    try:
        row.copy_(value)
    except RuntimeError:  # windows that overlap
        return value.expand(tensor.shape).contiguous()
    return result


def autocast() -> tuple[tuple[str, torch.dtype], ...]:
    """The devices on which autocast is on, with its types."""
    return tuple((d, torch.get_autocast_dtype(d)) for d in DEVICES if torch.is_autocast_enabled(d))


@contextlib.contextmanager
def without_modes() -> Iterator[None]:
    """Runs code without what its caller has switched on for calls of a model: inference mode, ``no_grad``, autocast."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(torch.inference_mode(False))
        stack.enter_context(torch.enable_grad())
        for device, dtype in autocast():
            stack.enter_context(torch.autocast(device, dtype, enabled=False))
        yield
