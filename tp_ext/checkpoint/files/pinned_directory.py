"""Access to the files of one directory, even if its path is replaced meanwhile, and whatever files it holds."""

import os
import stat
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from io import IOBase
from typing import BinaryIO, cast

from torch.distributed.checkpoint.filesystem import FileSystem

_MAX_OPEN = 256  # files of one directory that are kept open


def open_regular(path: str | os.PathLike[str], directory: int | None = None) -> BinaryIO:
    """Opens a file for reading. OSError: a pipe, a device or a directory; opening a pipe may block forever."""
    # The type is checked after opening, since a path may change in between; hence O_NONBLOCK
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC, dir_fd=directory)
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(f"path: {os.fspath(path)!r} must be a regular file")
    return open(descriptor, "rb")


# [Note: a reader holds a directory, a saver holds a lock]
class PinnedDirectory(FileSystem):
    """A directory that is opened once, as a file system for the readers of torch.distributed.checkpoint.

    All files are opened through its descriptor, so they belong to this directory even if another one replaces it at the
    path. The first ``_MAX_OPEN`` stay open until it is closed, so that on a local file system they can be read after
    they were removed.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        super().__init__()
        self._descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        self._files: dict[str, BinaryIO] = {}
        # Also when the reader is garbage; it must not refer to self
        self.close = weakref.finalize(self, _close, self._descriptor, self._files)

    def is_at(self, path: str | os.PathLike[str]) -> bool:
        """Returns True if this directory is the one at the path now."""
        try:
            return os.path.samestat(os.stat(path), os.fstat(self._descriptor))
        except OSError:
            return False

    def size(self, name: str) -> int:
        """Returns the size of the file in bytes. OSError: it is missing or no regular file."""
        with self.opened(name) as file:
            return os.fstat(file.fileno()).st_size

    @contextmanager
    def opened(self, name: str) -> Iterator[BinaryIO]:
        """Opens one of its files, positioned at its beginning."""
        file = self._files.get(name)
        if file is None:
            file = open_regular(name, self._descriptor)
            # The number of open files of a process is limited, often to 1024
            if len(self._files) >= _MAX_OPEN:
                with file:
                    yield file
                return
            self._files[name] = file
        file.seek(0)
        yield file

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[IOBase]:
        with self.opened(os.path.basename(path)) as file:
            yield cast(IOBase, file)


def _close(descriptor: int, files: dict[str, BinaryIO]) -> None:
    for file in files.values():
        file.close()
    files.clear()
    os.close(descriptor)
