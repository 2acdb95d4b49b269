"""Parser of the metadata of torch.distributed.checkpoint: rebuilds it from its pickle as plain data and checks it.

torch unpickles ``.metadata``, and a pickle may call any function. Here no class or function that a pickle names is
called: an unpickler that knows only records and plain values turns it into data. Its time and memory are bounded by the
size of the file.
"""

import io
import os
import pickle
import reprlib
import zlib
from bisect import bisect_left, insort
from collections.abc import Iterable
from itertools import pairwise
from math import prod
from typing import Any, ClassVar, NoReturn

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

ChunkBounds = tuple[tuple[int, int], ...]
"""Begin and end of a chunk in each dim of its tensor."""

_MARK = b"\ncrc32 "
_MAX_DIMS = 64
_MAX_CLASSES = 1000  # named by one pickle: each name creates a class, and pickle names each only once


def with_checksum(content: bytes) -> bytes:
    """Returns the bytes of ``.metadata`` and, after the end of the pickle, their checksum."""
    return content + _MARK + zlib.crc32(content).to_bytes(4, "little")


def parse_metadata(content: bytes) -> Metadata:
    """Returns the metadata that the bytes of ``.metadata`` hold, with or without :func:`with_checksum`.

    Raises:
        OSError: they have another checksum than they state.
        pickle.UnpicklingError: they name anything that does not belong to a checkpoint's metadata, or are no complete
            pickle. ValueError: the metadata is malformed: a field has another type, a chunk reaches beyond its tensor,
            the chunks of a tensor are no partition of it, or one of them is stored nowhere.
    """
    pickled, mark, stated = content[: -len(_MARK) - 4], content[-len(_MARK) - 4 : -4], content[-4:]
    if mark == _MARK and zlib.crc32(pickled).to_bytes(4, "little") != stated:
        raise OSError(".metadata: is damaged, its checksum is another one; load another checkpoint")
    try:
        raw = _Unpickler(io.BytesIO(content)).load()
    except Exception as error:  # any error that a damaged pickle causes
        if isinstance(error, pickle.UnpicklingError) and str(error).startswith(".metadata: "):
            raise
        raise pickle.UnpicklingError(
            f".metadata: is no whole pickle of a checkpoint's metadata: {type(error).__name__}: {error}"
        ) from error
    return _metadata(raw)


def file_ends(stored: Iterable[_StorageInfo]) -> dict[str, int]:
    """Returns the minimal size of each data file, from the offsets and lengths of all stored values."""
    ends: dict[str, int] = {}
    for info in stored:
        ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
    return ends


class _PickledObject:
    """An object of a pickle as data: the name of its class, its arguments and its state. Replaces all classes."""

    def __new__(cls, *args: Any) -> "_PickledObject":
        if len(args) > _MAX_DIMS:
            raise pickle.UnpicklingError(f".metadata: gives {cls.__name__} {len(args)} arguments")
        record = super().__new__(cls)
        record.args, record.state = args, {}
        return record

    args: tuple[Any, ...]
    state: Any

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


_KNOWN = {
    "builtins": {"getattr"},  # by which Python 3.11.0 to 3.11.3 pickle enums; a record like the others, never called
    "torch": {"Size"},
    "torch.serialization": {"_get_layout"},
    "torch.distributed.checkpoint.metadata": {
        "BytesStorageMetadata",
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "pathlib": {"PosixPath", "WindowsPath"},
    "pathlib._local": {"PosixPath", "WindowsPath"},
}


# [Note: .metadata is not unpickled]
class _Unpickler(pickle._Unpickler):
    """An unpickler that returns records, dtypes and plain values, and calls no class or function that a pickle names.

    It is in Python, like that of ``torch.load(weights_only=True)``. The C unpickler allocates as many memo entries as a
    pickle claims, 64 GiB for six bytes, and hashes keys that are nested tuples in exponential time.
    """

    dispatch: ClassVar[dict[int, Any]] = dict(pickle._Unpickler.dispatch)
    stack: list[Any]

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file)
        self.classes = 0

    def find_class(self, module: str, name: str) -> Any:
        # By vars: getattr would run torch's own __getattr__ for names that it lacks
        if module == "torch" and isinstance(dtype := vars(torch).get(name), torch.dtype):
            return dtype
        if name not in _KNOWN.get(module, ()):
            what = f"{_brief.repr(module)[1:-1]}.{_brief.repr(name)[1:-1]}"
            raise pickle.UnpicklingError(f".metadata: {what} is not of a checkpoint's metadata; not loaded")
        self.classes += 1
        if self.classes > _MAX_CLASSES:
            raise pickle.UnpicklingError(f".metadata: names more than {_MAX_CLASSES} classes")
        return type(
            name, (_PickledObject,), {}
        )  # a new class each time: a pickle may also write to the classes it names

    def _set_item(self) -> None:
        value, key = self.stack.pop(), self.stack.pop()
        self._put(key, value)

    def _set_items(self) -> None:
        items = self.pop_mark()  # type: ignore[attr-defined]
        for at in range(0, len(items), 2):
            self._put(items[at], items[at + 1])

    def _put(self, key: Any, value: Any) -> None:
        into = self.stack[-1]
        if type(into) is not dict or not isinstance(key, str | int | _PickledObject):
            raise pickle.UnpicklingError(f".metadata: has {type(key).__name__} for a key")
        into[key] = value

    dispatch[pickle.SETITEM[0]] = _set_item
    dispatch[pickle.SETITEMS[0]] = _set_items
    # Not used in any metadata; BYTEARRAY8 allocates as many zeros as it claims to hold bytes
    for _other in (pickle.DICT, pickle.EMPTY_SET, pickle.ADDITEMS, pickle.FROZENSET, pickle.BYTEARRAY8):
        del dispatch[_other[0]]


