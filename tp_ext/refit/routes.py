"""The table of what is moved: the intersection of what ranks hold of a source with what others need for a target."""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from tp_ext.refit.contents import Description, Item, Place
from tp_ext.refit.rectangles import Ints, Rectangle, intersection, remaining, split
from tp_ext.refit.sources import Source, TensorKey, first_names, sources_of

NameMap = Mapping[str, Any]


class Move(NamedTuple):
    """A rectangle that a rank sends to another, or copies (``sender == receiver``).

    Attributes:
        source, target: its place on the sender and on the receiver.
        dtypes: the dtypes that its values have one after the other, from the source's to the target's.
        wire: the index of the one that is sent.
    """

    sender: int
    receiver: int
    source: Place
    target: Place
    sizes: Ints
    dtypes: tuple[torch.dtype, ...]
    wire: int

    @property
    def bytes(self) -> int:
        """The bytes that are sent."""
        return Rectangle((), self.sizes).numel * self.dtypes[self.wire].itemsize


class Repeat(NamedTuple):
    """A rectangle of a target that the rank receives for another tensor of its target, too."""

    rank: int
    source: Place
    target: Place
    sizes: Ints


class Shared(NamedTuple):
    """A rectangle of the source that several ranks hold: the text of its item, and its place on each rank."""

    text: str
    places: dict[int, Place]
    sizes: Ints


class Tie(NamedTuple):
    """A rectangle of two tensors of the source that are one of the target: a sentence about them, and a rank that holds
    it and its place there, for each of them."""

    text: str
    holders: tuple[tuple[int, Place], tuple[int, Place]]
    sizes: Ints


class _Segment(NamedTuple):
    """A rectangle of a target's tensor that is a rectangle of a tensor of the source, ``by`` further."""

    source: Source
    rectangle: Rectangle
    by: Ints


