"""Export and import of full models as safetensors files in Hugging Face's layout: one file, or several and an index.
Rank 0 writes each tensor as it is gathered, every rank reads its own slices; nothing is unpickled.
"""

import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from torch.distributed import DeviceMesh

from tp_ext._checks import check_int
from tp_ext._object_collectives import call_and_gather, raise_on_all_ranks, true_on_any_rank
from tp_ext.checkpoint.expert_entries import ExpertGather, join_published
from tp_ext.checkpoint.expert_names import PublishedEntry, check_family, published_entries
from tp_ext.checkpoint.files.safetensors_slices import JoinedTensor, SlicedTensor
from tp_ext.checkpoint.files.saved_dtypes import check_saved_dtype, refuse_quantised
from tp_ext.checkpoint.files.write_lock import check_lock_timeout
from tp_ext.checkpoint.gather import Ranks, chunk_slices, ranks_of, write_full
from tp_ext.checkpoint.pipeline import WholeTensor, agreed_entries, check_same, from_stage, gather_whole, whole_entries
from tp_ext.checkpoint.safetensors_files import (
    Export,
    FileEntries,
    check_dtype,
    open_export,
    split_into_files,
)
from tp_ext.group import NOT_GIVEN, Group
from tp_ext.mesh import mesh_axes
from tp_ext.model.census import census
from tp_ext.model.fqn import Entry
from tp_ext.model.stages import Stages


def save_safetensors(
    path: str | os.PathLike[str],
    module: Stages,
    *,
    group: Group = NOT_GIVEN,
    mesh: DeviceMesh | None = None,
    max_shard_size: int | None = None,
    metadata: Mapping[str, str] | None = None,
    expert_names: str | None = None,
    lock_timeout: float = 60.0,
) -> None:
    """Exports the unsharded model: the entries of :func:`full_state_dict`, tied ones once, under the first name.

    Every rank calls it, rank 0 writes, all return when the files are in place. They are written under temporary names
    and then renamed, the index last: an interruption at any moment leaves one complete export, the old or the new one.
    Files of the old one are then removed. (Files whose names the old index uses are called
    ``model-b-00001-of-0000N.safetensors``; readers find them by the index.) Exports to one path run one after the
    other.

    Args:
        path: a folder, for the names that Hugging Face expects (``model.safetensors``), or a file ``*.safetensors``.
        module, group, mesh: as :func:`full_state_dict`. Rank 0 is the rank of ``rank0_only`` there. With ``mesh`` the
            export has the entries of all stages of a pipeline.
        max_shard_size: in bytes; a larger model is split into several files ``model-00001-of-0000N.safetensors``, with
            ``model.safetensors.index.json``. A larger tensor has a file of its own.
        metadata: strings for the header of every file, with ``format`` (``pt``) and, as in ``safetensors.torch``,
            the name of each entry that is not written -> the one that it is tied to.
        expert_names: ``"mixtral"``, ``"qwen3_moe"`` or ``"deepseek_v3"``: an entry for each expert, with the names of
            such files (:func:`tp_ext.huggingface.to_published_experts`). None: the stacked tensors.
        lock_timeout: seconds to wait for another export to the same path. The ranks exchange a number every second
            meanwhile, so the timeout of the group does not matter.

    Communicates as :func:`full_state_dict` with ``rank0_only``; one number per file. Rank 0 holds one full tensor at a
    time, whatever the size of the files; the first rank of each other stage, too. With ``expert_names`` it holds one
    expert's tensor, which is gathered over the group of the rank that has the expert, then sent in one all-to-all.

    Raises:
        OSError: on every rank, if rank 0 could not write; on rank 0 its cause is the error (a TimeoutError: another
            process, which is named, is still writing there). An earlier export is still in place.
        ValueError, TypeError: an entry that safetensors cannot hold (extra state that is no tensor, a dtype), or that
            is on the meta device; max_shard_size, metadata, lock_timeout; ``mesh`` as for :func:`full_state_dict`.
    """
    check_lock_timeout(lock_timeout)
    check_family(expert_names, "expert_names")
    if max_shard_size is not None:
        check_int(least=1, max_shard_size=max_shard_size)
    head = {"format": "pt", **(metadata or {})}
    if wrong := [key for key, value in head.items() if not (isinstance(key, str) and isinstance(value, str))]:
        raise TypeError(f"metadata: {wrong} must be strings, and their values")
    model = census(module, mesh_axes(group, mesh))
    ranks = ranks_of(model)
    entries = agreed_entries(model, ranks)
    whole = whole_entries(entries, ranks, with_extra=True, unique=True)
    published: dict[str, list[PublishedEntry]] = {}
    if expert_names is not None:
        shapes = {name: whole_entry.tensor.shape for name, whole_entry in whole.items() if whole_entry.tensor}
        published = published_entries(shapes, expert_names, "expert_names")
    # Every dtype is checked before the first tensor is gathered: an error must leave the old export, on all ranks
    written, parts = [], dict[str, tuple[str, PublishedEntry]]()
    for name, whole_entry in whole.items():
        tensor = check_dtype(name, whole_entry.tensor, whole_entry.value)
        own_parts = published.get(name, [PublishedEntry(name)])
        if whole_entry.tied == name:
            written += [(part.name, tensor._replace(shape=part.shape(tensor.shape))) for part in own_parts]
            parts |= {part.name: (name, part) for part in own_parts}
        else:
            tied = published.get(whole_entry.tied, [PublishedEntry(whole_entry.tied)])
            for part, other in zip(own_parts, tied, strict=True):
                # A name that the user's metadata has already stays
                head.setdefault(part.name, other.name)
    shards = split_into_files(written, max_shard_size)
    gather_part = ExpertGather(ranks)

    def gather(name: str, tensor: WholeTensor) -> Tensor | None:
        source, part = parts[name]
        entry = entries.get(source)
        if part.expert is None and part.part is None:
            return gather_whole(tensor, entry, ranks, rank0_only=True)
        full = gather_part(source, entry, part) if entry is not None and tensor.stages[0] == ranks.stage else None
        return from_stage(full, tensor, ranks, rank0_only=True)

    def gathered(shard: FileEntries) -> Iterator[Tensor | None]:
        return (gather(name, tensor) for name, tensor in shard)

    write_files(path, shards, head, gathered, ranks, lock_timeout)


