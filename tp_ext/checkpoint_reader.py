"""Reading a directory of torch.distributed.checkpoint that may come from anywhere: nothing in it is executed.

torch's own reader unpickles ``.metadata`` and every entry that is no tensor, and a pickle may call any function.
"""

import os
import pickle
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import ReadItem


class CheckpointReader(FileSystemReader):
    """torch's ``FileSystemReader``, for directories that are not trusted: the metadata are taken as data, rebuilt field
    by field and checked; a data file that is shorter than they say is an error before anything is loaded.

    Raises:
        FileNotFoundError: no such checkpoint. OSError: a data file is missing or too short.
        pickle.UnpicklingError: ``.metadata`` names anything that is not of a checkpoint's metadata. ValueError: it is
            malformed.
    """

    _read: Metadata | None = None

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        super().reset(checkpoint_id)
        self._read = None

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        if self._read is None:
            self._read = self._checked()
        return self._read

    def _checked(self) -> Metadata:
        with (Path(self.path) / ".metadata").open("rb") as file:
            metadata = _metadata(_Unpickler(file).load())
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        ends: dict[str, int] = {}
        for info in metadata.storage_data.values():
            ends[info.relative_path] = max(ends.get(info.relative_path, 0), info.offset + info.length)
        for name, end in ends.items():
            size = (Path(self.path) / name).stat().st_size
            if size < end:
                raise OSError(f"path: {os.fspath(self.path)!r}: {name} has {size} bytes and must have {end}")
        return metadata


class PlainPlanner(DefaultLoadPlanner):
    """Loads a flat state dict; of entries that are no tensors nothing but plain values and tensors is unpickled."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)


class _Record:
    """What a pickle says about an object: the class it names, arguments and state. Stands in for all classes."""

    def __new__(cls, *args: Any) -> "_Record":
        made = super().__new__(cls)
        made.args, made.state = args, {}
        return made

    args: tuple[Any, ...]
    state: Any

    def __init__(self, *args: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


_KNOWN = {
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


class _Unpickler(pickle.Unpickler):
    """Gives records, dtypes and plain values: whatever class or function a pickle names, it is not called."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := vars(torch).get(name), torch.dtype):
            return found
        if name not in _KNOWN.get(module, ()):
            raise pickle.UnpicklingError(f".metadata: {module}.{name} is not of a checkpoint's metadata; not loaded")
        return type(name, (_Record,), {})  # a new one each time: a pickle may also write to the classes it names


def _malformed(what: str) -> NoReturn:
    raise ValueError(f".metadata: {what}")


def _state(record: Any, name: str) -> Any:
    if not isinstance(record, _Record) or type(record).__name__ != name:
        _malformed(f"{record!r} must be a {name}")
    return record.state


def _fields(record: Any, name: str) -> dict[str, Any]:
    state = _state(record, name)
    return state if isinstance(state, dict) else _malformed(f"{name} has no fields")


def _typed(value: Any, kind: type) -> Any:
    """A value of exactly this type; that of an int is at least 0."""
    if type(value) is not kind or (isinstance(value, int) and value < 0):
        _malformed(f"{value!r} must be a {kind.__name__}")
    return value


def _size(record: Any) -> torch.Size:
    _state(record, "Size")
    if len(record.args) != 1 or not isinstance(record.args[0], tuple | list):
        _malformed(f"{record.args!r} must be a size")
    return torch.Size([_typed(n, int) for n in record.args[0]])


def _metadata(raw: Any) -> Metadata:
    fields = _fields(raw, "Metadata")
    entries = _typed(fields.get("state_dict_metadata"), dict)
    made = Metadata({_typed(key, str): _entry(key, entry) for key, entry in entries.items()})
    made.storage_data = {}
    for index, info in _typed(fields.get("storage_data"), dict).items():
        made.storage_data[_index(index)] = _place(info)
    return made


def _entry(key: str, record: Any) -> TensorStorageMetadata | BytesStorageMetadata:
    if type(record).__name__ == "BytesStorageMetadata":
        return BytesStorageMetadata()
    fields = _fields(record, "TensorStorageMetadata")
    size, volume = _size(fields.get("size")), 0
    chunks: list[ChunkStorageMetadata] = []
    for one in _typed(fields.get("chunks"), list):
        chunk = _fields(one, "ChunkStorageMetadata")
        offsets, sizes = _size(chunk.get("offsets")), _size(chunk.get("sizes"))
        if len(offsets) != len(size) or len(sizes) != len(size):
            _malformed(f"{key!r} has {len(size)} dims, a chunk of it {offsets}, {sizes}")
        if any(int(o) + int(n) > int(whole) for o, n, whole in zip(offsets, sizes, size, strict=True)):
            _malformed(f"{key!r} has shape {tuple(size)}, a chunk of it reaches beyond: {offsets}, {sizes}")
        chunks.append(ChunkStorageMetadata(offsets, sizes))
        volume += sizes.numel()
    if volume != size.numel():
        _malformed(f"{key!r} has {size.numel()} elements, its chunks {volume}")
    properties = _state(fields.get("properties"), "TensorProperties")
    dtype = properties[0] if isinstance(properties, tuple) and properties else None
    return TensorStorageMetadata(TensorProperties(dtype=_typed(dtype, torch.dtype)), size, chunks)


def _index(record: Any) -> MetadataIndex:
    fields = _fields(record, "MetadataIndex")
    offset = fields.get("offset")
    return MetadataIndex(_typed(fields.get("fqn"), str), None if offset is None else _size(offset))


def _place(record: Any) -> _StorageInfo:
    fields = _fields(record, "_StorageInfo")
    name = _typed(fields.get("relative_path"), str)
    if name != os.path.basename(name) or name in ("", ".", ".."):
        _malformed(f"{name!r} must be a file of the checkpoint")
    transforms = fields.get("transform_descriptors")
    if transforms is not None:
        transforms = [_typed(one, str) for one in _typed(transforms, list)]
    return _StorageInfo(name, _typed(fields.get("offset"), int), _typed(fields.get("length"), int), transforms)