# [Note: a refit is the intersection of two tables]
class Routes:
    """All moves between the ranks of a group, computed alike on all of them.

    Args:
        sources, targets: the description of each rank's model, None on a rank without one.
        hosts: the host of each rank.
        names, dtype: see :func:`tp_ext.refit.plan`.
        bucket: the most bytes that a rank sends, and receives, in a round.

    Attributes:
        states: of each rank, for each parameter of its target's optimizer, the items of its state.
        rounds: the moves between ranks, by round.
        copies: the moves within a rank.
        repeats, shared, ties: see their classes.

    Raises:
        ValueError: an entry of the target without a source, or of another shape; names that are not there; elements
            that no rank holds; ranks that disagree about an entry.
    """

    def __init__(
        self,
        sources: Sequence[Description | None],
        targets: Sequence[Description | None],
        hosts: Sequence[str],
        names: NameMap,
        dtype: torch.dtype | None,
        bucket: int,
    ) -> None:
        self._hosts, self._names, self._dtype = hosts, names, dtype
        self._first = first_names(sources)
        self._sources = sources_of(sources, self._first)
        params = [item for source in sources if source for item in source.items if not item.key]
        self._params = {name: item for item in params for name in item.names}
        self._sent = [0] * len(hosts)
        self._segments: dict[Item, list[_Segment]] = {}
        self.copies: list[Move] = []
        self.repeats: list[Repeat] = []
        known = {name for target in targets if target for item in target.items for name in (item.name, *item.names)}
        if unknown := sorted(names.keys() - known):
            raise ValueError(f"names: {unknown[0]!r} must be an entry of the target")
        self._options = {
            self._first.get(name, name): options for source in sources if source for name, options in source.options
        }
        self.states = [
            [self._state_items(param, target) for param in target.optimized] if target else [] for target in targets
        ]
        self.ties = list(self._ties(targets))
        moves: list[Move] = []
        for rank, target in enumerate(targets):
            items = [*target.items, *(item for items in self.states[rank] for item in items)] if target else []
            for move in self._moves_to(rank, items):
                # What a rank holds itself needs no collective, and no part of a bucket
                if move.sender == move.receiver:
                    self.copies += _split(move, bucket)
                else:
                    moves += _split(move, bucket)
        self.rounds = list(_rounds(moves, len(hosts), bucket))

    def _source_of(self, name: str, item: Item) -> tuple[Source, str]:
        source = self._sources.get((self._first.get(name, name), item.key))
        if source is None:
            what = f"{name}.{item.key}" if item.key else name
            raise ValueError(f"source: must have an entry {what!r}, for {item.text!r} of the target; see names=")
        return source, name

    def _parts_of(self, item: Item) -> list[Any]:
        """Returns the names of the source, or pairs of a name and the index of a part, that make up an item."""
        name = next((name for name in item.names if name in self._names), None)
        if name is None:
            # Of tied names one is enough
            known = (name for name in item.names if (self._first.get(name, name), item.key) in self._sources)
            return [next(known, item.name)]
        parts = self._names[name]
        return list(parts) if isinstance(parts, list) else [parts]

    def _state_items(self, optimized: Any, target: Description) -> list[Item]:
        """Returns the items of the state that a parameter of the target's optimizer gets."""
        param = optimized.item
        # The optimizer knows a tied weight by one of its names; names= may give another of them
        if (alias := next((item for item in target.items if param.name in item.names), None)) is not None:
            param = param._replace(names=alias.names)
        # Where parts are joined (q, k, v) the first one says which states there are; each is then joined as the
        # parameter is
        parts = [part[0] if isinstance(part, tuple) else part for part in self._parts_of(param)]
        name = parts[0]
        states = self._states_of(name)
        self._check_states(optimized, param, parts, dict(target.options).get(optimized.item.name, frozenset()))
        items = []
        for key, source in states.items():
            shape, scalar = source.item.shape, not source.item.shape
            of_param = shape == self._params[name].shape and not scalar
            # Such as a factored moment: there is no layout by which a rank would know its share of it
            if not (scalar or of_param) and [chunk.sizes for chunk in param.chunks] != [param.shape]:
                raise ValueError(
                    f"optimizers: state {key!r} of {param.name!r} has shape {shape} and must have that of the "
                    "parameter, by whose layout it is sharded"
                )
            chunks = param.chunks if of_param or param.shape == shape else (Rectangle((0,) * len(shape), shape),)
            full = param.shape if of_param else shape
            # A state that the target has already keeps its dtype
            dtype = optimized.dtypes.get(key, source.item.dtype)
            items.append(Item(param.name, key, full, dtype, chunks, names=param.names or (param.name,)))
        return items

    def _states_of(self, name: str) -> dict[str, Source]:
        owner = self._first.get(name, name)
        return {key: source for (first, key), source in self._sources.items() if first == owner and key}

    def _check_states(self, optimized: Any, param: Item, parts: Sequence[str], options: frozenset[str]) -> None:
        """Raises ValueError unless the states of a parameter's parts in the source are all that its optimizer in the
        target has, or makes by its options in a first step."""
        of_parts = [self._states_of(part).keys() for part in parts]
        for part, keys in zip(parts, of_parts, strict=True):
            if keys != of_parts[0]:
                raise ValueError(
                    f"optimizers: states of {part!r}, {sorted(keys)}, must be those of {parts[0]!r}, "
                    f"{sorted(of_parts[0])}, with which it is joined to {param.name!r}"
                )
        given = self._options.get(self._first.get(parts[0], parts[0]))
        lacks = sorted(optimized.dtypes.keys() - of_parts[0])
        # Without any state the target has none afterwards either, and its next step is a first one
        if lacks and (of_parts[0] or given is None):
            raise ValueError(
                f"optimizers: the source's must have the state {lacks[0]!r} of {parts[0]!r}, since the target's "
                f"has it of {param.name!r}"
            )
        if of_parts[0] and given is not None and (more := options - given):
            raise ValueError(
                f"optimizers: {sorted(more)[0]!r} of {param.name!r} must be set in the source's as in the target's, "
                "which has other states by it"
            )
        if of_parts[0] and given is not None and "use_muon" in given - options:
            raise ValueError(f"optimizers: 'use_muon' of {param.name!r} must be the same in the source's and target's")

    def _ties(self, targets: Sequence[Description | None]) -> Iterator[Tie]:
        known: set[tuple[tuple[str, ...], str]] = set()
        for rank, target in enumerate(targets):
            for item in (*target.items, *(item for items in self.states[rank] for item in items)) if target else ():
                # names= says which of them is meant
                if (item.names, item.key) in known or any(name in self._names for name in item.names):
                    continue
                known.add((item.names, item.key))
                # A name that the source ties to another tensor, or that of another shape, is meant for something else
                names = (name for name in item.names if self._first.get(name, name) == name)
                sources = [self._sources[name, item.key] for name in names if (name, item.key) in self._sources]
                for other in sources[1:]:
                    if other.item.shape == sources[0].item.shape:
                        yield from _tie(sources[0], other)

    def _segments_of(self, item: Item) -> list[_Segment]:
        """Returns the tensors of the source that make up an item of a target, by position in it."""
        known = item._replace(chunks=(), dtype=torch.float32)
        if known not in self._segments:
            self._segments[known] = self._join(item)
        return self._segments[known]

    def _join(self, item: Item) -> list[_Segment]:
        rectangles: list[tuple[Source, Rectangle]] = []
        parts = self._parts_of(item)
        # A number, such as a step, is not joined: that of the first part
        for part in parts if item.shape or not item.key else parts[:1]:
            name, index = part if isinstance(part, tuple) else (part, None)
            source, _ = self._source_of(name, item)
            whole = Rectangle((0,) * len(source.item.shape), source.item.shape)
            rectangles.append((source, whole if index is None or not whole.sizes else self._part(name, index, whole)))
        shapes = [rectangle.sizes for _, rectangle in rectangles]
        dim = _joined_dim(shapes, item.shape)
        if dim is None:
            shown = " and ".join(map(str, shapes))
            raise ValueError(
                f"source: {shown} of {parts!r} must make up the shape {item.shape} of {item.text!r} of the target"
            )
        segments, begin = [], 0
        for source, rectangle in rectangles:
            starts = [0] * len(item.shape)
            if starts:
                starts[dim] = begin
                begin += rectangle.sizes[dim]
            here = Rectangle(tuple(starts), rectangle.sizes)
            segments.append(_Segment(source, here, rectangle.within(here)))
        return segments

    def _part(self, name: str, index: int, whole: Rectangle) -> Rectangle:
        dim, sizes = self._params[name].parts or (0, ())
        if not 0 <= index < len(sizes):
            raise ValueError(f"names: part {index} of {name!r} must be one of its {len(sizes) or 1} parts")
        starts, shape = list(whole.starts), list(whole.sizes)
        starts[dim], shape[dim] = sum(sizes[:index]), sizes[index]
        return Rectangle(tuple(starts), tuple(shape))

    def _moves_to(self, rank: int, items: Sequence[Item]) -> Iterator[Move]:
        """Yields the moves that bring a rank its items; notes :attr:`repeats`."""
        # What the rank gets already: of each tensor of the source, in each dtype
        got: dict[tuple[TensorKey, tuple[torch.dtype, ...]], list[tuple[Rectangle, Place, Rectangle]]] = {}
        for number, item in enumerate(items):
            for segment in self._segments_of(item):
                source = segment.source
                dtypes = self._dtypes(source.item, item)
                # Casts are done on either side of the wire: the narrowest dtype is sent, and values are the same
                wire = min(range(len(dtypes)), key=lambda index: dtypes[index].itemsize)
                earlier = got.setdefault(((source.item.name, source.item.key), dtypes), [])
                for chunk, rectangle in enumerate(item.chunks):
                    common = intersection(rectangle, segment.rectangle)
                    if common is None:
                        continue
                    needed = common.moved(segment.by)
                    origin = rectangle.moved(segment.by)
                    rest = [needed]
                    # Elements that the target has twice, as under two names of a tie that it does not have, are sent
                    # once
                    for other, place, other_origin in earlier:
                        if (again := intersection(other, needed)) is not None:
                            for part in _overlaps(rest, again):
                                earlier_place = place._replace(start=part.within(other_origin))
                                here = Place(number, chunk, part.within(origin))
                                self.repeats.append(Repeat(rank, earlier_place, here, part.sizes))
                            rest = remaining(rest, again)
                    earlier.append((needed, Place(number, chunk, ()), origin))
                    for part in rest:
                        yield from self._fetch(rank, source, part, Place(number, chunk, ()), origin, dtypes, wire)

    def _fetch(
        self,
        rank: int,
        source: Source,
        part: Rectangle,
        place: Place,
        origin: Rectangle,
        dtypes: tuple[torch.dtype, ...],
        wire: int,
    ) -> Iterator[Move]:
        count = 0
        for cell, holders in source.cells:
            common = intersection(cell, part)
            if common is None:
                continue
            count += common.numel
            sender = rank if rank in holders else self._sender(rank, holders)
            move = Move(
                sender,
                rank,
                source.place(sender, common),
                place._replace(start=common.within(origin)),
                common.sizes,
                dtypes,
                wire,
            )
            if sender != rank:
                self._sent[sender] += move.bytes
            yield move
        # Cells are disjoint, so what no rank holds is missing in their sum
        if count != part.numel:
            raise ValueError(
                f"source: {source.item.text!r} must be held as a whole by the ranks of process_group, which lack "
                f"{part.numel - count} of {part.numel} elements that rank {rank} needs"
            )

    def _sender(self, receiver: int, holders: Ints) -> int:
        # Within a host, if possible. Of replicas one alone would send all, and be the slowest
        near = [rank for rank in holders if self._hosts[rank] == self._hosts[receiver]]
        return min(near or holders, key=lambda rank: (self._sent[rank], rank))

    def _dtypes(self, source: Item, target: Item) -> tuple[torch.dtype, ...]:
        if source.dtype.is_floating_point != target.dtype.is_floating_point:
            raise ValueError(
                f"source: {source.text!r} is of {source.dtype} and must be of floating point as {target.text!r} of the "
                f"target, of {target.dtype}, or both not"
            )
        dtypes = [source.dtype]
        # As Module.to: of floating-point parameters and buffers
        casts = not target.key and source.dtype.is_floating_point
        for dtype in (self._dtype if casts else None, target.dtype):
            if dtype is not None and dtype != dtypes[-1]:
                dtypes.append(dtype)
        return tuple(dtypes)

    def shared(self) -> Iterator[Shared]:
        """Yields the rectangles of the source that several ranks hold."""
        for source in self._sources.values():
            for cell, holders in source.cells:
                if len(holders) > 1:
                    yield Shared(source.item.text, {rank: source.place(rank, cell) for rank in holders}, cell.sizes)


