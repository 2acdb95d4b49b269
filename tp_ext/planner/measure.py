"""The profile of this machine, by timing GEMMs, memory-bound kernels and collectives."""

import contextlib
import itertools
import os
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tp_ext import _ops
from tp_ext._checks import check_number
from tp_ext._object_collectives import all_gather_objects, call_and_gather
from tp_ext.group import ALONE, Group, process_group
from tp_ext.planner.machine import Cluster, Device, EfficiencyCurve, Link

_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
_SIZES = {"cpu": (64, 256, 1024), "cuda": (256, 1024, 4096, 8192)}
_FEW = {"cpu": (64, 256), "cuda": _SIZES["cuda"]}  # of bf16, which some CPUs compute at a tenth of the speed
_LARGE = {"cpu": 2**25, "cuda": 2**30}  # bytes of a copy, more than caches hold
_SETS = 16  # of operands of a linear
_WIDE = {"cpu": 1024, "cuda": 8192}  # tokens, and features of the other kernels
_HEADS, _HEAD_DIM = 8, 64
_SMALL, _BIG = 2**12, 2**24  # bytes of a collective
_CHUNKS = 4  # of the time for a kernel


def measure(device: torch.device | str | None = None, group: Group = None, minutes: float = 2) -> Cluster:
    """Measures this machine: a device for each rank of ``group``, joined by one level of links.

    Times the three GEMMs of a linear, by the library that layers take, in fp32 and bf16 (a table for
    :class:`EfficiencyCurve`; the peak is the fastest of them); forward and backward of attention, of a norm, an
    activation and a residual; AdamW; a sum of large tensors; a linear of one element, which is the host's; all-reduces
    of 4 KiB and 16 MiB, from which latency and bandwidth of a ring follow; and an all-gather and a reduce-scatter of 16
    MiB, for the constant ``gather``. Each time is a mean over many calls, of all ranks at once, so that what they share
    (a core, a memory) is shared as in training: a rank computes before and after it measures, until all others have. Of
    four such means the median counts.

    Args:
        device: default: the current GPU, or the CPU without one. group: ranks that measure at the same time, as they
            will train; None: this process alone. minutes: at most so long.

    Communicates: an exchange of kinds of devices, a barrier for each kernel, the all-reduces, and an exchange of what
    each rank measured, of which all take the median.

    Raises:
        TypeError, ValueError, on all ranks: ``minutes`` is no number above 0, ``device`` no CPU and no GPU of this
            machine, or of another kind than on another rank.
    """
    ranks = None if group is None else process_group(group)

    def checked() -> str:
        check_number(above=0, minutes=minutes)
        return _device(device).type

    # The kernels of another kind of device would have another number of barriers
    kinds = [checked()] if ranks is None else call_and_gather(ranks, checked)
    if len(set(kinds)) > 1:
        raise ValueError(f"device: must be of one kind on all ranks of the group, and is {kinds}")
    where = _device(device)
    seconds = 60 * minutes
    rates = _kernels(where, ranks, 0.75 * seconds) | (_links(where, ranks, 0.2 * seconds) if ranks is not None else {})
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
    bandwidth = medians["bytes"]
    measured_device = Device(
        torch.cuda.get_device_name(where) if where.type == "cuda" else "cpu",
        peak=peak,
        memory_bandwidth=bandwidth,
        memory=_memory(where, count),
        launch=medians["launch"],
        asynchronous=where.type != "cpu",
        gemm=EfficiencyCurve(
            table=tuple(table),
            attention=medians["attention"] / peak["bf16" if where.type == "cuda" else "fp32"],
            memory=medians["pointwise"] / bandwidth,
            optimizer=medians["optimizer"] / bandwidth,
        ),
    )
    link = Link(medians.get("latency", 0.0), medians.get("bandwidth", 1e12))
    constants = {"gather": medians["gather"]} if "gather" in medians else {}
    return Cluster(measured_device, count, (link,), constants=constants)


def _device(device: torch.device | str | None) -> torch.device:
    if not isinstance(device, torch.device | str | None):
        raise TypeError(f"device: {device!r} must be a torch.device, its name or None")
    with contextlib.suppress(RuntimeError):  # torch knows no such name
        where = torch.device("cuda" if torch.cuda.is_available() else "cpu") if device is None else torch.device(device)
        if where.type == "cpu" or (where.type == "cuda" and (where.index or 0) < torch.cuda.device_count()):
            return where
    raise ValueError(f"device: {str(device)!r} must be 'cpu', or 'cuda' with a GPU")


def _finished(where: torch.device) -> float:
    """Returns the time when all that was begun has ended."""
    if where.type == "cuda":
        torch.cuda.synchronize(where)
    return time.perf_counter()


def _mean(call: Callable[[], object], where: torch.device, seconds: float, ranks: ProcessGroup | None = None) -> float:
    """Returns the time of a call: the median of some means over calls in a row, of all ranks at once."""
    begin = _finished(where)
    call()
    first = _finished(where) - begin
    if ranks is not None:
        dist.barrier(ranks)
        call()  # each rank computes when the first of them begins to measure
    means = []
    # A call that takes its share of the time is a mean by itself; one that takes all of it is not repeated
    for _ in range(_CHUNKS if first < seconds / _CHUNKS or ranks is not None else int(first < seconds)):
        begin = now = _finished(where)
        calls = 0
        while calls == 0 or now - begin < seconds / _CHUNKS:
            call()
            calls += 1
            now = _finished(where)
        means.append((now - begin) / calls)
    if ranks is not None:
        call()  # .. and when the last of them ends
    return statistics.median(means or [first])


