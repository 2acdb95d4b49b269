"""A model's attributes, kept while its forward runs on fakes and put back after it.

Forward code leaves things in modules: tables that the first call makes, counters, the last result. A second run would
take other branches because of them, and fakes would stay in the user's model."""

from __future__ import annotations

import collections
import contextlib
import functools
import types
from collections.abc import Collection, Iterator
from typing import Any

from torch import Tensor, nn

from tp_ext.auto.record.reachable import CONTAINERS, CodePlaces, Notes, Reachable, of_classes

DEPTH = 4  # of containers and plain objects inside of an attribute
FUNCTIONS = (types.FunctionType, types.MethodType, functools.partial, functools._lru_cache_wrapper)
ATOMS = frozenset({type(None), bool, int, float, str, dict, collections.OrderedDict})  # most attributes: no functions
PLAIN = ATOMS - {dict, collections.OrderedDict}
OPAQUE = (Tensor, type, types.FunctionType, types.MethodType, types.ModuleType, str, bytes, int, float, bool)


@contextlib.contextmanager
def unchanged(model: nn.Module) -> Iterator[None]:
    """Puts back, at the end, what modules hold: attributes, and the contents of containers and plain objects in them;
    and what their code keeps elsewhere, in globals, classes and closures (:mod:`tp_ext.auto.record.reachable`).

    Containers and dicts keep their identity. Caches of functions are emptied, before and after: they would return
    fakes, or what another run has made."""
    places = places_of(model)
    notes = Notes(places)
    notes.empty_caches()  # each run makes the calls that fill them
    try:
        yield
    finally:
        notes.put_back()


def places_of(model: nn.Module) -> CodePlaces:
    """Returns the containers in the modules of a model, and the places that its code can reach."""
    places, functions = _held_by(model)
    for reached in (reachable_from(model), *([Reachable(functions.values())] if functions else [])):
        for name, inner in vars(places).items():
            inner.update(getattr(reached, name))
    return places


def names_read(model: nn.Module) -> Collection[str] | None:
    """Returns the names of attributes that the code of a model can read; None: of any."""
    _, functions = _held_by(model)
    return None if functions else reachable_from(model).attributes


def _held_by(model: nn.Module) -> tuple[CodePlaces, dict[int, Any]]:
    """The containers in the modules of a model, and the functions in these."""
    places = CodePlaces()
    level: list[Any] = [vars(module) for module in model.modules()]
    for depth in reversed(range(DEPTH)):  # level by level: what is near to a module is taken first
        new = {id(holder): holder for holder in level if id(holder) not in places.containers}
        places.containers.update(new)
        level = [inner for holder in new.values() if holder for inner in _containers_in(holder)] if depth else []
    functions: dict[int, Any] = {}
    for container in places.containers.values():
        for value in container.values() if isinstance(container, dict) else container:
            if type(value) not in ATOMS and isinstance(value, FUNCTIONS):
                functions[id(value)] = value
    return places, functions


def reachable_from(model: nn.Module) -> Reachable:
    """Returns what the code of a model's classes can reach; a run finds it as long as a run before it is held."""
    return of_classes(frozenset(type(module) for module in model.modules()))


def _containers_in(holder: Any) -> list[Any]:
    """Returns the containers in a holder, and the attributes of plain objects in it."""
    inside = []
    for value in holder.values() if isinstance(holder, dict) else holder:
        kind = type(value)
        if kind in PLAIN:
            continue
        if kind in CONTAINERS:
            inside.append(value)
        elif isinstance(value, tuple):
            # A tuple itself does not change, but the containers in it may
            inside.append([*value])
        elif not isinstance(value, OPAQUE) and isinstance(attributes := getattr(value, "__dict__", None), dict):
            inside.append(attributes)
    return inside
