"""Full tensors from what ranks hold, and back, one at a time: what state dicts and exports are made with. A data axis
(FSDP2, DDP) makes no difference to what comes out.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tp_ext import _ops
from tp_ext.chunks import boxes
from tp_ext.group import Group, ParallelGroup, parallel_group, process_group
from tp_ext.nn.module import model_group
from tp_ext.sharding import Sharding

T = TypeVar("T")


class Ranks(NamedTuple):
    """Who takes part when the full state of a module is gathered or dealt out.

    Attributes:
        tp: the tensor-parallel group.
        axes: the groups of the data axes over which the module is dealt (FSDP2) or copied (DDP).
        data_first: this rank is the first on all of them.
        device: on which the ranks communicate.
    """

    tp: ParallelGroup
    axes: tuple[ProcessGroup, ...]
    data_first: bool
    device: torch.device

    @property
    def first(self) -> bool:
        """Whether this rank is the one that ``rank0_only`` means."""
        return self.data_first and self.tp.rank == 0


def ranks_of(module: nn.Module, group: Group) -> Ranks:
    """The ranks over which the module's state is spread: its tensor-parallel group (``group``, if given, must be that
    one), the meshes of its DTensors, the groups of DDP."""
    groups = [axis for mesh in _meshes(module) for axis in mesh.get_all_groups()]
    groups += [wrap.process_group for wrap in module.modules() if isinstance(wrap, DistributedDataParallel)]
    # Two groups of the same ranks are one axis
    axes = tuple({tuple(dist.get_process_group_ranks(axis)): axis for axis in groups}.values())
    devices = (_device(tensor) for tensor in _tensors(module))
    device = next(devices, torch.device("cpu"))
    return Ranks(parallel_group(model_group(module, group)), axes, all(axis.rank() == 0 for axis in axes), device)


def check_one_mesh(module: nn.Module) -> None:
    """Raises unless all DTensors of the module are on the same mesh: else there is no one first rank of them all."""
    meshes = _meshes(module)
    if len(meshes) > 1:
        raise ValueError(
            f"broadcast_from_rank0: the module's DTensors are on several meshes, {meshes}, and must be on one"
        )


def _tensors(module: nn.Module) -> Iterator[Tensor]:
    for owner in module.modules():
        yield from (tensor for tensor in (*owner._parameters.values(), *owner._buffers.values()) if tensor is not None)


def _meshes(module: nn.Module) -> list[DeviceMesh]:
    return list(dict.fromkeys(tensor.device_mesh for tensor in _tensors(module) if isinstance(tensor, DTensor)))


def _device(tensor: Tensor) -> torch.device:
    """Where the tensor is communicated; what FSDP2 offloads to the CPU, on the device of its mesh."""
    return torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor.device


@torch.no_grad()
def gather_full(local: Tensor, sharding: Sharding | None, ranks: Ranks, *, rank0_only: bool = False) -> Tensor | None:
    """The full tensor from the shards, a copy, so that no entry changes as training goes on; None where it is not made.

    Communicates: of a DTensor, one all-gather of the TP-local shard over its data axes; of a sharded tensor, one
    all-gather, or with ``rank0_only`` one gather to rank 0 of what the ranks own.
    """
    _, p, rank = ranks.tp
    value = _without_data_axes(local.detach())
    if rank0_only and not ranks.data_first:
        return None
    if sharding is None or p == 1:
        if rank0_only and rank:
            return None
        if sharding is not None:
            return sharding.unshard([value])
        own = local.to_local() if isinstance(local, DTensor) else local
        return value.clone() if value.untyped_storage().data_ptr() == own.untyped_storage().data_ptr() else value
    if rank0_only:
        return _gather_to_first(value, sharding, ranks.tp)
    sizes = sharding.local_sizes(p)
    gathered = _ops.gather_from_region(value, ranks.tp.name, sharding.dim, sizes)
    return sharding.unshard(gathered.split(sizes, sharding.dim))


def _without_data_axes(tensor: Tensor) -> Tensor:
    """The TP-local tensor of what FSDP2 has dealt out."""
    if not isinstance(tensor, DTensor):
        return tensor
    device = _device(tensor)
    moved = tensor if tensor.device.type == device.type else cast(DTensor, tensor.to(device))
    return moved.full_tensor()


def _gather_to_first(local: Tensor, sharding: Sharding, tp: ParallelGroup) -> Tensor | None:
    """Every rank sends what it owns, in as many bytes as the one that owns most.

    By a gather: messages from rank to rank would leave the ranks with other numbers of operations behind them, at which
    ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` stops.
    """
    _, p, rank = tp
    dim, pg = sharding.dim, process_group(tp.name)
    shape = list(local.shape)
    shape[dim] = sharding.size
    full = local.new_empty(shape, device="meta" if rank else None)
    places = [_owned_places(full, sharding, sender, p) for sender in range(p)]
    sizes = [sum(place.shape[dim] for place in of_one) for of_one in places]
    shape[dim] = max(sizes)
    sent = local.new_empty(shape)
    if sent.numel():
        for piece, packed in zip(sharding.owned(local, rank, p), _packed(sent, places[rank], dim), strict=True):
            packed.copy_(piece)
        if rank:
            dist.gather(_bytes(sent), group=pg, group_dst=0)
            return None
        # Rows in equal blocks, one of each rank, are received where they belong; others beside it
        rows = [of_one[0] for of_one in places if len(of_one) == 1 and of_one[0].shape == sent.shape]
        direct = len(rows) == p and all(piece.is_contiguous() for piece in rows)
        received = rows if direct else [torch.empty_like(sent) for _ in places]
        dist.gather(_bytes(sent), [_bytes(piece) for piece in received], group=pg, group_dst=0)
        for of_one, piece in zip(places, received, strict=True) if not direct else ():
            for place, packed in zip(of_one, _packed(piece, of_one, dim), strict=True):
                place.copy_(packed)
    return None if rank else full


def _owned_places(full: Tensor, sharding: Sharding, rank: int, p: int) -> list[Tensor]:
    """Where in the full tensor what the rank owns belongs (:meth:`Sharding.owned`)."""
    return [
        full.narrow(sharding.dim, piece.start, piece.stop - piece.start)
        for part, piece in zip(sharding.parts, sharding.slices(rank, p), strict=True)
        if rank % part.copies == 0 and piece.stop > piece.start
    ]


def _packed(whole: Tensor, places: Sequence[Tensor], dim: int) -> list[Tensor]:
    """Views of ``whole``, one after the other along ``dim``, as long as the places are."""
    sizes = [place.shape[dim] for place in places]
    return list(whole.split([*sizes, whole.shape[dim] - sum(sizes)], dim))[:-1]


def _bytes(tensor: Tensor) -> Tensor:
    """The contiguous tensor as bytes, which every backend can send."""
    return tensor.view(-1).view(torch.uint8)


@torch.no_grad()
def write_full(full: Tensor, local: Tensor, sharding: Sharding | None, tp: ParallelGroup) -> None:
    """Writes this rank's pieces of the full tensor into what it stores, zero into padding."""
    if sharding is not None and any(part.padding for part in sharding.parts):
        local.detach().zero_()
    for box in boxes(local, sharding, tp.rank, tp.size)[1]:
        where = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.tensor.shape, strict=True))
        box.tensor.copy_(full[where])


@torch.no_grad()
def deal_full(full: Tensor | None, local: Tensor, sharding: Sharding | None, ranks: Ranks) -> None:
    """:func:`write_full` of a full tensor that the first rank alone has; no other holds more of it than the TP-local
    tensor.

    Communicates: one scatter of the shards over ``group`` (of a replicated tensor, one broadcast), then one broadcast
    of them along every data axis.
    """
    tp = ranks.tp
    if sharding is not None and tp.size > 1 and ranks.data_first:
        shard = _scatter(full, local, sharding, tp)
    else:
        shard = torch.empty(local.shape, dtype=local.dtype, device=_device(local))
        if full is not None:
            shard.copy_(full if sharding is None else sharding.shard(full, 0, 1))
        if sharding is None and tp.size > 1 and ranks.data_first and shard.numel():
            dist.broadcast(_bytes(shard), group=process_group(tp.name), group_src=0)
    if shard.numel():
        for axis in _in_turn(ranks):
            dist.broadcast(_bytes(shard), group=axis, group_src=0)
    write_full(shard, local, None, ParallelGroup("", 1, 0))


def _scatter(full: Tensor | None, local: Tensor, sharding: Sharding, tp: ParallelGroup) -> Tensor:
    """The own shard of the full tensor of rank 0, in the dtype of ``local``."""
    dim, sizes = sharding.dim, sharding.local_sizes(tp.size)
    shape = list(local.shape)
    shape[dim] = max(sizes)
    received = torch.empty(shape, dtype=local.dtype, device=_device(local))
    if received.numel():
        shards = []
        for receiver, size in enumerate(sizes if full is not None else []):
            shards.append(torch.empty_like(received))
            shards[-1].narrow(dim, 0, size).copy_(sharding.shard(cast(Tensor, full), receiver, tp.size))
        pieces = [_bytes(piece) for piece in shards] or None
        dist.scatter(_bytes(received), pieces, group=process_group(tp.name), group_src=0)
    return received.narrow(dim, 0, sizes[tp.rank]).contiguous()


def from_first(make: Callable[[], T], ranks: Ranks) -> T:
    """What ``make`` returns on the first rank, on all ranks; or what it raises."""
    box: list[Any] = [None, None]
    if ranks.first:
        try:
            box[0] = make()
        except Exception as error:  # the other ranks wait for an answer, whatever it is
            box[1] = error
    if ranks.data_first and ranks.tp.size > 1:
        dist.broadcast_object_list(box, group=process_group(ranks.tp.name), group_src=0)
    for axis in _in_turn(ranks):
        dist.broadcast_object_list(box, group=axis, group_src=0)
    if box[1] is not None:
        raise box[1]
    return cast(T, box[0])


def _in_turn(ranks: Ranks) -> Iterator[ProcessGroup]:
    """The data axes along which this rank takes part when something spreads from the ranks that are first on all of
    them: along an axis, those that are first on all later ones."""
    for i, axis in enumerate(ranks.axes):
        if all(later.rank() == 0 for later in ranks.axes[i + 1 :]):
            yield axis


def any_rank(flag: bool, ranks: Ranks) -> bool:
    """Whether the flag is set on any of the ranks, so that all of them learn of one's failure: one number per group."""
    number = torch.tensor([float(flag)], device=ranks.device)
    for axis in (*([process_group(ranks.tp.name)] if ranks.tp.size > 1 else []), *ranks.axes):
        dist.all_reduce(number, dist.ReduceOp.MAX, group=axis)
    return bool(number)
