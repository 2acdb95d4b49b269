"""Makes this process believe that it runs on another host: another host name, boot and /dev/shm."""

import ctypes
import os
import zlib
from pathlib import Path

CLONE_NEWNS, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER = 0x20000, 0x4000000, 0x8000000, 0x10000000


def move_to_another_host(hostname: str) -> bool:
    """Moves this process to another /dev/shm and, with a ``hostname``, to what looks like another machine; False if
    that is not permitted."""
    libc = ctypes.CDLL(None, use_errno=True)
    user = 0 if os.geteuid() == 0 else CLONE_NEWUSER
    if libc.unshare(user | CLONE_NEWNS | CLONE_NEWUTS | CLONE_NEWIPC):
        return False
    libc.mount(b"none", b"/", None, 0x4000 | 0x40000, None)  # MS_REC | MS_PRIVATE: it stays ours
    if libc.mount(b"tmpfs", b"/dev/shm", b"tmpfs", 0, None):
        return False
    if hostname:
        boot = Path("/tmp") / f"boot_id_{os.getpid()}"
        boot.write_text(f"01234567-89ab-cdef-0123-{zlib.crc32(hostname.encode()):012x}\n")
        libc.sethostname(hostname.encode(), len(hostname))
        libc.mount(str(boot).encode(), b"/proc/sys/kernel/random/boot_id", None, 0x1000, None)  # MS_BIND
        boot.unlink()
    return True
