"""Safetensors files as Hugging Face lays them out: what goes into which, how one is written as its tensors come, and
how an export takes the place of an older one.
"""

import ctypes
import json
import os
import re
import secrets
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import IO

import torch
from torch import Tensor

from tp_ext.checkpoint.full import Entry
from tp_ext.checkpoint.pinned_directory import open_regular
from tp_ext.checkpoint.write_lock import WriteLock

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

_LARGEST_INDEX = 1 << 26  # bytes: some 500,000 entries

Shard = list[tuple[str, Entry]]
"""The entries of one file."""


def check_dtype(name: str, entry: Entry) -> None:
    if not isinstance(entry.value, Tensor):
        raise TypeError(f"module: {name!r} is {type(entry.value).__name__} and must be a tensor to be written")
    if entry.value.dtype not in DTYPES:
        raise ValueError(f"module: {name!r} is of {entry.value.dtype} and must be one of {list(DTYPES)} to be written")


def shards_of(entries: Shard, max_size: int | None) -> list[Shard]:
    """The entries of each file, in the order of the state dict; in a file wide dtypes first, for alignment."""
    shards: list[Shard] = [[]]
    size = 0
    for name, entry in entries:
        size += _size(entry)
        if max_size is not None and size > max_size and shards[-1]:
            shards.append([])
            size = _size(entry)
        shards[-1].append((name, entry))
    return [sorted(shard, key=lambda item: (-item[1].value.dtype.itemsize, item[0])) for shard in shards]


def _size(entry: Entry) -> int:
    return entry.shape.numel() * entry.value.dtype.itemsize


class Export:
    """The files of one export, on the rank that writes them."""

    def __init__(self, path: Path, shards: list[Shard], head: dict[str, str]) -> None:
        self.target, self.shards, self.head = target_of(path), shards, head
        self.index = index_of(self.target)
        self.suffix = f".{secrets.token_hex(4)}.tmp"
        self.names = [self.target.name]
        self.old: set[str] = set()
        self.lock = WriteLock(self.target)
        self.started = time.monotonic()

    def wait(self, timeout: float) -> bool:
        """One turn of waiting for other exports to the same place; whether it is over."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        return self.lock.take_turn(self.started, timeout)

    def begin(self) -> None:
        temporary = _temporary_names(self.target.stem)
        for name in os.listdir(self.target.parent):
            if temporary.fullmatch(name):  # of an export that was killed: we hold the lock
                self.target.with_name(name).unlink(missing_ok=True)
        with suppress(OSError, ValueError):  # an index that cannot be read is no export that we could damage
            self.old = {name for name in weight_map(self.index).values() if _is_shard(name)}
        count = len(self.shards)
        if count > 1:
            for tag in ("-b", ""):
                names = [f"{self.target.stem}{tag}-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
                self.names = names if self.old.isdisjoint(names) else self.names

    def write(self, number: int, tensors: Iterable[Tensor | None]) -> None:
        """One file: the length of the head, the head, and the tensors one after the other."""
        entries, at = {}, 0
        for name, entry in self.shards[number]:
            offsets = [at, at := at + _size(entry)]
            entries[name] = {"dtype": DTYPES[entry.value.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        head = json.dumps({"__metadata__": self.head, **entries}, separators=(",", ":")).encode()
        head += b" " * (-len(head) % 8)
        with self.temporary(self.names[number]).open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for full in tensors:
                if full is not None:  # as it is on the other ranks
                    _put(file, full)
                del full  # before the next one comes
            _sync(file)

    def finish(self) -> None:
        """Puts everything in place; the last rename is what makes it the export."""
        names = list(self.names)
        if len(names) > 1:
            place = {name: file for file, shard in zip(names, self.shards, strict=True) for name, _ in shard}
            total = sum(_size(entry) for shard in self.shards for _, entry in shard)
            content = {"metadata": {"total_size": total}, "weight_map": dict(sorted(place.items()))}
            with self.temporary(self.index.name).open("wb") as file:
                file.write((json.dumps(content, indent=2) + "\n").encode())
                _sync(file)
            names.append(self.index.name)
        self.lock.check_held()
        for name in names:
            self.temporary(name).replace(self.target.with_name(name))
        for name in sorted((self.old | {self.target.name, self.index.name}) - set(names)):
            self.target.with_name(name).unlink(missing_ok=True)
        folder = os.open(self.target.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def temporary(self, name: str) -> Path:
        return self.target.with_name(name + self.suffix)

    def clean(self) -> None:
        for name in (*self.names, self.index.name):
            with suppress(OSError):
                self.temporary(name).unlink()
        self.lock.release()


def _temporary_names(stem: str) -> re.Pattern[str]:
    """The names that :meth:`Export.temporary` gives."""
    return re.compile(
        rf"{re.escape(stem)}(-b)?(-\d{{5,}}-of-\d{{5,}})?\.safetensors(\.index\.json)?\.[0-9a-f]{{8}}\.tmp"
    )


def _is_shard(name: str) -> bool:
    """True for names that an export gives to its files: an index may name any file of its folder."""
    return name.endswith(".safetensors") and not name.startswith(".")


def _put(file: IO[bytes], full: Tensor) -> None:
    data = full.cpu().contiguous()
    if data.numel():
        file.write((ctypes.c_char * data.nbytes).from_address(data.data_ptr()))


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def target_of(path: Path) -> Path:
    """The file that a single export is; the folder's, where one is given."""
    name = path.name.removesuffix(".index.json")
    return path.with_name(name) if name.endswith(".safetensors") else path / "model.safetensors"


def index_of(target: Path) -> Path:
    return target.with_name(target.name + ".index.json")


def weight_map(index: Path) -> dict[str, str]:
    """The file of each entry. Raises OSError: it cannot be read; ValueError: no index, or one with files elsewhere."""
    try:
        with open_regular(index) as file:
            if os.fstat(file.fileno()).st_size > _LARGEST_INDEX:
                raise ValueError
            places: dict[str, str] = json.loads(file.read())["weight_map"]
        whole = all(name == os.path.basename(name) and name not in ("", ".", "..") for name in places.values())
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
        whole = False
    if not whole:
        raise ValueError(f"path: {str(index)!r} must be an index, whose weight_map names files in its own folder")
    return places
