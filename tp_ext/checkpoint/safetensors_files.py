"""Safetensors files in Hugging Face's layout: assigns entries to files, writes a file tensor by tensor, and replaces an
older export.
"""

import ctypes
import json
import os
import re
import secrets
import time
from collections.abc import Iterable, Mapping
from contextlib import ExitStack, suppress
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch.distributed as dist
from torch import Tensor

from tp_ext.checkpoint.files.atomic_directory import sync_to_disk
from tp_ext.checkpoint.files.plain_values import read_json
from tp_ext.checkpoint.files.safetensors_slices import DTYPES, SafetensorsFile, SlicedTensor
from tp_ext.checkpoint.files.write_lock import WriteLock
from tp_ext.checkpoint.pipeline import WholeTensor

FileEntries = list[tuple[str, WholeTensor]]
"""The entries of one file."""


def check_dtype(name: str, tensor: WholeTensor | None, value: Any) -> WholeTensor:
    """Returns the tensor of an entry, or its extra state ``value`` if it has none."""
    if tensor is None:
        raise TypeError(f"module: {name!r} is {type(value).__name__} and must be a tensor to be written")
    if tensor.dtype not in DTYPES:
        raise ValueError(f"module: {name!r} is of {tensor.dtype} and must be one of {list(DTYPES)} to be written")
    return tensor


def split_into_files(entries: FileEntries, max_size: int | None) -> list[FileEntries]:
    """Returns the entries of each file, in the order of the state dict; in a file wide dtypes first, for alignment."""
    shards: list[FileEntries] = [[]]
    size = 0
    for name, entry in entries:
        size += _size(entry)
        if max_size is not None and size > max_size and shards[-1]:
            shards.append([])
            size = _size(entry)
        shards[-1].append((name, entry))
    return [sorted(shard, key=lambda item: (-item[1].dtype.itemsize, item[0])) for shard in shards]


def _size(entry: WholeTensor) -> int:
    return entry.shape.numel() * entry.dtype.itemsize


class Export:
    """The files of one export, on the rank that writes them."""

    def __init__(
        self, path: Path, shards: list[FileEntries], head: dict[str, str], index_metadata: Mapping[str, int] | None
    ) -> None:
        self.target, self.shards, self.head = target_of(path), shards, head
        self.index_metadata = index_metadata or {}
        self.index = index_of(self.target)
        self.suffix = f".{secrets.token_hex(4)}.tmp"
        self.names = [self.target.name]
        self.old: set[str] = set()
        self.key = ""
        self.lock = WriteLock(self.target)
        self.started = time.monotonic()

    def wait(self, timeout: float) -> bool:
        """Waits one turn for other exports to the same path; returns whether the wait is over."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        return self.lock.take_turn(self.started, timeout)

    def begin(self) -> None:
        temporary = _temporary_names(self.target.stem)
        for name in os.listdir(self.target.parent):
            if temporary.fullmatch(name):  # of an export that was killed, since we hold the lock
                self.target.with_name(name).unlink(missing_ok=True)
        self._refuse_another_stage()
        with suppress(OSError, ValueError):  # an index that cannot be read belongs to no export that could be damaged
            self.old = {name for name in weight_map(self.index).values() if _is_shard(name)}
        count = len(self.shards)
        if count > 1:
            # The old index names files that readers may be reading: the new ones need other names until it is replaced
            for tag in ("-b", ""):
                names = [f"{self.target.stem}{tag}-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]
                self.names = names if self.old.isdisjoint(names) else self.names

    # [Note: a job's store remembers which rank exported where]
    def _refuse_another_stage(self) -> None:
        """Raises if another rank of this job has exported other tensors here: stages of a pipeline would replace each
        other's. A job's store knows the rank of the last export to a path."""
        if not dist.is_initialized():
            return
        self.key, writer = f"tp_ext export {self.target.resolve()}", dist.get_rank()
        with suppress(RuntimeError, NotImplementedError):  # a store without these functions, or that is gone
            store = _store()
            writer = int(store.get(self.key)) if store.check([self.key]) else writer
        if writer != dist.get_rank():
            mine, there = {name for shard in self.shards for name, _ in shard}, _names_in(self.target)
            if mine - there and there - mine:
                raise ValueError(
                    f"path: rank {writer} of this job has exported other tensors there, {min(there - mine)!r} is one; "
                    "the stages of a pipeline go into one export by mesh="
                )

    # [Note: we write safetensors files ourselves]
    def write(self, number: int, tensors: Iterable[Tensor | None]) -> None:
        """Writes one file: the length of the head, the head, and the tensors one after the other."""
        entries, at = {}, 0
        for name, entry in self.shards[number]:
            offsets = [at, at := at + _size(entry)]
            entries[name] = {"dtype": DTYPES[entry.dtype], "shape": list(entry.shape), "data_offsets": offsets}
        head = json.dumps({"__metadata__": self.head, **entries}, separators=(",", ":")).encode()
        # Aligns the data, as the library's writer does
        head += b" " * (-len(head) % 8)
        with self.temporary(self.names[number]).open("wb") as file:
            file.write(len(head).to_bytes(8, "little") + head)
            for full in tensors:
                if full is not None:  # None on the other ranks
                    _put(file, full)
                del full  # before the next one comes
            _sync(file)

    def finish(self) -> None:
        """Moves all files into place; the last rename makes them the export."""
        names = list(self.names)
        if len(names) > 1:
            place = {name: file for file, shard in zip(names, self.shards, strict=True) for name, _ in shard}
            total = sum(_size(entry) for shard in self.shards for _, entry in shard)
            metadata = {**self.index_metadata, "total_size": total}
            content = {"metadata": metadata, "weight_map": dict(sorted(place.items()))}
            with self.temporary(self.index.name).open("wb") as file:
                file.write((json.dumps(content, indent=2) + "\n").encode())
                _sync(file)
            names.append(self.index.name)
        # Renames begin: from here on the old export is replaced
        self.lock.check_held()
        # The index last: until then the old one names the old files
        for name in names:
            self.temporary(name).replace(self.target.with_name(name))
        # Last: a reader of the old index needs them until now. A single file and an index exclude each other
        for name in sorted((self.old | {self.target.name, self.index.name}) - set(names)):
            self.target.with_name(name).unlink(missing_ok=True)
        sync_to_disk(self.target.parent)
        with suppress(RuntimeError, NotImplementedError):
            if self.key:
                _store().set(self.key, str(dist.get_rank()))

    def temporary(self, name: str) -> Path:
        return self.target.with_name(name + self.suffix)

    def clean(self) -> None:
        for name in (*self.names, self.index.name):
            with suppress(OSError):
                self.temporary(name).unlink()
        self.lock.release()


def _store() -> Any:
    """Returns the store of the job, through which its ranks know of each other's exports."""
    store = dist.distributed_c10d._get_default_store()
    if store is None:  # of simulated ranks, which share this process; the names of their groups begin with their place
        assert dist.group.WORLD is not None
        return dist.PrefixStore(dist.group.WORLD.group_name.rpartition(".rank")[0], _store_of_process())
    return store


