"""All ranks of a group in this process: see :func:`simulate`."""

import itertools
from collections.abc import Callable
from typing import Any, TypeVar

import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d

from tp_ext.debug.simulation.backend import Members, SimulatedBackend
from tp_ext.debug.simulation.baton import Baton

T = TypeVar("T")
_serial = itertools.count()


def _make_group(members: Members, rank: int, name: str) -> dist.ProcessGroup:
    group = dist.ProcessGroup(rank, members.size)
    backend = SimulatedBackend(members, rank)
    for device in ("cpu", "cuda"):
        group._register_backend(torch.device(device), dist.ProcessGroup.BackendType.CUSTOM, backend)
    group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
    group._set_group_name(name)
    world = c10d._world
    world.pg_map[group] = ("cpu:simulated,cuda:simulated", None)
    world.pg_names[group] = name
    world.pg_group_ranks[group] = {global_rank: k for k, global_rank in enumerate(members.ranks)}
    world.pg_backend_config[group] = "cpu:simulated,cuda:simulated"
    torch._C._distributed_c10d._register_process_group(name, group)
    return group


def _remove_group(group: dist.ProcessGroup, name: str) -> None:
    torch._C._distributed_c10d._unregister_process_group(name)
    world = c10d._world
    for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_backend_config):
        table.pop(group, None)


def simulate(fn: Callable[..., T], p: int, *args: Any, seed: int = 0) -> list[T]:
    """Runs ``fn(rank, group, *args)`` for all ranks of a group in this process, and returns the results."""
    baton = Baton(p, seed)
    members = Members(baton, list(range(p)))
    serial = next(_serial)
    names = [f"simulated_{serial}_rank_{rank}" for rank in range(p)]
    groups = [_make_group(members, rank, name) for rank, name in enumerate(names)]
    try:
        return baton.run(lambda rank: fn(rank, groups[rank], *args))
    finally:
        for group, name in zip(groups, names, strict=True):
            _remove_group(group, name)
