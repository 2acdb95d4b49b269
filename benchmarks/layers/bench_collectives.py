"""Collectives on CPU: gloo, tp_ext's backend over shared memory, and a copy of as many bytes.

Bytes are those of the full tensor (fp32): the input of all-reduce, the output of all-gather, the input of
reduce-scatter, broadcast and all-to-all. "copy" is a bare memcpy of them that all ranks do at the same time, a bound:
each call except reduce-scatter writes as much on every rank. The path "dist" is torch.distributed's function, "region"
the C++ operator of ``tp_ext.reduce_from_region``, which returns a new tensor. "clone" also returns one and does not
communicate: for large tensors it measures the cost of new pages. All times include the call from Python. Results are
compared with exact ones before any measurement. The time of a call is that of the slowest rank.

    python -m benchmarks.layers.bench_collectives --op all_reduce --ranks 2
"""

import argparse
import ctypes
import functools
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lib import interleave, report
from benchmarks.lib.report import Record
from tp_ext import _ops
from tp_ext.group import group_name

OPS = ("all_reduce", "all_gather_into_tensor", "reduce_scatter_tensor", "broadcast", "all_to_all_single")
SIZES = (256, 4 << 10, 64 << 10, 1 << 20, 32 << 20)
COLORS = {"copy": "gray", "clone": "black"}
Call = Callable[[], object]


def buffers(op: str, size: int, p: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Input and output, zeros: all-reduce and broadcast write to their input, and sums must not grow."""
    whole, part = size // 4, size // 4 // p
    source = torch.zeros(part if op == "all_gather_into_tensor" else whole)
    target = torch.zeros(part if op == "reduce_scatter_tensor" else whole)
    return source, source if op in ("all_reduce", "broadcast") else target


def through_dist(op: str, source: torch.Tensor, target: torch.Tensor, group: Any) -> Call:
    if op == "all_reduce":
        return functools.partial(dist.all_reduce, source, group=group)
    if op == "broadcast":
        return functools.partial(dist.broadcast, source, 0, group=group)
    return functools.partial(getattr(dist, op), target, source, group=group)


def through_region(source: torch.Tensor, group: Any) -> Call:
    return functools.partial(_ops.reduce_from_region, source, group_name(group))


def expected(op: str, size: int, rank: int, p: int) -> torch.Tensor:
    """The result on ``rank`` if every rank r passes `given`: small whole numbers, whose sums are exact."""
    inputs = [given(op, size, r, p) for r in range(p)]
    if op == "broadcast":
        return inputs[0]
    if op == "all_gather_into_tensor":
        return torch.cat(inputs)
    if op == "all_to_all_single":
        return torch.cat([x.chunk(p)[rank] for x in inputs])
    total = torch.stack(inputs).sum(0)
    return total if op == "all_reduce" else total.chunk(p)[rank]


def given(op: str, size: int, rank: int, p: int) -> torch.Tensor:
    return torch.arange(len(buffers(op, size, p)[0])) % 7 + 10.0 * rank


@functools.cache
def checked(op: str, size: int, path: str, backend: str) -> Call:
    """On a rank: one call, whose result is checked."""
    group = interleave.group_on(backend)
    rank, p = dist.get_rank(), dist.get_world_size()
    source, target = buffers(op, size, p)
    call = through_region(source, group) if path == "region" else through_dist(op, source, target, group)
    source.copy_(given(op, size, rank, p))
    result = call()
    result = target if path == "dist" else result
    assert torch.equal(result, expected(op, size, rank, p)), f"{op} of {size} bytes, {path} over {backend}: wrong"
    source.zero_()
    return call


@functools.cache
def clone(size: int) -> Call:
    """On a rank: a new tensor of ``size`` bytes, the minimum of a call out of place."""
    return torch.zeros(size // 4).clone


@functools.cache
def copy(size: int) -> Call:
    """On a rank: memcpy of ``size`` bytes between two tensors."""
    source, target = torch.ones(size // 4), torch.zeros(size // 4)

    def call(keep: object = (source, target)) -> None:
        ctypes.memmove(to, from_, size)

    to, from_ = target.data_ptr(), source.data_ptr()
    call()
    assert torch.equal(source, target)
    return call


def measure(op: str, size: int, p: int, pinned: bool, seconds: float, block: float) -> list[Record]:
    """A record for each implementation."""
    ways = [("dist", backend) for backend in interleave.BACKENDS]
    ways += [("region", backend) for backend in interleave.BACKENDS] if op == "all_reduce" else []
    subjects = {
        f"{path}, {backend}": interleave.on_ranks(p, checked, op, size, path, backend) for path, backend in ways
    }
    subjects |= {"clone": interleave.on_ranks(p, clone, size)} if op == "all_reduce" else {}
    subjects["copy"] = interleave.on_ranks(p, copy, size)
    times = interleave.take(subjects, seconds, block, turns=5 if seconds else 1)
    medians = {name: statistics.median(values) for name, values in times.items()}
    return [
        {
            "ranks": p,
            "pinned": "pinned" if pinned else "not pinned",
            "op": op,
            "bytes": size,
            "way": name,
            "median_us": medians[name] * 1e6,
            "min_us": min(values) * 1e6,
            "calls": len(values),
            "gloo_ratio": medians["dist, gloo"] / medians[name],
            "copy_ratio": medians[name] / medians["copy"],
        }
        for name, values in times.items()
    ]


def draw(figure: Any, records: list[Record]) -> None:
    """A row for each setting, a panel for each call: median us over bytes, both logarithmic."""
    settings = list(dict.fromkeys((r["ranks"], r["pinned"]) for r in records))
    ops = list(dict.fromkeys(r["op"] for r in records))
    figure.set_size_inches(3.6 * len(ops), 3.2 * len(settings))
    grid = figure.subplots(len(settings), len(ops), squeeze=False, sharex=True, sharey=True)
    for row, setting in zip(grid, settings, strict=True):
        for axes, op in zip(row, ops, strict=True):
            rows = [r for r in records if (r["ranks"], r["pinned"], r["op"]) == (*setting, op)]
            for way in dict.fromkeys(r["way"] for r in rows):
                line = [(r["bytes"], r["median_us"]) for r in rows if r["way"] == way]
                axes.loglog(*zip(*line, strict=True), marker=".", label=way, color=COLORS.get(way))
            axes.set_title(f"{op}, {setting[0]} ranks, {setting[1]}", fontsize=8)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=6)
    for axes in grid[-1]:
        axes.set_xlabel("bytes")
    for row in grid:
        row[0].set_ylabel("us, median")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", choices=OPS, nargs="*", default=OPS)
    parser.add_argument("--ranks", type=int, nargs="*", help="default: 2 4; --quick: 2")
    report.add_options(parser)
    args = parser.parse_args()
    seconds, block = (0.0, 0.0) if args.quick else (4.0, 0.2) if args.full else (0.5, 0.05)
    run_stamp = report.stamp("cpu")
    print(", ".join(f"{key} {value}" for key, value in run_stamp.items()))
    cores, records = interleave.cores(), []
    for p in args.ranks or ([2] if args.quick else [2, 4]):
        for pinned in (True, False) if p <= len(cores) and not args.quick else (False,):
            interleave.pin_ranks(p, cores, pinned)
            for op in args.op:
                rows = []
                for size in (256, 64 << 10) if args.quick else SIZES:
                    rows += measure(op, size, p, pinned, seconds, block)
                report.print_table(rows)
                records += rows
    if args.csv:
        report.write(args.csv, Path(__file__).stem, run_stamp, records, lambda figure: draw(figure, records))


if __name__ == "__main__":
    main()
