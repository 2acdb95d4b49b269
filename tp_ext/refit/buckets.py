"""Buckets: what a rank sends and receives in one all-to-all, as one tensor of bytes each."""

import itertools
from collections.abc import Sequence

import torch
from torch import Tensor

from tp_ext.refit.contents import Contents
from tp_ext.refit.rectangles import Ints, Rectangle
from tp_ext.refit.routes import Move, Place


class Round:
    """The moves of this rank in one all-to-all.

    Attributes:
        sends, receives: its moves, in the order of the ranks that they go to, and come from.
        out, into: the bytes to, and from, each rank.
    """

    def __init__(self, moves: Sequence[Move], rank: int, size: int) -> None:
        self.sends = sorted((move for move in moves if move.sender == rank), key=lambda move: move.receiver)
        self.receives = sorted((move for move in moves if move.receiver == rank), key=lambda move: move.sender)
        self.out, self.into = [0] * size, [0] * size
        for move in self.sends:
            self.out[move.receiver] += move.bytes
        for move in self.receives:
            self.into[move.sender] += move.bytes

    @staticmethod
    def parts(buffer: Tensor, moves: Sequence[Move]) -> list[Tensor]:
        """Returns the part of a buffer of bytes for each move, with its dtype and sizes."""
        ends = [0, *itertools.accumulate(move.bytes for move in moves)]
        return [
            buffer[begin : begin + move.bytes].view(move.dtypes[move.wire]).view(move.sizes)
            for begin, move in zip(ends, moves, strict=False)
        ]


def view_of(contents: Contents, place: Place, sizes: Ints) -> Tensor:
    return Rectangle(place.start, sizes).of(contents.views[place.item][place.chunk])


def cast_into(out: Tensor, value: Tensor, dtypes: Sequence[torch.dtype]) -> None:
    """Writes a value to ``out`` by way of the dtypes between its own and the last."""
    for dtype in dtypes[1:-1]:
        value = value.to(dtype)
    out.copy_(value)
