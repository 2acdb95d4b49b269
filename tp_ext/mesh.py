"""The mesh of a job: pipeline, data, expert, context and tensor parallelism as axes ``pp``, ``dp``, ``ep``, ``cp`` and
``tp``. Layers know a group, never a mesh; functions of whole models take ``mesh=`` in place of ``group=`` and read the
axes by name.
"""

import math
import os
import warnings
from collections.abc import Sequence
from typing import Any, NamedTuple

from torch import Tensor
from torch.distributed import DeviceMesh, init_device_mesh

from tp_ext import _ops
from tp_ext.group import ALONE, NOT_GIVEN, Group, ParallelGroup, check_place, job_ranks, parallel_group

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


class DataAxes:
    """The axes of a mesh along which ranks have different data of one batch. A value that does not change.

    The ranks are numbered as the data in the batch of one process: those along the last axis follow one another.

    Attributes:
        axes: the groups of several ranks, one along each axis, the outermost first.
        context: the axis, one of them, whose ranks have other tokens of the same sequences.
        size: the number of ranks.
        rank: the number of this rank.
    """

    def __init__(self, axes: tuple[ParallelGroup, ...] = (), context: ParallelGroup = ALONE) -> None:
        self.axes, self.context = axes, context
        self.size = math.prod([axis.size for axis in axes])  # Dynamo takes no generator here
        self.rank = self.number([axis.rank for axis in axes])

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for axis in self.axes:
            check_place(axis)

    @property
    def sequences(self) -> "DataAxes":
        """The axes whose ranks have different sequences."""
        return DataAxes(tuple(axis for axis in self.axes if axis != self.context))

    def number(self, place: Sequence[int]) -> int:
        """Returns the number of the rank at these coordinates."""
        number = 0
        for index, axis in zip(place, self.axes, strict=True):
            number = number * axis.size + index
        return number

    def place(self, rank: int) -> tuple[int, ...]:
        """Returns the coordinates of the rank of this number."""
        place = []
        for axis in reversed(self.axes):
            rank, index = divmod(rank, axis.size)
            place.append(index)
        return tuple(reversed(place))

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum over the ranks; without a gradient. Communicates one all-reduce per axis."""
        for axis in self.axes:
            x = sum_of_constants(x, axis)
        return x.detach()

    def sum_over_context(self, x: Tensor) -> Tensor:
        """Returns the sum over the ranks that have the same sequences. Communicates one all-reduce."""
        return sum_of_constants(x, self.context) if self.context.size > 1 else x

    def stack(self, x: Tensor) -> Tensor:
        """Returns ``[ranks, ..]``, the ranks' x of one shape. Communicates one all-gather per axis."""
        x = x.detach()[None]
        for axis in reversed(self.axes):
            x = _ops.all_gather_region(x, axis.name, 0, None)
        return x

    def concatenate(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """Returns the ranks' x, of these lengths, along dim 0. Communicates one all-gather per axis."""
        rank, x = self.rank, x.detach()
        span = 1  # ranks whose x this rank already has
        for axis in reversed(self.axes):
            first = rank - rank % (span * axis.size)
            sizes = [sum(lengths[first + i * span : first + (i + 1) * span]) for i in range(axis.size)]
            x = _ops.all_gather_region(x, axis.name, 0, sizes)
            span *= axis.size
        return x


NO_DATA_AXES = DataAxes()


def sum_of_constants(x: Tensor, axis: ParallelGroup) -> Tensor:
    """Returns the sum over the ranks of an axis, without a gradient, for the computation of each rank. Communicates one
    all-reduce."""
    return _ops.copy_to_region(_ops.reduce_from_region(x.detach(), axis.name), axis.name)


def data_axes(ranks: Group | list[Group]) -> DataAxes:
    """Returns the axes of an argument such as ``mean_over``: a group, a list of groups that are axes of one mesh, or a
    mesh, for its data axes."""
    if ranks is None:  # the default of every loss, whose host time is that of each step
        return NO_DATA_AXES
    if isinstance(ranks, DeviceMesh) and ranks.ndim > 1:
        return mesh_axes(NOT_GIVEN, ranks).data
    groups = [parallel_group(group) for group in (ranks if isinstance(ranks, list) else [ranks])]
    return DataAxes(tuple(group for group in groups if group.size > 1))


# [Note: functions of whole models take a mesh, layers do not]
class MeshAxes(NamedTuple):
    """The axes of a mesh, or the group given in its place, for a function of a whole model.

    Attributes:
        tp: the tensor-parallel group, as the argument ``group`` of functions; :data:`NOT_GIVEN` without either.
        argument: how messages name it: ``mesh['tp']``, or the deprecated ``group``.
        pp: the group of the pipeline: its ranks hold different stages.
        ep: the group over which experts are sharded, which is one of ``data``, too.
        data: the axes along which parameters are equal copies, unless FSDP2 shards them: ``dp``, ``ep`` (along which
            experts differ, as their layouts say) and ``cp``.
    """

    tp: Group = NOT_GIVEN
    argument: str = "group"
    pp: ParallelGroup = ALONE
    ep: ParallelGroup = ALONE
    data: DataAxes = DataAxes()  # without any


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
    pp, ep, cp = (groups[name] if name in groups and groups[name].size > 1 else ALONE for name in ("pp", "ep", "cp"))
    return MeshAxes(groups["tp"].name if "tp" in groups else None, "mesh['tp']", pp, ep, DataAxes(data, cp))
