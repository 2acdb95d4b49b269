"""The plan of a checkpoint: which rank writes which chunk, and the metadata that says so.

It is that of ``torch.distributed.checkpoint`` and its format, made for many small entries: torch's planner makes
several objects for each entry on each rank, and sends them to the first and back.
"""

import pickle
import uuid
from array import array
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from itertools import chain
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from tp_ext.checkpoint.chunked_tensor import ChunkedTensor
from tp_ext.checkpoint.files.entry_files import SavedValues
from tp_ext.checkpoint.files.metadata import overlapping
from tp_ext.checkpoint.pipeline import check_unique
from tp_ext.chunks import LocalChunk, chunks_of
from tp_ext.model.fqn import StateDict

KeyPath = tuple[str | int, ...]


PLAIN_TENSORS = (Tensor, torch.nn.Parameter)
"""Types of tensors whose operators are torch's own: a subclass may copy, or be saved, in another way."""


class HeldChunks(NamedTuple):
    """The chunks of a full tensor on this rank: :class:`ChunkedTensor` without a tensor, which takes 8 us. They are
    views of ``value``, or the value itself."""

    shape: Sequence[int]
    local_chunks: list[LocalChunk]
    value: Tensor


class Options(dict[str, Any]):
    """The options of a parameter group in a state dict, as one entry of each of its parameters."""

    group: dict[str, Any]  # the live one

    @cached_property
    def are_plain(self) -> bool:
        """True if every option is one entry: a tensor is none, and a nested value has an entry for each element."""
        return not any(isinstance(option, Tensor) or _is_nested(option) for option in self.values())


class PlannedChunk(NamedTuple):
    """A chunk of a tensor that a rank can write. Plain tuples, since plans of all ranks are sent to the first."""

    key: str
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype


class PlannedValues(NamedTuple):
    """Entries that are no tensors, of the keys ``prefix`` + each of ``names``, such as the options of a parameter."""

    prefix: str
    names: tuple[str, ...]


class RankPlan(NamedTuple):
    """The entries that one rank can write.

    Attributes:
        entries: in order, a chunk, or the key of an entry that is no tensor, or several such entries.
        paths: the path in the nested state dict of each key that has another than (section, all after the first dot).
        names: the names of its model's entries, without declared copies, if those of stages must be different.
        stage: its rank in the pipeline.
    """

    entries: list[PlannedChunk | PlannedValues | str]
    paths: dict[str, KeyPath]
    names: list[str]
    stage: int


Payload = list[Tensor | bytes | tuple[bytes, ...]]
"""The contents of entries: of a chunk its live tensor, of another entry its bytes, of several the bytes of each."""


class EntrySource(NamedTuple):
    """The object that the contents of an entry come from, by its id.

    Attributes:
        source: a tensor of the model or the optimizer, or a parameter group.
        view: sizes, strides and begin of the view of the tensor that is saved; None: the tensor.
    """

    source: int
    view: tuple[torch.Size, tuple[int, ...], int] | None = None


def plan_of_rank(state: StateDict, names: list[str], stage: int) -> tuple[RankPlan, Payload, list[EntrySource]]:
    """Returns the plan of this rank for a state dict, and the contents and the origins of its entries."""
    flat, paths = _flattened(state)
    entries: list[PlannedChunk | PlannedValues | str] = []
    payload: Payload = []
    origins: list[EntrySource] = []
    values = SavedValues()
    known: dict[int, tuple[tuple[str, ...], tuple[bytes, ...]]] = {}  # by the id of the options
    for key, value in flat.items():
        if type(value) is Options:
            if id(value) not in known:
                known[id(value)] = tuple(value), tuple(values.of(option) for option in value.values())
            options, contents = known[id(value)]
            entries.append(PlannedValues(key, options))
            payload.append(contents)
            origins.append(EntrySource(id(value.group)))
        elif isinstance(value, _TENSORS):
            shape = tuple(value.shape)
            for offsets, tensor, owned in _chunks(value):
                if owned:
                    entries.append(PlannedChunk(key, offsets, tuple(tensor.shape), shape, tensor.dtype))
                    payload.append(tensor)
                    origins.append(_origin(value, tensor))
        else:
            entries.append(key)
            payload.append(values.of(value))
            origins.append(EntrySource(id(value)))
    return RankPlan(entries, paths, names, stage), payload, origins


