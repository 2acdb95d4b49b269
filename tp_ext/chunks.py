"""The chunks (rectangles) of a full tensor that a rank holds, as views of its local storage. Checkpoints, norms and
full state dicts are built on them, whether or not a data axis (FSDP2) splits the shards once more.
"""

import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Shard


class LocalChunk(NamedTuple):
    """A chunk of a full tensor that this rank holds.

    Attributes:
        offsets: its first index in the full tensor, one per dim.
        tensor: its values, a view of the local storage: writing to it writes to the parameter.
        owned: whether this rank is the one that counts it. Over all ranks of the layout's groups and of the tensor's
            own mesh, the owned chunks cover the full tensor exactly once.
    """

    offsets: tuple[int, ...]
    tensor: Tensor
    owned: bool


class Interval(NamedTuple):
    """An interval of ``size`` elements of one dim: from ``start`` on locally, from ``full_start`` in the full dim."""

    start: int
    full_start: int
    size: int
    owned: bool


# A placement (_StridedShard is another class with the same methods), the ranks it splits over, this rank's index
_PlacementSplit = tuple[Shard, int, int]


# [Note: where a rank stands along an axis of a mesh]
def mesh_position(mesh: DeviceMesh) -> tuple[int, ...] | None:
    """Returns this rank's index along each axis of the mesh; None if it is not in the mesh.

    It is the rank in the axis's group, by which ``fully_shard`` and ``distribute_tensor`` cut tensors and collectives
    join them. ``get_coordinate()`` is the place in the table of ranks, another one where that table does not ascend:
    torch makes groups of sorted ranks.
    """
    if mesh.get_coordinate() is None:
        return None
    return tuple(mesh.get_local_rank(axis) for axis in range(mesh.ndim))


def start_of(view: Tensor, local: Tensor) -> tuple[int, ...]:
    """Returns the first index of a view, made by ``narrow``, in the tensor that it is a view of."""
    distance = int(view.storage_offset() - local.storage_offset())
    starts = [0] * local.dim()
    for dim in sorted(range(local.dim()), key=lambda dim: local.stride(dim), reverse=True):
        if local.shape[dim] > 1 and local.stride(dim):
            starts[dim], distance = divmod(distance, local.stride(dim))
    return tuple(starts)


def chunks_of(tensor: Tensor, sharded: Mapping[int, Sequence[Interval]]) -> list[LocalChunk]:
    """Returns the non-empty chunks of a full tensor that the local ``tensor`` consists of; nothing is copied or
    communicated.

    Args:
        tensor: a plain tensor, or the DTensor that FSDP2 made of one over data axes.
        sharded: the intervals of the local dim, for each dim that is sharded before the data axes split it.

    Raises:
        ValueError: a DTensor with partial sums.
    """
    local, intervals, owned = _local(tensor)
    for dim, shard in sharded.items():
        intervals[dim] = list(compose(intervals[dim], shard))
    result = []
    for sides in itertools.product(*intervals):
        view = local
        for d, side in enumerate(sides):
            view = view.narrow(d, side.start, side.size)
        if view.numel():
            offsets = tuple(side.full_start for side in sides)
            result.append(LocalChunk(offsets, view, owned and all(side.owned for side in sides)))
    return result


def compose(inner: Iterable[Interval], outer: Sequence[Interval]) -> Iterator[Interval]:
    """Yields the intervals of a shard of a shard.

    Args:
        inner: the intervals that a rank holds, ``full_start`` counting in the local dim of ``outer``.
        outer: the intervals of that dim, ``full_start`` counting in the full dim.
    """
    for ours in inner:
        for other in outer:
            begin = max(ours.full_start, other.start)
            end = min(ours.full_start + ours.size, other.start + other.size)
            if begin < end:
                start, full_start = ours.start + begin - ours.full_start, other.full_start + begin - other.start
                yield Interval(start, full_start, end - begin, ours.owned and other.owned)


def merge_adjacent(intervals: Iterable[Interval]) -> list[Interval]:
    """Returns the intervals with those merged that are adjacent both locally and in the full dim."""
    merged: list[Interval] = []
    for new in intervals:
        last = merged[-1] if merged else None
        end = last and (last.start + last.size, last.full_start + last.size, last.owned)
        if last and end == (new.start, new.full_start, new.owned):
            merged[-1] = last._replace(size=last.size + new.size)
        else:
            merged.append(new)
    return merged


def _local(tensor: Tensor) -> tuple[Tensor, list[list[Interval]], bool]:
    """Returns the local storage, its intervals along each dim, and whether this is the first of the data replicas."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), [[Interval(0, 0, size, True)] for size in tensor.shape], True
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh_position(mesh)
    local = cast(DTensor, tensor.detach()).to_local()
    if coordinate is None:  # this rank is not in the mesh
        return local, [[] for _ in tensor.shape], False
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"tensor: a DTensor with placements {placements} must hold values, not partial sums")
    splits: dict[int, list[_PlacementSplit]] = {}
    owned = True
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            owned = owned and coordinate[axis] == 0
        else:
            shard = cast(Shard, placement)
            splits.setdefault(shard.dim, []).append((shard, mesh.size(axis), coordinate[axis]))
    intervals = []
    for dim, size in enumerate(tensor.shape):
        whole = [Interval(0, 0, size, True)]
        intervals.append(list(_placed_intervals(size, dim, tensor.dim(), splits[dim])) if dim in splits else whole)
    return local, intervals, owned


def _placed_intervals(size: int, dim: int, ndim: int, splits: list[_PlacementSplit]) -> Iterator[Interval]:
    """Yields the intervals that placements leave to this rank, found by splitting the numbers 0, 1, .. with them
    (strided placements leave several)."""
    numbers = torch.arange(size).view([-1 if d == dim else 1 for d in range(ndim)])
    for placement, count, index in splits:
        numbers = placement._split_tensor(numbers, count, with_padding=False, contiguous=False)[0][index]
    full_numbers = numbers.flatten()
    starts = [0, *(torch.nonzero(full_numbers.diff() != 1).flatten() + 1).tolist()]
    for start, stop in zip(starts, [*starts[1:], len(full_numbers)], strict=True):
        if stop > start:
            yield Interval(start, int(full_numbers[start]), stop - start, True)
