"""All ranks of a group in this process: see :func:`simulate`."""

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

from tp_ext.debug.simulation.baton import Baton
from tp_ext.debug.simulation.groups import Groups, default_group_of_rank, ranks_of
from tp_ext.debug.simulation.members import describe_stuck
from tp_ext.debug.simulation.place import Place, enter, here
from tp_ext.debug.simulation.rank_state import own_generators

__all__ = ["simulate"]

T = TypeVar("T")
_serial = itertools.count()


def simulate(fn: Callable[..., T], p: int | dict[str, int], *args: Any, seed: int = 0) -> list[T]:
    """Runs ``fn(rank, group, *args)`` for all ranks of a group in this process, and returns the results by rank.
    """
    axes, size = ranks_of(p)
    if not callable(fn):
        raise TypeError(f"fn: {fn!r} must be a function fn(rank, group, *args)")
    if not isinstance(seed, int) or isinstance(seed, bool):
        raise TypeError(f"seed: {seed!r} must be an integer")
    outer, serial = here(), next(_serial)
    prefixes = [outer.inner(serial, rank) for rank in range(size)]

    def run_rank(rank: int) -> T:
        enter(Place(prefixes[rank], groups.world[rank], {}, outer))
        return fn(rank, groups.argument(rank), *args)

    baton = Baton(size, seed, run_rank, describe_stuck)
    groups = Groups(baton, axes, size, prefixes)
    try:
        with default_group_of_rank(), own_generators():
            return baton.run()
    finally:
        groups.remove()
