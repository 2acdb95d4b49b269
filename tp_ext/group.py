"""A tensor-parallel group as the layers hold it: its name, its size, the own rank. No process group object is kept, so
modules can be copied and pickled, and nothing outlives ``destroy_process_group``.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup

from tp_ext._build import load

Group = ProcessGroup | DeviceMesh | str | None
"""What every ``group`` argument takes: a process group, a 1-D mesh, a group's name, or None (no parallelism)."""


class ParallelGroup(NamedTuple):
    """``name``: how operators find the group, "" without parallelism (:func:`group_name`); ``size`` p; own ``rank``."""

    name: str
    size: int
    rank: int

    def plain(self) -> "ParallelGroup":
        """The group without what :mod:`tp_ext.symmetric_memory` wrote behind its size."""
        bare = self.name.rpartition("@")[0]
        return ParallelGroup(_key(bare, self.rank, self.size), self.size, self.rank) if bare else self

    def __reduce__(self) -> tuple[type["ParallelGroup"], tuple[object, ...]]:
        return ParallelGroup, tuple(self.plain())  # where it is unpickled, there is no such memory

    def __copy__(self) -> "ParallelGroup":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParallelGroup":
        return self


def group_name(group: Group) -> str:
    """What operators take for a group: its name, own rank and size, as in "0@1/4"; "" stands for no parallelism.

    Rank and size are part of it because what ``torch.compile`` makes of an operator depends on them, and the caches of
    compiled code, which the ranks share, tell graphs apart by what stands in them. A name with more numbers behind
    the size is one of :func:`tp_ext.symmetric_memory.enable`.

    Raises:
        TypeError: group is none of the accepted kinds, or this rank is not in it.
        ValueError: a mesh with more than one axis, or a name that no process group has.
    """
    if group is None or group == "":
        return ""
    if isinstance(group, str):
        return group if _is_key(group) else _key(group, *_rank_and_size(group))
    if isinstance(group, ProcessGroup):
        return _key(group.group_name, group.rank(), group.size())
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            raise ValueError(
                f"group: a mesh of {group.ndim} axes {group.mesh_dim_names} must have one axis; "
                "slice it, as in mesh['tp']"
            )
        return group_name(group.get_group())
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError("group: this rank is not a member of the process group")
    raise TypeError(f"group: {group!r} must be a ProcessGroup, a DeviceMesh of one axis, a group's name or None")


def parallel_group(group: Group) -> ParallelGroup:
    """Name, size and own rank of the group.

    Raises:
        TypeError, ValueError: see :func:`group_name`.
    """
    name = group_name(group)
    if not name:
        return ParallelGroup("", 1, 0)
    rank, size = name.rpartition("@")[2].split("/")[:2]
    return ParallelGroup(name, int(size), int(rank))


def process_group(group: Group) -> ProcessGroup:
    """The process group itself, for torch.distributed.

    Raises:
        TypeError, ValueError: see :func:`group_name`; there must be a group.
    """
    name = group_name(group)
    if not name:
        raise ValueError(f"group: {group!r} must be a group of ranks")
    return dist.distributed_c10d._resolve_process_group(name.rpartition("@")[0])  # type: ignore[arg-type]


def global_ranks(group: Group) -> list[int]:
    """The group's ranks as the whole world numbers them; of no group, none."""
    return dist.get_process_group_ranks(process_group(group)) if group_name(group) else []


def check_place(group: ParallelGroup) -> None:
    """That what knows ``group`` is where it was made. A module that one rank pickled holds that rank's shard.

    Raises:
        ValueError: this process has another rank in the group of that name, or the group another size.
    """
    bare = group.name.rpartition("@")[0]
    try:
        here = _rank_and_size(bare) if bare else (group.rank, group.size)
    except ValueError:  # no such group here: nothing can be said, and no operator will run
        return
    if here != (group.rank, group.size):
        raise ValueError(
            f"tp_group: pickled by rank {group.rank} of {group.size}, this must be loaded there, not by rank {here[0]} "
            f"of {here[1]}; full_state_dict is for any rank and any number of them"
        )


def _key(name: str, rank: int, size: int) -> str:
    return f"{name}@{rank}/{size}"


def _is_key(name: str) -> bool:
    tail = name.rpartition("@")[2]
    return tail != name and tail.count("/") in (1, 5) and all(number.isdigit() for number in tail.split("/"))


@torch.compiler.assume_constant_result  # a call into C++, of which torch.compile sees the result alone
def _rank_and_size(name: str) -> tuple[int, int]:
    try:
        return load().group_rank(name), load().group_size(name)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"group: {name!r} must be the name of a process group") from error
