"""Reader of checkpoints in directories that need not be trusted and that another process may replace meanwhile."""

import contextlib
import os
import pickle
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO, TypeVar

import torch
from torch.distributed.checkpoint import DefaultLoadPlanner, FileSystemReader
from torch.distributed.checkpoint.filesystem import FileSystem, _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.futures import Future

from tp_ext._object_collectives import RetryError
from tp_ext.checkpoint.files.atomic_directory import backup_path
from tp_ext.checkpoint.files.entry_files import check_entry
from tp_ext.checkpoint.files.metadata import file_ends, parse_metadata
from tp_ext.checkpoint.files.pinned_directory import PinnedDirectory
from tp_ext.checkpoint.files.plain_values import load_saved

METADATA, EXTRA = ".metadata", "extra.pt"
_LARGEST = 1 << 30  # bytes of .metadata: some ten million chunks
T = TypeVar("T")


class ReplacedError(RetryError):
    """An error of a read during which the checkpoint was replaced or removed: the read must start over."""


class CheckpointReader(FileSystemReader):
    """A ``FileSystemReader`` of torch for directories that are not trusted and may be replaced while they are read.

    The metadata is read as data, rebuilt field by field and checked; a data file that is shorter than it states is an
    error before anything is loaded. The checksums of the metadata, and of each entry that this rank reads, which
    ``torch.save`` writes, are compared before this rank loads a tensor. The directory is opened at the first use and
    everything is read through its descriptor: one reader reads one checkpoint, even if another replaces it at the path.
    ``reset`` makes it open the path anew. :func:`load_sharded_state_dict` ensures that all ranks read the same
    checkpoint.

    Raises:
        FileNotFoundError: no such checkpoint. OSError: a data file is missing, too short, damaged or no regular
            file; the checkpoint was replaced before it could be read.
        pickle.UnpicklingError: ``.metadata`` names anything that does not belong to a checkpoint's metadata, or is no
            complete pickle. ValueError: the metadata is malformed.
    """

    _directory: PinnedDirectory | None = None
    _metadata: Metadata | None = None
    _identity = ""
    _verified: set[tuple[str, int]]

    def __init__(self, *args: Any, **options: Any) -> None:
        self._verified = set()
        super().__init__(*args, **options)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self.close()
        super().reset(checkpoint_id)

    def close(self) -> None:
        """Closes the files; the next read opens the path anew."""
        if self._directory is not None:
            self._directory.close()
        self._directory = self._metadata = None
        self._verified = set()
        self.fs = FileSystem()

    @property
    def identity(self) -> str:
        """Digest of ``.metadata``, the same on every host, different for each save (which writes a random number)."""
        self.read_metadata()
        return self._identity

    def read_metadata(self, *_args: Any, **_options: Any) -> Metadata:
        if self._metadata is None:
            directory = self._opened()
            self._metadata = self._unless_replaced(lambda: self._checked(directory))
        return self._metadata

    def read_extra(self) -> dict[str, Any]:
        """Returns the ``extra`` values that were passed to :func:`save_checkpoint`."""
        directory = self._opened()
        try:
            return self._unless_replaced(lambda: self._extra(directory))
        except FileNotFoundError:  # a checkpoint written by torch.distributed.checkpoint alone
            return {}

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        self._opened()
        return self._unless_replaced(lambda: self._loaded(plan, planner))

    def _verify_entries(self, plan: LoadPlan, directory: PinnedDirectory) -> None:
        """Compares the checksums of all entries that a plan reads; each is read once more, mostly from the cache."""
        for item in plan.items:
            info: _StorageInfo = self.storage_data[item.storage_index]
            place = info.relative_path, info.offset
            # A transformed entry, such as a compressed one, is no archive of torch.save
            if place not in self._verified and not info.transform_descriptors:
                with directory.opened(info.relative_path) as file:
                    self._verify(info.relative_path, file, info.offset, info.length)
                self._verified.add(place)  # equal values share one

    def _verify(self, name: str, file: BinaryIO, begin: int, length: int) -> None:
        try:
            check_entry(file.fileno(), begin, length)
        except ValueError as error:
            raise OSError(
                f"path: {os.fspath(self.path)!r}: {name}, from byte {begin} on, is damaged: {error}; load another "
                "checkpoint"
            ) from error

    def _loaded(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        try:
            self._verify_entries(plan, self._opened())
            return super().read_data(plan, planner)
        except OSError:
            raise
        except Exception as error:  # torch.load raises any error for a damaged file
            values = any(item.type is LoadItemType.BYTE_IO for item in plan.items)
            more = values and isinstance(error, pickle.UnpicklingError)  # more than plain values
            raise (pickle.UnpicklingError if more else OSError)(
                f"path: {os.fspath(self.path)!r}: a data file cannot be read: {error}"
            ) from error

    def _candidates(self) -> tuple[Path, Path]:
        target = Path(os.path.realpath(self.path))
        return target, backup_path(target)

    def _opened(self) -> PinnedDirectory:
        if self._directory is None:
            self._directory = self.fs = self._find()
        return self._directory

    def _find(self) -> PinnedDirectory:
        for path in self._candidates() * 3:  # a save that needs two renames may be between them at each attempt
            try:
                directory = PinnedDirectory(path)
            except (FileNotFoundError, NotADirectoryError):
                continue
            try:
                directory.size(METADATA)
                return directory
            except OSError as error:
                # Else it is of a save between two renames, or was replaced meanwhile: try the next candidate
                stays = directory.is_at(path) and not isinstance(error, FileNotFoundError)
                directory.close()
                if stays:
                    raise
        why = "" if os.path.exists(self.path) else "; it does not exist"
        raise FileNotFoundError(
            f"path: {os.fspath(self.path)!r} must be a checkpoint, a directory with {METADATA}{why}"
        )

    def _unless_replaced(self, read: Callable[[], T]) -> T:
        try:
            return read()
        except Exception as error:
            directory = self._opened()
            # The directory is still in place, so the error is one of its content
            if any(directory.is_at(path) for path in self._candidates()):
                raise
            raise ReplacedError(f"path: {os.fspath(self.path)!r} was replaced while it was read") from error

    def _checked(self, directory: PinnedDirectory) -> Metadata:
        if (size := directory.size(METADATA)) > _LARGEST:
            raise ValueError(f"{METADATA}: has {size} bytes and must have at most {_LARGEST}")
        with directory.opened(METADATA) as file:
            content = file.read()
        metadata = parse_metadata(content)
        # As torch's reader does
        metadata.storage_meta = StorageMeta(load_id=self.load_id)
        # It may lack in a checkpoint of torch
        with contextlib.suppress(OSError):
            directory.size(EXTRA)  # opened now, so that it stays open like the others
        for name, end in file_ends(metadata.storage_data.values()).items():
            if (size := directory.size(name)) < end:
                raise OSError(f"path: {os.fspath(self.path)!r}: {name} has {size} bytes and must have {end}")
        self._identity = sha256(content).hexdigest()
        return metadata

    def _extra(self, directory: PinnedDirectory) -> dict[str, Any]:
        with directory.opened(EXTRA) as file:
            self._verify(EXTRA, file, 0, directory.size(EXTRA))
            return load_saved(file, f"{EXTRA}:")


class PlainPlanner(DefaultLoadPlanner):
    """A planner that loads a flat state dict and unpickles nothing but plain values and tensors."""

    def __init__(self) -> None:
        super().__init__(flatten_state_dict=False, flatten_sharded_tensors=False)

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        self.state_dict[read_item.dest_index.fqn] = torch.load(value, map_location="cpu", weights_only=True)
