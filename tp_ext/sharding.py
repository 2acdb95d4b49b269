"""Sharding of a full tensor over the ranks of a group, and layout over several groups: the one description that
initialisation, state dicts, resharding, norms and weight import use.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from tp_ext.chunks import Interval, LocalChunk, chunks_of, compose, merge_adjacent
from tp_ext.group import Group, ParallelGroup, parallel_group
from tp_ext.part import CopiedRows as CopiedRows
from tp_ext.part import LocalPart as LocalPart
from tp_ext.part import Part as Part
from tp_ext.part import split_sizes as split_sizes
from tp_ext.share_sizes import Weights


@dataclass(frozen=True)
class Sharding:
    """A sharding of one dim: along ``dim`` the full tensor is the concatenation of ``parts``, each sharded over the
    ranks on its own; a local tensor is the concatenation of the rank's shares, in the order of the parts.

    Attributes:
        dim: the sharded dim of the tensor; may count from the end.
        parts: :class:`Part` or int (meaning ``Part(size)``), in order.
    """

    dim: int
    parts: tuple[Part, ...]

    def __init__(self, dim: int, parts: Iterable[Part | int]) -> None:
        object.__setattr__(self, "dim", dim)
        if isinstance(parts, str) or not isinstance(parts, Iterable):
            raise TypeError(f"parts: {parts!r} must be a list of Parts or integers")
        object.__setattr__(self, "parts", tuple(part if isinstance(part, Part) else Part(part) for part in parts))
        if not self.parts:
            raise ValueError("parts: () must hold at least one part")

    @property
    def size(self) -> int:
        """Length of ``dim`` in the full tensor."""
        return sum(part.size for part in self.parts)

    @property
    def shares(self) -> Weights | None:
        """The weights by which ranks share the dim (:func:`tp_ext.shares`); None: equally."""
        return self.parts[0].shares

    def in_shares(self, shares: Weights | None) -> "Sharding":
        """Returns the sharding over ranks of these shares; itself for None.

        Raises:
            ValueError: its parts have other ones already, or copies, groups or padding.
        """
        if shares is None:
            return self
        if self.shares not in (None, shares):
            raise ValueError(f"shares: {self} must have the shares of the layer, {shares}")
        return Sharding(self.dim, [replace(part, shares=shares) for part in self.parts])

    def local_parts(self, rank: int, p: int) -> Iterator[LocalPart]:
        """Yields the rank's share of each part, in the order of the local tensor. Every walk over a shard uses it.

        Of a part with ``queries`` the elements that another rank counts are a share of their own."""
        for shares in self.shares_of_parts(rank, p):
            yield from shares

    def shares_of_parts(self, rank: int, p: int) -> Iterator[list[LocalPart]]:
        """Yields the shares of each part: one, or two where this rank counts some elements and not others."""
        self._check_rank(rank, p)
        local_start = offset = 0
        for part in self.parts:
            start, stop = part.span(rank, p)
            length = min(stop, part.size) - min(start, part.size)
            full_start, padding = offset + min(start, part.size), stop - start - length
            copied = part.copied(rank, p) if part.queries else 0
            if 0 < copied < length:
                yield [
                    LocalPart(part, local_start, full_start, copied, 0, False),
                    LocalPart(part, local_start + copied, full_start + copied, length - copied, 0, True),
                ]
            else:
                owned = rank % part.copies == 0 if not part.queries else not copied
                yield [LocalPart(part, local_start, full_start, length, padding, owned)]
            local_start += stop - start
            offset += part.size

    def slices(self, rank: int, p: int) -> list[slice]:
        """Returns the slices of the full dim that the local tensor consists of, in order, one per part; no padding."""
        return [part.full for part in self.local_parts(rank, p)]

    def local_size(self, rank: int, p: int) -> int:
        """Returns the length of ``dim`` on the rank, padding included."""
        self._check_rank(rank, p)
        spans = [part.span(rank, p) for part in self.parts]
        return sum(stop - start for start, stop in spans)

    def local_sizes(self, p: int) -> list[int]:
        """Returns the length of ``dim`` on every rank, padding included."""
        return [self.local_size(rank, p) for rank in range(p)]

    def local_shape(self, full_shape: Sequence[int], rank: int, p: int) -> torch.Size:
        """Returns the shape of the local tensor.

        Raises:
            ValueError: ``full_shape[dim]`` is not the size of the parts, or there is no such rank.
        """
        shape = list(full_shape)
        self._check_full(shape)
        shape[self.dim] = self.local_size(rank, p)
        return torch.Size(shape)

    def shard(self, full: Tensor, rank: int, p: int) -> Tensor:
        """Returns the local tensor of a full one: a contiguous copy; padding is zero.

        Raises:
            ValueError: ``full.shape[dim]`` is not the size of the parts, or there is no such rank.
        """
        self._check_full(full.shape)
        shares = []
        for part in self.local_parts(rank, p):
            shares.append(full.narrow(self.dim, part.full_start, part.length))
            if part.padding:
                shape = list(full.shape)
                shape[self.dim] = part.padding
                shares.append(full.new_zeros(shape))
        return torch.cat(shares, self.dim)

    def unshard(self, locals_: Sequence[Tensor]) -> Tensor:
        """Returns the full tensor made from the local ones of all ranks, in rank order. Of copies the first is used.

        Raises:
            ValueError: there is none, or one has not the length that this sharding gives its rank.
        """
        p = len(locals_)
        if not p:
            raise ValueError("locals: [] must hold one tensor per rank")
        for rank, local in enumerate(locals_):
            shape = tuple(local.shape)
            if not -len(shape) <= self.dim < len(shape) or shape[self.dim] != self.local_size(rank, p):
                raise ValueError(
                    f"locals: shape {shape} on rank {rank} must have {self.local_size(rank, p)} elements in dim "
                    f"{self.dim}, for {self} and p = {p}"
                )
        parts_of_ranks = [list(self.shares_of_parts(rank, p)) for rank in range(p)]
        shares = [
            local.narrow(self.dim, share.local_start, share.length)
            for index in range(len(self.parts))
            for local, parts in zip(locals_, parts_of_ranks, strict=True)
            for share in parts[index]
            if share.owned
        ]
        return torch.cat(shares, self.dim)

    def owned(self, local: Tensor, rank: int, p: int) -> list[Tensor]:
        """Returns views of the local tensor that, over all ranks, cover the full tensor exactly once: without padding,
        of copies only the first."""
        return [
            local.narrow(self.dim, part.local_start, part.length)
            for part in self.local_parts(rank, p)
            if part.owned and part.length
        ]

    def intervals(self, rank: int, p: int) -> list[Interval]:
        """Returns the rank's intervals of the dim, without padding; adjacent ones are merged."""
        parts = self.local_parts(rank, p)
        return merge_adjacent(Interval(part.local_start, part.full_start, part.length, part.owned) for part in parts)

    @property
    def blocks(self) -> int:
        """The number of blocks that the dim is cut into; 0: it is not cut so."""
        return self.parts[0].blocks

    def segments(self, rank: int, p: int) -> list[int]:
        """Returns the segments of the local dim in which products are computed, as flat triples of block, start and
        length; see :meth:`Part.segments`."""
        flat, start = [], 0
        for part in self.parts:
            for block, length in part.segments(rank, p):
                flat += [block, start, length]
                start += length
        return flat

    def copied_rows(self, rank: int, p: int) -> CopiedRows | None:
        """Returns the local rows of parts with ``copies`` > 1, for summing gradients over the copies; None if none."""
        rows = CopiedRows([], [], [], sum(part.size + part.padding for part in self.parts if part.copies > 1))
        full_start = 0
        for shard in self.local_parts(rank, p):
            if shard.part.copies > 1:
                rows.local_starts.append(shard.local_start)
                rows.lengths.append(shard.length + shard.padding)
                rows.full_starts.append(full_start + shard.part.span(rank, p)[0])
                full_start += shard.part.size + shard.part.padding
        return rows if rows.lengths else None

    def _check_rank(self, rank: int, p: int) -> None:
        if not 0 <= rank < p:
            raise ValueError(f"rank: {rank} must be in [0, {p}), the ranks of the group")

    def _check_full(self, shape: Sequence[int]) -> None:
        if not -len(shape) <= self.dim < len(shape) or shape[self.dim] != self.size:
            raise ValueError(
                f"full: shape {tuple(shape)} must have {self.size} elements in dim {self.dim}, "
                f"the sum of the parts {self.parts}"
            )


