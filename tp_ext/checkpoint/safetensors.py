"""Full models as safetensors files, in Hugging Face's layout: one file, or several and an index. Rank 0 writes them as
the tensors come, every rank reads the slices that it holds; nothing is unpickled.
"""

import os
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from tp_ext.checkpoint.full import Entry, entries_of
from tp_ext.checkpoint.gather import Ranks, any_rank, gather_full, ranks_of, write_full
from tp_ext.checkpoint.pinned_directory import open_regular
from tp_ext.checkpoint.safetensors_files import Export, check_dtype, index_of, shards_of, target_of, weight_map
from tp_ext.checkpoint.write_lock import check_lock_timeout
from tp_ext.chunks import boxes
from tp_ext.group import NOT_GIVEN, Group
from tp_ext.nn.module import check_positive


def save_safetensors(
    path: str | os.PathLike[str],
    module: nn.Module,
    *,
    group: Group = NOT_GIVEN,
    max_shard_size: int | None = None,
    metadata: Mapping[str, str] | None = None,
    lock_timeout: float = 60.0,
) -> None:
    """Exports the unsharded model: the entries of :func:`full_state_dict`, tied ones once, under the first name.

    Every rank calls it, rank 0 writes, all return when the files are there. They are written under temporary names and
    then renamed, the index last: whenever it is interrupted, one whole export is there, the old one or the new. Files
    of the old one are then removed. (Shards whose names the old index uses are called
    ``model-b-00001-of-0000N.safetensors``; the index says so to every reader.) Exports to one place run one after the
    other.

    Args:
        path: a folder, for the names that Hugging Face expects (``model.safetensors``), or a file ``*.safetensors``.
        module, group: as :func:`full_state_dict`. Rank 0 is the one that ``rank0_only`` means there.
        max_shard_size: in bytes; more than that go into several files ``model-00001-of-0000N.safetensors``, with
            ``model.safetensors.index.json``. A larger tensor has a file of its own.
        metadata: strings for the header of every file, with ``format`` (``pt``) and, as in ``safetensors.torch``,
            the name of each entry that is not written -> the one that it is tied to.
        lock_timeout: seconds to wait for another export to the same place. The ranks exchange a number every second
            meanwhile, so the timeout of the group does not matter.

    Communicates as :func:`full_state_dict` with ``rank0_only``; one number per file. Rank 0 holds one full tensor at a
    time, whatever the size of the files.

    Raises:
        OSError: on every rank, if rank 0 could not write; there its cause says why (a TimeoutError: another process,
            which is named, is still writing there). The export that was there before still is.
        ValueError, TypeError: an entry that safetensors cannot hold (extra state that is no tensor, a dtype), or that
            is on the meta device; max_shard_size, metadata, lock_timeout.
    """
    check_lock_timeout(lock_timeout)
    if max_shard_size is not None:
        check_positive(max_shard_size=max_shard_size)
    head = {"format": "pt", **(metadata or {})}
    if wrong := [key for key, value in head.items() if not (isinstance(key, str) and isinstance(value, str))]:
        raise TypeError(f"metadata: {wrong} must be strings, and their values")
    entries = entries_of(module)
    ranks = ranks_of(module, group)
    written: dict[int, str] = {}
    for name, entry in entries.items():
        check_dtype(name, entry)
        if written.setdefault(id(entry.value), name) != name:
            head.setdefault(name, written[id(entry.value)])
    shards = shards_of([(name, entries[name]) for name in written.values()], max_shard_size)
    export = Export(Path(path), shards, head) if ranks.first else None
    try:
        _wait_for(export, lock_timeout, ranks, path)
        _together(export.begin if export else None, (), ranks, path)
        for number, shard in enumerate(shards):
            tensors = (gather_full(entry.value, entry.sharding, ranks, rank0_only=True) for _, entry in shard)
            _together(partial(export.write, number, tensors) if export else None, tensors, ranks, path)
        _together(export.finish if export else None, (), ranks, path)
    finally:
        if export is not None:
            export.clean()


def _wait_for(export: Export | None, timeout: float, ranks: Ranks, path: str | os.PathLike[str]) -> None:
    """Waits until rank 0 holds the lock of the place. All ranks meet after each turn, lest a collective time out."""
    ended = [export is None]

    def turn() -> None:
        assert export is not None
        ended[0] = export.wait(timeout)

    _together(turn if export else None, (), ranks, path)
    while any_rank(not ended[0], ranks):
        _together(turn if export else None, (), ranks, path)


def _together(
    step: Callable[[], None] | None, tensors: Iterable[Tensor | None], ranks: Ranks, path: str | os.PathLike[str]
) -> None:
    """A step of the writing rank, in which the others send it their parts of tensors; it fails on all ranks or none."""
    failure: Exception | None = None
    try:
        if step is not None:
            step()
    except Exception as error:  # whatever it is, the other ranks must not wait for us
        failure = error
    for _ in tensors:  # what is still to come when it failed, and all of them on the other ranks
        pass
    if any_rank(failure is not None, ranks):
        raise OSError(
            f"path: {os.fspath(path)!r} could not be written by rank 0, whose error has the cause"
        ) from failure


