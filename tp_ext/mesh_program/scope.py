"""The axes of the maps that are running: where collectives find a group by the name of an axis."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch

from tp_ext.group import ParallelGroup
from tp_ext.mesh_program.partition_spec import Names


class Scope(NamedTuple):
    """The axes of a map and of those around it.

    Attributes:
        groups: name of an axis -> its group.
        check: whether types say along which axes a value varies.
    """

    groups: dict[str, ParallelGroup]
    check: bool


class _Active(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Scope] = []


_active = _Active()
_seen: dict[str, set[ParallelGroup]] = {}
"""The groups of each axis of all maps: checkpointing computes parts of a map again in the backward pass, when none is
active."""


@contextmanager
def scope_of(groups: dict[str, ParallelGroup], check: bool) -> Iterator[Scope]:
    """Adds axes for the functions called in the block.

    Raises:
        ValueError: an axis of that name is there.
    """
    outer = _active.scopes[-1] if _active.scopes else Scope({}, check)
    if both := [name for name in groups if name in outer.groups]:
        raise ValueError(f"mesh: the axes {both} are those of a map around this one; slice the mesh, as in mesh['x']")
    if outer.groups and outer.check != check:
        raise ValueError(f"check: {check} must be that of the map around this one, {outer.check}")
    scope = Scope({**outer.groups, **groups}, check)
    for name, group in groups.items():
        _seen.setdefault(name, set()).add(group)
    _active.scopes.append(scope)
    try:
        yield scope
    finally:
        _active.scopes.pop()


def checked() -> bool:
    """Returns whether the innermost map follows the axes along which values vary."""
    return not _active.scopes or _active.scopes[-1].check


def groups_of(axis: Names, function: str) -> dict[str, ParallelGroup]:
    """Returns the groups of an axis or of several, in order.

    Raises:
        TypeError: no name. ValueError: no map has the axis; an axis twice.
    """
    names = (axis,) if isinstance(axis, str) else axis
    if not isinstance(names, tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError(f"{function}: axis {axis!r} must be the name of an axis of the mesh, or a tuple of names")
    if len(set(names)) != len(names):
        raise ValueError(f"{function}: axis {axis!r} must name each axis once")
    known = _active.scopes[-1].groups if _active.scopes else _groups_in_backward()
    for name in names:
        if name not in known:
            raise ValueError(f"{function}: axis {name!r} {_why_not(name, known)}")
    return {name: known[name] for name in names}


def _groups_in_backward() -> dict[str, ParallelGroup]:
    if torch._C._current_graph_task_id() < 0:
        return {}
    return {name: next(iter(found)) for name, found in _seen.items() if len(found) == 1}


def _why_not(name: str, known: dict[str, ParallelGroup]) -> str:
    if _active.scopes:
        return f"must be one of the axes of the map, {tuple(known)}"
    if torch._C._current_graph_task_id() >= 0 and len(_seen.get(name, ())) > 1:
        return (
            "is one of several meshes, and a checkpoint inside of a map runs again without the map; checkpoint the map"
        )
    return "needs a running map, tp_ext.spmd"
