"""A model's attributes, kept while its forward runs on fakes and put back after it.

Forward code leaves things in modules: tables that the first call makes, counters, the last result. A second run would
take other branches because of them, and fakes would stay in the user's model."""

from __future__ import annotations

import collections
import contextlib
import functools
import types
from collections.abc import Iterator
from typing import Any

from torch import Tensor, nn

DEPTH = 4  # of containers and plain objects inside of an attribute
CONTAINERS = (dict, collections.OrderedDict, collections.defaultdict, list, set, collections.deque)
OPAQUE = (Tensor, type, types.FunctionType, types.MethodType, types.ModuleType, str, bytes, int, float, bool)


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Puts back, at the end, what modules hold: attributes, and the contents of containers and plain objects in them.

    Containers and dicts keep their identity. Containers among the globals and class attributes of the files that define
    forward are put back, too, and caches of functions there are emptied, before and after: they would return fakes."""
    kept: dict[int, tuple[Any, Any]] = {}  # id -> a container or ``__dict__``, and its contents
    caches: dict[int, Any] = {}
    level = [vars(module) for module in model.modules()]
    for depth in reversed(range(DEPTH)):  # level by level: what is near to a module is kept first
        level = [inner for holder in level for inner in _keep(holder, kept, depth)]
    for cls in {cls for module in model.modules() for cls in type(module).__mro__}:
        # Their globals hold no tensors of a model, and are many
        if cls.__module__.partition(".")[0] in ("torch", "builtins"):
            continue
        forward = vars(cls).get("forward")
        for shared in (vars(cls), getattr(forward, "__globals__", {})):
            for name, value in list(shared.items()):
                if isinstance(value, functools._lru_cache_wrapper):
                    caches[id(value)] = value
                elif type(value) in CONTAINERS and not name.startswith("__"):
                    # Names such as __builtins__ are Python's own state, not the model's
                    kept.setdefault(id(value), (value, value.copy()))
    # A cached function may be an attribute of a module, alone or in a partial
    for _, contents in list(kept.values()):
        for value in contents.values() if isinstance(contents, dict) else contents:
            caches.update((id(cache), cache) for cache in _caches_in(value))
    for cache in caches.values():  # each run makes the calls that fill them
        cache.cache_clear()
    try:
        yield
    finally:
        for holder, contents in kept.values():
            if not _same(holder, contents):
                holder.clear()
                holder.extend(contents) if hasattr(holder, "extend") else holder.update(contents)
        for cache in caches.values():
            cache.cache_clear()


def _keep(holder: Any, kept: dict[int, tuple[Any, Any]], depth: int) -> Iterator[Any]:
    """Keeps the contents of a holder; returns the holders in it, if ``depth`` is not 0."""
    if id(holder) in kept:
        return
    contents = holder.copy()
    kept[id(holder)] = holder, contents
    for value in contents.values() if isinstance(holder, dict) and depth else contents if depth else ():
        if type(value) in CONTAINERS:
            yield value
        elif isinstance(value, tuple):
            # A tuple itself does not change, but the containers in it may
            yield [*value]
        elif not isinstance(value, OPAQUE) and isinstance(attributes := getattr(value, "__dict__", None), dict):
            yield attributes


def _caches_in(value: Any) -> Iterator[Any]:
    """The caches of a function that an attribute holds: itself, or what its arguments and closure hold."""
    if isinstance(value, functools._lru_cache_wrapper):
        yield value
    elif isinstance(value, functools.partial):
        for inner in (value.func, *value.args, *value.keywords.values()):
            yield from _caches_in(inner)
    elif isinstance(value, types.FunctionType):
        for cell in value.__closure__ or ():
            with contextlib.suppress(ValueError):  # a variable without a value
                if isinstance(cell.cell_contents, functools._lru_cache_wrapper):
                    yield cell.cell_contents


def _same(holder: Any, contents: Any) -> bool:
    if len(holder) != len(contents):
        return False
    # By identity: tensors have no truth value of ==, and a fake that equals the tensor must go, too
    if isinstance(holder, dict):
        return all(a is b and x is y for (a, x), (b, y) in zip(holder.items(), contents.items(), strict=True))
    return all(a is b for a, b in zip(holder, contents, strict=True))