def _tie(first: Source, other: Source) -> Iterator[Tie]:
    text = (
        f"source: {first.item.text!r} and {other.item.text!r} must be equal, which are one tensor in the target; "
        "or names= must say which of them it gets"
    )
    for cell, ranks in first.cells:
        for other_cell, other_ranks in other.cells:
            if (common := intersection(cell, other_cell)) is not None:
                holders = (first, ranks[0]), (other, other_ranks[0])
                a, b = ((rank, source.place(rank, common)) for source, rank in holders)
                yield Tie(text, (a, b), common.sizes)


def _joined_dim(shapes: Sequence[Ints], shape: Ints) -> int | None:
    """Returns the dim along which tensors of these shapes make up one of ``shape``; None if there is none."""
    if len(shapes) == 1:
        return 0 if shapes[0] == shape else None
    for dim in range(len(shape)):
        lengths = [sizes[dim] for sizes in shapes if len(sizes) == len(shape)]
        others = {(*sizes[:dim], shape[dim], *sizes[dim + 1 :]) for sizes in shapes}
        if len(lengths) == len(shapes) and sum(lengths) == shape[dim] and others == {shape}:
            return dim
    return None


def _overlaps(rectangles: Sequence[Rectangle], other: Rectangle) -> Iterator[Rectangle]:
    for rectangle in rectangles:
        if (common := intersection(rectangle, other)) is not None:
            yield common


