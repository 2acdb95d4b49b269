"""Full tensors gathered from the ranks and scattered back, one at a time, for state dicts and exports. The results do
not depend on a data axis (FSDP2, DDP).
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
from tp_ext.chunks import local_chunks
from tp_ext.group import Group, ParallelGroup, parallel_group, process_group
from tp_ext.nn.module import model_group
from tp_ext.sharding import Sharding

T = TypeVar("T")


class Ranks(NamedTuple):
    """The ranks that take part when the full state of a module is gathered or scattered.

    Attributes:
        tp: the tensor-parallel group.
        axes: the groups of the data axes over which the module is sharded (FSDP2) or replicated (DDP).
        data_first: this rank is the first on all of them.
        device: the device on which the ranks communicate.
    """

    tp: ParallelGroup
    axes: tuple[ProcessGroup, ...]
    data_first: bool
    device: torch.device

    @property
    def first(self) -> bool:
        """True on the rank that ``rank0_only`` refers to."""
        return self.data_first and self.tp.rank == 0


def ranks_of(module: nn.Module, group: Group) -> Ranks:
    """Returns the ranks over which the module's state is distributed: its tensor-parallel group (``group``, if given,
    must be that one), the meshes of its DTensors, the groups of DDP."""
    groups = [axis for mesh in _meshes(module) for axis in mesh.get_all_groups()]
    groups += [wrap.process_group for wrap in module.modules() if isinstance(wrap, DistributedDataParallel)]
    # Two groups of the same ranks are one axis
    axes = tuple({tuple(dist.get_process_group_ranks(axis)): axis for axis in groups}.values())
    devices = (_device(tensor) for tensor in _tensors(module))
    device = next(devices, torch.device("cpu"))
    return Ranks(parallel_group(model_group(module, group)), axes, all(axis.rank() == 0 for axis in axes), device)


def check_one_mesh(module: nn.Module) -> None:
    """Raises unless all DTensors of the module are on the same mesh: else no rank is the first of all."""
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
    """Returns the device on which the tensor is communicated: for one that FSDP2 offloads to the CPU, its mesh's."""
    return torch.device(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor.device


@torch.no_grad()
def gather_full(local: Tensor, sharding: Sharding | None, ranks: Ranks, *, rank0_only: bool = False) -> Tensor | None:
    """Gathers the full tensor from the shards: a copy, so that no entry changes as training goes on; None on ranks that
    do not receive it.

    Communicates: for a DTensor, one all-gather of the TP-local shard over its data axes; for a sharded tensor, one
    all-gather, or with ``rank0_only`` one gather to rank 0 of the elements that the ranks own.
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
    """Returns the TP-local tensor of one that FSDP2 may have sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    device = _device(tensor)
    moved = tensor if tensor.device.type == device.type else cast(DTensor, tensor.to(device))
    return moved.full_tensor()


def _gather_to_first(local: Tensor, sharding: Sharding, tp: ParallelGroup) -> Tensor | None:
    """Gathers the elements that each rank owns to rank 0, padded to the largest number that a rank owns.

    It is a gather, not point-to-point messages: those would give the ranks different numbers of operations, which
    ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` refuses.
    """
    _, p, rank = tp
    dim, pg = sharding.dim, process_group(tp.name)
    shape = list(local.shape)
    shape[dim] = sharding.size
    full = local.new_empty(shape, device="meta" if rank else None)
    targets = [_owned_targets(full, sharding, sender, p) for sender in range(p)]
    sizes = [sum(target.shape[dim] for target in of_one) for of_one in targets]
    shape[dim] = max(sizes)
    sent = local.new_empty(shape)
    if sent.numel():
        for view, packed in zip(sharding.owned(local, rank, p), _packed(sent, targets[rank], dim), strict=True):
            packed.copy_(view)
        if rank:
            dist.gather(_bytes(sent), group=pg, group_dst=0)
            return None
        # Equal blocks of rows, one per rank, are received in place in the full tensor; others in buffers
        rows = [of_one[0] for of_one in targets if len(of_one) == 1 and of_one[0].shape == sent.shape]
        direct = len(rows) == p and all(block.is_contiguous() for block in rows)
        received = rows if direct else [torch.empty_like(sent) for _ in targets]
        dist.gather(_bytes(sent), [_bytes(block) for block in received], group=pg, group_dst=0)
        for of_one, block in zip(targets, received, strict=True) if not direct else ():
            for target, packed in zip(of_one, _packed(block, of_one, dim), strict=True):
                target.copy_(packed)
    return None if rank else full


def _owned_targets(full: Tensor, sharding: Sharding, rank: int, p: int) -> list[Tensor]:
    """Returns the views of the full tensor that hold the elements that the rank owns (:meth:`Sharding.owned`)."""
    return [
        full.narrow(sharding.dim, where.start, where.stop - where.start)
        for part, where in zip(sharding.parts, sharding.slices(rank, p), strict=True)
        if rank % part.copies == 0 and where.stop > where.start
    ]


def _packed(whole: Tensor, targets: Sequence[Tensor], dim: int) -> list[Tensor]:
    """Returns consecutive views of ``whole`` along ``dim``, each of the length of its target."""
    sizes = [target.shape[dim] for target in targets]
    return list(whole.split([*sizes, whole.shape[dim] - sum(sizes)], dim))[:-1]


def _bytes(tensor: Tensor) -> Tensor:
    """Returns the contiguous tensor as bytes, which every backend can send."""
    return tensor.view(-1).view(torch.uint8)


@torch.no_grad()
def write_full(full: Tensor, local: Tensor, sharding: Sharding | None, tp: ParallelGroup) -> None:
    """Writes this rank's shard of the full tensor into its local storage, and zeros into padding."""
    if sharding is not None and any(part.padding for part in sharding.parts):
        local.detach().zero_()
    for chunk in local_chunks(local, sharding, tp.rank, tp.size)[1]:
        where = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.tensor.shape, strict=True))
        chunk.tensor.copy_(full[where])