@cache
def _store_of_process() -> Any:
    return dist.HashStore()


def _names_in(target: Path) -> set[str]:
    """Returns the names of the tensors of an export; none if there is no readable one."""
    with suppress(OSError, ValueError):
        if not target.exists():
            return set(weight_map(index_of(target)))
        with SafetensorsFile(target) as file:
            return set(file.tensors)
    return set()


def _temporary_names(stem: str) -> re.Pattern[str]:
    """Returns a pattern of the names that :meth:`Export.temporary` makes."""
    return re.compile(
        rf"{re.escape(stem)}(-b)?(-\d{{5,}}-of-\d{{5,}})?\.safetensors(\.index\.json)?\.[0-9a-f]{{8}}\.tmp"
    )


def _is_shard(name: str) -> bool:
    """Returns True for names that an export gives to its files: an index may name any file of its folder."""
    return name.endswith(".safetensors") and not name.startswith(".")


def _put(file: IO[bytes], full: Tensor) -> None:
    data = full.cpu().contiguous()
    if data.numel():
        file.write((ctypes.c_char * data.nbytes).from_address(data.data_ptr()))


def _sync(file: IO[bytes]) -> None:
    file.flush()
    os.fsync(file.fileno())


def target_of(path: Path) -> Path:
    """Returns the file of an export that is a single file; for a folder, the one in it."""
    name = path.name.removesuffix(".index.json")
    return path.with_name(name) if name.endswith(".safetensors") else path / "model.safetensors"


def index_of(target: Path) -> Path:
    return target.with_name(target.name + ".index.json")


def open_export(path: Path, opened: ExitStack) -> tuple[dict[str, SlicedTensor], dict[str, str]]:
    """Opens the files of an export. Returns its tensors, each from the file that the index names for it, and the
    metadata of all files. A tensor that the index does not list is that of the one file that has it.

    Raises:
        OSError: a file that cannot be opened. ValueError: no whole safetensors file; a malformed index; a tensor that
            is not in the file that the index names; one that it does not list, in two files.
    """
    target = target_of(path)
    places: dict[str, str] = {}
    if not target.exists():
        if not index_of(target).exists():
            raise FileNotFoundError(f"path: {str(path)!r} must have {target.name!r} or {index_of(target).name!r}")
        places = weight_map(index_of(target))
    names = sorted(set(places.values())) if places else [target.name]
    files = {name: opened.enter_context(SafetensorsFile(target.with_name(name))) for name in names}
    tensors: dict[str, SlicedTensor] = {}
    metadata: dict[str, str] = {}
    for key, name in places.items():
        if key not in files[name].tensors:
            raise ValueError(f"path: {key!r} must be in {name!r}, as {str(index_of(target))!r} has it, and is not")
    for name, file in files.items():
        metadata |= file.metadata
        for key, tensor in file.tensors.items():
            if key not in places and key in tensors:
                raise ValueError(f"path: {key!r} is in two files and must be in {str(index_of(target))!r}")
            if places.get(key, name) == name:
                tensors[key] = tensor
    return tensors, metadata


def weight_map(index: Path) -> dict[str, str]:
    """Returns the file of each entry.

    Raises:
        OSError: the index cannot be read. ValueError: it is no index, or names files outside of its folder.
    """
    try:
        places: dict[str, str] = read_json(index)["weight_map"]
        whole = all(
            name == os.path.basename(name) and name not in ("", ".", "..") and "\0" not in name
            for name in places.values()
        )
    # Whatever JSON a file holds: a list in place of the map, names that are no strings
    except (ValueError, KeyError, TypeError, AttributeError):
        whole = False
    if not whole:
        raise ValueError(f"path: {str(index)!r} must be an index, whose weight_map names files in its own folder")
    return places
