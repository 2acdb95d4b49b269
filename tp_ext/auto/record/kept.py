"""A cache that keeps no model alive."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable
from typing import Any, TypeVar

T = TypeVar("T")


def while_used(function: Callable[..., T]) -> Callable[..., T]:
    """Returns a function that makes the same object for the same arguments while somebody holds it.

    For what depends on classes and functions of the user's: these may refer to a model by a closure or by globals, and
    ``functools.cache`` would keep it."""
    made: weakref.WeakValueDictionary[tuple[Any, ...], Any] = weakref.WeakValueDictionary()

    @functools.wraps(function)
    def known(*key: Any) -> T:
        result = made.get(key)
        if result is None:
            result = made[key] = function(*key)
        return result

    return known
