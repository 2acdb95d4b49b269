"""Base of the planner's values: conversion to JSON and back, and immutable dicts."""

import dataclasses
import json
import reprlib
from typing import Any, NoReturn, Self

from tp_ext.checkpoint.files.plain_values import parse_json
from tp_ext.checkpoint.files.typed_values import value_of


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
        value: Self = value_of(cls, parse_json(text, f"text: {reprlib.repr(text)}"), "text")
        return value

    def _set(self, name: str, value: object) -> None:
        """Replaces a field while the value is made."""
        object.__setattr__(self, name, value)


def _plain(value: Any) -> Any:
    return {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
