"""Overlap of communication with GEMMs and attention, on ranks of this machine.

    python -m benchmarks.layers.trace_overlap                     # times, in 1, 2, 4 and 8 chunks
    python -m benchmarks.layers.trace_overlap --png overlap.png   # and a picture of rank 0
    python -m benchmarks.layers.trace_overlap --trace traces      # and chrome traces (json.gz), one per rank and case

Cases: the backward of a column linear (the sum of dx during the GEMM of dw), and the operations that `overlap_chunks`
splits: the forward of a column linear under sequence parallelism (gather, GEMM), of a row linear (GEMM, sum) and of one
under sequence parallelism (GEMM, reduce-scatter), and the backward of that (gather, GEMM, GEMM). The results in chunks
are compared with those without chunks first. And ring attention over a context group of all ranks (8 heads of 64, 2 KV
heads), whose exchanges run during the attention to the block at hand. One thread a rank.
"""

import argparse
import datetime
import gzip
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor

import tp_ext
from tp_ext.nn.attention.context_attention import context_attention

Times = dict[str, dict[int, list[float]]]  # ms, by case and number of chunks
Span = tuple[str, float, float]  # what, when it began and ended, in ms
GEMMS = ("aten::mm", "aten::addmm", "aten::_scaled_dot_product")
COLLECTIVES = ("gloo:", "tp_shm:")
TRACES = 9  # of each case; other work on the machine disturbs the shortest least


