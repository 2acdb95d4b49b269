"""The tensors in the nested values that programs pass around: batches, arguments and results of models."""

import contextlib
import dataclasses
import datetime
import enum
import numbers
import pathlib
import types
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree

PLAIN_VALUES: tuple[type, ...] = (
    type(None),
    numbers.Number,
    str,
    bytes,
    bytearray,
    enum.Enum,
    pathlib.PurePath,
    range,
    slice,
    type,
)
PLAIN_VALUES += (torch.dtype, torch.device, torch.layout, torch.memory_format, np.generic, np.dtype)
PLAIN_VALUES += (datetime.date, datetime.time, datetime.timedelta, datetime.tzinfo)
_CODE: tuple[type, ...] = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.ModuleType)
_DEEPEST = 12


class NestedTensors(NamedTuple):
    """The tensors of a nested value, and the objects that may hide others.

    Attributes:
        tensors: by the expression that leads to each, as ``batch['ids']``; NumPy arrays of numbers as tensors.
        unknown: the expressions that lead to objects which may hold tensors that are not seen, and their types.
    """

    tensors: dict[str, Tensor]
    unknown: dict[str, str]


def contents_of(value: Any, name: str, is_skipped: Callable[[Any], bool] = lambda value: False) -> NestedTensors:
    """Returns the tensors of dicts, lists, tuples, dataclasses, what torch's pytree knows, arrays, and attributes of
    objects.

    Args:
        value: any.
        name: that of the value, with which the expressions begin.
        is_skipped: says of an object whether it is left out.
    """
    contents = NestedTensors({}, {})
    _visit(value, name, contents, set(), is_skipped)
    return contents


def is_cache(value: Any) -> bool:
    """Returns whether an object keeps what a model has computed for its next call, by its class: each rank its own."""
    has_update = callable(getattr(type(value), "update", None)) and not isinstance(value, Mapping | set)
    return has_update or type(value).__name__.endswith("Cache")


def _visit(value: Any, name: str, contents: NestedTensors, above: set[int], is_skipped: Callable[[Any], bool]) -> None:
    if isinstance(value, Tensor):
        contents.tensors[name] = value
    elif isinstance(value, PLAIN_VALUES + _CODE) or id(value) in above or is_skipped(value):
        return
    elif (array := _array_of(value)) is not None:
        if array.dtype.kind in "biufc":
            contents.tensors[name] = torch.from_numpy(np.array(array))
        elif array.dtype.kind == "O":
            _visit(array.flatten().tolist(), name, contents, above, is_skipped)
    else:
        inside = list(_inside(value, name)) if len(above) < _DEEPEST else None
        if inside is None or (not inside and not _is_empty(value)):
            contents.unknown[name] = type(value).__name__
        elif isinstance(value, set | frozenset) and contents_of(list(value), name).tensors:
            contents.unknown[name] = type(value).__name__  # they have no order
        else:
            for key, item in inside:
                _visit(item, key, contents, {*above, id(value)}, is_skipped)


def _array_of(value: Any) -> np.ndarray[Any, Any] | None:
    """Returns an array, also of an image or a column of a table, which have no attributes of numbers."""
    if isinstance(value, np.ndarray):
        return value
    if not isinstance(value, type) and (hasattr(value, "__array_interface__") or hasattr(value, "__array__")):
        with contextlib.suppress(Exception):
            return np.asarray(value)
    return None


def _inside(value: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yields what a container has, with the expressions that lead to it."""
    if isinstance(value, Mapping):
        yield from ((f"{name}[{key!r}]", value[key]) for key in value)
    elif isinstance(value, tuple) and hasattr(value, "_fields"):
        yield from ((f"{name}.{key}", item) for key, item in zip(value._fields, value, strict=True))
    elif isinstance(value, list | tuple | deque | set | frozenset):
        yield from ((f"{name}[{k}]", item) for k, item in enumerate(value))
    elif type(value) in _pytree.SUPPORTED_NODES and not dataclasses.is_dataclass(value):
        items, _ = _pytree.SUPPORTED_NODES[type(value)].flatten_fn(value)
        yield from ((f"{name}[{k}]", item) for k, item in enumerate(items))
    else:
        yield from ((f"{name}.{key}", getattr(value, key)) for key in attributes_of(value))


def attributes_of(value: Any) -> list[str]:
    """Returns the names of the attributes that an object has of its own."""
    slots = [slot for cls in type(value).__mro__ for slot in _slots_of(cls)]
    names = dict.fromkeys([*getattr(value, "__dict__", {}), *slots])
    return [key for key in names if hasattr(value, key)]


def _slots_of(cls: type) -> list[str]:
    slots = vars(cls).get("__slots__", ())
    names = [slots] if isinstance(slots, str) else list(slots)
    return [name for name in names if name not in ("__dict__", "__weakref__") and not name.startswith("__")]


def _is_empty(value: Any) -> bool:
    """Returns whether a value in which nothing is seen is empty, as an empty list or an object of a class in Python. An
    object in C, as an iterator, may hold something."""
    if isinstance(value, Mapping | list | tuple | deque | set | frozenset):
        return True
    known = type(value) in _pytree.SUPPORTED_NODES or hasattr(value, "__dict__") or type(value) is object
    return known or any("__slots__" in vars(cls) for cls in type(value).__mro__)


def strided_parts(name: str, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """Yields the strided tensors inside a tensor: itself, or the parts of a sparse, nested or quantized one."""
    if tensor.is_nested:
        yield from ((f"{name}[{k}]", part) for k, part in enumerate(tensor.unbind()))
    elif tensor.layout == torch.sparse_coo:
        tensor = tensor.coalesce()
        yield from ((f"{name}.indices()", tensor.indices()), (f"{name}.values()", tensor.values()))
    elif tensor.layout in (torch.sparse_csr, torch.sparse_bsr, torch.sparse_csc, torch.sparse_bsc):
        rows = tensor.layout in (torch.sparse_csr, torch.sparse_bsr)
        names = ("crow_indices", "col_indices") if rows else ("ccol_indices", "row_indices")
        yield from ((f"{name}.{part}()", getattr(tensor, part)()) for part in (*names, "values"))
    elif tensor.layout == torch.strided:
        yield name, tensor.int_repr() if tensor.is_quantized else tensor
    else:
        yield name, tensor.to_dense()