def write_files(
    path: str | os.PathLike[str],
    shards: list[FileEntries],
    head: dict[str, str],
    gathered: Callable[[FileEntries], Iterator[Tensor | None]],
    ranks: Ranks,
    lock_timeout: float,
    *,
    index_metadata: Mapping[str, int] | None = None,
    finish: Callable[[], None] | None = None,
) -> None:
    """Writes the files of an export on rank 0, and replaces an older one.

    Args:
        shards: the entries of each file. head: the strings of each header.
        gathered: returns the tensors of a file, one after the other; None on other ranks. All ranks iterate over it.
        index_metadata: numbers for the index, besides ``total_size``.
        finish: called on rank 0 before the files are moved into place.
    """
    # One more file on a rank would be one more collective
    names = {f"file {number}": f"of {', '.join(name for name, _ in shard)}" for number, shard in enumerate(shards, 1)}
    check_same("max_shard_size", lambda: names, ranks)
    # Rank 0 alone touches files; the others follow its steps
    export = Export(Path(path), shards, head, index_metadata) if ranks.first else None
    try:
        _wait_for(export, lock_timeout, ranks, path)
        _run_step(export.begin if export else None, (), ranks, path)
        for number, shard in enumerate(shards):
            tensors = gathered(shard)
            _run_step(partial(export.write, number, tensors) if export else None, tensors, ranks, path)
        if finish is not None:
            _run_step(finish if export else None, (), ranks, path)
        # Each step before has succeeded on all ranks: now the old export may be replaced
        _run_step(export.finish if export else None, (), ranks, path)
    finally:
        if export is not None:
            export.clean()


def _wait_for(export: Export | None, timeout: float, ranks: Ranks, path: str | os.PathLike[str]) -> None:
    """Waits until rank 0 holds the lock of the path. All ranks communicate after each turn, lest a collective time
    out."""
    ended = [export is None]

    def turn() -> None:
        assert export is not None
        ended[0] = export.wait(timeout)

    _run_step(turn if export else None, (), ranks, path)
    while true_on_any_rank(not ended[0], ranks.axes, ranks.device):
        _run_step(turn if export else None, (), ranks, path)


