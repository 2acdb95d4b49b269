"""Base of the planner's values: conversion to JSON and back, and immutable dicts."""

import dataclasses
import json
import types
import typing
from collections.abc import Iterable, Mapping
from typing import Any, NoReturn, Self


class FixedDict(dict[str, Any]):
    """A dict that cannot be changed, so that a value that holds it can be hashed."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(frozenset(self.items()))

    def _refuse(self, *args: Any, **options: Any) -> NoReturn:
        raise TypeError("a value of the planner must not be changed; make another one, by dataclasses.replace")

    __setitem__ = __delitem__ = update = pop = popitem = clear = setdefault = _refuse

    def __reduce__(self) -> Any:
        return FixedDict, (dict(self),)


class Value:
    """A frozen dataclass of numbers, strings, tuples, dicts and such values, that JSON can hold."""

    def to_json(self) -> str:
        """Returns the value as JSON; :meth:`from_json` returns an equal one."""
        return json.dumps(self, default=_plain)

    @classmethod
    def from_json(cls, text: str) -> Self:
        """Returns the value of :meth:`to_json`.

        Raises:
            TypeError, ValueError: no such text, or fields of another class.
        """
        if not isinstance(text, str):
            raise TypeError(f"text: {text!r} must be a string")
        try:
            read = json.loads(text)
        except ValueError as error:
            raise ValueError(f"text: {text!r} must be JSON: {error}") from error
        value: Self = _value_of(cls, read)
        return value

    def _set(self, name: str, value: object) -> None:
        """Replaces a field while the value is made."""
        object.__setattr__(self, name, value)


def _plain(value: Any) -> Any:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}


def _value_of(kind: Any, read: Any) -> Any:
    """Returns the value of a type from what JSON holds of it."""
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        kinds = [option for option in inner if option is not type(None)]
        return None if read is None else _value_of(kinds[0], read) if len(kinds) == 1 else read
    if origin is tuple and isinstance(read, list):
        # Of another length: what makes the value refuses it
        each: Iterable[Any] = inner if len(inner) == len(read) and inner[1:] != (...,) else (inner[0],) * len(read)
        return tuple(_value_of(field, part) for field, part in zip(each, read, strict=True))
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        fields = dataclasses.fields(kind)
        known = sorted(field.name for field in fields)
        needed = {field.name for field in fields if field.default is field.default_factory is dataclasses.MISSING}
        if not isinstance(read, dict) or not needed <= read.keys() <= set(known):
            raise ValueError(f"text: {read!r} must be an object with the fields {', '.join(known)} of {kind.__name__}")
        kinds_of = typing.get_type_hints(kind)
        return kind(**{name: _value_of(kinds_of[name], value) for name, value in read.items()})
    return FixedDict(read) if isinstance(read, Mapping) else read