def _origin(value: HeldChunks | Tensor, tensor: Tensor) -> EntrySource:
    source = value.value if isinstance(value, HeldChunks) else value
    # A single number is saved detached
    if tensor is source or not source.dim():
        return EntrySource(id(source))
    begin = int(tensor.storage_offset() - source.storage_offset())
    return EntrySource(id(source), (tensor.shape, tensor.stride(), begin))


_CHUNKED = HeldChunks, ChunkedTensor
_TENSORS = HeldChunks, Tensor
_LEAVES = *_TENSORS, Options, float, int, type(None), str  # found faster than that a value is no Mapping


def _flattened(state: StateDict) -> tuple[StateDict, dict[str, KeyPath]]:
    """Returns torch's ``flatten_state_dict``, which looks for tensors in each entry, without paths of two parts."""
    flat: StateDict = {}
    paths: dict[str, KeyPath] = {}
    for section, entries in state.items():
        for name, value in entries.items():
            # Nested values are rare, and get the keys of torch
            if not isinstance(value, _LEAVES) and _is_nested(value):
                more, more_paths = flatten_state_dict({section: {name: value}})
                flat |= more
                paths |= more_paths
            else:
                flat[f"{section}.{name}"] = value
    return flat, paths


def _is_nested(value: Any) -> bool:
    """Returns whether torch flattens it; tuples of numbers, such as betas, are no nested ones."""
    return isinstance(value, list | tuple | Mapping) and not _is_flat(value)


def _is_flat(value: Any) -> bool:
    return type(value) is tuple and all(type(element) in (float, int) for element in value)


def _chunks(value: HeldChunks | Tensor) -> Iterable[tuple[tuple[int, ...], Tensor, bool]]:
    if isinstance(value, _CHUNKED):
        return value.local_chunks
    # chunks_of yields no chunk of a tensor without elements, which must be in the metadata all the same, and takes its
    # time for single numbers, such as the step of each parameter
    if not value.numel() or (type(value) is Tensor and not value.dim()):
        return [((0,) * value.dim(), value, True)]
    return chunks_of(value, {})


class GlobalPlan:
    """The plan of all ranks, on the first one.

    Attributes:
        assigned: the indices of the entries that each rank writes. An entry that several ranks have, such as replicas
            along a data axis, is written by the one that has the fewest bytes of such entries.

    Raises:
        ValueError: the chunks of a tensor on all ranks are not the whole tensor, or overlap, or are no tensor on
            another rank; one name in two stages.
    """

    def __init__(self, plans: Sequence[RankPlan]) -> None:
        _check_names(plans)
        self._plans = plans
        self._last: tuple[tuple[Any, Any], str, bytes] | None = None  # places, id and file of the last metadata
        shared: dict[_Id, list[int]] = {}  # ranks that have it, if several do
        owner: dict[_Id, int] = {}
        for rank, plan in enumerate(plans):
            for entry in plan.entries:
                chunk_id = _id(entry)
                if owner.setdefault(chunk_id, rank) != rank:
                    shared.setdefault(chunk_id, [owner[chunk_id]]).append(rank)
        load = [0] * len(plans)
        self.assigned: list[list[int]] = [[] for _ in plans]
        self._entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
        self._properties: dict[torch.dtype, TensorProperties] = {}  # one object is pickled once, in 50 us
        for rank, plan in enumerate(plans):
            for index, entry in enumerate(plan.entries):
                chunk_id = _id(entry)
                if ranks := shared.pop(chunk_id, None):  # this is the first of them
                    owner[chunk_id] = chosen = min(ranks, key=load.__getitem__)
                    load[chosen] += entry.dtype.itemsize * prod(entry.sizes) if isinstance(entry, PlannedChunk) else 1
                # Not of shared entries but to the chosen rank, which comes at or after this one
                if owner[chunk_id] == rank:
                    self.assigned[rank].append(index)
                    self._add(entry)
        for key, saved in self._entries.items():
            if isinstance(saved, TensorStorageMetadata):
                _check_whole(key, saved)

    def _add(self, entry: PlannedChunk | PlannedValues | str) -> None:
        if not isinstance(entry, PlannedChunk):
            for key in _keys(entry):
                # Ranks may have different options of one parameter, and some of them in common
                if not isinstance(self._entries.setdefault(key, _BYTES), BytesStorageMetadata):
                    raise ValueError(f"module: {key!r} is a tensor on one rank, and must be one on all")
            return
        key = entry.key
        saved = self._entries.get(key)
        if isinstance(saved, BytesStorageMetadata):
            raise ValueError(f"module: {key!r} is a tensor on one rank, and must be one on all")
        if saved is None:
            if entry.dtype not in self._properties:
                self._properties[entry.dtype] = TensorProperties(dtype=entry.dtype)
            properties = self._properties[entry.dtype]
            saved = self._entries[key] = TensorStorageMetadata(properties, torch.Size(entry.shape), [])
        elif (saved.size, saved.properties.dtype) != (entry.shape, entry.dtype):
            raise ValueError(
                f"module: {key!r} has shape {tuple(saved.size)} and {saved.properties.dtype} on one rank, "
                f"{entry.shape} and {entry.dtype} on another, and must be one tensor"
            )
        saved.chunks.append(ChunkStorageMetadata(torch.Size(entry.offsets), torch.Size(entry.sizes)))

    def metadata(self, written: Sequence["array[int]"], files: Sequence[str]) -> bytes:
        """Returns the file of the checkpoint's metadata, from the places of the assigned entries of each rank in its
        data file. Another save of this plan with the same places differs in its id alone."""
        save_id, places = str(uuid.uuid4()), (written, files)
        if self._last is not None and self._last[0] == places:
            _, old_id, content = self._last
            # UUIDs have one length, so the pickle stays well-formed
            content = content.replace(old_id.encode(), save_id.encode())
        else:
            content = pickle.dumps(self._metadata(written, files, save_id))
        self._last = places, save_id, content
        return content

    def _metadata(self, written: Sequence["array[int]"], files: Sequence[str], save_id: str) -> Metadata:
        paths: dict[str, KeyPath] = {key: tuple(key.split(".", 1)) for key in self._entries}
        # The first rank's paths win
        for plan in reversed(self._plans):
            paths.update(plan.paths)
        stored: dict[MetadataIndex, _StorageInfo] = {}
        for plan, indices, places, file in zip(self._plans, self.assigned, written, files, strict=True):
            infos = {place: _StorageInfo(file, *place) for place in pairs(places)}  # equal values have one place
            for at, place in zip(chain(*(_indices(plan.entries[i]) for i in indices)), pairs(places), strict=True):
                stored[at] = infos[place]
        meta = StorageMeta(save_id=save_id)
        return Metadata(self._entries, paths, stored, meta, version=CURRENT_DCP_VERSION)


