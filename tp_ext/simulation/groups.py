"""Process groups and meshes of simulated ranks, and torch's default group as they see it."""

import contextlib
import math
import threading
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed.distributed_c10d as c10d
from torch.distributed import DeviceMesh, ProcessGroup

from tp_ext._build import load
from tp_ext.simulation.baton import Baton
from tp_ext.simulation.members import Group, Member
from tp_ext.simulation.place import here

_BACKEND = "simulated"


class Groups:
    """The groups of all ranks: ``world``, of all, and those along each axis of a mesh. Registered with torch until
    :meth:`remove`.

    Attributes:
        world: the group of all ranks, as each rank has it.
    """

    def __init__(self, baton: Baton, axes: dict[str, int] | None, p: int, prefixes: list[str]) -> None:
        self._axes = axes
        self._registered: list[ProcessGroup] = []
        self._by_axis: list[list[ProcessGroup]] = [[] for _ in range(p)]  # of each rank
        self.world = self._add(baton, [list(range(p))], prefixes, "world")
        if axes is not None:
            self._mesh = torch.arange(p, dtype=torch.int).view(*axes.values())
            for dim, (axis, size) in enumerate(axes.items()):
                along = self.world
                if size < p:
                    along = self._add(baton, self._mesh.movedim(dim, -1).reshape(-1, size).tolist(), prefixes, axis)
                for of_rank, group in zip(self._by_axis, along, strict=True):
                    of_rank.append(group)

    def argument(self, rank: int) -> ProcessGroup | DeviceMesh:
        """Returns what a rank is given: the group, or the mesh. Must be called by the rank, whose number torch asks
        for."""
        if self._axes is None:
            return self.world[rank]
        names, groups = tuple(self._axes), self._by_axis[rank]
        device = torch.get_default_device().type
        if len(groups) == 1:
            return DeviceMesh.from_group(groups[0], device, mesh_dim_names=names)
        return DeviceMesh.from_group(groups, device, mesh=self._mesh, mesh_dim_names=names)

    def remove(self) -> None:
        """Removes all groups from torch's tables."""
        world = c10d._world
        for group in self._registered:
            torch._C._distributed_c10d._unregister_process_group(group.group_name)
            for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
                table.pop(group, None)

    def _add(self, baton: Baton, members: list[list[int]], prefixes: list[str], axis: str) -> list[ProcessGroup]:
        groups: dict[int, ProcessGroup] = {}
        for ranks in members:
            calls = Group(baton, ranks)
            for place, rank in enumerate(ranks):
                groups[rank] = self._register(Member(calls, place), place, ranks, prefixes[rank] + axis)
        return [groups[rank] for rank in range(len(groups))]

    def _register(self, member: Member, place: int, ranks: list[int], name: Any) -> ProcessGroup:
        group = ProcessGroup(place, len(ranks))
        backend = load().create_simulated_backend(place, len(ranks), member)
        for device in ("cpu", "cuda"):
            group._register_backend(torch.device(device), ProcessGroup.BackendType.CUSTOM, backend)
        group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
        group._set_group_name(name)
        world: Any = c10d._world
        world.pg_map[group] = (_BACKEND, None)
        world.pg_names[group] = name
        world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
        world.pg_backend_config[group] = _BACKEND
        torch._C._distributed_c10d._register_process_group(name, group)
        self._registered.append(group)
        return group


class _DefaultGroup:
    """While simulations run, torch's default group is ``world`` for a simulated rank, whose number functions such as
    ``dist.get_rank(group)`` look up there, and as before for all other code."""

    lock, simulations = threading.Lock(), 0
    property_of_torch: Any = None


@contextlib.contextmanager
def default_group_of_rank() -> Iterator[None]:
    """Shows simulated ranks their default group in the block."""
    with _DefaultGroup.lock:
        _DefaultGroup.simulations += 1
        if _DefaultGroup.simulations == 1:
            original: Any = c10d._World.default_pg
            _DefaultGroup.property_of_torch = original
            seen = property(lambda world: here().world or original.fget(world), original.fset)
            setattr(c10d._World, "default_pg", seen)  # noqa: B010, a property cannot be assigned for mypy
    try:
        yield
    finally:
        with _DefaultGroup.lock:
            _DefaultGroup.simulations -= 1
            if _DefaultGroup.simulations == 0:
                setattr(c10d._World, "default_pg", _DefaultGroup.property_of_torch)  # noqa: B010


def ranks_of(p: int | dict[str, int]) -> tuple[dict[str, int] | None, int]:
    """Returns the axes, None without a mesh, and the number of ranks.

    Raises:
        TypeError, ValueError: p is no size, nor a dict of them.
    """
    axes = p if isinstance(p, dict) else None
    sizes: dict[str, Any] = {"p": p} if axes is None else axes
    if not sizes or not all(isinstance(name, str) and name for name in sizes):
        raise ValueError(f"p: {p!r} must be a number of ranks, or such numbers by names of axes")
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool):
            raise TypeError(f"p: {p!r} must be an integer, or a dict of integers by axis")
        if size < 1:
            raise ValueError(f"p: {p!r} must be at least 1" + ("" if axes is None else f" for axis {name!r}"))
    return axes, math.prod(sizes.values())
