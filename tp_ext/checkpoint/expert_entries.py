"""Entries of expert layers in files with one entry for each expert: read as one stacked tensor, gathered one by one."""

from collections.abc import Mapping
from typing import cast

import torch
import torch.distributed as dist
from torch import Tensor

from tp_ext.checkpoint.expert_names import PublishedEntry
from tp_ext.checkpoint.files.safetensors_slices import JoinedTensor, SlicedTensor
from tp_ext.checkpoint.gather import Ranks, as_bytes, gather_full, gather_shards, without_data_axes
from tp_ext.group import ALONE, ParallelGroup, process_group
from tp_ext.model.fqn import Entry
from tp_ext.sharding import Layout, Sharding


def join_published(
    tensors: Mapping[str, SlicedTensor | JoinedTensor], published: list[PublishedEntry], shape: torch.Size
) -> SlicedTensor | JoinedTensor:
    """Returns our tensor of this full shape from all its published entries in files.

    Raises:
        ValueError: an entry of another shape.
    """
    for entry in published:
        if tensors[entry.name].shape != entry.shape(shape):
            raise ValueError(
                f"path: {entry.name!r} has shape {tuple(tensors[entry.name].shape)} and must have "
                f"{tuple(entry.shape(shape))}, that of the unsharded module"
            )
    rows: dict[int | None, list[SlicedTensor | JoinedTensor]] = {}
    for entry in published:
        rows.setdefault(entry.expert, []).append(tensors[entry.name])
    joined = [parts[0] if len(parts) == 1 else JoinedTensor(parts) for parts in rows.values()]
    return joined[0] if None in rows else JoinedTensor(joined, stacked=True)


class ExpertGather:
    """Gathers published entries, each to the first rank: that rank holds no more than one of them.

    What FSDP2 shards is gathered over its axes once for the consecutive entries of a layer, and kept meanwhile.
    """

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks
        self._layer = ""
        self._kept: dict[str, Tensor] = {}

    @torch.no_grad()
    def __call__(self, name: str, entry: Entry, published: PublishedEntry) -> Tensor | None:
        """Returns the published entry of the entry ``name`` on the first rank of the stage, None on the others.

        Communicates: of an expert's weight one gather over the tensor-parallel group of the rank that holds the expert,
        and one all-to-all over the expert group in which that rank alone sends; of others as :func:`gather_full`.
        """
        if published.expert is None:
            full = gather_full(entry.value, entry.layout, self._ranks, rank0_only=True)
            return None if full is None else published.of(full)
        if (layer := name.rpartition(".")[0]) != self._layer:
            self._layer, self._kept = layer, {}
        # Entries of a layer come one after the other, so one layer is kept at a time
        if name not in self._kept:
            self._kept[name] = without_data_axes(entry.value.detach())
        # Only the first of equal copies go on; what FSDP2 shards all ranks have gathered above
        if not (self._ranks.data_first(entry.layout) and self._ranks.groups.counts(entry.layout)):
            return None
        return _gather_expert(self._kept[name], entry.layout, published)


def _gather_expert(local: Tensor, layout: Layout, published: PublishedEntry) -> Tensor | None:
    """Gathers one expert's weight, or its gate or up projection, from the stacked shards of all."""
    index, owner = cast(int, published.expert), 0
    over = [(sharding, group) for sharding, group in layout if sharding.dim == 0]
    within = [(sharding, group) for sharding, group in layout if sharding.dim != 0]
    group = over[0][1] if over else ALONE
    for rank in range(group.size if over else 0):
        experts = next(over[0][0].local_parts(rank, group.size)).full
        if experts.start <= index < experts.stop:
            index, owner = index - experts.start, rank
            break
    value = None
    # Ranks of other experts take part in the all-to-all below alone
    if group.rank == owner:
        value = _gather_rows(
            local[index], [(Sharding(sharding.dim - 1, sharding.parts), tp) for sharding, tp in within], published.part
        )
    # A gather to the first rank has brought the weight there, so the other ranks of that group have no part in this
    if owner and all(tp.rank == 0 for _, tp in within):
        value = _move_to_first(value, published.shape(layout.full_shape(local.shape)), owner, group, local)
    return value


def _gather_rows(value: Tensor, within: list[tuple[Sharding, ParallelGroup]], part: int | None) -> Tensor | None:
    """Gathers a matrix from its shards over the first rank's group, or one part of its rows."""
    if part is not None and not any(sharding.dim == 0 for sharding, _ in within):
        # Rows are whole on this rank: gate | up are halves
        value = value.chunk(2)[part]
    elif part is not None:
        (sharding, group), *others = sorted(within, key=lambda entry: entry[0].dim)
        # Gate and up are cut separately, so a rank has a slice of each, one after the other
        interval = list(sharding.local_parts(group.rank, group.size))[part]
        value = value.narrow(0, interval.local_start, interval.length + interval.padding)
        within = [(Sharding(0, (sharding.parts[part],)), group), *others]
    return gather_shards(value, Layout(*within), rank0_only=True)


def _move_to_first(
    value: Tensor | None, shape: torch.Size, owner: int, group: ParallelGroup, like: Tensor
) -> Tensor | None:
    """Sends the tensor of one rank to the first. It is an all-to-all, not a message: all ranks take part in it, as
    ``TORCH_DISTRIBUTED_DEBUG=DETAIL`` demands."""
    received = like.new_empty(shape if group.rank == 0 else 0)
    sent = like.new_empty(0) if value is None else value.contiguous()
    count = shape.numel() * like.dtype.itemsize
    dist.all_to_all_single(
        as_bytes(received),
        as_bytes(sent),
        [count * (group.rank == 0 and rank == owner) for rank in range(group.size)],
        [count * (group.rank == owner and rank == 0) for rank in range(group.size)],
        group=process_group(group.name),
    )
    return received if group.rank == 0 else None