class _Brief(reprlib.Repr):
    """A ``repr`` that is short for values of any size and depth."""

    def __init__(self) -> None:
        super().__init__()
        self.maxlevel, self.maxstring, self.maxother = 2, 200, 200

    def repr_int(self, x: int, level: int) -> str:
        return repr(x) if x.bit_length() <= 128 else f"a number of {x.bit_length()} bits"


_brief = _Brief()


def _malformed(what: str) -> NoReturn:
    raise ValueError(f".metadata: {what}")


def _state(record: Any, name: str) -> Any:
    if not isinstance(record, _PickledObject) or type(record).__name__ != name:
        _malformed(f"{_brief.repr(record)} must be a {name}")
    return record.state


def _fields(record: Any, name: str) -> dict[str, Any]:
    state = _state(record, name)
    return state if isinstance(state, dict) else _malformed(f"{name} has no fields")


def _typed(value: Any, kind: type) -> Any:
    """Checks that the value is of exactly this type, and an int in [0, 2^63); returns it."""
    if type(value) is not kind or (isinstance(value, int) and not 0 <= value < 1 << 63):
        _malformed(f"{_brief.repr(value)} must be a {kind.__name__}")
    return value


def _size(record: Any) -> torch.Size:
    _state(record, "Size")
    if len(record.args) != 1 or not isinstance(record.args[0], tuple | list) or len(record.args[0]) > _MAX_DIMS:
        _malformed(f"{_brief.repr(record.args)} must be a size")
    return torch.Size([_typed(n, int) for n in record.args[0]])


def _metadata(raw: Any) -> Metadata:
    fields = _fields(raw, "Metadata")
    entries = _typed(fields.get("state_dict_metadata"), dict)
    metadata = Metadata({_typed(key, str): _entry(key, entry) for key, entry in entries.items()})
    metadata.storage_data = {}
    for index, info in _typed(fields.get("storage_data"), dict).items():
        metadata.storage_data[_index(index)] = _storage_info(info)
    for key, entry in metadata.state_dict_metadata.items():
        chunks = entry.chunks if isinstance(entry, TensorStorageMetadata) else [None]
        for chunk in chunks:
            index = MetadataIndex(key, None if chunk is None else chunk.offsets)
            if index not in metadata.storage_data:
                where = "" if chunk is None else f", its chunk at {tuple(chunk.offsets)},"
                _malformed(f"{_brief.repr(key)}{where} must have an entry in storage_data")
    return metadata


