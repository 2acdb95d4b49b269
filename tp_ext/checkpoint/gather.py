"""Full tensors gathered from the ranks and scattered back, one at a time, for state dicts and exports. The results do
not depend on a data axis (FSDP2, DDP).
"""

from collections.abc import Iterable, Sequence
from typing import NamedTuple, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup
from torch.distributed.tensor import DTensor

from tp_ext import _ops
from tp_ext._object_collectives import broadcast_axes
from tp_ext.checkpoint.files.safetensors_slices import JoinedTensor, SlicedTensor
from tp_ext.group import ParallelGroup, process_group
from tp_ext.model.census import Census, device_of
from tp_ext.model.model_groups import ModelGroups
from tp_ext.sharding import Layout, Sharding


class Ranks(NamedTuple):
    """The ranks that take part when the full state of a module is gathered or scattered.

    Attributes:
        groups: the groups over which layouts shard it.
        data_axes: the groups of the data axes over which the module is sharded (FSDP2) or replicated (DDP, a mesh's
            ``dp``, ``ep`` and ``cp``).
        stage_axes: the axes of ``groups``, then the data axes: those of the ranks that hold this module.
        pipeline: the group whose ranks hold the other stages; None if this module is the whole model.
        device: the device on which the ranks communicate.
    """

    groups: ModelGroups
    data_axes: tuple[ProcessGroup, ...]
    stage_axes: tuple[ProcessGroup, ...]
    pipeline: ProcessGroup | None
    device: torch.device

    @property
    def axes(self) -> tuple[ProcessGroup, ...]:
        """All axes, that of the pipeline last."""
        return self.stage_axes if self.pipeline is None else (*self.stage_axes, self.pipeline)

    @property
    def stage(self) -> int:
        """The index of this rank in the pipeline."""
        return 0 if self.pipeline is None else self.pipeline.rank()

    @property
    def first(self) -> bool:
        """True on the rank that ``rank0_only`` refers to."""
        return self.stage == 0 and self.stage_first

    @property
    def stage_first(self) -> bool:
        """True on the first of the ranks that hold this rank's stage."""
        return all(axis.rank() == 0 for axis in self.stage_axes)

    def data_first(self, layout: Layout) -> bool:
        """Returns whether this rank is the first, over all data axes, of those that hold its shard of the layout.

        A data axis may span a group of the layout, as a model's axis spans the expert group. Then the groups of the
        axis's first rank are the first ones."""
        groups = [set(group.ranks) for _, group in layout if group.size > 1]
        for axis in self.data_axes:
            members = dist.get_process_group_ranks(axis)
            within = [ranks for ranks in groups if ranks < set(members)]
            if not (members[0] in within[0] if within else axis.rank() == 0):
                return False
        return True


def ranks_of(model: Census) -> Ranks:
    """Returns the ranks over which the model's state is distributed: the groups of its modules, the meshes of its
    DTensors, the groups of DDP, the axes of the mesh."""
    model_axes = [process_group(axis.name) for axis in model.groups.axes]
    candidates = [axis for mesh in model.meshes for axis in mesh.get_all_groups()]
    candidates += [wrapper.process_group for wrapper in model.wrappers.values()]
    candidates += [process_group(axis.name) for axis in model.axes.data.axes]
    # Two groups of the same ranks are one axis, and so is a flattened one and those within it
    members = {frozenset(dist.get_process_group_ranks(axis)): axis for axis in candidates}
    used = {frozenset(dist.get_process_group_ranks(axis)) for axis in model_axes}
    data = tuple(
        axis for group, axis in members.items() if not any(group < other for other in members) and group not in used
    )
    pipeline = process_group(model.axes.pp.name) if model.axes.pp.size > 1 else None
    # One that is on meta here, by a mistake, is not so on the ranks with which this one then meets
    device = next((device_of(tensor) for tensor in model.tensors if not tensor.is_meta), torch.device("cpu"))
    return Ranks(model.groups, data, (*model_axes, *data), pipeline, device)


def check_one_mesh(model: Census) -> None:
    """Raises unless all DTensors of the model are on the same mesh: else no rank is the first of all."""
    if len(model.meshes) > 1:
        raise ValueError(
            f"broadcast_from_rank0: the module's DTensors are on several meshes, {model.meshes}, and must be on one"
        )


