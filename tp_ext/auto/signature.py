"""What code may branch on, of the arguments of a call."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tp_ext.auto.module_state import FUNCTIONS, PLAIN, text_of
from tp_ext.auto.record.flow import is_number
from tp_ext.auto.record.trace import arguments


def signature(named: Mapping[str, Any]) -> tuple[Any, tuple[Any, ...], list[str]]:
    """What code may branch on, of the arguments of a call.

    Returns:
        The kinds of the arguments, with the values of those that are no numbers. All numbers, and the lengths of
        tensors. The names of arguments of which not all is known, such as a cache; then without lengths, of which there
        are others in each call of a decoding.
    """
    values: list[Any] = []
    opaque: list[str] = []
    kinds = []
    for name, value in named.items():
        unknown: list[str] = []
        kinds.append((name, _kind(value, values, unknown)))
        opaque += [name] if unknown else []
    if opaque:
        values.clear()
        kinds = [(name, _kind(value, values, [], lengths=False)) for name, value in named.items()]
    return tuple(kinds), tuple(values), opaque


def _kind(value: Any, values: list[Any], opaque: list[str], lengths: bool = True) -> Any:
    if isinstance(value, Tensor):
        if lengths:
            values.extend(value.shape)
        return value.dim(), value.dtype
    if isinstance(value, PLAIN) and not is_number(value):
        return type(value).__name__, value
    if is_number(value):
        values.append(value)
        return type(value).__name__
    inner: Any = None
    if isinstance(value, Mapping):
        inner = value
    elif dataclasses.is_dataclass(value) or isinstance(value, types.SimpleNamespace):
        inner = vars(value)
    # Exact types: a subclass may be a cache, which holds more than its items
    elif type(value) in (list, tuple, torch.Size) or (isinstance(value, tuple) and hasattr(value, "_fields")):
        return type(value).__name__, tuple(_kind(x, values, opaque, lengths) for x in value)
    if inner is not None:
        return type(value).__name__, tuple((str(k), _kind(x, values, opaque, lengths)) for k, x in inner.items())
    if isinstance(value, (*FUNCTIONS, slice, set, frozenset)):
        return text_of(value) if not isinstance(value, slice) else repr(value)
    opaque.append("")
    return type(value).__name__


def values_without_lengths(example: Any) -> tuple[Any, ...]:
    """The numbers among arguments."""
    return tuple(leaf for leaf in tree_leaves(arguments(example)) if is_number(leaf))
