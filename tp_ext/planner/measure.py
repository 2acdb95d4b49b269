"""The profile of this machine, by timing GEMMs, memory-bound kernels and collectives."""

import math
import os
import time
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup

from tp_ext._checks import check_number
from tp_ext._object_collectives import all_gather_objects
from tp_ext.group import Group, process_group
from tp_ext.planner.machine import Cluster, Device, EfficiencyCurve, Link

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SIZES = {"cpu": (64, 256, 1024), "cuda": (256, 1024, 4096, 8192)}
_LARGE = {"cpu": 2**25, "cuda": 2**30}  # bytes of a copy, more than caches hold
_SMALL, _BIG = 2**12, 2**24  # bytes of a collective


def measure(device: torch.device | str | None = None, group: Group = None, minutes: float = 2) -> Cluster:
    """Measures this machine: a device for each rank of ``group``, joined by one level of links.

    Times the best of repeated runs of GEMMs of fp32 and bf16 (a table for :class:`EfficiencyCurve`; the peak is the
    fastest of them), of a sum of large tensors, of a kernel of one element, and of all-reduces of 4 KiB and 16 MiB,
    from which latency and bandwidth of a ring follow.

    Args:
        device: default: the current GPU, or the CPU without one. group: ranks that measure at the same time, as they
            will train; None: this process alone. minutes: at most so long.

    Communicates: the all-reduces, and an exchange of what each rank measured, of which all take the median.

    Raises:
        ValueError: ``minutes`` is no number above 0.
    """
    check_number(above=0, minutes=minutes)
    kind = "cuda" if device is None and torch.cuda.is_available() else "cpu" if device is None else device
    where = torch.device(kind)
    ranks = None if group is None else process_group(group)
    seconds = 60 * minutes
    rates = _kernels(where, 0.7 * seconds) | (_links(where, ranks, 0.2 * seconds) if ranks is not None else {})
    everyone = [rates] if ranks is None else all_gather_objects(rates, ranks)
    medians = {name: sorted(of_rank[name] for of_rank in everyone)[len(everyone) // 2] for name in rates}
    count = 1 if ranks is None else ranks.size()
    peak = {
        dtype: max(flops for name, flops in medians.items() if name.startswith(f"gemm {dtype} ")) for dtype in _DTYPES
    }
    table = []
    for name, flops in medians.items():
        words = name.split()
        if words[0] == "gemm":
            m, n, k = map(int, words[2:])
            table.append((m, n, k, words[1], flops / peak[words[1]]))
    measured_device = Device(
        torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        peak=peak,
        memory_bandwidth=medians["bytes"],
        memory=_memory(where, count),
        launch=medians["launch"],
        # A GEMM of two cores has no fused attention that is faster than its products
        gemm=EfficiencyCurve(table=tuple(table), memory=1.0, attention=0.5),
    )
    link = Link(medians.get("latency", 0.0), medians.get("bandwidth", 1e12))
    return Cluster(measured_device, count, (link,))


def _best(call: Callable[[], object], where: torch.device, seconds: float) -> float:
    """Returns the least time of one call, of as many as fit."""
    call()
    end, best = time.perf_counter() + seconds, math.inf
    while True:
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        begin = time.perf_counter()
        call()
        if where.type == "cuda":
            torch.cuda.synchronize(where)
        now = time.perf_counter()
        best = min(best, now - begin)
        if now > end:
            return best


def _kernels(where: torch.device, seconds: float) -> dict[str, float]:
    """Returns FLOP/s of GEMMs by size, bytes/s of a sum, seconds of a small kernel."""
    sizes = _SIZES[where.type]
    shapes = [(m, n, k) for m in sizes for n in sizes for k in sizes]
    each = seconds / (len(shapes) * len(_DTYPES) + 2)
    rates = {}
    for name, dtype in _DTYPES.items():
        for m, n, k in shapes:
            a, b = torch.ones(m, k, dtype=dtype, device=where), torch.ones(n, k, dtype=dtype, device=where)
            taken = _best(lambda a=a, b=b: torch.nn.functional.linear(a, b), where, each)  # type: ignore[misc]
            rates[f"gemm {name} {m} {n} {k}"] = 2 * m * n * k / taken
    large = torch.ones(_LARGE[where.type] // 4, device=where)
    result, small = torch.empty_like(large), torch.ones(1, device=where)
    rates["bytes"] = 3 * large.nbytes / _best(lambda: torch.add(large, large, out=result), where, each)
    if where.type == "cuda":  # launches, of which the device waits for none
        rates["launch"] = _best(lambda: [small.add_(1) for _ in range(100)], where, each) / 100
    else:
        rates["launch"] = _best(lambda: small.add_(1), where, each)
    return rates


def _links(where: torch.device, ranks: ProcessGroup, seconds: float) -> dict[str, float]:
    """Returns latency and bandwidth of a ring whose all-reduces would take as long."""
    size = ranks.size()
    if size == 1:
        return {}
    times = []
    for payload in (_SMALL, _BIG):
        tensor = torch.ones(payload // 4, device=where)
        # The number of calls must be that of all ranks
        taken = [_best(lambda t=tensor: dist.all_reduce(t, group=ranks), where, 0) for _ in range(3)]  # type: ignore[misc]
        number = torch.tensor([max(3, min(200, int(seconds / 2 / max(taken))))], device=where)
        dist.all_reduce(number, dist.ReduceOp.MIN, group=ranks)
        for _ in range(int(number)):
            dist.barrier(ranks)
            taken.append(_best(lambda t=tensor: dist.all_reduce(t, group=ranks), where, 0))  # type: ignore[misc]
        times.append(min(taken))
    per_byte = max(1e-15, (times[1] - times[0]) / (_BIG - _SMALL))
    bandwidth = 2 * (size - 1) / size / per_byte
    latency = max(0.0, times[0] - _SMALL * per_byte) / (2 * (size - 1))
    return {"latency": latency, "bandwidth": bandwidth}


def _memory(where: torch.device, ranks: int) -> float:
    if where.type == "cuda":
        return float(torch.cuda.get_device_properties(where).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
