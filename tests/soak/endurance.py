"""Many steps of a small layer, and what the process holds before and after: memory, open files, threads, shared memory.

    .venv/bin/python -m tests.soak.endurance --steps 100000                      # 2 ranks, gloo
    .venv/bin/python -m tests.soak.endurance --steps 100000 --backend tp_shm --ranks 4
    .venv/bin/python -m tests.soak.endurance --steps 100000 --backend fake       # one process as a rank of 8
    .venv/bin/python -m tests.soak.endurance --steps 1000 --leak bytes           # see what a finding looks like

Nothing may grow after the warm-up, whatever the number of steps. LIMITS allows for caches that fill late: less than one
of malloc's smallest blocks (32 bytes) a step from 1100 steps on.
"""

import argparse
import ctypes
import gc
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist

import tp_ext
from tp_ext.group import Group

HIDDEN, WIDE, TOKENS = 8, 16, 8
WARM_UP = 1000  # steps: torch's flight recorder keeps the last 2000 collectives
LIMITS = {
    "malloc bytes": 32 << 10,  # in use, of all arenas, tensors among them; the suite has the recorder on
    "python blocks": 200,
    "resident KiB": 1 << 10,  # pages: what malloc and Python keep for later
    "open files": 0,
    "threads": 0,
    "shared memory": 0,  # mappings of it in this process, and entries of this process in /dev/shm
}
"""By how much each may be larger after the steps than before."""


class _Mallinfo(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in "arena ordblks smblks hblks hblkhd usmblks fsmblks uordblks fordblks keepcost".split()  # noqa: SIM905
    ]


def held() -> dict[str, int]:
    """The resources that this process holds now."""
    gc.collect()
    mallinfo = ctypes.CDLL(None).mallinfo2  # glibc 2.33
    mallinfo.restype = _Mallinfo
    info = mallinfo()
    maps = Path("/proc/self/maps").read_text().splitlines()
    entries = [name for name in os.listdir("/dev/shm") if f".{os.getpid()}." in name or f"_{os.getpid()}_" in name]
    return {
        "malloc bytes": info.uordblks + info.hblkhd,
        "python blocks": sys.getallocatedblocks(),
        "resident KiB": int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE") >> 10,
        "open files": len(os.listdir("/proc/self/fd")),
        "threads": len(os.listdir("/proc/self/task")),
        "shared memory": sum("/dev/shm/" in line for line in maps) + len(entries),
    }


def _leave_in_shared_memory() -> None:
    Path(f"/dev/shm/endurance.{os.getpid()}.{time.monotonic_ns()}").touch()


LEAKS: dict[str, tuple[str, int, Callable[[], object]]] = {
    "bytes": ("malloc bytes", 1, lambda: ctypes.CDLL(None).malloc(16)),
    "tensor": ("malloc bytes", 1, lambda: _kept.append(torch.empty(1))),
    "object": ("python blocks", 1, lambda: _kept.append(object())),
    "file": ("open files", 50, lambda: _kept.append(os.open("/dev/null", os.O_RDONLY))),
    "thread": ("threads", 50, lambda: threading.Thread(target=threading.Event().wait, daemon=True).start()),
    "shared": ("shared memory", 50, _leave_in_shared_memory),
}
"""Mistakes made on purpose: where each shows, every how many steps it is made, what it is."""
_kept: list[object] = []


def train(group: Group, steps: int, leak: str | None = None, warm_up: int = WARM_UP) -> dict[str, int]:
    """Forward, backward and update of a column and a row linear with and without sequence parallelism, by turns: all
    four kinds of collectives. How much more is held after the steps than before, the warm-up not counted."""
    torch.manual_seed(0)
    models = [tp_ext.ParallelMLP(HIDDEN, WIDE, group=group, sequence_parallel=sp) for sp in (False, True)]
    p = models[0].tp_group.size
    inputs = [torch.randn(TOKENS // n, HIDDEN) for n in (1, p)]
    optimizer = torch.optim.SGD([param for model in models for param in model.parameters()], lr=1e-3)
    before: dict[str, int] = {}
    for step in range(warm_up + steps):
        if step == warm_up:
            held()  # what counting itself keeps
            before = held()
        optimizer.zero_grad()
        y = models[step % 2](inputs[step % 2])
        if step % 4 == 0:
            y = tp_ext.all_to_all_region(y, group, 0, 1)
        y.square().sum().backward()
        optimizer.step()
        if leak is not None and step % LEAKS[leak][1] == 0:
            LEAKS[leak][2]()
    after = held()
    return {name: after[name] - before[name] for name in LIMITS}


def findings(grown: dict[str, int], steps: int) -> list[str]:
    """The resources that have grown by more than their limits."""
    return [
        f"{name}: {by} more after {steps} steps, where {LIMITS[name]} are allowed"
        for name, by in grown.items()
        if by > LIMITS[name]
    ]


def _rank(rank: int, ranks: int, backend: str, folder: str, steps: int, leak: str | None, results) -> None:
    torch.set_num_threads(1)
    os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # torch's flight recorder: its entries are not all of one size
    if backend == "fake":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=8)
    else:
        dist.init_process_group(backend, store=dist.FileStore(f"{folder}/store", ranks), rank=rank, world_size=ranks)
    started = time.monotonic()
    grown = train(dist.group.WORLD, steps, leak)
    results.put((rank, grown, time.monotonic() - started))
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--steps", type=int, default=10_000)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--backend", default="gloo", help="gloo, tp_shm, fake (one process, world size 8)")
    parser.add_argument("--leak", choices=LEAKS, help="a mistake made on purpose")
    options = parser.parse_args()
    ranks = 1 if options.backend == "fake" else options.ranks
    os.environ["GLIBC_TUNABLES"] = "glibc.malloc.tcache_count=0"  # what a thread keeps freed would count as in use
    context = multiprocessing.get_context("spawn")
    results, found = context.SimpleQueue(), []
    with tempfile.TemporaryDirectory() as folder:
        arguments = ranks, options.backend, folder, options.steps, options.leak, results
        processes = [context.Process(target=_rank, args=(rank, *arguments), daemon=True) for rank in range(ranks)]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
    for rank, grown, seconds in sorted(results.get() for _ in range(ranks) if not results.empty()):
        print(
            f"rank {rank}: {options.steps} steps in {seconds:.0f} s;", ", ".join(f"{k} {v:+}" for k, v in grown.items())
        )
        found += [f"rank {rank}: {one}" for one in findings(grown, options.steps)]
    failed = [rank for rank, process in enumerate(processes) if process.exitcode != 0]
    sys.exit("\n".join([*found, *(f"rank {rank}: failed" for rank in failed)]) or None)


if __name__ == "__main__":
    main()
