"""The rank, and the simulation, that the running code belongs to, if any."""

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

from torch.distributed import ProcessGroup, Store

_MARK = "simulation"


@dataclass(frozen=True)
class RankPlace:
    """A rank of a simulation.

    Attributes:
        prefix: of the names of this rank's groups; those of a simulation inside of the rank begin with it, too.
        world: the group of all ranks, as this rank has it; None outside of simulations.
        new_group: makes this rank's part of a group, None if it is no member; None outside of simulations.
        generators: this rank's generators of ``random`` and ``numpy.random`` that are in use, by module.
        outer: the place of the caller.
        store: of all ranks of the simulation; None outside of simulations.
        poll: runs other ranks once, and returns whether one could run; None outside of simulations.
    """

    prefix: str = ""
    world: ProcessGroup | None = None
    new_group: Callable[[Sequence[int], str | None], ProcessGroup | None] | None = None
    generators: dict[str, Any] = field(default_factory=dict)
    outer: "RankPlace | None" = None
    store: Store | None = None
    poll: Callable[[], bool] | None = None

    def inner(self, serial: int, rank: int) -> str:
        """Returns the prefix of a rank of a simulation that this rank runs."""
        return f"{self.prefix}{_MARK}{serial}.rank{rank}:"

    def is_of_other_rank(self, group: str) -> bool:
        """Returns whether the group of that name is one of another simulated rank, or of a simulation inside of this
        one."""
        return group.startswith(_MARK) and (
            not group.startswith(self.prefix) or _MARK in group.removeprefix(self.prefix)
        )


_nowhere = RankPlace()
_here: ContextVar[RankPlace] = ContextVar("place", default=_nowhere)


def here() -> RankPlace:
    """Returns the place of the caller."""
    return _here.get()


def enter(place: RankPlace) -> None:
    """Makes it the place of this thread's context."""
    _here.set(place)
