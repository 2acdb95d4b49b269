"""Reads slices of a tensor of a safetensors file: only their bytes, into new memory.

``safe_open`` maps the file: a slice of it keeps the mapping of the whole tensor, and the system reads ahead of it."""

from __future__ import annotations

import ctypes
import functools
import math
import os
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from tp_ext.checkpoint.files.pinned_directory import open_regular
from tp_ext.checkpoint.files.plain_values import parse_json

DTYPES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.float8_e4m3fn: "F8_E4M3",
    torch.float8_e5m2: "F8_E5M2",
    torch.int64: "I64",
    torch.int32: "I32",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}

_TORCH = {name: dtype for dtype, name in DTYPES.items()}
_SHORTEST = 1024  # bytes of a row's slice; below, whole rows are read
_BLOCK = 1 << 24  # bytes of whole rows that are read at a time


class SafetensorsFile:
    """An open file: its tensors by name, and its metadata.

    Raises:
        OSError: it cannot be opened. ValueError: it is no whole safetensors file.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = open_regular(path)  # opening a pipe may block forever
        try:
            with safe_open(path, framework="pt"):  # checks the whole header against the length of the file
                pass
        except SafetensorError as error:
            self._file.close()
            raise ValueError(f"path: {str(path)!r} must be a whole safetensors file: {error}") from error
        self._file.seek(0)
        length = int.from_bytes(self._file.read(8), "little")
        head = parse_json(self._file.read(length), f"path: the header of {str(path)!r}")
        os.posix_fadvise(self._file.fileno(), 0, 0, os.POSIX_FADV_RANDOM)  # do not read ahead
        self.metadata: dict[str, str] = head.pop("__metadata__", None) or {}
        self.tensors = {
            name: SlicedTensor(
                name, self._file.fileno(), 8 + length + entry["data_offsets"][0], entry["dtype"], entry["shape"]
            )
            for name, entry in head.items()
        }

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> SafetensorsFile:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class SlicedTensor:
    """A tensor in an open file, which indexing by a slice per dim reads."""

    def __init__(self, name: str, descriptor: int, start: int, dtype: str, shape: list[int]) -> None:
        self._name, self._descriptor, self._start, self._dtype = name, descriptor, start, dtype
        self.shape = torch.Size(shape)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype; ValueError for one that torch does not have."""
        if self._dtype not in _TORCH:
            raise ValueError(f"path: {self._name!r} has dtype {self._dtype!r} and must be of one of {list(_TORCH)}")
        return _TORCH[self._dtype]

    def __getitem__(self, where: tuple[slice, ...]) -> Tensor:
        """Reads the elements at ``where``: contiguous slices, of step 1, one for each dim."""
        wanted = [range(*span.indices(size)) for span, size in zip(where, self.shape, strict=True)]
        if not all(wanted):
            return torch.empty([len(span) for span in wanted], dtype=self.dtype)
        inner = math.prod(self.shape[1:])  # elements of a row
        # Whole rows are one range of bytes
        if len(wanted) < 2 or all(len(span) == size for span, size in zip(wanted[1:], self.shape[1:], strict=True)):
            first = wanted[0] if wanted else range(1)
            return self._read(first.start * inner, len(first) * inner).view([len(span) for span in wanted])
        # One read per row; shorter slices cost more calls than whole rows cost bytes
        if len(wanted) == 2 and len(wanted[1]) * self.dtype.itemsize >= _SHORTEST:
            read = torch.empty([len(span) for span in wanted], dtype=self.dtype)
            for i, row in enumerate(wanted[0]):
                self._read_into(read[i], row * inner + wanted[1].start)
            return read
        # In blocks: only a part of each row is kept, so whole rows need not be in memory together
        rows = max(1, _BLOCK // (inner * self.dtype.itemsize))
        inside = (slice(None), *where[1:])
        blocks = []
        for start in range(wanted[0].start, wanted[0].stop, rows):
            count = min(rows, wanted[0].stop - start)
            blocks.append(self._read(start * inner, count * inner).view(count, *self.shape[1:])[inside])
        return torch.cat(blocks)

    def _read(self, start: int, count: int) -> Tensor:
        read = torch.empty(count, dtype=self.dtype)
        self._read_into(read, start)
        return read

    def _read_into(self, memory: Tensor, start: int) -> None:
        """Fills contiguous memory with the elements from ``start`` on."""
        view = memoryview((ctypes.c_char * memory.nbytes).from_address(memory.data_ptr()))
        at = self._start + start * self.dtype.itemsize
        while view:  # a call reads 2 GB at most
            count = os.preadv(self._descriptor, [view], at)
            if not count:
                raise OSError("path: a file became shorter while it was read")
            view, at = view[count:], at + count


class JoinedTensor:
    """Several tensors of files as one, which indexing by a slice per dim reads: only the bytes of these slices.

    Args:
        parts: tensors that are concatenated along their first dim, with the same sizes of the others.
        stacked: they have one shape, and are stacked along a new first dim instead.
    """

    def __init__(self, parts: Sequence[SlicedTensor | JoinedTensor], *, stacked: bool = False) -> None:
        self._parts, self._stacked = parts, stacked
        shapes: list[torch.Size] = [part.shape for part in parts]
        joined = (len(parts), *shapes[0]) if stacked else (sum(shape[0] for shape in shapes), *shapes[0][1:])
        self.shape: torch.Size = torch.Size(joined)

    @property
    def dtype(self) -> torch.dtype:
        """The dtype that holds the values of all parts."""
        # As torch.cat of the parts, so that no value is rounded
        return functools.reduce(torch.promote_types, (part.dtype for part in self._parts))

    def __getitem__(self, where: tuple[slice, ...]) -> Tensor:
        """Reads the elements at ``where``: contiguous slices, of step 1, one for each dim."""
        wanted = [range(*span.indices(size)) for span, size in zip(where, self.shape, strict=True)]
        read = torch.empty([len(span) for span in wanted], dtype=self.dtype)
        if self._stacked:
            for row, index in enumerate(wanted[0]):
                read[row] = self._parts[index][where[1:]]
            return read
        at = 0
        for part in self._parts:
            size = part.shape[0]
            start, stop = max(wanted[0].start - at, 0), min(wanted[0].stop - at, size)
            if start < stop:
                to = at - wanted[0].start
                read[start + to : stop + to] = part[(slice(start, stop), *where[1:])]
            at += size
        return read