def _product(x: Tensor, w: Tensor) -> Tensor:
    """Returns x w^T by the library whose products the layers have on this processor."""
    return _ops.column_parallel_linear(x, w, None, ALONE.name)


def _kernels(where: torch.device, ranks: ProcessGroup | None, seconds: float) -> dict[str, float]:
    """Returns FLOP/s of GEMMs by size and of attention, bytes/s of the other kernels, seconds of the host."""
    shapes = {
        name: list(itertools.product(sizes[where.type], repeat=3)) for name, sizes in (("fp32", _SIZES), ("bf16", _FEW))
    }
    each = seconds / (len(shapes["fp32"]) + len(shapes["bf16"]) + 5)
    rates = {}
    for name, dtype in _DTYPES.items():
        for m, n, k in shapes[name]:
            shapes_of_linear = (m, k), (n, k), (m, n)
            count = (m * k + n * k + m * n) * dtype.itemsize
            # In turns, as in training: the operands of a layer come from memory, not from a cache
            turns = itertools.cycle(
                [torch.ones(shape, dtype=dtype, device=where) for shape in shapes_of_linear]
                for _ in range(max(1, min(_SETS, _LARGE[where.type] // count)))
            )

            def linear(turns: Iterator[list[Tensor]] = turns) -> None:
                x, w, dy = next(turns)
                _product(x, w), _product(dy, w.t()), _product(dy.t(), x.t())

            taken = _mean(linear, where, each, ranks)
            rates[f"gemm {name} {m} {n} {k}"] = 6 * m * n * k / taken
    large, other, result = (torch.ones(_LARGE[where.type] // 4, device=where) for _ in range(3))
    rates["bytes"] = 3 * large.nbytes / _mean(lambda: torch.add(large, other, out=result), where, each, ranks)

    # The bytes by which a prediction counts these kernels, workload.py and layer.cpp
    n = _WIDE[where.type]
    x, gate, weight = (torch.randn(shape, device=where, requires_grad=True) for shape in ((n, n), (n, 2 * n), (n,)))
    dy = torch.randn(n, n, device=where)

    def block() -> None:
        hidden = x + _ops.rms_norm(x, weight, 1e-5)
        torch.autograd.grad(hidden + _ops.gated_act(gate, None, "swiglu"), (x, gate, weight), dy)

    rates["pointwise"] = 4 * n * n * (2 + 3 + 3 + 5 + 2 * (3 + 1)) / _mean(block, where, each, ranks)

    tokens = n // _HEADS
    query, key, value = (
        torch.randn(_HEADS, _HEADS, tokens, _HEAD_DIM, device=where, requires_grad=True) for _ in range(3)
    )

    def attention() -> None:
        y = _ops.attention(query, key, value, None, True)
        torch.autograd.grad(y, (query, key, value), y)

    flops = 2 * _HEADS * tokens * tokens * 0.5 * _HEADS * 2 * _HEAD_DIM
    rates["attention"] = (1 + 2.5 / 0.8) * flops / _mean(attention, where, each, ranks)

    params = [torch.nn.Parameter(torch.randn(n, n, device=where)) for _ in range(4)]
    optimizer = torch.optim.AdamW(params)
    for param in params:
        param.grad = torch.randn_like(param)
    rates["optimizer"] = 4 * 4 * n * n * (2 + 1 + 2 * 2) / _mean(optimizer.step, where, each, ranks)

    small, host = torch.ones(1, 1, device=where), torch.nn.Linear(1, 1, device=where)
    rates["launch"] = _mean(lambda: host(small).backward(), where, each, ranks) / 3  # a kernel each: y, dw, db
    return rates


def _links(where: torch.device, ranks: ProcessGroup, seconds: float) -> dict[str, float]:
    """Returns latency and bandwidth of a ring whose all-reduces would take as long, and the time of such an all-reduce
    by that of an all-gather and a reduce-scatter, which are one by the formulas."""
    size = ranks.size()
    if size == 1:
        return {}

    def gather_and_scatter(full: Tensor) -> None:  # as ZeRO does
        part = full[ranks.rank() * (len(full) // size) :][: len(full) // size].clone()
        dist.all_gather_into_tensor(full, part, group=ranks)
        dist.reduce_scatter_tensor(part, full, group=ranks)

    def timed(payload: int, call: Callable[[Tensor], object]) -> float:
        # In turns, as above: gradients were written before others
        tensors = [torch.ones(payload // 4 // size * size, device=where) for _ in range(_CHUNKS)]

        def mean(calls: int) -> float:
            begin = _finished(where)
            for number in range(calls):
                call(tensors[number % _CHUNKS])
            return (_finished(where) - begin) / calls

        taken = [mean(3) for _ in range(2)]
        # The number of calls must be that of all ranks
        number = torch.tensor([max(3, min(200, int(seconds / 3 / _CHUNKS / taken[1])))], device=where)
        dist.all_reduce(number, dist.ReduceOp.MIN, group=ranks)
        return statistics.median(mean(int(number)) for _ in range(_CHUNKS))

    times = [timed(payload, partial(dist.all_reduce, group=ranks)) for payload in (_SMALL, _BIG)]
    per_byte = max(1e-15, (times[1] - times[0]) / (_BIG - _SMALL))
    bandwidth = 2 * (size - 1) / size / per_byte
    latency = max(0.0, times[0] - _SMALL * per_byte) / (2 * (size - 1))
    return {"latency": latency, "bandwidth": bandwidth, "gather": times[1] / timed(_BIG, gather_and_scatter)}


def _memory(where: torch.device, ranks: int) -> float:
    if where.type == "cuda":
        return float(torch.cuda.get_device_properties(where).total_memory)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / ranks