@torch.no_grad()
def gather_full(local: Tensor, layout: Layout, ranks: Ranks, *, rank0_only: bool = False) -> Tensor | None:
    """Gathers the full tensor from the shards: a copy, so that no entry changes as training goes on; None on ranks that
    do not receive it.

    Communicates: for a DTensor, one all-gather of the TP-local shard over its data axes; for a sharded tensor, one
    all-gather over the group of each entry of its layout, the last one first, or with ``rank0_only`` one gather of the
    elements that the ranks own to rank 0 of each.
    """
    value = without_data_axes(local.detach())
    # After the gather over data axes, in which all of their ranks take part
    if rank0_only and not (ranks.data_first(layout) and ranks.groups.counts(layout)):
        return None
    if not layout:
        shard = local.to_local() if isinstance(local, DTensor) else local
        # Nothing was gathered, or full_tensor has returned the local memory: the result must be a copy
        return value.clone() if value.untyped_storage().data_ptr() == shard.untyped_storage().data_ptr() else value
    return gather_shards(value, layout, rank0_only=rank0_only)


def gather_shards(value: Tensor, layout: Layout, *, rank0_only: bool) -> Tensor | None:
    """Gathers the full tensor as :func:`gather_full`, from a shard that is no DTensor and on ranks that all take
    part."""
    # A later entry shards what an earlier one has left, so it is undone first
    for sharding, group in reversed(layout):
        if group.size == 1:
            # Without a collective, but not as it is: parts and padding have another order in the full tensor
            value = sharding.unshard([value])
        elif rank0_only:
            gathered = _gather_to_first(value, sharding, group)
            if gathered is None:
                return None
            value = gathered
        else:
            sizes = sharding.local_sizes(group.size)
            joined = _ops.gather_from_region(value, group.name, sharding.dim, sizes)
            value = sharding.unshard(joined.split(sizes, sharding.dim))
    return value


def without_data_axes(tensor: Tensor) -> Tensor:
    """Returns the TP-local tensor of one that FSDP2 may have sharded."""
    if not isinstance(tensor, DTensor):
        return tensor
    device = device_of(tensor)
    # FSDP2's offload: NCCL cannot gather what is on the CPU
    moved = tensor if tensor.device.type == device.type else cast(DTensor, tensor.to(device))
    return moved.full_tensor()


# [Note: full tensors go to rank 0 by a gather]
def _gather_to_first(local: Tensor, sharding: Sharding, tp: ParallelGroup) -> Tensor | None:
    """Gathers the elements that each rank owns to rank 0, padded to the largest number that a rank owns.

    It is a gather, not point-to-point messages: those would give the ranks different numbers of operations, which
    ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` refuses.
    """
    _, p, rank = tp
    dim, pg = sharding.dim, process_group(tp.name)
    shape = list(local.shape)
    shape[dim] = sharding.size
    # Others need its shape alone, for the sizes of all ranks
    full = local.new_empty(shape, device="meta" if rank else None)
    targets = [_owned_targets(full, sharding, sender, p) for sender in range(p)]
    sizes = [sum(target.shape[dim] for target in of_one) for of_one in targets]
    shape[dim] = max(sizes)
    sent = local.new_empty(shape)
    # Equal on all ranks: none calls a collective for an empty tensor
    if sent.numel():
        for view, packed in zip(sharding.owned(local, rank, p), _packed(sent, targets[rank], dim), strict=True):
            packed.copy_(view)
        if rank:
            dist.gather(as_bytes(sent), group=pg, group_dst=0)
            return None
        # Equal blocks of rows, one per rank, are received in place in the full tensor; others in buffers
        rows = [of_one[0] for of_one in targets if len(of_one) == 1 and of_one[0].shape == sent.shape]
        direct = len(rows) == p and all(block.is_contiguous() for block in rows)
        received = rows if direct else [torch.empty_like(sent) for _ in targets]
        dist.gather(as_bytes(sent), [as_bytes(block) for block in received], group=pg, group_dst=0)
        for of_one, block in zip(targets, received, strict=True) if not direct else ():
            for target, packed in zip(of_one, _packed(block, of_one, dim), strict=True):
                target.copy_(packed)
    return None if rank else full


def _owned_targets(full: Tensor, sharding: Sharding, rank: int, p: int) -> list[Tensor]:
    """Returns the views of the full tensor that hold the elements that the rank owns (:meth:`Sharding.owned`)."""
    return [
        full.narrow(sharding.dim, part.full_start, part.length)
        for part in sharding.local_parts(rank, p)
        if part.owned and part.length
    ]


