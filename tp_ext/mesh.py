"""The mesh of a job: pipeline, data, expert, context and tensor parallelism as axes ``pp``, ``dp``, ``ep``, ``cp`` and
``tp``. Layers know a group, never a mesh; functions of whole models take ``mesh=`` in place of ``group=`` and read the
axes by name.
"""

import math
import os
import warnings
from typing import NamedTuple

from torch.distributed import DeviceMesh, init_device_mesh

from tp_ext.group import ALONE, NOT_GIVEN, Group, ParallelGroup, job_ranks, parallel_group

AXES = ("pp", "dp", "ep", "cp", "tp")
DATA_AXES = ("dp", "ep", "cp")
"""The axes whose ranks have different tokens of a batch, and equal copies of all parameters but the experts'."""
GRADIENT_REDUCTIONS = ("mean", "sum")
"""The values of the argument ``gradient_reduction``: data parallelism takes the mean of the gradients, or their sum."""


class SlowMeshWarning(UserWarning):
    """A warning that the ranks of a tensor-parallel group are on several hosts."""


def init_mesh(
    device_type: str, *, pp: int = 1, dp: int = -1, ep: int | None = None, cp: int = 1, tp: int = 1
) -> DeviceMesh:
    """Makes the mesh of all ranks with the axes ``pp``, ``dp``, ``cp`` and ``tp``, and ``ep`` after ``dp`` if it is
    given, in this order: the ranks of a tensor-parallel group are neighbours, those of a pipeline are farthest apart.

    Layers take ``mesh["tp"]``, DDP and FSDP2 ``mesh["dp"]``, functions of whole models the mesh itself, ``mesh=mesh``.
    ``ep`` is the axis of :class:`ParallelMoE`'s ``expert_group``: its ranks have different sequences, as those of
    ``dp``, which are dp x ep data ranks.

    Args:
        device_type: ``"cuda"`` or ``"cpu"``, as for ``torch.distributed.init_device_mesh``.
        pp, dp, ep, cp, tp: the number of ranks of each axis; one of them may be -1, for the remaining ranks.

    Communicates: the creation of the groups, as ``init_device_mesh``; every rank of the job calls it.

    Raises:
        TypeError: ``device_type`` is no string. ValueError: a number that is no positive integer, several that are -1,
            or numbers that do not multiply to the ranks of the job.

    Warns:
        SlowMeshWarning: a tensor-parallel group spans hosts, by the ``LOCAL_WORLD_SIZE`` of torchrun.
    """
    if not isinstance(device_type, str):
        raise TypeError(f"device_type: {device_type!r} must be a string such as 'cpu' or 'cuda'")
    sizes = {"pp": pp, "dp": dp} | ({} if ep is None else {"ep": ep}) | {"cp": cp, "tp": tp}
    for name, size in sizes.items():
        if not isinstance(size, int) or isinstance(size, bool) or (size < 1 and size != -1):
            raise ValueError(f"{name}: {size!r} must be an integer of at least 1, or -1 for the remaining ranks")
    ranks, known = job_ranks(), math.prod(size for size in sizes.values() if size > 0)
    remaining = [name for name, size in sizes.items() if size == -1]
    if len(remaining) > 1:
        raise ValueError(f"{', '.join(remaining)}: only one of them may be -1, for the remaining ranks")
    # Also without a -1: torch accepts a mesh of some of the ranks, and those left out would run on alone
    if ranks % known or (not remaining and ranks != known):
        shown = ", ".join(f"{name} = {size}" for name, size in sizes.items())
        raise ValueError(f"{', '.join(sizes)}: {shown} must multiply to the {ranks} ranks of the job")
    shape = tuple(ranks // known if size == -1 else size for size in sizes.values())
    # torchrun numbers the ranks of a host in sequence, and tp is the last axis
    local = os.environ.get("LOCAL_WORLD_SIZE", "")
    if local.isdecimal() and 0 < int(local) < ranks and int(local) % shape[-1]:
        warnings.warn(
            f"tp: a group of {shape[-1]} ranks spans hosts of {local} ranks each, where its collectives are slow; tp "
            "should divide the ranks of a host",
            SlowMeshWarning,
            stacklevel=2,
        )
    return init_device_mesh(device_type, shape, mesh_dim_names=tuple(sizes))


# [Note: functions of whole models take a mesh, layers do not]
class MeshAxes(NamedTuple):
    """The axes of a mesh, or the group given in its place, for a function of a whole model.

    Attributes:
        group: the tensor-parallel group, as the argument ``group`` of functions.
        named: the name of that argument in messages.
        pp: the group of the pipeline: its ranks hold different stages.
        ep: the group over which experts are sharded, which is one of ``data``, too.
        data: the groups along which parameters are equal copies, unless FSDP2 shards them: ``dp``, ``ep`` (along which
            experts differ, as their layouts say) and ``cp``.
    """

    group: Group
    named: str = "group"
    pp: ParallelGroup = ALONE
    ep: ParallelGroup = ALONE
    data: tuple[ParallelGroup, ...] = ()


def mesh_axes(group: Group, mesh: DeviceMesh | None) -> MeshAxes:
    """Returns the axes of a mesh, or the ``group`` in place of it.

    Raises:
        TypeError: both are given; ``mesh`` is no mesh.
        ValueError: a mesh that has no names or others than :data:`AXES`, or that this rank is not in.
    """
    if mesh is None:
        return MeshAxes(group)
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: {type(mesh).__name__} must be a DeviceMesh with axes among {AXES}, or None")
    if group is not NOT_GIVEN:
        raise TypeError("group: must not be given together with mesh, whose axis 'tp' is the group")
    names = mesh.mesh_dim_names or ()
    if not names or not set(names) <= set(AXES):
        raise ValueError(f"mesh: its axes {mesh.mesh_dim_names} must be among {AXES}; slice it, or pass group=")
    if mesh.get_coordinate() is None:
        raise ValueError("mesh: this rank must be a member of the mesh")
    groups = {name: parallel_group(mesh.get_group(name)) for name in names}
    data = tuple(groups[name] for name in DATA_AXES if name in groups and groups[name].size > 1)
    pp, ep = (groups[name] if name in groups and groups[name].size > 1 else ALONE for name in ("pp", "ep"))
    return MeshAxes(groups["tp"].name if "tp" in groups else None, "mesh['tp']", pp, ep, data)


def data_axes(mean_over: Group | list[Group]) -> list[ParallelGroup]:
    """Returns the groups of several ranks over which the mean is taken."""
    if isinstance(mean_over, DeviceMesh) and mean_over.ndim > 1:
        axes = list(mesh_axes(NOT_GIVEN, mean_over).data)
    else:
        axes = [parallel_group(axis) for axis in (mean_over if isinstance(mean_over, list) else [mean_over])]
    return [axis for axis in axes if axis.size > 1]
