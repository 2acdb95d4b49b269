"""Atomic replacement of a directory by a new one: a kill at any moment leaves one of the two complete.

Only the process that holds the path's :class:`tp_ext.checkpoint.files.write_lock.WriteLock` may use it: then the
writers of all directories that :func:`finish_interrupted_swap` removes have ended.
"""

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # Linux, fcntl.h and linux/fs.h
_SYNC_FILE_RANGE_WRITE = 2  # likewise
_MAX_THREADS = 16
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST)


def staging_path(target: Path) -> Path:
    """Returns a new name next to ``target``, under which the new directory is written before the swap."""
    return _hidden_path(target, "saving")


def backup_path(target: Path) -> Path:
    """Returns the old directory's name during a swap, on file systems that cannot exchange two directories."""
    return target.with_name(f".{target.name}.replaced")


def finish_interrupted_swap(target: Path) -> None:
    """Completes a swap that a kill interrupted: restores the old directory if ``target`` is missing, and removes
    leftovers."""
    backup = backup_path(target)
    # Killed between two renames. If both exist, the second rename has taken place
    if backup.exists() and not target.exists():
        backup.rename(target)
    ours = re.compile(rf"\.{re.escape(target.name)}(\.[0-9a-f]{{8}})?\.(saving|removing|replaced)")
    for name in os.listdir(target.parent):
        if ours.fullmatch(name):
            remove_directory(target.with_name(name), target)


def swap_in(staging: Path, target: Path) -> None:
    """Moves ``staging``, which is on disk, to ``target``, and removes the old directory. The new names are on disk when
    it returns.

    The two are exchanged in one step (``renameat2``) where the file system supports it; else the old one is renamed to
    ``backup_path(target)`` first, and for a moment nothing exists at ``target``.
    """
    old = None
    if not _rename_to_free_path(staging, target):
        if _exchange(staging, target):
            old = staging
        else:
            old = backup_path(target)
            # An earlier save could not remove its backup, and a rename needs a free name
            remove_directory(old, target)
            target.rename(old)
            try:
                staging.rename(target)
            # The old checkpoint comes back: its loss is worse than a failed save
            except OSError:
                old.rename(target)
                raise
    # The old one is removed only when the new name is on disk
    sync_to_disk(target.parent)
    if old is not None:
        remove_directory(old, target)


def remove_directory(path: Path, target: Path) -> None:
    """Removes a directory next to ``target`` as far as possible: files that another host has open may stay a while.

    It is renamed first, so that a partial directory is never found or moved to ``target``.
    """
    condemned = _hidden_path(target, "removing")
    with contextlib.suppress(FileNotFoundError):
        path.rename(condemned)
        with contextlib.suppress(OSError):
            _at_once(os.unlink, list(condemned.iterdir()))
        # NFS keeps an open file under another name in its directory until it is closed
        shutil.rmtree(condemned, ignore_errors=True)


def sync_to_disk(*paths: Path) -> None:
    """Waits until the contents of the files, or the names in the directories, are on disk."""

    def sync(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    _at_once(sync, paths)


def start_writing(descriptor: int, begin: int, length: int) -> None:
    """Starts to write a range of a file to the disk, and does not wait; without effect where the system cannot."""
    if start := getattr(ctypes.CDLL(None), "sync_file_range", None):
        start(descriptor, ctypes.c_int64(begin), ctypes.c_int64(length), _SYNC_FILE_RANGE_WRITE)


def _at_once(act: Callable[[Path], object], paths: Sequence[Path]) -> None:
    """Calls ``act`` for each path, in threads: a disk serves calls that wait together in little more than the time of
    one. Raises the first error of any.

    Plain threads: a pool takes no work while the interpreter waits for the last asynchronous save to end.
    """
    errors: list[OSError] = []

    def work(mine: Sequence[Path]) -> None:
        for path in mine:
            try:
                act(path)
            except OSError as error:
                errors.append(error)

    count = min(len(paths), _MAX_THREADS)
    threads = [threading.Thread(target=work, args=(paths[i::count],)) for i in range(1, count)]
    for thread in threads:
        thread.start()
    work(paths[::count] if count else ())
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def _hidden_path(target: Path, purpose: str) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.{purpose}")


def _rename_to_free_path(staging: Path, target: Path) -> bool:
    """Renames ``staging`` if nothing, or an empty directory, is at ``target``; returns whether it did."""
    try:
        staging.rename(target)
    except OSError as error:
        # POSIX leaves the choice between the two to the system
        if error.errno in _OCCUPIED:
            return False
        raise
    return True


def _exchange(a: Path, b: Path) -> bool:
    """Exchanges two paths in one step; returns False if the system does not support it."""
    # [Note: a new checkpoint is exchanged with the old one]
    # os has no function for it, and an old C library neither
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), os.fspath(b))