# [Note: a layout is a tuple of shardings and groups]
class Layout(tuple[tuple[Sharding, ParallelGroup], ...]):
    """A layout of a full tensor over the ranks of any number of groups: an ordered tuple of (:class:`Sharding`, group).

    An empty layout means replicated. Each entry shards the tensor that the entries before it leave on this rank: along
    another dim, or along the same dim once more, padding included. For entries of different dims the order does not
    matter. As a weight ``[out, in]`` sharded on both dims of a (2, 2) mesh::

        Layout((Sharding(0, [out]), mesh["x"]), (Sharding(1, [in_]), mesh["y"]))

    Args:
        entries: pairs of a :class:`Sharding` and a group in any form that layers take; None is a group of one rank.

    Raises:
        TypeError: an entry is no such pair, or its group is none of the accepted kinds.
        ValueError: the parts of an entry are not the elements that the entries before it leave on this rank; two
            entries have the same group; the dims of several entries count from different ends.
    """

    def __new__(cls, *entries: tuple[Sharding, Group | ParallelGroup]) -> "Layout":
        checked_entries: list[tuple[Sharding, ParallelGroup]] = []
        left: dict[int, int] = {}
        for entry in entries:
            if not isinstance(entry, tuple) or len(entry) != 2 or not isinstance(entry[0], Sharding):
                raise TypeError(f"entries: {entry!r} must be a pair of a Sharding and a group")
            sharding, group_like = entry
            group = group_like if isinstance(group_like, ParallelGroup) else parallel_group(group_like)
            if group.size > 1 and any(group.name == other.name for _, other in checked_entries):
                raise ValueError(f"entries: {sharding} must have another group than the entries before it")
            if any((sharding.dim < 0) != (other.dim < 0) for other, _ in checked_entries):
                raise ValueError(f"entries: dim {sharding.dim} must count from the same end as that of the first entry")
            length = left.get(sharding.dim, sharding.size)
            if sharding.size != length:
                raise ValueError(
                    f"entries: {sharding} must have the {length} elements of dim {sharding.dim} that the entries "
                    "before it leave on this rank"
                )
            left[sharding.dim] = sharding.local_size(group.rank, group.size)
            checked_entries.append((sharding, group))
        return super().__new__(cls, checked_entries)

    def __getnewargs__(self) -> tuple[Any, ...]:
        return tuple(self)

    @property
    def has_padding(self) -> bool:
        """True if shards hold padding, which the full tensor does not have."""
        return any(part.padding for sharding, _ in self for part in sharding.parts)

    def __repr__(self) -> str:
        return f"Layout({', '.join(f'({sharding}, {group.name or None!r})' for sharding, group in self)})"

    @cached_property
    def blocks(self) -> int:
        """The number of blocks of :func:`tp_ext.tp_invariant` that a dim is cut into; 0: none is."""
        return next((sharding.blocks for sharding, _ in self if sharding.blocks), 0)

    @property
    def sizes(self) -> tuple[int, ...]:
        """The number of ranks of each entry's group."""
        return tuple(group.size for _, group in self)

    def at(self, *ranks: int) -> "Layout":
        """Returns the layout as the members of the groups with these ranks have it, one rank per entry.

        They differ where an entry shards a dim again of which the entries before leave other ranks another length.

        Raises:
            ValueError: another number of ranks than entries; the length that is left there differs and cannot be
                sharded alike: into several parts, or into whole units.
        """
        if len(ranks) != len(self):
            raise ValueError(f"ranks: {ranks} must be one rank for each of the {len(self)} entries")
        entries_of_ranks: list[tuple[Sharding, ParallelGroup]] = []
        left: dict[int, int] = {}
        for (sharding, group), rank in zip(self, ranks, strict=True):
            length = left.get(sharding.dim, sharding.size)
            if length != sharding.size:
                if len(sharding.parts) > 1:
                    raise ValueError(f"ranks: {ranks} have {length} elements in dim {sharding.dim}, unlike {sharding}")
                sharding = Sharding(sharding.dim, [replace(sharding.parts[0], size=length)])
            left[sharding.dim] = sharding.local_size(rank, group.size)
            entries_of_ranks.append((sharding, group.member(rank)))
        return tuple.__new__(Layout, entries_of_ranks)

    def local_shape(self, full_shape: Sequence[int]) -> torch.Size:
        """Returns the shape of this rank's tensor.

        Raises:
            ValueError: ``full_shape`` is not that of the shardings.
        """
        shape = torch.Size(full_shape)
        for sharding, group in self:
            shape = sharding.local_shape(shape, group.rank, group.size)
        return shape

    def full_shape(self, local_shape: Sequence[int]) -> torch.Size:
        """Returns the shape of the full tensor from any rank's local shape."""
        shape = list(local_shape)
        for sharding, _ in reversed(self):
            shape[sharding.dim] = sharding.size
        return torch.Size(shape)

    def shard(self, full: Tensor) -> Tensor:
        """Returns this rank's tensor of a full one: a contiguous copy; padding is zero. A replicated one is ``full``.

        Raises:
            ValueError: the shape of ``full`` is not that of the shardings.
        """
        for sharding, group in self:
            full = sharding.shard(full, group.rank, group.size)
        return full

    def unshard(self, locals_: Sequence[Tensor]) -> Tensor:
        """Returns the full tensor made from the local ones of all ranks of the groups. Of copies the first is used.

        Args:
            locals_: the tensors in the order of the ranks in the groups, those of the last entry's group fastest; one
                tensor for a replicated layout.

        Raises:
            ValueError: another number of tensors, or one has another length than this layout gives its rank.
        """
        if len(locals_) != math.prod(self.sizes):
            raise ValueError(f"locals: {len(locals_)} tensors must be one for each rank of groups of {self.sizes}")
        tensors = list(locals_)
        for index in reversed(range(len(self))):
            p, joined = self.sizes[index], []
            for first, outer in enumerate(itertools.product(*map(range, self.sizes[:index]))):
                sharding = self.at(*outer, *[0] * (len(self) - index))[index][0]
                joined.append(sharding.unshard(tensors[first * p : (first + 1) * p]))
            tensors = joined
        return tensors[0]

    def local_chunks(self, tensor: Tensor) -> tuple[torch.Size, list[LocalChunk]]:
        """Returns the shape of the full tensor and this rank's chunks of it; nothing is copied or communicated.

        Args:
            tensor: this rank's tensor: a plain one, or the DTensor that FSDP2 made of it over data axes.

        Returns:
            The shape, and chunks that are never empty. No chunk contains padding. Of copies (KV heads, replicas along a
            data axis) every holder has the chunk and the first one owns it. Over the ranks of the layout's groups, and
            of the data axes of a DTensor, the owned chunks cover the full tensor exactly once; replicas outside of them
            each own their chunks.

        Raises:
            ValueError: the tensor has another length than the layout gives this rank, or is a DTensor with partial
                sums.
        """
        shape, expected = list(tensor.shape), {}
        for sharding, group in self:  # the last entry of a dim determines its local length
            expected[sharding.dim] = sharding, group
        for sharding, (_, p, rank) in expected.values():
            if not -len(shape) <= sharding.dim < len(shape) or shape[sharding.dim] != sharding.local_size(rank, p):
                raise ValueError(
                    f"tensor: shape {tuple(shape)} on rank {rank} must have {sharding.local_size(rank, p)} elements in "
                    f"dim {sharding.dim}, for {sharding} and p = {p}"
                )
        sharded: dict[int, list[Interval]] = {}
        for sharding, group in self:
            dim, intervals = sharding.dim % len(shape), sharding.intervals(group.rank, group.size)
            sharded[dim] = list(compose(intervals, sharded[dim])) if dim in sharded else intervals
        return self.full_shape(shape), chunks_of(tensor, sharded)

    def owned(self, local: Tensor) -> list[Tensor]:
        """Returns views of the local tensor that, over all ranks of the groups, cover the full tensor exactly once:
        without padding, of copies only the first."""
        return [chunk.tensor for chunk in self.local_chunks(local)[1] if chunk.owned]


