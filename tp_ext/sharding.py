"""How a full tensor is cut over the ranks of a group. Initialisation, state dicts, resharding and weight import all use
this and nothing else.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


def split_sizes(n: int, p: int) -> list[int]:
    """Lengths of ``torch.tensor_split`` of n elements over p ranks: the first n mod p get one more."""
    return [n // p + (rank < n % p) for rank in range(p)]


@dataclass(frozen=True)
class Part:
    """A piece of a dim that is cut on its own: q, k or v; gate or up.

    Attributes:
        size: elements of the dim in the full tensor.
        unit: the smallest number of elements that stay together (``head_dim`` for heads); divides ``size``.
        copies: so many neighbouring ranks hold the same elements; divides the number of ranks.
        padding: so many elements follow the part, dealt out like it, that exist on ranks only and never in the full
            tensor; the last ranks hold them.
        groups: the part is so many equal blocks, each dealt over its own p / groups neighbouring ranks (the query heads
            of one key-value head); divides the number of ranks.
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
        """[start, stop) of the part on this rank, padding included."""
        if p % (self.copies * self.groups):
            raise ValueError(
                f"copies: {self.copies} times groups {self.groups} must divide the number of ranks, p = {p}"
            )
        holders = p // (self.copies * self.groups)  # that deal one group
        group, holder = divmod(rank // self.copies, holders)
        units = (self.size + self.padding) // (self.unit * self.groups)
        sizes = split_sizes(units, holders)
        start = group * units + sum(sizes[:holder])
        return start * self.unit, (start + sizes[holder]) * self.unit


class Pieces(NamedTuple):
    """Rows of a local tensor that other ranks hold too, and where they stand among all such rows."""

    local_starts: list[int]
    lengths: list[int]
    full_starts: list[int]
    full_size: int


@dataclass(frozen=True)
class Sharding:
    """Along ``dim`` the full tensor is the concatenation of ``parts``, each dealt out over the ranks on its own; a
    local tensor is the concatenation of the rank's pieces, in the order of the parts.

    Attributes:
        dim: the dim of the tensor that is cut; may count from the end.
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
        """Slices of the full dim that make up the local tensor, in local order, one per part; without padding."""
        self._check_rank(rank, p)
        result, offset = [], 0
        for part in self.parts:
            start, stop = (offset + min(end, part.size) for end in part.span(rank, p))
            result.append(slice(start, stop))
            offset += part.size
        return result

    def local_size(self, rank: int, p: int) -> int:
        """Length of ``dim`` on this rank, padding included."""
        self._check_rank(rank, p)
        spans = [part.span(rank, p) for part in self.parts]
        return sum(stop - start for start, stop in spans)

    def local_sizes(self, p: int) -> list[int]:
        """Length of ``dim`` on every rank, padding included."""
        return [self.local_size(rank, p) for rank in range(p)]

    def local_shape(self, full_shape: Sequence[int], rank: int, p: int) -> torch.Size:
        """Shape of the local tensor.

        Raises:
            ValueError: ``full_shape[dim]`` is not the size of the parts, or there is no such rank.
        """
        shape = list(full_shape)
        self._check_full(shape)
        shape[self.dim] = self.local_size(rank, p)
        return torch.Size(shape)

    def shard(self, full: Tensor, rank: int, p: int) -> Tensor:
        """The local tensor, a contiguous copy; padding is zero.

        Raises:
            ValueError: ``full.shape[dim]`` is not the size of the parts, or there is no such rank.
        """
        self._check_full(full.shape)
        pieces = []
        for part, piece in zip(self.parts, self.slices(rank, p), strict=True):
            pieces.append(full.narrow(self.dim, piece.start, piece.stop - piece.start))
            start, stop = part.span(rank, p)
            missing = (stop - start) - (piece.stop - piece.start)
            if missing:
                shape = list(full.shape)
                shape[self.dim] = missing
                pieces.append(full.new_zeros(shape))
        return torch.cat(pieces, self.dim)

    def unshard(self, locals_: Sequence[Tensor]) -> Tensor:
        """The full tensor from the local ones of all ranks, in order of rank. Of copies the first is taken.

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
        pieces = []
        for index, part in enumerate(self.parts):
            for rank, local in enumerate(locals_):
                piece = self.slices(rank, p)[index]
                if rank % part.copies == 0:
                    pieces.append(local.narrow(self.dim, at[rank], piece.stop - piece.start))
                start, stop = part.span(rank, p)
                at[rank] += stop - start
        return torch.cat(pieces, self.dim)

    def owned(self, local: Tensor, rank: int, p: int) -> list[Tensor]:
        """Views of the local tensor that together, over all ranks, are the full tensor exactly once: no padding, and
        of copies the first."""
        views, at = [], 0
        for part, piece in zip(self.parts, self.slices(rank, p), strict=True):
            if rank % part.copies == 0 and piece.stop > piece.start:
                views.append(local.narrow(self.dim, at, piece.stop - piece.start))
            start, stop = part.span(rank, p)
            at += stop - start
        return views

    def copied_pieces(self, rank: int, p: int) -> Pieces | None:
        """The local elements of parts with ``copies`` > 1, for summing gradients over the copies; None without any."""
        pieces = Pieces([], [], [], sum(part.size + part.padding for part in self.parts if part.copies > 1))
        local_start = full_start = 0
        for part in self.parts:
            start, stop = part.span(rank, p)
            if part.copies > 1:
                pieces.local_starts.append(local_start)
                pieces.lengths.append(stop - start)
                pieces.full_starts.append(full_start + start)
                full_start += part.size + part.padding
            local_start += stop - start
        return pieces if pieces.lengths else None

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
    """How the features of q, and of k and v, are cut over p ranks.

    With at least as many KV heads as ranks, by whole KV groups (uneven if need be). With fewer, each KV head lives on
    p / num_kv_heads neighbours, which deal the query heads of its group among themselves.

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
