"""The time of one call, on the CPU by the clock, on a GPU by its events; and the memory that it takes there."""

import time
from collections.abc import Callable

import torch

Call = Callable[[], object]

FLUSH_BYTES = 256 << 20  # more than the L2 cache of any GPU
LONGEST_PAUSE = 1 << 26  # cycles, some 30 ms: a call that takes the host longer waits for the device by itself


def time_on_cpu(call: Call, before: Call | None) -> float:
    if before is not None:
        before()
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


class TimeOnCuda:
    """The device's time for a call, with a cold L2 cache and all of the call queued before it starts, so it never waits
    for the host. For that the device pauses first, as long as the call was measured to need.
    """

    def __init__(self) -> None:
        self.flush = torch.zeros(FLUSH_BYTES // 4, device="cuda")
        self.pauses: dict[Call, int] = {}

    def __call__(self, call: Call, before: Call | None) -> float:
        while True:
            pause = self.pauses.setdefault(call, 1 << 17)
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
            if before is not None:
                before()
            self.flush.sum()  # read, not written: nothing to be written back while the call is timed
            torch.cuda._sleep(pause)
            start.record()
            call()
            end.record()
            ahead = not start.query()
            end.synchronize()
            if ahead or pause >= LONGEST_PAUSE:
                return float(start.elapsed_time(end))
            self.pauses[call] = 2 * pause


def extra_bytes(call: Call, before: Call | None) -> int:
    """The peak memory of a call in addition to the memory in use before it."""
    if before is not None:
        before()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated()
    result = call()
    peak = torch.cuda.max_memory_allocated()
    del result
    return peak - held
