"""Process groups and meshes of simulated ranks, and torch's default group as they see it."""

import contextlib
import math
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import DeviceMesh, ProcessGroup

from tp_ext._build import load
from tp_ext.simulation.baton import Baton
from tp_ext.simulation.members import Member, SimulatedGroup
from tp_ext.simulation.place import here

_BACKEND = "simulated"
_NO_MEMBER: Any = dist.GroupMember.NON_GROUP_MEMBER


class SimulatedGroups:
    """The groups of all ranks: ``world``, of all, and those along each axis of a mesh. Registered with torch until
    :meth:`remove`.

    Attributes:
        world: the group of all ranks, as each rank has it.
    """

    def __init__(self, baton: Baton, axes: dict[str, int] | None, p: int, prefixes: list[str]) -> None:
        self._axes, self._baton, self._prefixes = axes, baton, prefixes
        self._registered: list[ProcessGroup] = []
        # what torch counts and notes at each new group; other processes of a job have not counted ours
        self._count, self._noted = c10d._world.group_count, _NO_MEMBER in c10d._world.pg_group_ranks
        # By how often a rank has made one of these ranks
        self._new: dict[tuple[int, tuple[int, ...]], SimulatedGroup] = {}
        self._made: list[Counter[tuple[int, ...]]] = [Counter() for _ in range(p)]  # of each rank
        self._by_axis: list[list[ProcessGroup]] = [[] for _ in range(p)]  # of each rank
        self.world = self._add([list(range(p))], "world", "default_pg")
        if axes is not None:
            self._mesh = torch.arange(p, dtype=torch.int).view(*axes.values())
            for dim, (axis, size) in enumerate(axes.items()):
                along = self.world
                if size < p:
                    along = self._add(self._mesh.movedim(dim, -1).reshape(-1, size).tolist(), axis, f"mesh_{axis}")
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
        world: Any = c10d._world
        for group in self._registered:
            if group in world.pg_map:  # else the rank has destroyed it
                torch._C._distributed_c10d._unregister_process_group(group.group_name)
            for table in _tables(world):
                table.pop(group, None)
        world.group_count = self._count
        if not self._noted:
            world.pg_group_ranks.pop(_NO_MEMBER, None)

    def new_group(self, rank: int, ranks: Sequence[int], description: str | None) -> ProcessGroup | None:
        """Creates a rank's handle of a group. The n-th call of each rank with the same ``ranks`` gives the same group.
        Returns None if the rank is no member."""
        key = tuple(ranks)
        if rank not in key:
            return None
        number = self._made[rank][key]
        self._made[rank][key] += 1
        calls = self._new.setdefault((number, key), SimulatedGroup(self._baton, list(key)))
        name = f"new {'_'.join(map(str, key))} {number}"
        member, name = Member(calls, key.index(rank)), self._prefixes[rank] + name
        return self._register(member, key.index(rank), list(key), name, description or "undefined")

    def _add(self, members: list[list[int]], name: str, description: str) -> list[ProcessGroup]:
        groups: dict[int, ProcessGroup] = {}
        for ranks in members:
            calls = SimulatedGroup(self._baton, ranks)
            for place, rank in enumerate(ranks):
                member, full_name = Member(calls, place), self._prefixes[rank] + name
                groups[rank] = self._register(member, place, ranks, full_name, description)
        return [groups[rank] for rank in range(len(groups))]

    def _register(self, member: Member, place: int, ranks: list[int], name: Any, description: str) -> ProcessGroup:
        group = ProcessGroup(place, len(ranks))
        backend = load().create_simulated_backend(place, len(ranks), member)
        for device in ("cpu", "cuda"):
            group._register_backend(torch.device(device), ProcessGroup.BackendType.CUSTOM, backend)
        group._set_default_backend(ProcessGroup.BackendType.CUSTOM)
        group._set_group_name(name)
        group._set_group_desc(description)  # as torch describes the groups of a mesh
        world: Any = c10d._world
        world.pg_map[group] = (_BACKEND, None)
        world.pg_names[group] = name
        world.pg_group_ranks[group] = {rank: place for place, rank in enumerate(ranks)}
        world.pg_backend_config[group] = _BACKEND
        world.pg_to_tag[group] = ""  # destroy_process_group reads it
        torch._C._distributed_c10d._register_process_group(name, group)
        self._registered.append(group)
        return group


def _tables(world: Any) -> list[dict[Any, Any]]:
    return [world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config, world.pg_to_tag]


class _Torch:
    """The functions of torch that are replaced while simulations run. A simulated rank sees ``world`` as its default
    group, in which ``dist.get_rank(group)`` and others look up its number, and makes groups of simulated ranks. Other
    code sees torch's own."""

    lock, simulations = threading.Lock(), 0
    default_group: Any = None
    new_group: Any = None


def _new_group(size: int, rank: Any, ranks: Sequence[int], *args: Any, **kwargs: Any) -> tuple[Any, Any]:
    """Replaces torch's function, which connects to a store: simulated ranks have none."""
    make = here().new_group
    if make is None:
        store_and_rank: tuple[Any, Any] = _Torch.new_group(size, rank, ranks, *args, **kwargs)
        return store_and_rank
    group = make(ranks or range(size), kwargs.get("group_desc"))  # of all ranks, none are given
    return (_NO_MEMBER if group is None else group), None


@contextlib.contextmanager
def torch_sees_groups_of_rank() -> Iterator[None]:
    """Shows simulated ranks their default group in the block, and lets them make groups."""
    module: Any = c10d
    torch_world = module._World
    with _Torch.lock:
        _Torch.simulations += 1
        if _Torch.simulations == 1:
            original = _Torch.default_group = torch_world.default_pg
            torch_world.default_pg = property(lambda world: here().world or original.fget(world), original.fset)
            _Torch.new_group = module._new_process_group_helper
            module._new_process_group_helper = _new_group
    try:
        yield
    finally:
        with _Torch.lock:
            _Torch.simulations -= 1
            if _Torch.simulations == 0:
                torch_world.default_pg = _Torch.default_group
                module._new_process_group_helper = _Torch.new_group


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
