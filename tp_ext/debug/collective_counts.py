"""Exact counts of the collectives that this process issues in a block of code, by group and kind.

``with tp_ext.debug.count_collectives() as counts: ...; print(counts)``; docs/reference/communication.md has the
numbers of all modules.
"""

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from fractions import Fraction
from typing import NamedTuple

from tp_ext._build import load
from tp_ext._checks import check_choice
from tp_ext.group import Group, global_ranks, parallel_group
from tp_ext.simulation.place import RankPlace, here

__all__ = ["CollectiveCount", "CollectiveCounts", "count_collectives"]

_WIRE: dict[str, Callable[[int, int, int], int]] = {  # (n, own, t) -> wire bytes times t
    "all_reduce": lambda n, own, t: 2 * (t - 1) * n,
    "all_gather": lambda n, own, t: t * (n - own),
    "reduce_scatter": lambda n, own, t: t * (n - own),
    "all_to_all": lambda n, own, t: t * (n - own),
    "gather": lambda n, own, t: t * (n - own),
    "scatter": lambda n, own, t: t * (n - own),
    "broadcast": lambda n, own, t: t * n if t > 1 else 0,
    "reduce": lambda n, own, t: t * n if t > 1 else 0,
    "send": lambda n, own, t: t * n,
    "recv": lambda n, own, t: t * n,
    "barrier": lambda n, own, t: 0,
}


class CollectiveCount(NamedTuple):
    """A number of equal calls: of one kind, in one group, of the same size in bytes."""

    group: str
    """The group's name."""
    ranks: tuple[int, ...]
    """Its global ranks; empty if the group had been destroyed when this was read."""
    size: int
    """t, the number of ranks."""
    kind: str
    """``all_reduce``, ``all_gather``, ..: see :func:`count_collectives`."""
    payload: int
    """n of one call, in bytes."""
    own: int
    """The bytes of the payload that this rank holds both before and after the call."""
    number: int
    """The number of such calls."""

    @property
    def payload_bytes(self) -> int:
        """Total payload n of all calls, in bytes."""
        return self.number * self.payload

    @property
    def wire_bytes(self) -> float:
        """Bytes that this rank sends in all calls."""
        return float(self._wire())

    def _wire(self) -> Fraction:
        return Fraction(self.number * _WIRE[self.kind](self.payload, self.own, self.size), self.size)


class CollectiveCounts:
    """The counts of :func:`count_collectives`. ``print`` them for a table."""

    def __init__(self, read: Callable[[], Sequence[CollectiveCount]]):
        self._read = read

    @property
    def rows(self) -> tuple[CollectiveCount, ...]:
        """The rows of the table: one for each group, kind and size, in order of first occurrence."""
        return tuple(self._read())

    @property
    def number(self) -> int:
        """Total number of collectives."""
        return sum(row.number for row in self.rows)

    @property
    def payload_bytes(self) -> int:
        """Total bytes of payload."""
        return sum(row.payload_bytes for row in self.rows)

    @property
    def wire_bytes(self) -> float:
        """Total bytes on the wire that this rank sends."""
        return float(sum(row._wire() for row in self.rows))  # rounded once

    def by_kind(self) -> dict[str, int]:
        """Returns the number of collectives of each kind that occurred, such as ``{"all_reduce": 4}``."""
        numbers: Counter[str] = Counter()
        for row in self.rows:
            numbers[row.kind] += row.number
        return dict(numbers)

    def select(self, *, group: Group = None, kind: str | None = None) -> "CollectiveCounts":
        """Returns the counts of one group, of one kind, or of one kind in one group.

        Raises:
            ValueError: an unknown kind. TypeError, ValueError: ``group`` is no group.
        """
        if kind is not None:
            check_choice(_WIRE, kind=kind)
        name = None if group is None else parallel_group(group).torch_name
        rows = [row for row in self.rows if kind in (None, row.kind) and name in (None, row.group)]
        return CollectiveCounts(lambda: rows)

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [
            ("group", "ranks", "kind", "number", "bytes each", "payload bytes", "wire bytes")
        ]
        for row in self.rows:
            ranks = str(list(row.ranks)) if 0 < len(row.ranks) <= 8 else f"{row.size} ranks"
            lines.append((row.group, ranks, row.kind, *map(_figure, (row.number, row.payload, *_bytes(row)))))
        lines.append(("all", "", "", _figure(self.number), "", *map(_figure, _bytes(self))))
        widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
        return "\n".join(_line(line, widths) for line in lines)