@torch.no_grad()
def scatter_full(full: Tensor | None, local: Tensor, sharding: Sharding | None, ranks: Ranks) -> None:
    """Does what :func:`write_full` does, with a full tensor that only the first rank has; no other rank holds more of
    it than the TP-local tensor.

    Communicates: one scatter of the shards over ``group`` (for a replicated tensor, one broadcast), then one broadcast
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
        for axis in _broadcast_axes(ranks):
            dist.broadcast(_bytes(shard), group=axis, group_src=0)
    write_full(shard, local, None, ParallelGroup("", 1, 0))


def _scatter(full: Tensor | None, local: Tensor, sharding: Sharding, tp: ParallelGroup) -> Tensor:
    """Scatters the shards of rank 0's full tensor; returns this rank's, in the dtype of ``local``."""
    dim, sizes = sharding.dim, sharding.local_sizes(tp.size)
    shape = list(local.shape)
    shape[dim] = max(sizes)
    received = torch.empty(shape, dtype=local.dtype, device=_device(local))
    if received.numel():
        shards = []
        for receiver, size in enumerate(sizes if full is not None else []):
            shards.append(torch.empty_like(received))
            shards[-1].narrow(dim, 0, size).copy_(sharding.shard(cast(Tensor, full), receiver, tp.size))
        sent = [_bytes(shard) for shard in shards] or None
        dist.scatter(_bytes(received), sent, group=process_group(tp.name), group_src=0)
    return received.narrow(dim, 0, sizes[tp.rank]).contiguous()


def broadcast_from_first(make: Callable[[], T], ranks: Ranks) -> T:
    """Calls ``make`` on the first rank and returns its result, or raises its error, on all ranks."""
    result: list[Any] = [None, None]  # value, error
    if ranks.first:
        try:
            result[0] = make()
        except Exception as error:  # of any kind: the other ranks wait for an answer
            result[1] = error
    if ranks.data_first and ranks.tp.size > 1:
        dist.broadcast_object_list(result, group=process_group(ranks.tp.name), group_src=0)
    for axis in _broadcast_axes(ranks):
        dist.broadcast_object_list(result, group=axis, group_src=0)
    if result[1] is not None:
        raise result[1]
    return cast(T, result[0])


def _broadcast_axes(ranks: Ranks) -> Iterator[ProcessGroup]:
    """Yields the data axes along which this rank takes part in a broadcast from the ranks that are first on all axes:
    along an axis, the ranks that are first on all later ones take part."""
    for i, axis in enumerate(ranks.axes):
        if all(later.rank() == 0 for later in ranks.axes[i + 1 :]):
            yield axis


def true_on_any_rank(flag: bool, ranks: Ranks) -> bool:
    """Returns whether the flag is set on any rank, so that all know of one's failure. Communicates one number per
    group."""
    number = torch.tensor([float(flag)], device=ranks.device)
    for axis in (*([process_group(ranks.tp.name)] if ranks.tp.size > 1 else []), *ranks.axes):
        dist.all_reduce(number, dist.ReduceOp.MAX, group=axis)
    return bool(number)