def head_parts(
    num_heads: int, num_kv_heads: int, head_dim: int, p: int, blocks: int = 0, shares: Weights | None = None
) -> tuple[Part, Part]:
    """Returns the parts of q, and of k and v: how their features are sharded over p ranks.

    With at least as many KV heads as ranks, whole KV groups are sharded (unevenly if need be). With fewer, each KV head
    is held by p / num_kv_heads neighbouring ranks, over which the query heads of its group are sharded. With ``blocks``
    query heads are cut into blocks, and a rank holds the KV heads that its query heads use. With ``shares`` whole KV
    groups are sharded, also where they are fewer than the ranks.

    Raises:
        ValueError: heads that do not make whole groups; fewer query heads than ranks; fewer KV heads than ranks, and
            they do not divide p.
    """
    numbers = f"num_heads = {num_heads}, num_kv_heads = {num_kv_heads}, p = {p}"
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads: must divide num_heads; {numbers}")
    if num_heads < p and shares is None:
        raise ValueError(f"num_heads: must be at least the number of ranks; {numbers}")
    if blocks:
        queries = num_heads if num_kv_heads < num_heads else 0
        q = Part(num_heads * head_dim, unit=head_dim, blocks=blocks, shares=shares)
        return q, Part(num_kv_heads * head_dim, unit=head_dim, blocks=blocks, queries=queries, shares=shares)
    group = num_heads // num_kv_heads
    if num_kv_heads >= p or shares is not None:
        q = Part(num_heads * head_dim, unit=group * head_dim, shares=shares)
        return q, Part(num_kv_heads * head_dim, unit=head_dim, shares=shares)
    if p % num_kv_heads:
        raise ValueError(f"num_kv_heads: when fewer than the ranks, must divide their number; {numbers}")
    q = Part(num_heads * head_dim, unit=head_dim, groups=num_kv_heads)
    return q, Part(num_kv_heads * head_dim, unit=head_dim, copies=p // num_kv_heads)
