"""Puts a whole new directory in the place of another, so that a kill at any moment leaves one of them whole.

Only the process that holds the path's :class:`tp_ext.checkpoint.write_lock.WriteLock` may call it: the writers of all
directories that :func:`recover` removes have ended then.
"""

import contextlib
import ctypes
import errno
import os
import re
import secrets
import shutil
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # Linux, fcntl.h and linux/fs.h
_NO_EXCHANGE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)
_OCCUPIED = (errno.ENOTEMPTY, errno.EEXIST)


def staging_path(target: Path) -> Path:
    """A new name next to ``target``: what is to stand there is written here."""
    return _hidden(target, "saving")


def backup_path(target: Path) -> Path:
    """The old directory's name while the new one is put in its place, on file systems that cannot exchange two."""
    return target.with_name(f".{target.name}.replaced")


def recover(target: Path) -> None:
    """Completes what a kill interrupted: puts the old directory back if ``target`` is missing, removes leftovers."""
    backup = backup_path(target)
    if backup.exists() and not target.exists():
        backup.rename(target)
    ours = re.compile(rf"\.{re.escape(target.name)}(\.[0-9a-f]{{8}})?\.(saving|removing|replaced)")
    for name in os.listdir(target.parent):
        if ours.fullmatch(name):
            discard(target.with_name(name), target)


def swap_in(staging: Path, target: Path) -> None:
    """Puts ``staging`` at ``target`` and removes what stood there. The new names are on disk when it returns.

    Two directories are exchanged in one step (``renameat2``) where the file system can; else the old one is renamed to
    ``backup_path(target)`` first, and for a moment nothing stands at ``target``.
    """
    sync(staging)
    old = None
    if not _renamed(staging, target):
        if _exchange(staging, target):
            old = staging
        else:
            old = backup_path(target)
            discard(old, target)
            target.rename(old)
            try:
                staging.rename(target)
            except OSError:
                old.rename(target)
                raise
    sync(target.parent)
    if old is not None:
        discard(old, target)


def discard(path: Path, target: Path) -> None:
    """Removes a directory next to ``target``, as far as it can: files that another host has open may stay a while.

    It gets another name first, so that half a directory is never found, nor put in place.
    """
    condemned = _hidden(target, "removing")
    with contextlib.suppress(FileNotFoundError):
        path.rename(condemned)
        shutil.rmtree(condemned, ignore_errors=True)


def sync(path: Path) -> None:
    """Waits until the file, or the names in the directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _hidden(target: Path, what: str) -> Path:
    return target.with_name(f".{target.name}.{secrets.token_hex(4)}.{what}")


def _renamed(staging: Path, target: Path) -> bool:
    """Renames if nothing, or an empty directory, is at ``target``."""
    try:
        staging.rename(target)
    except OSError as error:
        if error.errno in _OCCUPIED:
            return False
        raise
    return True


def _exchange(a: Path, b: Path) -> bool:
    """Exchanges two paths in one step; False if this system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NO_EXCHANGE:
        return False
    raise OSError(code, os.strerror(code), os.fspath(b))
