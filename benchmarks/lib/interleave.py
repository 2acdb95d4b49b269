"""Several ranks and one process take turns on the same machine, so that other work on it affects all cases alike.

The ranks are the tests' pools of gloo processes (tests/helpers/ranks.py: file rendezvous, a hard timeout, the first
failing rank's traceback); a rank without a turn waits on a pipe and costs nothing. A subject is measured in blocks of
consecutive calls; the time of a call on several ranks is that of the slowest rank.
"""

import functools
import os
import statistics
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

import tp_ext
from benchmarks.lib.report import Record
from tests.helpers import megatron_on_cpu, ranks  # noqa: F401, for the peers

BACKENDS = ("gloo", "tp_shm")
Block = Callable[[int], list[float]]  # how often to call -> the seconds of each call
TIMEOUT = 240.0  # seconds for one block, the first of all with the imports and models of its rank


@functools.cache
def group_on(backend: str) -> Any:
    """In a rank: the group of all ranks over ``backend``; the pool's own is gloo's."""
    return dist.group.WORLD if backend == "gloo" else dist.new_group(backend=backend)


def cores() -> list[int]:
    """The cores that this process may use."""
    return sorted(os.sched_getaffinity(0))


def pin(to: list[int]) -> None:
    """Pins all threads of this process; threads created later inherit it."""
    for thread in os.listdir("/proc/self/task"):
        os.sched_setaffinity(int(thread), to)


def _pinned(group: Any, on: list[int], one_core: bool) -> None:
    pin([on[group.rank() % len(on)]] if one_core else on)


def pin_ranks(p: int, on: list[int], one_core: bool) -> None:
    """Each rank on one core, in turn, or all on all."""
    ranks.run(_pinned, p, on, one_core)


def _keep_memory(_: Any, enabled: bool) -> None:
    tp_ext.keep_memory(enabled)


def keep_memory(p: int, enabled: bool) -> None:
    """Sets whether this process and the ranks keep the memory of freed tensors, for ours and the peers."""
    tp_ext.keep_memory(enabled)
    ranks.run(_keep_memory, p, enabled)


def ways_of_processes(p: int, quick: bool) -> list[tuple[bool, bool]]:
    """Returns what a benchmark measures: (one core a rank, memory kept)."""
    if quick:
        return [(False, False)]
    pinned = len(cores()) >= p
    return [(pinned, False), (pinned, True), *([(False, False)] if pinned else [])]


def described(pinned: bool, kept: bool) -> dict[str, str]:
    """Returns the columns that say which of them a row is."""
    return {"pinned": "pinned" if pinned else "not pinned", "memory": "kept" if kept else "torch's"}


def seconds_of(call: Callable[[], object], count: int) -> list[float]:
    """Seconds of ``count`` calls in a row."""
    times = []
    for _ in range(count):
        start = time.perf_counter()
        call()
        times.append(time.perf_counter() - start)
    return times


def _block(group: Any, make: Callable[..., Callable[[], object]], args: tuple, count: int) -> list[float]:
    call = make(*args)
    dist.barrier()
    for _ in range(2 if count > 10 else 0):  # the way from the pipe to here has cooled the caches
        call()
    return seconds_of(call, count)


def on_ranks(p: int, make: Callable[..., Callable[[], object]], *args: object) -> Block:
    """A block on p ranks of the call that ``make(*args)`` returns on each; ``make`` caches expensive objects."""

    def block(count: int) -> list[float]:
        return [max(times) for times in zip(*ranks.run(_block, p, make, args, count, timeout=TIMEOUT), strict=True)]

    return block


def here(call: Callable[[], object], threads: int, on: list[int]) -> Block:
    """A block in this process, with ``threads`` threads, on the cores ``on``."""

    def block(count: int) -> list[float]:
        before = cores()
        torch.set_num_threads(threads)
        pin(on)
        times = seconds_of(call, count)
        pin(before)
        return times

    return block


def take(
    subjects: Mapping[str, Block], seconds: float, block: float = 0.1, turns: int = 3, count: int | None = None
) -> dict[str, list[float]]:
    """The seconds of every call of every subject: blocks of about ``block`` seconds, or of ``count`` calls, each turn
    in another order, until ``seconds`` are over, at least ``turns`` times.
    """
    names = list(subjects)
    counts = dict.fromkeys(names, count)
    if count is None:  # from the fastest of the first, which warm up, too
        counts = {name: max(1, min(1000, round(block / min(subjects[name](3))))) for name in names}
    times: dict[str, list[float]] = {name: [] for name in names}
    start, turn = time.perf_counter(), 0
    while turn < turns or time.perf_counter() - start < seconds:
        for i in range(len(names)):
            name = names[(turn + i) % len(names)]
            times[name] += subjects[name](counts[name])
        turn += 1
    return times


def rows(
    times: Mapping[str, list[float]],
    columns: Mapping[str, object],
    more: Callable[[Mapping[str, float], str], Mapping[str, object]],
) -> list[Record]:
    """Returns a record for each subject: these columns, its median and least time, what ``more`` says of all medians
    and its name, and the number of its calls.
    """
    of = {name: statistics.median(values) for name, values in times.items()}
    return [
        {"case": name, **columns, "median_ms": of[name] * 1e3, "min_ms": min(values) * 1e3}
        | {**more(of, name), "steps": len(values)}
        for name, values in times.items()
    ]
