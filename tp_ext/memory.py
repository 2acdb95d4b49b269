"""Memory of tensors on the CPU."""

from tp_ext._build import load
from tp_ext._checks import check_bool

_C = load()


def keep_memory(enabled: bool = True) -> None:
    """Keeps the memory of freed tensors of 512 KiB and more in this process, for the next tensors.

    torch's allocator on the CPU returns large blocks to the system, which clears each page again when the next tensor
    touches it: a copy of 32 MiB then takes several times as long as the copying. Afterwards a block goes to the next
    tensor of its size, rounded up to an eighth of a power of two; blocks of 4 MiB and more are huge pages where the
    system allows it (``madvise``). Values do not change. It holds for all threads, and for tensors that are made from
    now on.

    The process stays as large as it was when the most bytes were in use, and at most a quarter larger: what is beyond
    that is freed, the largest blocks first.

    Args:
        enabled: False: gives what is kept back to the system, and later tensors, too, when they are freed.

    Communicates nothing. Tensors on other devices are not concerned.

    Raises:
        TypeError: ``enabled`` is no bool.
    """
    check_bool(enabled=enabled)
    _C.keep_memory(enabled)