def cases(group: Any, args: argparse.Namespace, chunks: int) -> dict[str, Callable[[], list[Tensor]]]:
    """One step of each case, by name; returns its results."""
    torch.manual_seed(0)
    p, tokens, hidden, ffn = group.size(), args.tokens, args.hidden, args.ffn
    sp: dict[str, Any] = {"group": group, "bias": False, "overlap_chunks": chunks, "sequence_parallel": True}
    plain = sp | {"sequence_parallel": False}
    column, column_sp = (tp_ext.ColumnParallelLinear(hidden, ffn, **o) for o in (plain, sp))
    row, row_sp = (tp_ext.RowParallelLinear(ffn, hidden, **o) for o in (plain, sp))
    x, x_sp, h = (torch.randn(s) for s in ((tokens, hidden), (tokens // p, hidden), (tokens, ffn // p)))
    x.requires_grad_()

    def forward(layer: torch.nn.Module, x: Tensor) -> list[Tensor]:
        with torch.no_grad():
            return [layer(x)]

    def backward(layer: torch.nn.Module, x: Tensor, dy: Tensor) -> Callable[[], list[Tensor]]:
        y = layer(x)
        return lambda: list(torch.autograd.grad(y, [x, layer.weight], dy, retain_graph=True))

    ring: dict[str, Callable[[], list[Tensor]]] = {}
    if chunks == 1:
        layout = tp_ext.ContextLayout(batch=1, seq=tokens, group=group)
        q, k, v = (torch.randn(1, tokens // p, heads, 64, requires_grad=True) for heads in (8, 2, 2))
        attended = context_attention(q, k, v, layout)
        ring["ring forward"] = lambda: [context_attention(q.detach(), k.detach(), v.detach(), layout)]
        ring["ring backward"] = lambda: list(
            torch.autograd.grad(attended, [q, k, v], torch.ones_like(attended), retain_graph=True)
        )
    return ring | {
        "column backward": backward(column, x, h),
        "column sp forward": lambda: forward(column_sp, x_sp),
        "row forward": lambda: forward(row, h),
        "row sp forward": lambda: forward(row_sp, h),
        "row sp backward": backward(row_sp, h.clone().requires_grad_(), x_sp),
    }


def measure(group: Any, args: argparse.Namespace, every: dict[int, dict[str, Callable[[], list[Tensor]]]]) -> Times:
    times: Times = {}
    for name in every[1]:
        want = every[1][name]()
        alike = {n: steps for n, steps in every.items() if name in steps}
        for steps in alike.values():
            for got, one in zip(steps[name](), want, strict=True):
                assert (got - one).norm() <= 1e-5 * one.norm(), name
        times[name] = {n: [] for n in alike}
        for _ in range(args.repeats):
            for n, steps in alike.items():  # in turns, all ranks at once
                dist.barrier(group)
                start = time.perf_counter()
                steps[name]()
                times[name][n].append((time.perf_counter() - start) * 1e3)
    return times


def traced(group: Any, step: Callable[[], list[Tensor]], path: Path) -> list[Span]:
    """GEMMs and collectives of a step, from the chrome trace at ``path``: of several steps, rank 0's shortest."""
    best: list[Span] = []
    shortest = torch.tensor(float("inf"))
    for _ in range(TRACES):
        dist.barrier(group)
        with torch.profiler.profile() as profile:
            step()
        profile.export_chrome_trace(f"{path}.new.json.gz")
        with gzip.open(f"{path}.new.json.gz") as file:
            events = json.load(file)["traceEvents"]
        found = [e for e in events if e.get("ph") == "X" and e["name"].startswith((*GEMMS, *COLLECTIVES))]
        first = min(e["ts"] for e in found)
        spans = [(e["name"], (e["ts"] - first) / 1e3, (e["ts"] - first + e["dur"]) / 1e3) for e in found]
        length = torch.tensor(max(end for _, _, end in spans))
        dist.broadcast(length, 0, group)
        if length < shortest:
            shortest, best = length, spans
            Path(f"{path}.new.json.gz").rename(path)
    Path(f"{path}.new.json.gz").unlink(missing_ok=True)
    return best


def work(rank: int, args: argparse.Namespace, folder: str, results: Any) -> None:
    torch.set_num_threads(1)
    store = dist.FileStore(f"{folder}/store", args.ranks)
    dist.init_process_group(f"cpu:{args.backend}", store=store, rank=rank, world_size=args.ranks)
    group = dist.group.WORLD
    every = {n: cases(group, args, n) for n in (1, *args.chunks)}
    times = measure(group, args, every)
    lines: dict[str, list[Span]] = {}
    if args.png or args.trace:
        where = Path(args.trace or folder)
        where.mkdir(parents=True, exist_ok=True)
        for name in every[1]:
            for n in (n for n in (1, args.drawn) if name in every[n] and (n == 1 or name != "column backward")):
                path = where / f"{name.replace(' ', '_')}_{n}_rank{rank}.json.gz"
                lines[f"{name}, {'one chunk' if n == 1 else f'{n} chunks'}"] = traced(group, every[n][name], path)
    if rank == 0:
        results.put((times, lines))
    dist.barrier(group)
    dist.destroy_process_group()


def table(times: Times) -> str:
    """Fastest and median ms without chunks, and the times with chunks over those."""
    middle = lambda values: sorted(values)[len(values) // 2]  # noqa: E731
    counts = sorted({n for by in times.values() for n in by if n > 1})
    text = f"{'case':<20}{'min ms':>9}{'median':>9}" + "".join(f"{f'{n}: min':>9}{'median':>9}" for n in counts) + "\n"
    for name, by in times.items():
        cells = [min(by[1]), middle(by[1])]
        cells += [f(by[n]) / f(by[1]) for n in counts if n in by for f in (min, middle)]
        text += f"{name:<20}" + "".join(f"{cell:9.2f}" for cell in cells) + "\n"
    return text


def draw(lines: dict[str, list[Span]], path: str, title: str) -> None:
    from matplotlib import pyplot

    figure, panels = pyplot.subplots(len(lines), figsize=(11, 1.05 * len(lines) + 0.8), squeeze=False)
    for axis, (name, spans) in zip(panels[:, 0], lines.items(), strict=True):
        for what, start, end in spans:
            gemm = what.startswith(GEMMS)
            axis.barh(
                1 if gemm else 0, end - start, left=start, color="C0" if gemm else "C1", edgecolor="black", lw=0.6
            )
        axis.set_yticks([0, 1], ["collective", "compute"])
        axis.set_title(name, loc="left", fontsize=9)
        axis.margins(x=0.01)
    panels[-1, 0].set_xlabel("ms")
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    print(f"{path} drawn")


def main() -> None:
    parser = argparse.ArgumentParser(description="Times, traces and draws communication during GEMMs.")
    parser.add_argument("--backend", default="gloo", help="gloo or tp_shm (default: %(default)s)")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--ffn", type=int, default=2048)
    parser.add_argument("--chunks", type=lambda text: [int(n) for n in text.split(",")], default=[2, 4, 8])
    parser.add_argument("--drawn", type=int, default=4, help="chunks in the picture (default: %(default)s)")
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--png", help="file to draw rank 0 into")
    parser.add_argument("--trace", help="folder for the chrome traces")
    args = parser.parse_args()
    args.chunks = sorted({*args.chunks, args.drawn} if args.png or args.trace else {*args.chunks})
    about = (
        f"{args.backend}, {args.ranks} ranks, {args.tokens} tokens, {args.hidden} x {args.ffn}, fp32, "
        f"torch {torch.__version__}, {datetime.date.today()}"
    )
    print(about)
    context = mp.get_context("spawn")
    results = context.SimpleQueue()
    with tempfile.TemporaryDirectory() as folder:
        ranks = [context.Process(target=work, args=(r, args, folder, results)) for r in range(args.ranks)]
        for process in ranks:
            process.start()
        times, lines = results.get()
        for process in ranks:
            process.join()
    print(table(times))
    if args.png:
        draw(lines, args.png, f"rank 0: {about}")


if __name__ == "__main__":
    main()