def _run_step(
    step: Callable[[], None] | None, tensors: Iterable[Tensor | None], ranks: Ranks, path: str | os.PathLike[str]
) -> None:
    """Runs a step of the writing rank, in which the other ranks send it their shards; it fails on all ranks or none."""
    failure: Exception | None = None
    try:
        if step is not None:
            step()
    except Exception as error:  # of any kind: the other ranks must not wait for this one
        failure = error
    for _ in tensors:  # the remaining ones after a failure, and all of them on the other ranks
        pass
    if true_on_any_rank(failure is not None, ranks.axes, ranks.device):
        raise OSError(
            f"path: {os.fspath(path)!r} could not be written by rank 0, whose error has the cause"
        ) from failure


class _StoredTensor(NamedTuple):
    """A tensor in an open file, or in several; its name there, or ours if it is joined from several."""

    tensor: SlicedTensor | JoinedTensor
    name: str

    def whole(self) -> Tensor:
        return self.tensor[(slice(None),) * len(self.tensor.shape)]


@torch.no_grad()
def load_safetensors(
    path: str | os.PathLike[str],
    module: Stages,
    *,
    group: Group = NOT_GIVEN,
    mesh: DeviceMesh | None = None,
    strict: bool = True,
    expert_names: str | None = None,
) -> None:
    """Loads an export made by any number of ranks, or by another program from an unsharded model; each rank reads only
    the slices that it holds.

    Args:
        path: a folder with ``model.safetensors`` or ``model.safetensors.index.json``, one of these files, or another.
        module, group, mesh: as :func:`load_full_state_dict`.
        strict: missing or unexpected keys are an error; else they are ignored. An entry is not missing if one that it
            is tied to, in the module or by the file's metadata, is present. Tied entries must be equal.
        expert_names: of files with an entry for each expert, as :func:`save_safetensors`; a rank reads its slices of
            its own experts. None: the stacked tensors.

    Communicates one number per group: all ranks load, or none. With a pipeline, one exchange of names over ``pp``.

    Raises:
        On all ranks: OSError: a file that cannot be read.
        KeyError: under ``strict``, naming the missing and the unexpected keys; always, if an expert layer lacks some
            of its published entries.
        ValueError: an entry of another shape than the unsharded parameter's; names the key and both shapes. Integers or
            floats of 8 bits in place of floats, a quantised weight's scales. A file that
            is no complete safetensors file, a malformed index, tied entries that differ, an entry on the meta device;
            ``expert_names`` as for :func:`save_safetensors`.
    """
    check_family(expert_names, "expert_names")
    model = census(module, mesh_axes(group, mesh))
    ranks = ranks_of(model)
    failure: Exception | None = None
    with ExitStack() as opened:
        try:
            entries = model.state()
            sources = _match_sources(entries, lambda: _open_sources(Path(path), opened), strict, ranks, expert_names)
        except Exception as error:  # of any kind: it must reach the other ranks
            failure = error
        # A rank without the error must not load either: the model would be of two files
        raise_on_all_ranks(failure, ranks.axes, ranks.device)
        # All ranks have checked everything: from here on the model changes
        for name, source in sources.items():
            entry = entries[name]
            if entry.extra:
                entry.owner.set_extra_state(source.whole())
            else:
                write_full(source.tensor, entry.value, entry.layout)


def _open_sources(path: Path, opened: ExitStack) -> dict[str, _StoredTensor]:
    """Opens the files; returns every tensor in them, also under the names of entries tied to it."""
    tensors, tied = open_export(path, opened)
    sources = {key: _StoredTensor(tensor, key) for key, tensor in tensors.items()}
    # A tensor of that name in a file wins over the metadata, which any program may write
    return sources | {name: sources[kept] for name, kept in tied.items() if kept in sources and name not in sources}


