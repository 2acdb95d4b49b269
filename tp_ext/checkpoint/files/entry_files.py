"""Entries of a checkpoint as bytes that ``torch.load`` reads, one after the other in a data file.

``torch.save`` takes 150 microseconds for each, however small, and a checkpoint of 300 parameters and their AdamW has
4500 entries. So equal values are written once, and the file of a small tensor is that of an earlier one of its shape
and dtype, with other data.
"""

import ctypes
import functools
import io
import os
import zipfile
import zlib
from collections.abc import Sequence
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

_LARGEST_COPIED = 1 << 18  # bytes; of larger tensors the time of torch.save itself does not matter
_LARGEST_SHARED = 1 << 16  # bytes of a value that are kept to the end of the file, so that they are not written twice
_EXACT = (int, bool, str, bytes, type(None))
_IMMUTABLE = (*_EXACT, float, complex)


class Written(NamedTuple):
    """The place of an entry in its data file."""

    offset: int
    length: int


def saved_value(value: Any) -> bytes:
    """Returns the bytes of a value that is no tensor."""
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


@functools.lru_cache(256)
def saved_option(key: object, value: Any) -> bytes:
    """Returns :func:`saved_value`, kept from one save to the next: for options of optimizers, which are short."""
    return saved_value(value)


# [Note: saves write DCP's format without DCP's planner]
class SavedValues:
    """The bytes of values that are no tensors; equal immutable ones share one object."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], bytes] = {}
        self._objects: dict[int, tuple[Any, bytes]] = {}  # by id, with the value, which keeps it from being used again

    def of(self, value: Any) -> bytes:
        """Returns the bytes of a value."""
        same = self._objects.get(id(value))
        if same is not None:
            return same[1]
        key = value_key(value)
        if key is None:
            return saved_value(value)
        content = self._known.get(key)
        if content is None:
            content = self._known[key] = saved_value(value)
        self._objects[id(value)] = value, content
        return content


def value_key(value: Any) -> tuple[Any, ...] | None:
    """Returns what identifies an immutable value: 1, 1.0 and True are equal and not the same, as are 0.0 and -0.0."""
    if type(value) in _EXACT:
        return type(value), value
    if type(value) in _IMMUTABLE:
        return type(value), repr(value)
    if type(value) is tuple and all(type(element) in _IMMUTABLE for element in value):
        return tuple, *map(value_key, value)
    return None


class EntryWriter:
    """Writes entries to a data file, each as ``torch.save`` would.

    Attributes:
        end: the bytes of the file so far.
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file, self.end = file, file.tell()
        self._values: dict[bytes, Written] = {}
        self._tuples: dict[tuple[bytes, ...], list[int]] = {}
        self._templates: dict[tuple[torch.dtype, torch.Size], _Template | bytes | None] = {}

    def write(self, entry: Tensor | bytes) -> Written:
        """Writes a tensor, of any device, or the bytes of a value: those of a small one only once."""
        begin = self.end
        if isinstance(entry, bytes):
            if (written := self._values.get(entry)) is not None:
                return written
            self._append(entry)
            place = Written(begin, len(entry))
            if len(entry) <= _LARGEST_SHARED:
                self._values[entry] = place
            return place
        # Tensors of a synchronous save are live, and may be on a GPU
        tensor = entry.detach().cpu()
        if not _is_plain(tensor):
            self._save(tensor)
        elif (tensor := tensor.contiguous()).nbytes > _LARGEST_COPIED:
            self._save(_with_own_storage(tensor))
        else:
            self._write_small(tensor)
        return Written(begin, self.end - begin)

    def write_values(self, contents: tuple[bytes, ...]) -> list[int]:
        """Writes the bytes of several values, equal ones only once; returns the offset and the length of each."""
        if (places := self._tuples.get(contents)) is None:
            places = self._tuples[contents] = [number for content in contents for number in self.write(content)]
        return places

    def _write_small(self, tensor: Tensor) -> None:
        key = tensor.dtype, tensor.shape
        template = self._templates.get(key, b"")
        # The first of a shape is written by torch; a template pays from the second on
        if isinstance(template, bytes) and template:
            template = self._templates[key] = _template(template, tensor.nbytes)
        if isinstance(template, _Template):
            self._append(*template.filled(_bytes_of(tensor)))
            return
        content = saved_value(_with_own_storage(tensor))
        # Not over None, which says that this torch writes another form
        self._templates.setdefault(key, content)
        self._append(content)

    def _append(self, *parts: bytes) -> None:
        self._file.writelines(parts)
        self.end += sum(map(len, parts))

    def _save(self, tensor: Tensor) -> None:
        torch.save(tensor, self._file)
        self.end = self._file.tell()


