"""Arguments of functions of torch by their places: ``h.reshape(shape=(2, -1))`` is ``h.reshape((2, -1))``.

What intercepts a call reads its arguments by place; code may pass any of them by name."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

# Names that torch's Python functions take, by those of the operators
ALIASES = {
    "self": ("input", "x", "a", "x1"), "other": ("x2",), "dim": ("axis",), "keepdim": ("keepdims",),
    "start_dim": ("start_axis",), "end_dim": ("end_axis",),
}  # fmt: skip
_REQUIRED = object()


@dataclass(frozen=True)
class _Overload:
    """The parameters of a function: those that a place can give, name -> default, and those by name alone."""

    placed: dict[str, Any]
    named: frozenset[str]


@functools.lru_cache(maxsize=4096)
def _overloads(func: Any) -> list[_Overload]:
    """The overloads of a function; []: its parameters are not known."""
    schemas = torch._C._jit_get_schemas_for_operator(f"aten::{getattr(func, '__name__', '')}")
    if schemas and not inspect.isfunction(func):
        return [
            _Overload(
                {a.name: a.default_value if a.has_default_value() else _REQUIRED for a in of if not a.kwarg_only},
                frozenset(a.name for a in of if a.kwarg_only),
            )
            for of in (schema.arguments for schema in schemas)
        ]
    try:
        parameters = inspect.signature(func).parameters.values()
    except (TypeError, ValueError):
        return []
    # What follows *sizes has no place
    if any(p.kind in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters):
        return []
    placed = {p.name: _REQUIRED if p.default is p.empty else p.default for p in parameters if p.kind != p.KEYWORD_ONLY}
    return [_Overload(placed, frozenset(p.name for p in parameters) - set(placed))]


def by_place(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call with those by name at their places, as far as the function's parameters are known."""
    for overload in _overloads(func) if kwargs else ():
        moved = _moved(overload, args, kwargs)
        if moved is not None:
            return moved
    return tuple(args), dict(kwargs)


def _moved(
    overload: _Overload, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]] | None:
    """The arguments at the places of an overload; None: it is not the one that is called."""
    rest, values, last = dict(kwargs), list(args), len(args)
    for name, default in list(overload.placed.items())[len(args) :]:
        given = next((key for key in (name, *ALIASES.get(name, ())) if key in rest), None)
        if given is None and default is _REQUIRED:
            return None
        values.append(default if given is None else rest.pop(given))
        last = last if given is None else len(values)
    return (tuple(values[:last]), rest) if overload.named.issuperset(rest) else None
