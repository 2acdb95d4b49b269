"""A lock that admits one writer at a time to a path, among all processes on all hosts that share the file system.

The writer holds a ``flock`` on a lock file next to the path, which names its host and process. The kernel releases it
with the process, so the lock of a killed writer is free at once. On file systems that refuse ``flock`` the existence of
the file is the lock, and its owner touches it every few seconds: an owner on the same machine is looked up in /proc,
one on another host is taken for ended if the file's time has not changed for ``_SILENT_SECONDS``. A forked child,
such as a worker of a DataLoader, closes the descriptor and has no part in the lock.
"""

import contextlib
import errno
import fcntl
import json
import os
import secrets
import socket
import threading
import time
import weakref
from pathlib import Path
from typing import Any

from tp_ext.checkpoint.files.pinned_directory import open_regular
from tp_ext.checkpoint.files.plain_values import parse_json

_REFUSED = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP, errno.EINVAL)
TURN_SECONDS = 1.0
_POLL_SECONDS = 0.02
_TOUCH_SECONDS = 3.0
_SILENT_SECONDS = 30.0
_open: "weakref.WeakSet[WriteLock]" = weakref.WeakSet()  # those that have a descriptor


def check_lock_timeout(lock_timeout: float) -> None:
    """Raises ValueError unless ``lock_timeout`` is a number of seconds, of at least 0."""
    if not isinstance(lock_timeout, int | float) or not lock_timeout >= 0:
        raise ValueError(f"lock_timeout: {lock_timeout!r} must be a number of seconds, at least 0")


