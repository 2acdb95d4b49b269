"""The axes of the maps that are running: where collectives find a group by the name of an axis."""

import threading
from collections import deque
from collections.abc import Iterator, Sequence
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


class _MapRun(NamedTuple):
    """A map that has run: its autograd nodes have the sequence numbers ``begin`` to ``end`` - 1 of its thread."""

    begin: int
    end: int
    scope: Scope


class _Active(threading.local):
    def __init__(self) -> None:
        self.scopes: list[Scope] = []
        self.uneven = False


_active = _Active()
_runs: dict[int, deque[_MapRun]] = {}
"""The latest maps of each thread, in the order of their ends. Checkpointing computes parts of a map again in the
backward pass, when none is active."""


@contextmanager
def scope_of(groups: dict[str, ParallelGroup], check: bool) -> Iterator[Scope]:
    """Adds axes for the functions called in the block.

    Raises:
        ValueError: an axis of that name is there.
    """
    outer = _active.scopes[-1] if _active.scopes else Scope({}, check)
    if both := [name for name in groups if name in outer.groups]:
        raise ValueError(f"mesh: the axes {both} are those of a map around this one; slice the mesh, as in mesh['x']")
    # A plain tensor is the same on all ranks in a checked map, and unknown in the other
    if outer.groups and outer.check != check:
        raise ValueError(f"check: {check} must be that of the map around this one, {outer.check}")
    scope = Scope({**outer.groups, **groups}, check)
    _active.scopes.append(scope)
    begin = _next_sequence_number()
    try:
        yield scope
    finally:
        _active.scopes.pop()
        # A map without autograd nodes has no backward that could ask for it
        if (end := _next_sequence_number()) > begin:
            _runs.setdefault(threading.get_ident(), deque(maxlen=10_000)).append(_MapRun(begin, end, scope))


def note_uneven(sizes: Sequence[int]) -> None:
    """Notes that a collective of the map makes shards of these lengths."""
    _active.uneven = _active.uneven or len(set(sizes)) > 1


def made_uneven() -> bool:
    """Returns whether a collective has made shards of different lengths since the last call."""
    uneven, _active.uneven = _active.uneven, False
    return uneven


def checked() -> bool:
    """Returns whether the innermost map follows the axes along which values vary."""
    scope = _current()
    return scope is None or scope.check


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
    scope = _current()
    for name in names:
        if scope is None:
            raise ValueError(f"{function}: axis {name!r} {_why_none()}")
        if name not in scope.groups:
            raise ValueError(f"{function}: axis {name!r} must be one of the axes of the map, {tuple(scope.groups)}")
    return {name: scope.groups[name] for name in names} if scope else {}


def _next_sequence_number() -> int:
    """Returns the number of the autograd node that this thread creates next; 0 while torch.compile traces, where each
    collective has its group in the graph."""
    return 0 if torch.compiler.is_compiling() else torch._C._autograd._get_sequence_nr()


def _current() -> Scope | None:
    """Returns the innermost map that is running, or to which the node belongs whose backward is running."""
    if _active.scopes:
        return _active.scopes[-1]
    if torch.compiler.is_compiling() or not _in_backward():
        return None
    # Numbers are of a thread, and the backward may run in another: all threads are asked
    number = torch._C._current_autograd_node()._sequence_nr()
    scopes = [scope for runs in _runs.values() if (scope := _innermost(runs, number)) is not None]
    if not scopes:  # a node of a part that was computed again: any map, if all are alike
        scopes = [run.scope for runs in _runs.values() for run in runs]
    # Threads number their nodes alike: if their maps differ it is open which one is meant
    return scopes[0] if scopes and all(scope == scopes[0] for scope in scopes) else None


def _innermost(runs: deque[_MapRun], number: int) -> Scope | None:
    innermost: _MapRun | None = None
    for run in reversed(runs):
        # Runs are in the order of their ends: no earlier one has the node
        if run.end <= number:
            break
        # Of nested maps the one that began last
        if run.begin <= number and (innermost is None or run.begin >= innermost.begin):
            innermost = run
    return innermost.scope if innermost else None


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() >= 0


def _why_none() -> str:
    if not torch.compiler.is_compiling() and _in_backward() and _runs:
        return "is one of several maps, and it is not known which of them is computed again; checkpoint the map"
    return "needs a running map, tp_ext.spmd"
