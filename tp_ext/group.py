"""The tensor-parallel group as layers hold it: name, size and rank. No process group object is kept, so modules can be
copied and pickled, and nothing outlives ``destroy_process_group``.
"""

import enum
import os
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup

from tp_ext._build import load
from tp_ext._checks import warn_caller
from tp_ext._imports import after_import

Group = ProcessGroup | DeviceMesh | str | None
"""Type of every ``group`` argument: a process group, a 1-D mesh, a group's name, or None (no parallelism)."""


class _NotGiven(enum.Enum):
    NOT_GIVEN = enum.auto()

    def __repr__(self) -> str:
        return "None"  # in signatures: without it nothing is sharded


# [Note: a missing group argument is a warning]
NOT_GIVEN: Any = _NotGiven.NOT_GIVEN
"""Default of every optional ``group``. Accepted wherever None is; it differs from a None that the caller wrote."""


class ForgottenGroupWarning(UserWarning):
    """A warning that a layer has no group in a job of several ranks, so that every rank trains a separate model."""


class ParallelGroup(NamedTuple):
    """A group: ``name``, as operators take it (:func:`group_name`; "" means no parallelism), ``size`` p, ``rank``."""

    name: str
    size: int
    rank: int

    @property
    def torch_name(self) -> str:
        """The name of the process group, as torch knows it."""
        return _parse(self.name)[0]

    @property
    def ranks(self) -> list[int]:
        """The global ranks (:func:`global_ranks`)."""
        return global_ranks(self.name)

    def member(self, rank: int) -> "ParallelGroup":
        """Returns the group as its member of this rank holds it."""
        return ParallelGroup(_key(self.torch_name, rank, self.size) if self.name else "", self.size, rank)

    def __copy__(self) -> "ParallelGroup":
        return self

    def __deepcopy__(self, memo: dict[int, Any]) -> "ParallelGroup":
        return self


ALONE = ParallelGroup("", 1, 0)
"""No parallelism: a group of one rank."""


def group_name(group: Group) -> str:
    """Returns the group as operators take it: name, this rank and size, as in "0@1/4"; "" means no parallelism.

    Rank and size are part of it because compiled code depends on them, and the caches of ``torch.compile``, which the
    ranks share, distinguish graphs by their contents.

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
    if group is NOT_GIVEN:
        return ""
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise TypeError("group: this rank is not a member of the process group")
    raise TypeError(f"group: {group!r} must be a ProcessGroup, a DeviceMesh of one axis, a group's name or None")


def parallel_group(group: Group) -> ParallelGroup:
    """Returns name, size and this rank of the group.

    Raises:
        TypeError, ValueError: see :func:`group_name`.
    """
    name = group_name(group)
    if not name:
        return ALONE
    _, rank, size = _parse(name)
    return ParallelGroup(name, size, rank)


def layer_group(group: Group, layer: str) -> ParallelGroup:
    """Returns :func:`parallel_group` of the ``group`` passed to ``layer``; warns if a group appears to be missing.

    In a job of several ranks (by ``torch.distributed``, or by ``WORLD_SIZE``) a layer without ``group`` trains one
    whole model per rank. The warning is given once per process. An explicit ``group=None`` is silent, except before
    ``init_process_group``, where ``dist.group.WORLD`` is None too.

    Raises:
        TypeError, ValueError: see :func:`group_name`.
    """
    resolved = parallel_group(group)
    if not resolved.name and not _Warned.yet:
        _warn_if_forgotten(group, layer)
    return resolved


def job_ranks() -> int:
    """Returns the number of ranks of the job: of ``torch.distributed``, or before its initialisation ``WORLD_SIZE``."""
    if dist.is_initialized():
        return dist.get_world_size()
    size = os.environ.get("WORLD_SIZE", "")
    return int(size) if size.isdecimal() else 1


class _Warned:
    yet = False


def _warn_if_forgotten(group: Group, layer: str) -> None:
    ranks = job_ranks()
    if ranks < 2 or (group is not NOT_GIVEN and dist.is_initialized()):
        return
    _Warned.yet = True
    if group is NOT_GIVEN:
        text = f"{layer}: group was not given in a job of {ranks} ranks"
        advice = "pass group=, as in group=mesh['tp'], or write group=None if that is meant"
    else:
        text = f"{layer}: group is None in a job of WORLD_SIZE = {ranks} ranks"
        advice = "call init_process_group first (until then dist.group.WORLD is None)"
    warn_caller(
        f"{text}: it is not sharded, and each rank computes a whole one of its own; {advice}", ForgottenGroupWarning
    )


def process_group(group: Group) -> ProcessGroup:
    """Returns the process group itself, for torch.distributed.

    Raises:
        TypeError, ValueError: see :func:`group_name`; there must be a group, and it must be the one that ``group``
            names: one created again under its name with another rank or size is refused, as by every operator.
    """
    tp = parallel_group(group)
    if not tp.name:
        raise ValueError(f"group: {group!r} must be a group of ranks")
    name = tp.torch_name
    found = dist.distributed_c10d._resolve_process_group(name)  # type: ignore[arg-type]
    if (found.rank(), found.size()) != (tp.rank, tp.size):
        raise ValueError(  # same text as in csrc/comm/collectives.cpp
            f"group: {name!r} was rank {tp.rank} of {tp.size} when the module was built, and is rank {found.rank()} of "
            f"{found.size()} now: the process group was created again; build the modules anew on it (and load a "
            "full_state_dict or a checkpoint)"
        )
    return found


def global_ranks(group: Group) -> list[int]:
    """Returns the global ranks of the group; an empty list for no group."""
    return dist.get_process_group_ranks(process_group(group)) if group_name(group) else []


def check_place(group: ParallelGroup) -> None:
    """Checks that an object that holds ``group`` is on the rank that made it: a pickled module holds one rank's shard.

    Raises:
        ValueError: this process has another rank in the group of that name, or the group another size.
    """
    try:
        here = _rank_and_size(group.torch_name) if group.name else (group.rank, group.size)
    except ValueError:  # no such group here: nothing can be checked, and no operator will run
        return
    if here != (group.rank, group.size):
        raise ValueError(
            f"tp_group: pickled by rank {group.rank} of {group.size}, this must be loaded there, not by rank {here[0]} "
            f"of {here[1]}; full_state_dict is for any rank and any number of them"
        )


def _key(name: str, rank: int, size: int) -> str:
    return f"{name}@{rank}/{size}"


def _parse(name: str) -> tuple[str, int, int]:
    """Returns the process group's name, the rank and the size of a name that :func:`group_name` returned."""
    bare, _, place = name.rpartition("@")
    rank, size = place.split("/") if place else ("0", "1")
    return bare, int(rank), int(size)


def _is_key(name: str) -> bool:
    tail = name.rpartition("@")[2]
    return tail != name and tail.count("/") == 1 and all(number.isdigit() for number in tail.split("/"))


def _rank_and_size(name: str) -> tuple[int, int]:
    try:
        return load().group_rank(name), load().group_size(name)
    except (RuntimeError, ValueError) as error:
        raise ValueError(f"group: {name!r} must be the name of a process group") from error


# A call into C++: torch.compile sees only its result
after_import("torch._dynamo", lambda: torch.compiler.assume_constant_result(_rank_and_size))
