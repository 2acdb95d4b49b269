"""A part of a dim that is sharded on its own (q, k or v; gate or up), and the share of it that a rank holds."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from tp_ext._checks import check_int
from tp_ext.invariance import block_of, block_start, blocks_in_shares, blocks_of_rank, units_of_rank
from tp_ext.share_sizes import Weights, checked_weights
from tp_ext.share_sizes import split_sizes as split_sizes


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
        shares: the weights by which ranks share the units, or the blocks (:func:`tp_ext.shares`); None: equally.
    """

    size: int
    unit: int = 1
    copies: int = 1
    # [Note: padding and groups of a part]
    padding: int = 0
    groups: int = 1
    # [Note: one tree of blocks]
    blocks: int = 0
    queries: int = 0
    shares: Weights | None = None

    def __post_init__(self) -> None:
        check_int(least=0, size=self.size, padding=self.padding, blocks=self.blocks, queries=self.queries)
        check_int(least=1, unit=self.unit, copies=self.copies, groups=self.groups)
        if (self.size + self.padding) % (self.unit * self.groups):
            raise ValueError(
                f"size: {self.size} and padding {self.padding} must make {self.groups} groups of whole units "
                f"of {self.unit}"
            )
        if self.blocks and (self.copies > 1 or self.groups > 1 or self.padding):
            raise ValueError(f"blocks: {self} must not have copies, groups or padding together with blocks")
        if self.queries and (not self.blocks or self.queries % (self.size // self.unit)):
            raise ValueError(f"queries: {self} must have blocks, and equally many queries for each unit")
        if self.shares is not None:
            object.__setattr__(self, "shares", checked_weights(self.shares))
            if self.copies > 1 or self.groups > 1 or self.padding:
                raise ValueError(f"shares: {self} must not have copies, groups or padding together with shares")

    @property
    def has_copies(self) -> bool:
        """Returns whether several ranks can hold one element."""
        return self.copies > 1 or self.queries > 0

    def span(self, rank: int, p: int) -> tuple[int, int]:
        """Returns [start, stop) of the rank's share of the part, padding included."""
        if self.blocks:
            start, stop = units_of_rank(self.queries or self.size // self.unit, self._blocks, rank, p)
            if self.queries:
                share = self._share
                start, stop = start // share, -(-stop // share) if stop > start else start // share
            return start * self.unit, stop * self.unit
        if p % (self.copies * self.groups):
            raise ValueError(
                f"copies: {self.copies} times groups {self.groups} must divide the number of ranks, p = {p}"
            )
        holders = p // (self.copies * self.groups)  # of the shards of one group
        group, holder = divmod(rank // self.copies, holders)
        units = (self.size + self.padding) // (self.unit * self.groups)
        sizes = split_sizes(units, holders, self.shares)
        start = group * units + sum(sizes[:holder])
        return start * self.unit, (start + sizes[holder]) * self.unit

    @property
    def _blocks(self) -> int:
        return blocks_in_shares(self.blocks, self.shares)

    @property
    def _share(self) -> int:
        """The number of queries of a unit."""
        return self.queries * self.unit // self.size

    def copied(self, rank: int, p: int) -> int:
        """Returns the number of the first elements of the rank's share of a part in blocks that another rank counts."""
        if not self.queries:
            return 0
        first, stop = units_of_rank(self.queries, self._blocks, rank, p)
        return self.unit if first % self._share and stop > first else 0

    def segments(self, rank: int, p: int) -> Iterator[tuple[int, int]]:
        """Yields block and length of the segments of the rank's share in which products are computed, in order: of a
        part with ``queries`` each unit, in the block of its first query, or -1 where another rank counts it."""
        held = blocks_of_rank(self._blocks, rank, p)
        if not self.queries:
            units = self.size // self.unit
            for block in held:
                length = block_start(units, block + 1, self.blocks) - block_start(units, block, self.blocks)
                yield block, length * self.unit
            return
        start, stop = self.span(rank, p)
        for unit in range(start // self.unit, stop // self.unit):
            block = block_of(unit * self._share, self.queries, self.blocks)
            yield (block if block in held else -1), self.unit


class CopiedRows(NamedTuple):
    """The rows of a local tensor that other ranks hold too, and their positions among all such rows."""

    local_starts: list[int]
    lengths: list[int]
    full_starts: list[int]
    full_size: int


class LocalPart(NamedTuple):
    """A rank's share of a part.

    Attributes:
        part: the part.
        local_start, full_start: its first element in the local dim, and in the full dim.
        length: its number of elements, without padding.
        padding: the number of elements of padding that follow them locally.
        owned: whether this rank counts the elements. Of the ranks that hold copies, only the first does.
    """

    part: Part
    local_start: int
    full_start: int
    length: int
    padding: int
    owned: bool

    @property
    def full(self) -> slice:
        """The slice of the full dim."""
        return slice(self.full_start, self.full_start + self.length)