def _match_sources(
    entries: Mapping[str, Entry],
    open_sources: Callable[[], dict[str, _StoredTensor]],
    strict: bool,
    ranks: Ranks,
    expert_names: str | None,
) -> dict[str, _StoredTensor]:
    """Opens the sources, checks names, shapes and tied entries, and returns each entry's source."""
    sources: dict[str, _StoredTensor] = {}

    def unmatched() -> tuple[set[str], set[str]]:
        sources.update(open_sources())
        lacking = _join_experts(sources, entries, expert_names, strict) if expert_names is not None else {}
        # A file has a tied tensor once: under the name of the entry that it is tied to, or under another of its names
        for name, entry in entries.items():
            if entry.copy_of in sources:
                sources.setdefault(name, sources[entry.copy_of])
        present = {id(entry.value) for name, entry in entries.items() if name in sources}
        missing = {name for name, entry in entries.items() if name not in sources and id(entry.value) not in present}
        unexpected = {name for name, source in sources.items() if name not in entries and source.name == name}
        return set[str]().union(*(lacking.get(name, [name]) for name in missing)), unexpected

    reports = [unmatched()] if ranks.pipeline is None else call_and_gather(ranks.pipeline, unmatched)
    # A stage lacks only entries of its own, and every stage sees all names of the files
    missing = sorted(set[str]().union(*(names for names, _ in reports)))
    unexpected = sorted(set[str].intersection(*(other for _, other in reports)))  # no stage takes it
    refuse_quantised(sources, sources.keys() - unexpected | entries.keys(), "path")
    if strict and (missing or unexpected):
        raise KeyError(f"path: missing keys {_listed(missing)}, unexpected keys {_listed(unexpected)}")
    matched = {name: sources[name] for name in entries if name in sources}
    of_tied = {id(entries[name].value): name for name in reversed(matched)}
    for name, source in matched.items():
        entry, first = entries[name], of_tied[id(entries[name].value)]
        if not entry.extra and source.tensor.shape != entry.shape:
            raise ValueError(
                f"path: {name!r} has shape {tuple(source.tensor.shape)} and must have {tuple(entry.shape)}, "
                "that of the unsharded module"
            )
        if not entry.extra:
            check_saved_dtype(name, source.tensor.dtype, entry.value.dtype, "path")
        # By chunks: no rank reads the full tensors to compare them
        if strict and source != matched[first] and not _equal(source, matched[first], entry):
            raise ValueError(f"path: {first!r} and {name!r} are one tensor in the module and must be equal")
    return matched


def _listed(keys: list[str]) -> str:
    """Returns the names as text: the first hundred, and the number of the others."""
    return f"{keys[:100]}" + (f" and {len(keys) - 100} more" if len(keys) > 100 else "")


def _join_experts(
    sources: dict[str, _StoredTensor], entries: Mapping[str, Entry], family: str, strict: bool
) -> dict[str, list[str]]:
    """Replaces the sources of single experts by those of our entries; returns the published names that an entry lacks.

    Raises:
        KeyError: some of an entry's published names are missing, and ``strict`` does not refuse that. ValueError: an
        entry of another shape; a file with our names.
    """
    shapes = {name: entry.shape for name, entry in entries.items() if not entry.extra}
    lacking: dict[str, list[str]] = {}
    for name, published in published_entries(shapes, family, "expert_names").items():
        missing = [part.name for part in published if part.name not in sources]
        if name in sources:
            raise ValueError(
                f"path: has {name!r}, and with expert_names={family!r} must have {published[0].name!r}, .."
            )
        # Without strict a layer may be absent, but half of one would be a wrong model
        if missing and len(missing) < len(published) and not strict:
            raise KeyError(f"path: has only some of the entries of {name!r}, and lacks {_listed(missing)}")
        if not missing:
            tensors = {part.name: sources[part.name].tensor for part in published}
            joined = join_published(tensors, published, shapes[name])
            for part_name in tensors:
                del sources[part_name]
            sources[name] = _StoredTensor(joined, name)
        else:
            lacking[name] = missing
    return lacking


def _equal(source: _StoredTensor, other: _StoredTensor, entry: Entry) -> bool:
    """Returns True if two sources of one tensor are equal in the chunks that this rank holds."""
    for offsets, chunk, _ in entry.layout.local_chunks(entry.value)[1]:
        where = chunk_slices(offsets, chunk)
        if not torch.equal(source.tensor[where], other.tensor[where]):
            return False
    return True
