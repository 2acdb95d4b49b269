"""What code may branch on, of the arguments of a call."""

from __future__ import annotations

import collections
import dataclasses
import functools
import hashlib
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from tp_ext._containers import PLAIN_VALUES, NestedTensors, attributes_of, contents_of, is_cache
from tp_ext.auto.module_state import FUNCTIONS, text_of
from tp_ext.auto.record.flow import is_number
from tp_ext.auto.record.trace import arguments
from tp_ext.context_layout import ContextLayout


def signature(named: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...], dict[str, bool]]:
    """What code may branch on, of the arguments of a call.

    Returns:
        The kinds of the arguments, with the values of those that are no numbers. All numbers, and the lengths of
        tensors. The names of arguments with objects that have tensors, and whether one is not looked into, such as a
        cache; then without lengths, and without the numbers in these, of which each call of a decoding has others.
    """
    values: list[Any] = []
    opaque: dict[str, bool] = {}
    kinds = []
    for name, value in named.items():
        unknown: list[bool] = []
        kinds.append((name, _kind(value, values, unknown)))
        if unknown:
            opaque[name] = any(unknown)
    if opaque:
        values.clear()
        kinds = [(name, _kind(x, [] if name in opaque else values, [], lengths=False)) for name, x in named.items()]
    return tuple(kinds), tuple(values), opaque


def _kind(value: Any, values: list[Any], opaque: list[bool], lengths: bool = True, above: tuple[int, ...] = ()) -> Any:
    if isinstance(value, Tensor):
        if lengths:
            values.extend(value.shape)
        return value.dim(), value.dtype, _strides(value)
    if isinstance(value, np.generic):
        value = value.item()
    if is_number(value):
        values.append(value)
        return type(value).__name__
    if isinstance(value, np.ndarray) and not value.dtype.hasobject:
        return value.dtype.str, value.shape, hashlib.sha256(value.tobytes()).hexdigest()
    if isinstance(value, PLAIN_VALUES):
        return type(value).__name__, repr(value)
    if isinstance(value, (*FUNCTIONS, set, frozenset)):
        return text_of(value)
    name, above = type(value).__name__, (*above, id(value))
    if id(value) in above[:-1]:  # an object that refers to itself
        return name
    # Exact types: a subclass may be a cache, which holds more than its items
    if type(value) in (list, tuple, torch.Size) or hasattr(value, "_fields"):
        return name, tuple(_kind(x, values, opaque, lengths, above) for x in value)
    if isinstance(value, functools.partial):
        return name, text_of(value.func), _kind((value.args, value.keywords), values, opaque, lengths, above)
    if isinstance(value, Mapping):
        inner = value
    else:
        items = enumerate(value) if isinstance(value, list | tuple | collections.deque) else ()
        inner = {**dict(items), **{key: getattr(value, key) for key in attributes_of(value)}}
    if not isinstance(value, Mapping) and not dataclasses.is_dataclass(value):
        # A rank has a cache of its own, and tokens of its own: the attention over a layout is no part of a plan
        is_skipped = is_cache(value) or isinstance(value, nn.Module | ContextLayout)
        contents = NestedTensors({}, {"": ""}) if is_skipped else contents_of(value, "")
        if contents.unknown or contents.tensors:
            opaque.append(bool(contents.unknown))
        if contents.unknown:
            return name
        if torch.is_grad_enabled() and any(t.requires_grad for t in contents.tensors.values()):
            raise RuntimeError(
                f"model: a {name} among its arguments has a tensor that requires a gradient, which would be a rank's "
                "part: pass the tensor in a dict, a list or a dataclass, or detached"
            )
    return name, tuple((str(k), _kind(x, values, opaque, lengths, above)) for k, x in inner.items())


def _strides(tensor: Tensor) -> Any:
    """Returns the order of a tensor's strides, whatever its lengths; () for a contiguous one."""
    if tensor.layout != torch.strided or tensor.is_contiguous():
        return () if tensor.layout == torch.strided else tensor.layout
    order = sorted(set(tensor.stride()))
    return tuple((order.index(stride), min(stride, 2)) for stride in tensor.stride())


def numbers_of(example: Any) -> tuple[Any, ...]:
    """The numbers among arguments, without the lengths of tensors."""
    values: list[Any] = []
    _kind(arguments(example), values, [], lengths=False)
    return tuple(values)
