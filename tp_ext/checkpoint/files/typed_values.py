"""Values of dataclasses from the plain data that JSON holds of them, by the types of their fields."""

import dataclasses
import enum
import reprlib
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from tp_ext._checks import is_finite


def value_of(kind: Any, read: Any, where: str) -> Any:
    """Returns the value of a type: of a dataclass, an enum, plain values, and lists, tuples, dicts and unions of such.

    JSON has lists in place of tuples; else the types must be the same, and dataclasses have all fields without a
    default and no others.

    Raises:
        TypeError, ValueError: another type; what the dataclass raises. ``where`` begins the messages.
    """
    if kind is Any:
        return read
    # Generic types first: they are no classes, for which the tests below ask
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return _of_any(inner, read, where)
    if origin is list or origin is tuple:
        return origin(_items(origin, inner, read, where))
    if origin in (dict, Mapping):
        if not isinstance(read, dict):
            _refuse(read, "an object", where)
        return {key: value_of(inner[1], value, f"{where}[{reprlib.repr(key)}]") for key, value in read.items()}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        return _dataclass(kind, read, where)
    if isinstance(kind, type) and issubclass(kind, enum.Enum):
        if read not in (names := [member.value for member in kind]):
            _refuse(read, f"one of {', '.join(map(repr, names))}", where)
        return kind(read)
    fits = type(read) is kind or (kind is float and type(read) is int)
    if not fits or (isinstance(read, int | float) and not is_finite(read)):
        _refuse(read, {int: "an integer", float: "a finite number", str: "a string"}.get(kind, kind.__name__), where)
    return read


def _refuse(read: Any, what: str, where: str) -> NoReturn:
    raise ValueError(f"{where}: {reprlib.repr(read)} must be {what}")


def _of_any(kinds: Sequence[Any], read: Any, where: str) -> Any:
    if read is None and type(None) in kinds:
        return None
    error: Exception = ValueError(f"{where}: None must not stand here")
    for kind in kinds:
        if kind is not type(None):
            try:
                return value_of(kind, read, where)
            except (TypeError, ValueError) as refused:
                error = refused
    raise error


def _items(origin: type, inner: Sequence[Any], read: Any, where: str) -> list[Any]:
    if not isinstance(read, list):
        _refuse(read, "a list", where)
    kinds = [inner[0]] * len(read) if origin is list or inner[1:] == (...,) else list(inner)
    if len(kinds) != len(read):
        _refuse(read, f"a list of {len(kinds)}", where)
    return [value_of(kind, item, f"{where}[{i}]") for i, (kind, item) in enumerate(zip(kinds, read, strict=True))]


def _dataclass(kind: type[Any], read: Any, where: str) -> Any:
    fields = dataclasses.fields(kind)
    needed = {field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING}
    known = {field.name for field in fields}
    if not isinstance(read, dict) or not needed <= read.keys() <= known:
        _refuse(read, f"an object with the fields {', '.join(sorted(known))} of {kind.__name__}", where)
    kinds = typing.get_type_hints(kind)
    return kind(**{name: value_of(kinds[name], value, f"{where}.{name}") for name, value in read.items()})