def _entry(key: str, record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(record).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    key = _brief.repr(key)
    fields = _fields(record, "TensorStorageMetadata")
    size = _size(fields.get("size"))
    chunks: list[ChunkStorageMetadata] = []
    bounds: list[ChunkBounds] = []
    for chunk_record in _typed(fields.get("chunks"), list):
        chunk = _fields(chunk_record, "ChunkStorageMetadata")
        offsets, sizes = _size(chunk.get("offsets")), _size(chunk.get("sizes"))
        if len(offsets) != len(size) or len(sizes) != len(size):
            _malformed(f"{key} has {len(size)} dims, a chunk of it {tuple(offsets)}, {tuple(sizes)}")
        extent = tuple((int(start), int(start) + int(length)) for start, length in zip(offsets, sizes, strict=True))
        if any(stop > whole for (_, stop), whole in zip(extent, size, strict=True)):
            _malformed(f"{key} has shape {tuple(size)}, a chunk of it reaches beyond: {tuple(offsets)}, {tuple(sizes)}")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
        bounds.append(extent)
    # Python's integers do not overflow, whatever sizes a file claims
    volume, covered = prod(size), sum(prod(stop - start for start, stop in bound) for bound in bounds)
    if volume != covered:
        _malformed(f"{key} has {volume} elements, its chunks {covered}")
    if volume >= 1 << 63:
        _malformed(f"{key} has shape {tuple(size)}, which no tensor can have")
    if pair := overlapping(bounds):
        _malformed(f"{key} has chunks that overlap: {pair[0]} and {pair[1]} (begin and end in each dim)")
    properties = _state(fields.get("properties"), "TensorProperties")
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    return TensorStorageMetadata(TensorProperties(dtype=_typed(dtype, torch.dtype)), size, chunks)


def overlapping(chunks: list[ChunkBounds]) -> tuple[ChunkBounds, ChunkBounds] | None:
    """Returns two chunks that share an element, or None. O(n log n) for a grid, however irregular its last two dims."""
    # Empty chunks share no element, but would be neighbours in the sweep
    chunks = [chunk for chunk in chunks if all(stop > start for start, stop in chunk)]
    return _overlapping(chunks, 0) if len(chunks) > 1 else None


def _overlapping(chunks: list[ChunkBounds], dim: int) -> tuple[ChunkBounds, ChunkBounds] | None:
    """Does the same for chunks that may differ from dim ``dim`` on."""
    if len(chunks) < 2:
        return None
    if dim == len(chunks[0]):
        return chunks[0], chunks[1]
    rows: dict[tuple[int, int], list[ChunkBounds]] = {}
    for chunk in chunks:
        rows.setdefault(chunk[dim], []).append(chunk)
    intervals = sorted(rows)
    # Rows of a grid: only chunks of one row can overlap
    if all(stop <= start for (_, stop), (start, _) in pairwise(intervals)):
        return next((pair for row in rows.values() if (pair := _overlapping(row, dim + 1))), None)
    return _overlapping_by_sweep(chunks, dim)


def _overlapping_by_sweep(chunks: list[ChunkBounds], dim: int) -> tuple[ChunkBounds, ChunkBounds] | None:
    """Does the same by a sweep along ``dim``; the chunks that it crosses are kept in the order of their last dim."""
    # 0 before 1: a chunk that ends where another begins has left by then
    events = [(chunk[dim][0], 1, chunk) for chunk in chunks] + [(chunk[dim][1], 0, chunk) for chunk in chunks]
    last = len(chunks[0]) - 1
    crossed: list[tuple[tuple[int, int], ChunkBounds]] = []
    for _, begins, chunk in sorted(events):
        keyed = chunk[last], chunk
        at = bisect_left(crossed, keyed)
        if not begins:
            del crossed[at]
            continue
        # With one dim left, chunks that do not overlap are in order, so the neighbours decide
        near = crossed[max(at - 1, 0) : at + 1] if dim + 2 > last else crossed
        for _, other in near:
            if all(a < d and c < b for (a, b), (c, d) in zip(chunk[dim + 1 :], other[dim + 1 :], strict=True)):
                return other, chunk
        insort(crossed, keyed)
    return None


def _index(record: Any) -> MetadataIndex:
    fields = _fields(record, "MetadataIndex")
    offset = fields.get("offset")
    return MetadataIndex(_typed(fields.get("fqn"), str), None if offset is None else _size(offset))


def _storage_info(record: Any) -> _StorageInfo:
    fields = _fields(record, "_StorageInfo")
    name = _typed(fields.get("relative_path"), str)
    # A file of another directory, or a name for which the system has errors of its own
    if name != os.path.basename(name) or name in ("", ".", "..") or "\0" in name or len(name) > 255:
        _malformed(f"{_brief.repr(name)} must be a file of the checkpoint")
    transforms = fields.get("transform_descriptors")
    if transforms is not None:
        transforms = [_typed(transform, str) for transform in _typed(transforms, list)]
    return _StorageInfo(name, _typed(fields.get("offset"), int), _typed(fields.get("length"), int), transforms)
