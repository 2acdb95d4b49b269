"""Sharding of a full tensor over the ranks of a group: the one description that initialisation, state dicts, resharding
and weight import use.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


def split_sizes(n: int, p: int) -> list[int]:
    """Returns the lengths of ``torch.tensor_split`` of n elements over p ranks: the first n mod p get one more."""
    return [n // p + (rank < n % p) for rank in range(p)]


@dataclass(frozen=True)
class Part:
    """A part of a dim that is sharded on its own: q, k or v; gate or up.

    Attributes:
        size: elements of the dim in the full tensor.
        unit: the smallest number of elements that stay together (``head_dim`` for heads); divides ``size``.
        copies: the number of neighbouring ranks that hold the same elements; divides the number of ranks.
        padding: the number of elements that follow the part, sharded like it, and exist on ranks only, never in the
            full tensor; the last ranks hold them.
        groups: the number of equal groups that the part consists of, each sharded over its own p / groups neighbouring
            ranks (the query heads of one key-value head); divides the number of ranks.
    """

    size: int
    unit: int = 1
    copies: int = 1
    padding: int = 0
    groups: int = 1

    def __post_init__(self) -> None:
        for name in ("size", "unit", "copies", "padding", "groups"):
            value, least = getattr(self, name), int(name not in ("size", "padding"))
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(f"{name}: {value!r} must be an integer of at least {least}")
        if (self.size + self.padding) % (self.unit * self.groups):
            raise ValueError(
                f"size: {self.size} and padding {self.padding} must make {self.groups} groups of whole units "
                f"of {self.unit}"
            )

    def span(self, rank: int, p: int) -> tuple[int, int]:
        """Returns [start, stop) of the rank's share of the part, padding included."""
        if p % (self.copies * self.groups):
            raise ValueError(
                f"copies: {self.copies} times groups {self.groups} must divide the number of ranks, p = {p}"
            )
        holders = p // (self.copies * self.groups)  # of the shards of one group
        group, holder = divmod(rank // self.copies, holders)
        units = (self.size + self.padding) // (self.unit * self.groups)
        sizes = split_sizes(units, holders)
        start = group * units + sum(sizes[:holder])
        return start * self.unit, (start + sizes[holder]) * self.unit


class CopiedRows(NamedTuple):
    """The rows of a local tensor that other ranks hold too, and their positions among all such rows."""

    local_starts: list[int]
    lengths: list[int]
    full_starts: list[int]
    full_size: int


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
        object.__setattr__(self, "parts", tuple(part if isinstance(part, Part) else Part(part) for part in parts))
        if not self.parts:
            raise ValueError("parts: () must hold at least one part")

    @property
    def size(self) -> int:
        """Length of ``dim`` in the full tensor."""
        return sum(part.size for part in self.parts)

    def slices(self, rank: int, p: int) -> list[slice]:
        """Returns the slices of the full dim that the local tensor consists of, in order, one per part; no padding."""
        self._check_rank(rank, p)
        result, offset = [], 0
        for part in self.parts:
            start, stop = (offset + min(end, part.size) for end in part.span(rank, p))
            result.append(slice(start, stop))
            offset += part.size
        return result

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
        for part, where in zip(self.parts, self.slices(rank, p), strict=True):
            shares.append(full.narrow(self.dim, where.start, where.stop - where.start))
            start, stop = part.span(rank, p)
            missing = (stop - start) - (where.stop - where.start)
            if missing:
                shape = list(full.shape)
                shape[self.dim] = missing
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
        at = [0] * p
        shares = []
        for index, part in enumerate(self.parts):
            for rank, local in enumerate(locals_):
                where = self.slices(rank, p)[index]
                if rank % part.copies == 0:
                    shares.append(local.narrow(self.dim, at[rank], where.stop - where.start))
                start, stop = part.span(rank, p)
                at[rank] += stop - start
        return torch.cat(shares, self.dim)

    def owned(self, local: Tensor, rank: int, p: int) -> list[Tensor]:
        """Returns views of the local tensor that, over all ranks, cover the full tensor exactly once: without padding,
        of copies only the first."""
        views, at = [], 0
        for part, where in zip(self.parts, self.slices(rank, p), strict=True):
            if rank % part.copies == 0 and where.stop > where.start:
                views.append(local.narrow(self.dim, at, where.stop - where.start))
            start, stop = part.span(rank, p)
            at += stop - start
        return views

    def copied_pieces(self, rank: int, p: int) -> CopiedRows | None:
        """Returns the local rows of parts with ``copies`` > 1, for summing gradients over the copies; None if none."""
        rows = CopiedRows([], [], [], sum(part.size + part.padding for part in self.parts if part.copies > 1))
        local_start = full_start = 0
        for part in self.parts:
            start, stop = part.span(rank, p)
            if part.copies > 1:
                rows.local_starts.append(local_start)
                rows.lengths.append(stop - start)
                rows.full_starts.append(full_start + start)
                full_start += part.size + part.padding
            local_start += stop - start
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


def head_parts(num_heads: int, num_kv_heads: int, head_dim: int, p: int) -> tuple[Part, Part]:
    """Returns the parts of q, and of k and v: how their features are sharded over p ranks.

    With at least as many KV heads as ranks, whole KV groups are sharded (unevenly if need be). With fewer, each KV head
    is held by p / num_kv_heads neighbouring ranks, over which the query heads of its group are sharded.

    Raises:
        ValueError: heads that do not make whole groups; fewer query heads than ranks; fewer KV heads than ranks, and
            they do not divide p.
    """
    numbers = f"num_heads = {num_heads}, num_kv_heads = {num_kv_heads}, p = {p}"
    if num_heads % num_kv_heads:
        raise ValueError(f"num_kv_heads: must divide num_heads; {numbers}")
    if num_heads < p:
        raise ValueError(f"num_heads: must be at least the number of ranks; {numbers}")
    group = num_heads // num_kv_heads
    if num_kv_heads >= p:
        q = Part(num_heads * head_dim, unit=group * head_dim)
        return q, Part(num_kv_heads * head_dim, unit=head_dim)
    if p % num_kv_heads:
        raise ValueError(f"num_kv_heads: when fewer than the ranks, must divide their number; {numbers}")
    q = Part(num_heads * head_dim, unit=head_dim, groups=num_kv_heads)
    return q, Part(num_kv_heads * head_dim, unit=head_dim, copies=p // num_kv_heads)
