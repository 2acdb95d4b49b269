"""Binding of Python functions to the operators of csrc/library.cpp: loads the library and defines the decorators of
the other files of this folder.

An operator is declared once in Python, by a function with the schema's parameters, defaults and types, and a docstring.
At run time its name is bound to the operator itself: no Python frame lies between a layer and the dispatcher. Type
checkers and editors see the declared function.
"""

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch

from tp_ext._build import load
from tp_ext._imports import after_import

library = load()

Sizes = Sequence[int] | None
Function = TypeVar("Function", bound=Callable[..., Any])

declarations: dict[str, Callable[..., Any]] = {}  # name of the schema -> the declared function, for tests


def overload_of(name: str) -> Any:
    """Returns the overload of the operator ``name``, as torch function modes see it."""
    return getattr(torch.ops.tp_ext, name).default


def c10d_operator(name: str) -> Any:
    """Returns the overload of an operator of torch's process groups."""
    return getattr(torch.ops.c10d, name).default


def _overload(name: str, function: Callable[..., Any]) -> Any:
    declarations[name] = function
    return overload_of(name)


def operator(function: Function) -> Function:
    """Binds a public operator, whose schema has the function's name, to its overload. The body is empty: C++ has it."""
    overload: Function = _overload(function.__name__, function)
    return overload


def direct_operator(function: Function) -> Function:
    """Binds a public operator that layers call often to a C function without boxing (csrc/python/direct_call.h).

    A call that passes every argument by position takes this way. With a keyword, or without an argument that has a
    default, the result is the same by the slower way of ``torch.ops``. ``torch.compile`` traces the overload.
    """
    overload = _overload(function.__name__, function)
    direct: Function = library.direct_call(function.__name__, overload)

    def traced(*args: Any, **kwargs: Any) -> Any:
        return overload(*args, **kwargs)

    # Dynamo takes longer to import than the rest of torch
    after_import("torch._dynamo", lambda: torch.compiler.substitute_in_graph(direct, skip_signature_check=True)(traced))
    return direct


def primitive(name: str) -> Callable[[Function], Function]:
    """Binds the primitive operator ``name`` to its overload. The body is its fake: shapes and dtypes of the results."""

    def bind(function: Function) -> Function:
        torch.library.register_fake(f"tp_ext::{name}", function)
        overload: Function = _overload(name, function)
        return overload

    return bind