class _FileRange(io.RawIOBase):
    """A range of a file as one of its own. (That of torch.distributed.checkpoint takes offsets from its end for those
    from the range's end with the other sign.)"""

    def __init__(self, descriptor: int, begin: int, length: int) -> None:
        self._descriptor, self._begin, self._length, self._at = descriptor, begin, length, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        at = offset + {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._length}[whence]
        if at < 0:
            raise OSError(f"offset {at} must not be before the range")
        self._at = at
        return at

    def readinto(self, into: Any) -> int:
        view = memoryview(into).cast("B")[: max(self._length - self._at, 0)]
        count = os.preadv(self._descriptor, [view], self._begin + self._at)
        self._at += count
        return count


def check_entry(file: int, begin: int, length: int) -> None:
    """Raises ValueError if the archive that ``torch.save`` wrote to this range of an open file (its descriptor) does
    not have the checksums that it states."""
    # All records of a zip archive begin with PK
    if os.pread(file, 2, begin) != _DIRECTORY_ENTRY[:2]:
        return  # the form without checksums, or no entry at all: torch.load knows
    try:
        with zipfile.ZipFile(io.BufferedReader(_FileRange(file, begin, length), 1 << 16)) as archive:
            members = archive.infolist()
            if any(member.compress_type != zipfile.ZIP_STORED for member in members):
                raise ValueError("a member is compressed")
            # torch.serialization.set_crc32_options(False) writes zeros
            wrong = archive.testzip() if any(member.CRC for member in members) else None
    except Exception as error:  # zipfile has many for damaged headers
        raise ValueError(f"it is no whole archive: {error}") from error
    if wrong is not None:
        raise ValueError(f"the checksum of its member {wrong!r} is another one")


class _Template(NamedTuple):
    """The zip archive of a tensor. Keeps the constant bytes around its variable fields: the data, and the checksum,
    which occurs twice."""

    before: bytes
    between: bytes
    after: bytes

    def filled(self, data: bytes) -> Sequence[bytes]:
        """Returns the file of a tensor with this data."""
        checksum = zlib.crc32(data).to_bytes(4, "little")
        return self.before, data, _DESCRIPTOR, checksum, self.between, checksum, self.after


_DESCRIPTOR = b"PK\x07\x08"  # comes after the data of a member, before its checksum and sizes
_DIRECTORY_ENTRY = b"PK\x01\x02"
_LOCAL_NAME, _ENTRY_CHECKSUM, _ENTRY_NAME = 30, 16, 46  # offsets in the header of a member and in its directory entry


def _template(content: bytes, size: int) -> _Template | None:
    """Returns the template of a file that ``torch.save`` has made, of a tensor of ``size`` bytes; None if it has
    another form than that of the torch versions known."""
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        records = [info for info in archive.infolist() if info.filename.endswith("/data/0")]
    if len(records) != 1 or records[0].file_size != size or records[0].compress_type != zipfile.ZIP_STORED:
        return None
    name, checksum = records[0].filename.encode(), records[0].CRC.to_bytes(4, "little")
    header = records[0].header_offset
    lengths = header + _LOCAL_NAME - 4
    begin = header + _LOCAL_NAME + sum(int.from_bytes(content[at : at + 2], "little") for at in (lengths, lengths + 2))
    end = begin + size
    # The directory is at the end, where the name occurs last
    entry = content.rfind(_DIRECTORY_ENTRY, end, content.rfind(name))
    directory_checksum = entry + _ENTRY_CHECKSUM
    if (
        zlib.crc32(content[begin:end]) != records[0].CRC
        or content[end : end + 8] != _DESCRIPTOR + checksum
        or content[entry + _ENTRY_NAME :][: len(name)] != name
        or content[directory_checksum : directory_checksum + 4] != checksum
        or any(content[header + 14 : header + 18])  # the checksum is in the header, too
    ):
        return None
    return _Template(content[:begin], content[end + 8 : directory_checksum], content[directory_checksum + 4 :])


def _is_plain(tensor: Tensor) -> bool:
    """Returns whether the tensor is nothing but its numbers, in memory."""
    strided = type(tensor) in (Tensor, torch.nn.Parameter) and tensor.layout is torch.strided
    return strided and not (tensor.is_quantized or tensor.is_conj() or tensor.is_neg()) and tensor.numel() > 0


def _memory(tensor: Tensor) -> Any:
    """Returns the memory of a contiguous tensor, which must be kept."""
    return (ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())


def _bytes_of(tensor: Tensor) -> bytes:
    return bytes(_memory(tensor))


def _with_own_storage(tensor: Tensor) -> Tensor:
    """Returns a contiguous tensor as one with a storage of its own, in the same memory, which the caller keeps: of a
    view ``torch.save`` would write all of the storage."""
    return torch.frombuffer(_memory(tensor), dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)
