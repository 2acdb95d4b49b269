"""Buckets: what a rank sends and receives in one all-to-all, as one tensor of bytes each."""

import itertools
import mmap
from collections.abc import Sequence

import torch
from torch import Tensor

from tp_ext import _ops
from tp_ext._build import load
from tp_ext.refit.contents import Contents, Views
from tp_ext.refit.routes import Move

_C = load()


class Parts:
    """The rectangles that this rank sends, or receives, in one all-to-all, by the rank at the other end.

    Attributes:
        bytes: the bytes to, or from, each rank.
        views: the rectangles of the source, or of the target.
        dtypes: of each rectangle the dtypes that its values have one after the other, to that of the wire, or from it.
    """

    def __init__(self, moves: Sequence[Move], ranks: int, *, sent: bool) -> None:
        # In the order of the ranks, as an all-to-all has its parts; among those of two ranks both have the order of the
        # plan
        moves = sorted(moves, key=lambda move: move.receiver if sent else move.sender)
        self.bytes = [0] * ranks
        for move in moves:
            self.bytes[move.receiver if sent else move.sender] += move.bytes
        self.views = Views((move.source if sent else move.target, move.sizes) for move in moves)
        self.dtypes = [move.dtypes[: move.wire + 1] if sent else move.dtypes[move.wire :] for move in moves]
        self._ranks = [move.receiver if sent else move.sender for move in moves]
        self._sizes = [move.bytes for move in moves]
        self._wire = [(move.dtypes[move.wire], move.sizes) for move in moves]

    def split(self, buffer: Tensor) -> Sequence[Tensor]:
        """Returns the part of a buffer of bytes for each rectangle."""
        parts: Sequence[Tensor] = buffer.split(self._sizes) if self._sizes else ()
        return parts

    def of(self, buffer: Tensor) -> list[Tensor]:
        """As :meth:`split`, with the dtype of the wire and the sizes of the rectangle."""
        parts = zip(self.split(buffer), self._wire, strict=True)
        return [part.view(dtype).view(sizes) for part, (dtype, sizes) in parts]

    def memory_of(self, contents: Contents, device: torch.device, lists: bool) -> list[Tensor] | None:
        """Returns views that a collective on ``device`` can use without packing: the only rectangle, if it is
        contiguous, or, with ``lists``, rows for each rank. None: they must be packed."""
        views = contents.of(self.views)
        if not lists and len(views) != 1:
            return None
        for view, (dtype, _) in zip(views, self._wire, strict=True):
            usable = view.stride()[-1:] == (1,) if lists else view.is_contiguous()
            if not usable or view.dtype != dtype or view.device != device:
                return None
        return [view.view(torch.uint8) if lists else view.view(-1).view(torch.uint8) for view in views]

    def by_rank(self, parts: Sequence[Tensor]) -> list[Tensor]:
        """Returns for each rank the part that it sends or receives: one at most."""
        result = [torch.empty(0, dtype=torch.uint8)] * len(self.bytes)
        for rank, part in zip(self._ranks, parts, strict=True):
            result[rank] = part
        return result


class Round:
    """The moves of this rank in one all-to-all.

    Attributes:
        sent, received: see :class:`Parts`.
        apart: whether there is one rectangle at most from each rank to each other: the same on all ranks.
    """

    def __init__(self, moves: Sequence[Move], rank: int, ranks: int) -> None:
        self.sent = Parts([move for move in moves if move.sender == rank], ranks, sent=True)
        self.received = Parts([move for move in moves if move.receiver == rank], ranks, sent=False)
        self.apart = len({(move.sender, move.receiver) for move in moves}) == len(moves)


def memory(sizes: Sequence[int], device: torch.device) -> list[Tensor]:
    """Returns tensors of these numbers of bytes in new memory."""
    # Each begins at a multiple of 64 bytes, so that it can be viewed in any dtype
    starts = [0, *itertools.accumulate(-(-size // 64) * 64 for size in sizes)]
    total = starts.pop()
    if device.type != "cpu" or total < 4 << 20 or _C.keeps_memory() or not hasattr(mmap, "MADV_HUGEPAGE"):
        whole = torch.empty(total, dtype=torch.uint8, device=device)
    else:
        # The system clears a page before its first use: of small pages that takes several times as long as a copy
        pages = mmap.mmap(-1, total, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        pages.madvise(mmap.MADV_HUGEPAGE)
        whole = torch.frombuffer(pages, dtype=torch.uint8)
    return [whole[start : start + size] for start, size in zip(starts, sizes, strict=True)]


def cast_into(outs: Sequence[Tensor], values: Sequence[Tensor], dtypes: Sequence[Sequence[torch.dtype]]) -> None:
    """Casts each value through its remaining dtypes and writes it to the matching tensor of ``outs``."""
    direct: tuple[list[Tensor], list[Tensor]] = [], []
    on_cpu = True
    for out, value, way in zip(outs, values, dtypes, strict=True):
        if len(way) > 2:
            # By way of each dtype: those in between round, and the values are those of source.to(dtype)
            for dtype in way[1:-1]:
                value = value.to(dtype)
            out.copy_(value)
            continue
        direct[0].append(out)
        direct[1].append(value)
        on_cpu = on_cpu and out.is_cpu and value.is_cpu
    if direct[0]:
        (_ops.multi_tensor_copy_ if on_cpu else torch._foreach_copy_)(*direct)