def _split(move: Move, most: int) -> Iterator[Move]:
    """Yields the moves of rectangles of at most ``most`` bytes in any of their dtypes."""
    itemsize = max(dtype.itemsize for dtype in move.dtypes)
    for part in split(Rectangle((0,) * len(move.sizes), move.sizes), max(1, most // itemsize)):
        source, target = (
            place._replace(start=tuple(a + b for a, b in zip(place.start, part.starts, strict=True)))
            for place in (move.source, move.target)
        )
        yield move._replace(source=source, target=target, sizes=part.sizes)


def _rounds(moves: Sequence[Move], ranks: int, most: int) -> Iterator[list[Move]]:
    """Yields the moves of each round, in which a rank sends, and receives, at most ``most`` bytes of one size of
    elements: so all are aligned in a bucket."""
    for itemsize in sorted({move.dtypes[move.wire].itemsize for move in moves}, reverse=True):
        rounds: list[list[Move]] = []
        free: list[tuple[list[int], list[int]]] = []  # of each round: bytes that ranks may still send, receive
        begin = [0] * ranks, [0] * ranks  # rounds before are nearly full for the rank
        for move in moves:
            if move.dtypes[move.wire].itemsize != itemsize:
                continue
            size, ends = move.bytes, (move.sender, move.receiver)
            index = max(begin[0][ends[0]], begin[1][ends[1]])
            while index < len(free) and min(free[index][0][ends[0]], free[index][1][ends[1]]) < size:
                index += 1
            if index == len(free):
                rounds.append([])
                free.append(([most] * ranks, [most] * ranks))
            rounds[index].append(move)
            for side, rank in enumerate(ends):
                free[index][side][rank] -= size
                while begin[side][rank] < len(free) and free[begin[side][rank]][side][rank] < most // 8:
                    begin[side][rank] += 1
        yield from rounds
