"""Checks of the arguments, before anything runs."""

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tp_ext._checks import check_int


def check_make_model(make_model: Any) -> None:
    """Raises TypeError unless ``make_model`` can be called with a group alone."""
    if not callable(make_model):
        raise TypeError(f"make_model: {type(make_model).__name__} must be a function of a group that returns a module")
    try:
        signature = inspect.signature(make_model)
    except ValueError:  # of a builtin
        return
    try:
        signature.bind(None)
    except TypeError:
        raise TypeError(
            f"make_model: {getattr(make_model, '__name__', make_model)}{signature} must take one argument, the group"
        ) from None


def numbers_of_ranks(p: Any) -> tuple[int, ...]:
    """Returns the numbers of ranks, each once and in order.

    Raises:
        TypeError: not a sequence of integers. ValueError: none, or one below 1.
    """
    if not isinstance(p, Sequence | set | range) or isinstance(p, str):
        raise TypeError(f"p: {p!r} must be a tuple of numbers of ranks")
    for number in p:
        check_int(p=number)
        check_int(least=1, p=number)
    if not p:
        raise ValueError("p: () must hold at least one number of ranks")
    return tuple(sorted(set(p)))


def arguments_of(example: Any) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Returns args and kwargs of forward from a tuple or a dict of them, or from a function that returns either.

    Raises:
        TypeError: anything else.
    """
    value = example
    if isinstance(example, Callable) and not isinstance(example, tuple | Mapping):  # type: ignore[arg-type]
        try:
            inspect.signature(example).bind()
        except TypeError:
            name = getattr(example, "__name__", type(example).__name__)
            raise TypeError(f"example: {name} must be callable without arguments") from None
        value = example()
    if isinstance(value, tuple):
        return value, {}
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return (), dict(value)
    of = "" if value is example else " that a function returned"
    raise TypeError(
        f"example: a {type(value).__name__}{of} must be a tuple of forward's arguments, a dict of its keyword "
        "arguments, or a function without arguments that returns one of them"
    )
