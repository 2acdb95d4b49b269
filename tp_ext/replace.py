"""Putting a whole new directory in the place of another, so that a kill at any moment leaves one of them whole."""

import ctypes
import errno
import os
import shutil
from pathlib import Path

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # Linux, fcntl.h and linux/fs.h
_NOT_HERE = (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP)


def saving(target: Path) -> Path:
    """Where what is to stand at ``target`` is written."""
    return target.with_name(f".{target.name}.saving")


def aside(target: Path) -> Path:
    """Where the old one stands while the new one is put in its place, on file systems that cannot exchange two."""
    return target.with_name(f".{target.name}.replaced")


def recover(target: Path) -> None:
    """Ends what a kill has interrupted: the old directory is put back if none is there, leftovers are removed."""
    if aside(target).exists() and not target.exists():
        aside(target).rename(target)
    for left in (saving(target), aside(target)):
        if left.exists():
            shutil.rmtree(left)


def replace(target: Path) -> None:
    """Puts ``saving(target)`` at ``target`` and removes what stood there. Both are on disk when it returns.

    Two directories are exchanged in one step (``renameat2``) where the file system can; else the old one is renamed to
    ``aside(target)`` first, and for a moment nothing stands at ``target``.
    """
    new, old = saving(target), aside(target)
    sync(new)
    if not target.exists():
        new.rename(target)
    elif _exchange(new, target):
        old = new
    else:
        target.rename(old)
        new.rename(target)
    sync(target.parent)
    if old.exists():
        shutil.rmtree(old)


def sync(path: Path) -> None:
    """Waits until the file, or the names in the directory, are on disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _exchange(a: Path, b: Path) -> bool:
    """Exchanges two paths in one step; False if this system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(_AT_FDCWD, os.fsencode(a), _AT_FDCWD, os.fsencode(b), _RENAME_EXCHANGE) == 0:
        return True
    code = ctypes.get_errno()
    if code in _NOT_HERE:
        return False
    raise OSError(code, os.strerror(code), os.fspath(b))
