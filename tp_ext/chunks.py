"""The chunks (rectangles) of a full tensor that a rank holds, as views of its local storage. Checkpoints, norms and
full state dicts are built on them, whether or not a data axis (FSDP2) splits the shards once more.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Shard

from tp_ext.sharding import Sharding


class LocalChunk(NamedTuple):
    """A chunk of a full tensor that this rank holds.

    Attributes:
        offsets: its first index in the full tensor, one per dim.
        tensor: its values, a view of the local storage: writing to it writes to the parameter.
        owned: whether this rank is the one that counts it. Over all ranks of the tensor-parallel group and of the
            tensor's own mesh, the owned chunks cover the full tensor exactly once.
    """

    offsets: tuple[int, ...]
    tensor: Tensor
    owned: bool


class _Interval(NamedTuple):
    """An interval of ``size`` elements of one dim: from ``start`` on locally, from ``full_start`` in the full dim."""

    start: int
    full_start: int
    size: int
    owned: bool


# A placement (_StridedShard is another class with the same methods), the ranks it splits over, this rank's index
_Split = tuple[Shard, int, int]


def local_chunks(tensor: Tensor, sharding: Sharding | None, rank: int, p: int) -> tuple[torch.Size, list[LocalChunk]]:
    """Returns the shape of the full tensor and this rank's chunks of it; nothing is copied or communicated.

    Args:
        tensor: the tensor of rank ``rank`` of p: a plain tensor, or the DTensor that FSDP2 made of one over data axes.
        sharding: the sharding of the full tensor over the p ranks; None for a replicated one.

    Returns:
        The shape, and chunks that are never empty. No chunk contains padding. Of copies (KV heads, replicated tensors,
        replicas along a data axis) every holder has the chunk and the first one owns it. Replicas on plain
        data-parallel ranks (DDP) are each owned by their rank: they cannot be recognised from here.

    Raises:
        ValueError: the tensor has another length than the sharding gives this rank, or is a DTensor with partial sums.
    """
    local, intervals, owned = _local(tensor)
    shape = list(tensor.shape)
    if sharding is None:
        owned = owned and rank == 0
    else:
        if not -len(shape) <= sharding.dim < len(shape) or shape[sharding.dim] != sharding.local_size(rank, p):
            raise ValueError(
                f"tensor: shape {tuple(shape)} on rank {rank} must have {sharding.local_size(rank, p)} elements in "
                f"dim {sharding.dim}, for {sharding} and p = {p}"
            )
        dim = sharding.dim % len(shape)
        shape[dim] = sharding.size
        intervals[dim] = list(_intersections(intervals[dim], _shard_intervals(sharding, rank, p)))
    result = []
    for sides in itertools.product(*intervals):
        view = local
        for d, side in enumerate(sides):
            view = view.narrow(d, side.start, side.size)
        if view.numel():
            offsets = tuple(side.full_start for side in sides)
            result.append(LocalChunk(offsets, view, owned and all(side.owned for side in sides)))
    return torch.Size(shape), result


def _local(tensor: Tensor) -> tuple[Tensor, list[list[_Interval]], bool]:
    """Returns the local storage, its intervals along each dim, and whether this is the first of the data replicas."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), [[_Interval(0, 0, size, True)] for size in tensor.shape], True
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    local = cast(DTensor, tensor.detach()).to_local()
    if coordinate is None:  # this rank is not in the mesh
        return local, [[] for _ in tensor.shape], False
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"tensor: a DTensor with placements {placements} must hold values, not partial sums")
    splits: dict[int, list[_Split]] = {}
    owned = True
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            owned = owned and coordinate[axis] == 0
        else:
            shard = cast(Shard, placement)
            splits.setdefault(shard.dim, []).append((shard, mesh.size(axis), coordinate[axis]))
    intervals = []
    for dim, size in enumerate(tensor.shape):
        whole = [_Interval(0, 0, size, True)]
        intervals.append(list(_placed_intervals(size, dim, tensor.dim(), splits[dim])) if dim in splits else whole)
    return local, intervals, owned


def _placed_intervals(size: int, dim: int, ndim: int, splits: list[_Split]) -> Iterator[_Interval]:
    """Yields the intervals that placements leave to this rank, found by splitting the numbers 0, 1, .. with them
    (strided placements leave several)."""
    numbers = torch.arange(size).view([-1 if d == dim else 1 for d in range(ndim)])
    for placement, count, index in splits:
        numbers = placement._split_tensor(numbers, count, with_padding=False, contiguous=False)[0][index]
    held = numbers.flatten()
    starts = [0, *(torch.nonzero(held.diff() != 1).flatten() + 1).tolist()]
    for start, stop in zip(starts, [*starts[1:], len(held)], strict=True):
        if stop > start:
            yield _Interval(start, int(held[start]), stop - start, True)


def _shard_intervals(sharding: Sharding, rank: int, p: int) -> list[_Interval]:
    """Returns the rank's intervals of the sharded dim, without padding; those adjacent in both dims are merged."""
    found: list[_Interval] = []
    at = 0
    for part, where in zip(sharding.parts, sharding.slices(rank, p), strict=True):
        new = _Interval(at, where.start, where.stop - where.start, rank % part.copies == 0)
        last = found[-1] if found else None
        if last and (last.start + last.size, last.full_start + last.size, last.owned) == (at, where.start, new.owned):
            found[-1] = last._replace(size=last.size + new.size)
        else:
            found.append(new)
        start, stop = part.span(rank, p)
        at += stop - start
    return found


def _intersections(held: list[_Interval], shard: list[_Interval]) -> Iterator[_Interval]:
    """Yields the elements that a data rank holds (``held``, numbered in the TP-local dim) of the TP shard (``shard``,
    numbered in the full dim)."""
    for ours in held:
        for other in shard:
            begin = max(ours.full_start, other.start)
            end = min(ours.full_start + ours.size, other.start + other.size)
            if begin < end:
                start, full_start = ours.start + begin - ours.full_start, other.full_start + begin - other.start
                yield _Interval(start, full_start, end - begin, other.owned)
