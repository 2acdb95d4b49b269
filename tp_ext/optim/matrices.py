"""The matrices of a parameter: the parts of its layout and the indices of its leading dim, each orthogonalized on its
own, and the blocks of them that a rank holds.

Letters of shapes: a full tensor is [rows, columns], or [E, rows, columns], with a matrix for each of the E indices; a
matrix is [m, n], where m and n are lengths of parts of the rows and columns.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple, cast

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tp_ext.chunks import start_of
from tp_ext.sharding import Layout


class Chunk(NamedTuple):
    """A chunk (a rectangle) of a full tensor: its first index and its sizes."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return torch.Size(self.sizes).numel()

    def within(self, other: "Chunk") -> "Chunk | None":
        """Returns the chunk that both have in common, None if there is none."""
        starts = [max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True)]
        stops = [min(a + m, b + n) for a, m, b, n in zip(*self, *other, strict=True)]
        # Chunks that only touch have no element in common
        if any(stop <= start for start, stop in zip(starts, stops, strict=True)):
            return None
        return Chunk(tuple(starts), tuple(stop - start for start, stop in zip(starts, stops, strict=True)))

    def view(self, tensor: Tensor, origin: Sequence[int]) -> Tensor:
        """Returns the chunk of a tensor whose first element has the index ``origin`` in the full tensor."""
        for dim, (start, size) in enumerate(zip(self.offsets, self.sizes, strict=True)):
            if size != tensor.shape[dim]:
                tensor = tensor.narrow(dim, start - origin[dim], size)
        return tensor


class HeldChunk(NamedTuple):
    """A chunk that a rank holds.

    Attributes:
        chunk: the chunk of the full tensor.
        local: its first index in the local tensor.
        owned: whether the rank provides its values to others.
    """

    chunk: Chunk
    local: tuple[int, ...]
    owned: bool


class ShardOf(NamedTuple):
    """Description of a rank's shard that ranks exchange.

    Attributes:
        shape: that of the full tensor.
        matrices: the chunks that are orthogonalized on their own, in order; the same on every rank.
        held: the chunks that this rank holds.
    """

    shape: tuple[int, ...]
    matrices: tuple[Chunk, ...]
    held: tuple[HeldChunk, ...]


def local_tensor(tensor: Tensor) -> Tensor:
    """Returns what this rank stores of a tensor, without its history."""
    return cast(DTensor, tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor.detach()


def shard_of(param: Tensor, layout: Layout) -> ShardOf:
    """Returns this rank's shard of the parameter; communicates nothing.

    Raises:
        ValueError: the parameter has another length than the layout gives this rank.
    """
    shape, chunks = layout.local_chunks(param)
    local = local_tensor(param)
    held_chunks = []
    for offsets, view, owned in chunks:
        start = start_of(view, local)
        held_chunks.append(HeldChunk(Chunk(offsets, tuple(view.shape)), start, owned))
    return ShardOf(tuple(shape), tuple(_matrices(shape, layout)), tuple(held_chunks))


def _matrices(shape: torch.Size, layout: Layout) -> Iterator[Chunk]:
    """Yields the matrices of a full tensor: the last two dims are cut into the parts of the layout."""
    ndim = len(shape)
    cuts: dict[int, list[int]] = {}
    for sharding, _ in layout:  # the first entry of a dim has the parts of the full dim
        cuts.setdefault(sharding.dim % ndim, [part.size for part in sharding.parts if part.size])
    rows, columns = (_spans(cuts.get(dim, [shape[dim]])) for dim in (ndim - 2, ndim - 1))
    for index in range(shape[:-2].numel()):
        for row, height in rows:
            for column, width in columns:
                if height and width:
                    # A stack, such as experts [E, rows, columns], has a matrix per index; muon.py admits 2 and 3 dims
                    first = () if ndim == 2 else (index,)
                    yield Chunk((*first, row, column), (*((1,) * len(first)), height, width))


def _spans(sizes: Sequence[int]) -> list[tuple[int, int]]:
    """Returns (start, size) of consecutive intervals."""
    return [(sum(sizes[:i]), size) for i, size in enumerate(sizes)]