class _Source(NamedTuple):
    """A tensor in an open file."""

    file: Any
    name: str

    def shape(self) -> torch.Size:
        return torch.Size(self.file.get_slice(self.name).get_shape())

    def values(self) -> Any:
        """Gives slices of the tensor when it is indexed; one number is just read."""
        return self.file.get_slice(self.name) if self.shape() else self.file.get_tensor(self.name)


@torch.no_grad()
def load_safetensors(
    path: str | os.PathLike[str], module: nn.Module, *, group: Group = NOT_GIVEN, strict: bool = True
) -> None:
    """Loads an export of any number of ranks, or of an unsharded model by anyone else; each rank reads the slices that
    it holds, and no more.

    Args:
        path: a folder with ``model.safetensors`` or ``model.safetensors.index.json``, one of these, or another file.
        module, group: as :func:`load_full_state_dict`.
        strict: missing or unexpected keys are an error; else they are passed over. An entry is not missing if one that
            it is tied to, in the module or as the file's metadata says, is there. Tied entries must be equal.

    Communicates one number per group: all ranks load, or none.

    Raises:
        OSError: a file that cannot be read, here or on another rank.
        KeyError: under ``strict``, naming the missing and the unexpected keys.
        ValueError: an entry of another shape than the unsharded parameter's; names the key and both shapes. A file that
            is no whole safetensors file, an index that is none, tied entries that differ, an entry on the meta device.
    """
    entries = entries_of(module)
    ranks = ranks_of(module, group)
    failure: Exception | None = None
    with ExitStack() as opened:
        try:
            found = _found(entries, _sources(Path(path), opened), ranks, strict)
        except Exception as error:  # the other ranks must hear of it, whatever it is
            failure = error
        if any_rank(failure is not None, ranks):
            raise failure or OSError(f"path: {os.fspath(path)!r} could not be read on another rank, which tells why")
        for name, source in found.items():
            entry = entries[name]
            if entry.extra:
                entry.owner.set_extra_state(source.file.get_tensor(source.name))
            else:
                write_full(source.values(), entry.value, entry.sharding, ranks.tp)


def _sources(path: Path, opened: ExitStack) -> dict[str, _Source]:
    """Every tensor of the files, under the names of entries tied to it, too."""
    target = target_of(path)
    if target.exists():
        names = {target.name}
    elif index_of(target).exists():
        names = set(weight_map(index_of(target)).values())
    else:
        raise FileNotFoundError(f"path: {str(path)!r} must have {target.name!r} or {index_of(target).name!r}")
    sources: dict[str, _Source] = {}
    tied: dict[str, str] = {}
    for name in sorted(names):
        try:
            open_regular(target.with_name(name)).close()  # to open a pipe may block for ever
            file = opened.enter_context(safe_open(target.with_name(name), framework="pt"))
        except SafetensorError as error:
            raise ValueError(
                f"path: {str(target.with_name(name))!r} must be a whole safetensors file: {error}"
            ) from error
        sources |= {key: _Source(file, key) for key in file.keys()}  # noqa: SIM118, it is no dict
        tied |= file.metadata() or {}
    return sources | {name: sources[kept] for name, kept in tied.items() if kept in sources and name not in sources}


def _found(entries: Mapping[str, Entry], sources: dict[str, _Source], ranks: Ranks, strict: bool) -> dict[str, _Source]:
    """The source of each entry."""
    found = {name: sources[name] for name in entries if name in sources}
    of_tied = {id(entries[name].value): name for name in reversed(found)}
    missing = sorted(name for name, entry in entries.items() if name not in found and id(entry.value) not in of_tied)
    unexpected = sorted(name for name, source in sources.items() if name not in entries and source.name == name)
    if strict and (missing or unexpected):
        raise KeyError(f"path: missing keys {missing}, unexpected keys {unexpected}")
    for name, source in found.items():
        entry, first = entries[name], of_tied[id(entries[name].value)]
        if not entry.extra and source.shape() != entry.shape:
            raise ValueError(
                f"path: {name!r} has shape {tuple(source.shape())} and must have {tuple(entry.shape)}, "
                "that of the unsharded module"
            )
        if strict and source != found[first] and not _equal(source, found[first], entry, ranks):
            raise ValueError(f"path: {first!r} and {name!r} are one tensor in the module and must be equal")
    return found


def _equal(one: _Source, other: _Source, entry: Entry, ranks: Ranks) -> bool:
    """True if two sources of one tensor are equal where this rank holds it."""
    for box in boxes(entry.value, entry.sharding, ranks.tp.rank, ranks.tp.size)[1]:
        where = tuple(slice(start, start + size) for start, size in zip(box.offsets, box.tensor.shape, strict=True))
        if not torch.equal(one.values()[where], other.values()[where]):
            return False
    return True
