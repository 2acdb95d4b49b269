"""The tensors of the source of a refit, as all ranks together hold them."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from tp_ext.refit.contents import Description, Item, Place
from tp_ext.refit.rectangles import Ints, Rectangle, cells, intersection

TensorKey = tuple[str, str]


class SourceChunk(NamedTuple):
    rank: int
    item: int
    chunk: int
    rectangle: Rectangle


class Source(NamedTuple):
    """A tensor of the source: of one of its items what all have, the chunks of each rank, and disjoint cells."""

    item: Item
    chunks: dict[int, list[SourceChunk]]
    cells: list[tuple[Rectangle, Ints]]

    def place(self, rank: int, rectangle: Rectangle) -> Place:
        """Returns where a rank that holds a part of a cell has it."""
        chunk = next(chunk for chunk in self.chunks[rank] if intersection(chunk.rectangle, rectangle) == rectangle)
        return Place(chunk.item, chunk.chunk, rectangle.within(chunk.rectangle))


def first_names(sources: Sequence[Description | None]) -> dict[str, str]:
    """Returns, for each name of a tied tensor of the source, the first of its names."""
    first: dict[str, str] = {}

    def find(name: str) -> str:
        while first.get(name, name) != name:
            name = first[name]
        return name

    for source in sources:
        for a, b in source.ties if source else ():
            # Ranks may know different ties, as stages do; sorted, so that the order of the ranks decides nothing
            a, b = sorted((find(a), find(b)))
            first[b] = a
    return {name: find(name) for name in first}


def sources_of(sources: Sequence[Description | None], first: Mapping[str, str]) -> dict[TensorKey, Source]:
    items: dict[TensorKey, tuple[int, Item]] = {}
    chunks: dict[TensorKey, list[SourceChunk]] = {}
    for rank, source in enumerate(sources):
        for number, item in enumerate(source.items if source else ()):
            key = first.get(item.name, item.name), item.key
            other_rank, other = items.setdefault(key, (rank, item))
            if (item.shape, item.dtype) != (other.shape, other.dtype):
                raise ValueError(
                    f"source: {item.text!r} must be the same on all ranks, and has shape {other.shape} and "
                    f"{other.dtype} on rank {other_rank}, {item.shape} and {item.dtype} on rank {rank}"
                )
            chunks.setdefault(key, []).extend(
                SourceChunk(rank, number, index, rectangle) for index, rectangle in enumerate(item.chunks)
            )
    cut: dict[Any, list[tuple[Rectangle, Ints]]] = {}
    result = {}
    for key, (_, item) in items.items():
        ranks: dict[Rectangle, list[int]] = {}
        by_rank: dict[int, list[SourceChunk]] = {}
        for chunk in chunks.get(key, ()):
            by_rank.setdefault(chunk.rank, []).append(chunk)
            if chunk.rank not in ranks.setdefault(chunk.rectangle, []):
                ranks[chunk.rectangle].append(chunk.rank)
        # Many tensors are held alike
        table = tuple((rectangle, tuple(holders)) for rectangle, holders in ranks.items())
        if table not in cut:
            cut[table] = cells(dict(table))
        result[key] = Source(item._replace(name=key[0]), by_rank, cut[table])
    return result