class WriteLock:
    """The right to write at ``target``, and to remove temporary files of earlier writers next to it.

    While it is held, the writers of all temporary files of ``target`` except the holder have ended.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.path = target.with_name(f".{target.name}.tp_ext-lock")
        self._descriptor: int | None = None
        self._close: weakref.finalize[..., WriteLock] | None = None
        self._released = threading.Event()  # ends the thread that touches the file
        self._by_flock = True
        self._seen: tuple[bytes, int] | None = None  # content and time of a rival's file, ..
        self._seen_at = 0.0  # .. and the time since when they are unchanged

    def take_turn(self, begin: float, timeout: float) -> bool:
        """Tries to acquire the lock, at least once and for at most ``TURN_SECONDS``; False: another process holds it.

        Callers with several ranks communicate after each turn, so that no collective waits longer than a turn.
        ``begin`` is the time of the first turn. Raises TimeoutError ``timeout`` seconds later, OSError.
        """
        end = time.monotonic() + TURN_SECONDS
        while not self._acquired():
            now = time.monotonic()
            if now >= begin + timeout:
                raise TimeoutError(
                    f"path: {os.fspath(self.target)!r} is being written by {self.owner()}, which must be done within "
                    f"lock_timeout = {timeout:g} s"
                )
            if now >= end:
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def owner(self) -> str:
        """Returns the name of the process that holds the lock."""
        record = _parsed(self._content()[0])
        return f"process {record['pid']} on {record['host']}" if record else "another process"

    def check_held(self) -> None:
        """Raises OSError if the lock file is no longer this lock's: another process has removed it."""
        # Where flock is refused, a rival takes an owner that is silent for long for ended
        if self._descriptor is None or not self._is_ours():
            raise OSError(f"{self.path.name} was removed, or taken by {self.owner()}, while it was held")

    def release(self) -> None:
        """Removes the file and releases the lock, if it is held."""
        if self._descriptor is None:
            return
        with contextlib.suppress(OSError):
            if self._is_ours():
                os.unlink(self.path)  # while it is held: no other process can hold a file of this name
        self._drop()

    def _acquired(self) -> bool:
        return self._tried() or self._tried()  # again: the first try may have found a lock that it removed

    def _tried(self) -> bool:
        try:
            # O_EXCL: where flock is refused, creating the file is the lock
            descriptor, new = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666), True
        except FileExistsError:
            try:
                descriptor, new = os.open(self.path, os.O_RDWR | os.O_CLOEXEC), False
            except FileNotFoundError:  # just released
                return False
        self._descriptor, self._released = descriptor, threading.Event()
        self._close = weakref.finalize(self, _close, descriptor, self._released)  # also when the lock is garbage
        _open.add(self)
        try:
            if self._locked(descriptor, new):
                self._take(descriptor)
                return True
        # Ctrl-C, too: a descriptor that stays open would hold the lock
        except BaseException:
            self._drop()
            raise
        self._drop()
        return False

    def _drop(self) -> None:
        if self._close is not None:
            self._close()
        self._descriptor = None

    def leave_to_parent(self) -> None:
        """Closes the descriptor in a forked child, which would hold the lock of a killed parent by it."""
        if self._descriptor is not None and self._close is not None and self._close.detach():
            os.close(self._descriptor)  # without unlocking it, which would be for the parent, too
            self._descriptor = None

    def _locked(self, descriptor: int, new: bool) -> bool:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except (BlockingIOError, PermissionError):
            return False
        except OSError as error:
            if error.errno not in _REFUSED:
                raise
            self._by_flock = False
            # Not taken at once: of several that find it so, each must create the file anew
            if not new and self._rival_has_ended():
                self._break()
            return new
        self._by_flock = True
        return self._is_ours()  # not a file whose owner has released it since we opened it

    def _take(self, descriptor: int) -> None:
        record = {"host": socket.gethostname(), "pid": os.getpid(), "started": _started(os.getpid())}
        content = json.dumps(record | {"machine": _machine(), "token": secrets.token_hex(8)}).encode()
        with contextlib.suppress(OSError):  # disk full: only the owner's name is missing
            os.ftruncate(descriptor, 0)
            os.pwrite(descriptor, content, 0)
        if not self._by_flock:
            # A copy of the descriptor: the thread may still use it when the lock closes its own
            threading.Thread(target=_touch, args=(os.dup(descriptor), self._released), daemon=True).start()

    def _is_ours(self) -> bool:
        assert self._descriptor is not None
        try:
            return os.path.samestat(os.fstat(self._descriptor), os.stat(self.path))
        except FileNotFoundError:
            return False

    def _content(self) -> tuple[bytes, int]:
        """Returns bytes and time of the lock file; no bytes and 0 if it is missing."""
        try:
            with open_regular(self.path) as file:
                return file.read(4096), os.fstat(file.fileno()).st_mtime_ns
        except OSError:
            return b"", 0

    def _rival_has_ended(self) -> bool:
        seen = self._content()
        if seen != self._seen:
            self._seen, self._seen_at = seen, time.monotonic()
        record = _parsed(seen[0])
        if record and record["machine"] == _machine():
            return record["started"] != _started(record["pid"])
        # By this host's clock since it saw a change: clocks of hosts differ
        return time.monotonic() - self._seen_at > _SILENT_SECONDS

    def _break(self) -> None:
        """Removes the lock file of a process that has ended. Only one of several processes that find it so succeeds; if
        another has created a new file meanwhile, that file is restored."""
        mine = self.path.with_name(f"{self.path.name}.{secrets.token_hex(4)}")
        with contextlib.suppress(FileNotFoundError):
            self.path.rename(mine)
            if self._seen is not None and mine.read_bytes() != self._seen[0]:
                with contextlib.suppress(OSError):
                    os.link(mine, self.path)
            mine.unlink()


def _touch(descriptor: int, released: threading.Event) -> None:
    """Updates the time of the lock file every few seconds until the lock is released."""
    while not released.wait(_TOUCH_SECONDS):
        with contextlib.suppress(OSError):
            os.utime(descriptor)
    os.close(descriptor)


def _close(descriptor: int, released: threading.Event) -> None:
    released.set()
    with contextlib.suppress(OSError):
        # Explicitly: a forked process may have the descriptor still open, and with it the lock
        fcntl.flock(descriptor, fcntl.LOCK_UN)
    os.close(descriptor)


def _after_fork() -> None:
    for lock in list(_open):
        lock.leave_to_parent()


os.register_at_fork(after_in_child=_after_fork)


def _parsed(content: bytes) -> dict[str, Any] | None:
    try:
        record = parse_json(content, "")
        return {key: record[key] for key in ("host", "pid", "started", "machine")}
    except (ValueError, KeyError):
        return None


def _machine() -> str:
    """Returns boot id and process namespace: equal for two processes that see one another in /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return f"unknown {secrets.token_hex(8)}"


def _started(pid: object) -> str | None:
    """Returns the start time of a process of this machine, in ticks since boot; None: it has ended. Pids are reused."""
    try:
        return Path(f"/proc/{int(str(pid))}/stat").read_text().rpartition(")")[2].split()[19]
    except (OSError, ValueError, IndexError):
        return None