def pairs(places: "array[int]") -> Iterable[tuple[int, int]]:
    """Returns the offset and the length of each entry."""
    return zip(places[::2], places[1::2], strict=True)


_BYTES = BytesStorageMetadata()
_Id = str | PlannedValues | tuple[str, tuple[int, ...]]


def _id(entry: PlannedChunk | PlannedValues | str) -> _Id:
    return (entry.key, entry.offsets) if isinstance(entry, PlannedChunk) else entry


def _keys(entry: PlannedValues | str) -> Iterable[str]:
    return (entry,) if isinstance(entry, str) else (entry.prefix + name for name in entry.names)


def _indices(entry: PlannedChunk | PlannedValues | str) -> Iterable[MetadataIndex]:
    return (
        (MetadataIndex(entry.key, entry.offsets),)
        if isinstance(entry, PlannedChunk)
        else map(MetadataIndex, _keys(entry))
    )


def _check_names(plans: Sequence[RankPlan]) -> None:
    """Raises ValueError if two stages have an entry of one name."""
    stages: dict[str, set[int]] = {}
    for plan in plans:
        for name in plan.names:
            stages.setdefault(name, set()).add(plan.stage)
    for name, numbers in stages.items():
        check_unique(name, tuple(sorted(numbers)))


def _check_whole(key: str, saved: TensorStorageMetadata) -> None:
    """Raises ValueError unless the chunks are a partition of the tensor."""
    # Most entries without parallelism: the check below takes longer
    if len(saved.chunks) == 1 and saved.chunks[0].sizes == saved.size:
        return
    elements = sum(prod(chunk.sizes) for chunk in saved.chunks)
    if elements != prod(saved.size):
        raise ValueError(
            f"process_group: its ranks hold {elements} elements of {key!r} and must hold all of its {prod(saved.size)}"
            "; all ranks of the model take part"
        )
    bounds = [
        tuple((int(begin), int(begin) + int(size)) for begin, size in zip(chunk.offsets, chunk.sizes, strict=True))
        for chunk in saved.chunks
    ]
    if pair := overlapping(bounds):
        raise ValueError(
            f"module: {key!r} has chunks that overlap: {pair[0]} and {pair[1]} (begin and end in each dim)"
        )
