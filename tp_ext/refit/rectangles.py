"""Rectangles of a full tensor: intersection, difference, and the cells into which several of them cut it."""

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

Ints = tuple[int, ...]


class Rectangle(NamedTuple):
    """A rectangle of a tensor: its first index and its length, one of each per dim."""

    starts: Ints
    sizes: Ints

    @property
    def numel(self) -> int:
        """The number of its elements."""
        return math.prod(self.sizes)

    def within(self, other: "Rectangle") -> Ints:
        """Returns its first index, counted from the first one of ``other``."""
        return tuple(start - begin for start, begin in zip(self.starts, other.starts, strict=True))

    def moved(self, by: Ints) -> "Rectangle":
        """Returns it at other indices: ``by`` is added to them."""
        return Rectangle(tuple(start + offset for start, offset in zip(self.starts, by, strict=True)), self.sizes)

    def of(self, tensor: Tensor) -> Tensor:
        """Returns the view of a tensor that it is."""
        for dim, (start, size) in enumerate(zip(self.starts, self.sizes, strict=True)):
            if size != tensor.shape[dim]:
                tensor = tensor.narrow(dim, start, size)
        return tensor


def intersection(rectangle: Rectangle, other: Rectangle) -> Rectangle | None:
    """Returns the elements of both; None if there are none."""
    starts, sizes = [], []
    for a, m, b, n in zip(rectangle.starts, rectangle.sizes, other.starts, other.sizes, strict=True):
        start = a if a > b else b
        size = (a + m if a + m < b + n else b + n) - start
        if size <= 0:
            return None
        starts.append(start)
        sizes.append(size)
    return Rectangle(tuple(starts), tuple(sizes))


def difference(whole: Rectangle, inner: Rectangle) -> Iterator[Rectangle]:
    """Yields disjoint rectangles of the elements of ``whole`` that are not in ``inner``, a rectangle within it."""
    starts, sizes = list(whole.starts), list(whole.sizes)
    for dim, (start, size) in enumerate(zip(inner.starts, inner.sizes, strict=True)):
        end = starts[dim] + sizes[dim]
        for first, last in ((starts[dim], start), (start + size, end)):
            if last > first:
                yield Rectangle(
                    (*starts[:dim], first, *starts[dim + 1 :]), (*sizes[:dim], last - first, *sizes[dim + 1 :])
                )
        starts[dim], sizes[dim] = start, size


def remaining(rectangles: Iterable[Rectangle], taken: Rectangle) -> list[Rectangle]:
    """Returns the elements of disjoint rectangles that are not in ``taken``."""
    rest: list[Rectangle] = []
    for rectangle in rectangles:
        common = intersection(rectangle, taken)
        rest += [rectangle] if common is None else difference(rectangle, common)
    return rest


def cells(holders_of: Mapping[Rectangle, Ints]) -> list[tuple[Rectangle, Ints]]:
    """Returns disjoint rectangles that cover ``holders_of``, each with all ranks that hold it."""
    disjoint: list[tuple[Rectangle, Ints]] = []
    for rectangle, ranks in holders_of.items():
        rest, cut = [rectangle], []
        for cell, holders in disjoint:
            common = intersection(cell, rectangle)
            if common is None:
                cut.append((cell, holders))
                continue
            cut.append((common, tuple(sorted({*holders, *ranks}))))
            cut += [(other, holders) for other in difference(cell, common)]
            rest = remaining(rest, common)
        disjoint = cut + [(other, ranks) for other in rest]
    return disjoint


def split(rectangle: Rectangle, most: int) -> Iterator[Rectangle]:
    """Yields rectangles of at most ``most`` elements that make it up: rows as long as possible."""
    if rectangle.numel <= most:
        yield rectangle
        return
    dim = next(dim for dim, size in enumerate(rectangle.sizes) if size > 1)
    row = rectangle.numel // rectangle.sizes[dim]
    step = max(1, most // row)
    for first in range(0, rectangle.sizes[dim], step):
        starts, sizes = list(rectangle.starts), list(rectangle.sizes)
        starts[dim], sizes[dim] = starts[dim] + first, min(step, sizes[dim] - first)
        yield from split(Rectangle(tuple(starts), tuple(sizes)), most)