def _packed(whole: Tensor, targets: Sequence[Tensor], dim: int) -> list[Tensor]:
    """Returns consecutive views of ``whole`` along ``dim``, each of the length of its target."""
    sizes = [target.shape[dim] for target in targets]
    return list(whole.split([*sizes, whole.shape[dim] - sum(sizes)], dim))[:-1]


def as_bytes(tensor: Tensor) -> Tensor:
    """Returns the contiguous tensor as bytes, which every backend can send."""
    return tensor.view(-1).view(torch.uint8)


@torch.no_grad()
def write_full(full: Tensor | SlicedTensor | JoinedTensor, local: Tensor, layout: Layout) -> None:
    """Writes this rank's shard of the full tensor, which may be in a file, into its storage, and zeros into padding."""
    if layout.has_padding:
        local.detach().zero_()
    for offsets, chunk, _ in layout.local_chunks(local)[1]:
        chunk.copy_(full[chunk_slices(offsets, chunk)])


def chunk_slices(offsets: tuple[int, ...], chunk: Tensor) -> tuple[slice, ...]:
    """Returns the slices of the full tensor that a chunk stands for."""
    return tuple(slice(start, start + size) for start, size in zip(offsets, chunk.shape, strict=True))


@torch.no_grad()
def scatter_full(full: Tensor | None, local: Tensor, layout: Layout, ranks: Ranks) -> None:
    """Does what :func:`write_full` does, with a full tensor that only the first rank of the stage has; no other rank
    holds more of it than the shards that it passes on.

    Communicates: one scatter of the shards over the group of each entry of the layout, then one broadcast of them along
    every other axis. If a group is only a part of an axis, a broadcast of the full tensor along every axis instead.
    """
    # Before it is sent: the others receive the dtype of their parameters
    value = None if full is None else full.to(device_of(local), local.dtype)
    shape = layout.full_shape(local.shape)
    groups = [group for _, group in layout if group.size > 1]
    spanned = [set(dist.get_process_group_ranks(axis)) for axis in ranks.data_axes]
    parts = any(set(group.ranks) < members for group in groups for members in spanned)
    # A group within an axis: no group connects the first ranks of the smaller groups
    if parts or not all(map(ranks.groups.is_axis, groups)):
        whole = _broadcast(value, shape, local, broadcast_axes(ranks.stage_axes))
        return write_full(whole, local, layout)
    scattered = [process_group(group.name) for group in groups]
    members = [dist.get_process_group_ranks(axis) for axis in scattered]
    # Axes that do not shard the tensor hold copies, which are made at last
    others = [axis for axis in ranks.stage_axes if dist.get_process_group_ranks(axis) not in members]
    along = list(broadcast_axes([*scattered, *others]))
    for sharding, group in layout:
        shape = sharding.local_shape(shape, group.rank, group.size)
        if group.size == 1:
            value = None if value is None else sharding.shard(value, 0, 1)
        # Only ranks that are the first of all later axes take part; others get the shard by the broadcasts below
        elif process_group(group.name) in along:
            value = _scatter(value, shape, local, sharding, group)
    return write_full(_broadcast(value, shape, local, [axis for axis in along if axis in others]), local, Layout())


def _scatter(full: Tensor | None, shape: torch.Size, local: Tensor, sharding: Sharding, group: ParallelGroup) -> Tensor:
    """Scatters the shards of the tensor that the group's first rank has; returns this rank's, of this shape."""
    dim, sizes = sharding.dim, sharding.local_sizes(group.size)
    padded = list(shape)
    padded[dim] = max(sizes)
    received = torch.empty(padded, dtype=local.dtype, device=device_of(local))
    if received.numel():
        shards = []
        for receiver, size in enumerate(sizes if full is not None else []):
            shards.append(torch.empty_like(received))
            shards[-1].narrow(dim, 0, size).copy_(sharding.shard(cast(Tensor, full), receiver, group.size))
        sent = [as_bytes(shard) for shard in shards] or None
        dist.scatter(as_bytes(received), sent, group=process_group(group.name), group_src=0)
    return received.narrow(dim, 0, sizes[group.rank]).contiguous()


def _broadcast(value: Tensor | None, shape: torch.Size, local: Tensor, axes: Iterable[ProcessGroup]) -> Tensor:
    """Broadcasts the tensor of the first ranks along each of the axes."""
    buffer = torch.empty(shape, dtype=local.dtype, device=device_of(local)) if value is None else value.contiguous()
    if buffer.numel():
        for axis in axes:
            dist.broadcast(as_bytes(buffer), group=axis, group_src=0)
    return buffer