@contextmanager
def count_collectives() -> Iterator[CollectiveCounts]:
    """Counts the collectives that this process issues in the ``with`` block, from any thread: those of tp_ext, forward
    and backward, of ``torch.distributed``, DDP, FSDP2, functional collectives and compiled code.

    For each call it records the size t of its group, the payload n and the bytes on the wire that one rank sends (and
    receives). Wire bytes are those of ring algorithms, the minimum without in-network reduction:

    =================  ================================================  ===================
    kind               n, in bytes                                       on the wire
    =================  ================================================  ===================
    all_reduce         the tensor                                        2 (t - 1) / t n
    all_gather         the result                                        (t - 1) / t n
    reduce_scatter     the input                                         (t - 1) / t n
    all_to_all         the input                                         (t - 1) / t n
    gather, scatter    the tensors of all ranks together, on every rank  (t - 1) / t n
    broadcast, reduce  the tensor                                        n (0 if t = 1)
    send, recv         the tensor, at the rank that sends or receives    n
    barrier            0                                                 0
    =================  ================================================  ===================

    (t - 1) / t n stands for n minus the bytes that the rank holds both before and after the call; with uneven lists it
    differs between ranks. Padding counts, since it is communicated. The implementation of a backend is not considered:
    gloo's reduce-scatter, for instance, sends as much as its all-reduce. A coalesced call counts as one of the sum of
    its sizes. A call counts when it is issued; an asynchronous one is not waited for. Nothing is issued for empty
    tensors, nor by tp_ext where t = 1.

    Blocks nest, each counting everything inside. The counts may also be read inside the block. It uses torch's record
    functions, as ``torch.profiler`` does: no dispatch mode is active, the layers use their ordinary code path (under
    torch's ``CommDebugMode`` they use the functional one), compiled code stays compiled. Inside a block every operator
    costs about 0.2 us more; outside there is no cost.

    All-reduces over torch's symmetric memory, and GEMMs fused with an all-gather or a reduce-scatter, count as the
    collective that they replace. Not counted: replays of a CUDA graph, whose capture counts; other work over symmetric
    memory; calls of a process group written in Python, before it forwards them to one of torch's.

    Yields:
        :class:`CollectiveCounts`. Communicates nothing; every rank counts its own calls, a rank of
        :func:`tp_ext.debug.simulate`, too, and nothing of a simulation that it runs.
    """
    library = load()
    counter = library.open_counter(False)
    place = here()
    counts = CollectiveCounts(lambda: _rows(library.read_counter(counter), place))
    try:
        yield counts
    finally:
        # For good: the counter goes now, and groups may later
        rows = counts.rows
        counts._read = lambda: rows
        library.close_counter(counter)


def _rows(read: Sequence[tuple[str, int, str, int, int, int, str]], place: RankPlace) -> list[CollectiveCount]:
    return [CollectiveCount(row[0], _ranks(row[0]), *row[1:6]) for row in read if not place.is_of_other_rank(row[0])]


def _ranks(name: str) -> tuple[int, ...]:
    try:
        return tuple(global_ranks(name))
    except ValueError:  # destroyed meanwhile
        return ()


def _bytes(counted: CollectiveCount | CollectiveCounts) -> tuple[float, float]:
    return counted.payload_bytes, counted.wire_bytes


def _figure(number: float) -> str:
    return f"{number:,.0f}" if number == int(number) else f"{number:,.1f}"


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    texts = [cell.ljust(width) for cell, width in zip(cells[:3], widths[:3], strict=True)]
    numbers = [cell.rjust(width) for cell, width in zip(cells[3:], widths[3:], strict=True)]
    return "  ".join(texts + numbers).rstrip()
