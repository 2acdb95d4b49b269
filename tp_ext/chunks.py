"""Which pieces of a full tensor a rank holds, as views of what it stores: what checkpoints, norms and full state dicts
are made from, whether or not a data axis (FSDP2) cuts the shards once more.
"""

import itertools
from collections.abc import Iterator
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.placement_types import Shard

from tp_ext.sharding import Sharding


class Box(NamedTuple):
    """A piece of a full tensor.

    Attributes:
        offsets: where it begins in the full tensor.
        tensor: its values, a view of the local storage: what is written there is written to the parameter.
        owned: whether this rank is the one that counts it. Over all ranks of the tensor-parallel group and of the
            tensor's own mesh, the owned boxes are the full tensor exactly once.
    """

    offsets: tuple[int, ...]
    tensor: Tensor
    owned: bool


class _Run(NamedTuple):
    """Neighbours along one dim: ``size`` elements from ``start`` on stand from ``full_start`` on in the full dim."""

    start: int
    full_start: int
    size: int
    owned: bool


_Cut = tuple[Shard, int, int]  # a placement (_StridedShard is another class with the same methods), of how many, which


def boxes(tensor: Tensor, sharding: Sharding | None, rank: int, p: int) -> tuple[torch.Size, list[Box]]:
    """The shape of the full tensor and the pieces of it that this rank holds; nothing is copied or communicated.

    Args:
        tensor: what rank ``rank`` of p holds: a plain tensor, or the DTensor that FSDP2 made of one over data axes.
        sharding: how the full tensor is cut over the p ranks; None for a replicated one.

    Returns:
        The shape, and boxes that are never empty. Padding is in none. Of copies (KV heads, replicated tensors, replicas
        along a data axis) every holder has the box and the first one owns it. What plain data-parallel ranks hold alike
        (DDP) each of them owns: their copies cannot be told from here.

    Raises:
        ValueError: the tensor has another length than the sharding gives this rank, or is a DTensor with partial sums.
    """
    local, runs, owned = _local(tensor)
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
        runs[dim] = list(_overlaps(runs[dim], _pieces(sharding, rank, p)))
    result = []
    for box in itertools.product(*runs):
        view = local
        for d, run in enumerate(box):
            view = view.narrow(d, run.start, run.size)
        if view.numel():
            offsets = tuple(run.full_start for run in box)
            result.append(Box(offsets, view, owned and all(run.owned for run in box)))
    return torch.Size(shape), result


def _local(tensor: Tensor) -> tuple[Tensor, list[list[_Run]], bool]:
    """What is stored here, along each dim the runs of it, and whether this rank is the first of its data replicas."""
    if not isinstance(tensor, DTensor):
        return tensor.detach(), [[_Run(0, 0, size, True)] for size in tensor.shape], True
    mesh, placements = tensor.device_mesh, tensor.placements
    coordinate = mesh.get_coordinate()
    local = cast(DTensor, tensor.detach()).to_local()
    if coordinate is None:  # this rank is not in the mesh
        return local, [[] for _ in tensor.shape], False
    if any(placement.is_partial() for placement in placements):
        raise ValueError(f"tensor: a DTensor with placements {placements} must hold values, not partial sums")
    along: dict[int, list[_Cut]] = {}
    owned = True
    for axis, placement in enumerate(placements):
        if isinstance(placement, Replicate):
            owned = owned and coordinate[axis] == 0
        else:
            cut = cast(Shard, placement)
            along.setdefault(cut.dim, []).append((cut, mesh.size(axis), coordinate[axis]))
    runs = []
    for dim, size in enumerate(tensor.shape):
        runs.append(list(_dealt(size, dim, tensor.dim(), along[dim])) if dim in along else [_Run(0, 0, size, True)])
    return local, runs, owned


def _dealt(size: int, dim: int, ndim: int, cuts: list[_Cut]) -> Iterator[_Run]:
    """The runs that placements leave, found by letting them cut the numbers 0, 1, .. (strided ones leave several)."""
    numbers = torch.arange(size).view([-1 if d == dim else 1 for d in range(ndim)])
    for placement, count, own in cuts:
        numbers = placement._split_tensor(numbers, count, with_padding=False, contiguous=False)[0][own]
    held = numbers.flatten()
    starts = [0, *(torch.nonzero(held.diff() != 1).flatten() + 1).tolist()]
    for start, stop in zip(starts, [*starts[1:], len(held)], strict=True):
        if stop > start:
            yield _Run(start, int(held[start]), stop - start, True)


def _pieces(sharding: Sharding, rank: int, p: int) -> list[_Run]:
    """The rank's pieces of the sharded dim, without padding; neighbours in both are one."""
    pieces: list[_Run] = []
    at = 0
    for part, piece in zip(sharding.parts, sharding.slices(rank, p), strict=True):
        run = _Run(at, piece.start, piece.stop - piece.start, rank % part.copies == 0)
        last = pieces[-1] if pieces else None
        if last and (last.start + last.size, last.full_start + last.size, last.owned) == (at, piece.start, run.owned):
            pieces[-1] = last._replace(size=last.size + run.size)
        else:
            pieces.append(run)
        start, stop = part.span(rank, p)
        at += stop - start
    return pieces


def _overlaps(held: list[_Run], pieces: list[_Run]) -> Iterator[_Run]:
    """What a data rank holds (numbered in the TP-local dim) of the pieces (numbered in the full dim)."""
    for run in held:
        for piece in pieces:
            begin = max(run.full_start, piece.start)
            end = min(run.full_start + run.size, piece.start + piece.size)
            if begin < end:
                offset = begin - piece.start
                yield _Run(run.start + begin - run.full_start, piece.full_start + offset, end - begin, piece.owned)
