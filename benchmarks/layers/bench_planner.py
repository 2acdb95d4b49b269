"""Predicted steps of this machine next to measured ones: layouts of 1, 2 and 4 ranks of one thread each.

A profile is measured first, by ``planner.measure``: of one process, of two and of four ranks at once, and of the links
of each backend, in a minute for all of them. Then every layout trains the same model, of attention, SwiGLU MLPs or
experts, on the same global batch, in turns; its time is the least over all steps of the slowest rank. Two ranks share a
core where there are four, neighbours of them, which work at the same time.
All of them keep the memory of freed tensors.
"""

import argparse
import itertools
import statistics
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh, init_device_mesh

import tp_ext
from benchmarks.lib import interleave, report
from benchmarks.lib.report import Record
from tests.helpers import ranks
from tests.helpers.planned_model import Model
from tp_ext import planner
from tp_ext.planner import Cluster, Layout

SIZES = {"layers": 4, "hidden": 384, "heads": 6, "kv_heads": 6, "ffn": 1024, "vocab": 2048, "seq": 128}
EXPERTS = {"experts": 4, "top_k": 2, "expert_ffn": 512}
BATCH = 8
AXES = ("pp", "dp", "ep", "cp", "tp")
TIMEOUT = 900.0

Case = tuple[str, dict[str, Any]]  # a backend and the arguments of a layout

ALONE: list[dict[str, Any]] = [
    {"micro_batch": 8},
    {"micro_batch": 4},
    {"micro_batch": 2},
    {"micro_batch": 8, "recompute": "full"},
    {"micro_batch": 8, "recompute": "selective"},
]
TWO: list[dict[str, Any]] = [
    {"tp": 2, "micro_batch": 8},
    {"tp": 2, "micro_batch": 8, "sequence_parallel": False},
    {"tp": 2, "micro_batch": 2},
    {"tp": 2, "micro_batch": 8, "recompute": "full"},
    *({"dp": 2, "micro_batch": 4, "zero": zero} for zero in range(4)),
    {"dp": 2, "micro_batch": 4, "zero": 3, "recompute": "full"},
    {"cp": 2, "micro_batch": 8},
    *({"pp": 2, "micro_batch": 1, "schedule": name} for name in ("GPipe", "1F1B")),
    {"pp": 2, "micro_batch": 2},
    *({"pp": 2, "virtual": 2, "micro_batch": 1, "schedule": name} for name in ("Interleaved1F1B", "ZBVZeroBubble")),
    {"ep": 2, "dp": 1, "micro_batch": 4},
]
FOUR: list[dict[str, Any]] = [
    {"tp": 4, "micro_batch": 8},
    {"dp": 4, "micro_batch": 2},
    {"dp": 4, "micro_batch": 2, "zero": 3},
    {"dp": 2, "tp": 2, "micro_batch": 4},
    {"dp": 2, "tp": 2, "micro_batch": 4, "zero": 2, "recompute": "selective"},
    {"dp": 2, "cp": 2, "micro_batch": 4},
    {"pp": 2, "tp": 2, "micro_batch": 1},
    {"pp": 2, "dp": 2, "micro_batch": 1},
    {"pp": 2, "tp": 2, "virtual": 2, "micro_batch": 1, "schedule": "ZBVZeroBubble"},
    {"ep": 2, "dp": 1, "tp": 2, "micro_batch": 4},
]
GLOO: list[dict[str, Any]] = [
    {"tp": 2, "micro_batch": 8},
    {"dp": 2, "micro_batch": 4},
    {"dp": 2, "micro_batch": 4, "zero": 3},
    {"pp": 2, "micro_batch": 1},
]


def sizes_of(layout: Layout) -> dict[str, int]:
    return SIZES | (EXPERTS if layout.ep > 1 else {})


def workload_of(layout: Layout) -> planner.Workload:
    return planner.transformer(**sizes_of(layout))  # type: ignore[arg-type]


def layout_of(options: dict[str, Any]) -> Layout:
    return Layout(dp=options.get("dp", 1), dtype="fp32", **{k: v for k, v in options.items() if k != "dp"})


class Training:
    """A step of a layout on this rank."""

    def __init__(self, layout: Layout) -> None:
        mesh = mesh_of(layout)
        torch.manual_seed(0)
        with torch.device("meta"):
            model = Model(sizes_of(layout), mesh, layout.sequence_parallel)
        self.run = tp_ext.parallelize(model, mesh, loss=model.loss, **layout.arguments(BATCH))
        self.optimizer = self.run.optimizer(torch.optim.AdamW)
        self.tokens = tp_ext.ContextLayout(batch=layout.micro_batch, seq=SIZES["seq"], group=mesh["cp"])
        rows = layout.micro_batch * layout.microbatches(BATCH)
        self.ids = self.tokens.shard(torch.randint(SIZES["vocab"], (rows, SIZES["seq"])), 1)

    def __call__(self) -> None:
        self.run.step(self.ids, self.ids, layout=self.tokens)
        self.optimizer.step()
        self.optimizer.zero_grad()


def mesh_of(layout: Layout) -> DeviceMesh:
    shape = tuple(getattr(layout, axis) for axis in AXES)
    return init_device_mesh("cpu", shape, mesh_dim_names=AXES)


def on_rank(folder: str, backend: str, p: int, options: list[dict[str, Any]], seconds: float, minutes: float) -> Any:
    """On a rank: the profile, and the seconds of every step of each layout."""
    tp_ext.keep_memory()  # as the examples do
    store = dist.FileStore(f"{folder}/{backend}-{p}", p)
    rank = store.add("ranks", 1) - 1
    cores = interleave.cores()
    interleave.pin([cores[rank * min(p, len(cores)) // p]])
    dist.init_process_group(backend, store=dist.PrefixStore("group", store), rank=rank, world_size=p)
    profile = planner.measure("cpu", dist.group.WORLD, minutes)
    trainings = [Training(layout_of(arguments)) for arguments in options]
    times: list[list[float]] = [[] for _ in options]
    for training in trainings:
        training()
    start = time.perf_counter()
    for turn in itertools.count():
        for training, taken in zip(trainings, times, strict=True):
            for _ in range(2):
                dist.barrier()
                taken += interleave.seconds_of(training, 1)
        over = torch.tensor([float(turn >= 1 and time.perf_counter() - start > seconds)])
        dist.all_reduce(over, dist.ReduceOp.MAX)
        if over.item():
            break
    everyone: list[Any] = [None] * p
    dist.all_gather_object(everyone, times)
    dist.destroy_process_group()
    slowest = [[max(step) for step in zip(*of_ranks, strict=True)] for of_ranks in zip(*everyone, strict=True)]
    return profile, slowest


def measured(cases: list[tuple[str, int, list[dict[str, Any]]]], seconds: float, passes: int) -> list[Record]:
    """Each backend and number of ranks with its layouts: ``passes`` times, since a machine changes."""
    profiles: dict[tuple[str, int], list[Cluster]] = {}
    times: dict[tuple[str, int, int], list[float]] = {}
    for _ in range(passes):
        for backend, p, options in cases:
            with TemporaryDirectory() as folder:
                arguments = (folder, backend, p, options, seconds * len(options), 1 / len(cases) / passes)
                profile, steps = ranks.run_apart(on_rank, p, *arguments, timeout=TIMEOUT)[0]
            profiles.setdefault((backend, p), []).append(profile)
            for i, taken in enumerate(steps):
                times.setdefault((backend, p, i), []).extend(taken)
    rows: list[Record] = []
    for backend, p, options in cases:
        for i, one in enumerate(options):
            layout = layout_of(one)
            # Of the profiles, too, the one of the fastest minute
            predicted = (
                planner.predict(workload_of(layout), profile, layout, BATCH) for profile in profiles[backend, p]
            )
            got = min(predicted, key=lambda one: one.step_time)
            least = min(times[backend, p, i])
            name = ", ".join(f"{key} {value}" for key, value in one.items())
            spent = {f"{k}_ms": 1e3 * v for k, v in got.breakdown.items()}
            rows.append(
                {
                    "layout": f"{backend}: {name}",
                    "ranks": p,
                    "measured_ms": 1e3 * least,
                    "median_ms": 1e3 * statistics.median(times[backend, p, i]),
                    "predicted_ms": 1e3 * got.step_time,
                    "error": got.step_time / least - 1,
                    **spent,
                }
            )
    return rows


def summary(rows: list[Record]) -> str:
    errors = sorted(abs(float(row["error"])) for row in rows)  # type: ignore[arg-type]
    # Of one model: layouts with ep train another one, of experts
    dense = [row for row in rows if ": ep " not in str(row["layout"])]
    times = [(float(row["measured_ms"]), float(row["predicted_ms"])) for row in dense]  # type: ignore[arg-type]
    pairs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in itertools.combinations(times, 2)]
    tau = sum((x > 0) - (x < 0) for x in pairs) / len(pairs)
    best = min(times)[0]
    pick = min(times, key=lambda both: both[1])[0]
    return (
        f"{len(rows)} layouts: median error {statistics.median(errors):.1%}, worst {errors[-1]:.1%}, "
        f"Kendall's tau {tau:.2f}, the planner's pick takes {pick / best - 1:.1%} more than the best"
    )


def draw(figure: Any, records: list[Record]) -> None:
    axes = figure.subplots()
    for p in sorted({int(row["ranks"]) for row in records}):  # type: ignore[call-overload]
        some = [row for row in records if row["ranks"] == p]
        axes.plot([r["measured_ms"] for r in some], [r["predicted_ms"] for r in some], "o", label=f"{p} ranks")
    low, high = (f(float(row["measured_ms"]) for row in records) for f in (min, max))  # type: ignore[arg-type]
    axes.plot([low, high], [low, high], "k-", lw=0.5)
    axes.set(xlabel="measured step [ms]", ylabel="predicted step [ms]", xscale="log", yscale="log")
    axes.legend()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_options(parser)
    args = parser.parse_args()
    cases = [("tp_shm", 1, ALONE), ("tp_shm", 2, TWO), ("tp_shm", 4, FOUR), ("gloo", 2, GLOO)]
    seconds, passes = (0.0, 1) if args.quick else (12.0, 3) if args.full else (4.0, 2)
    if args.quick:
        cases = [(backend, p, options[:1]) for backend, p, options in cases[:2]]
    circumstances = report.stamp("cpu")
    rows = measured(cases, seconds, passes)
    report.print_table(rows)
    print(summary(rows))
    if args.csv:
        report.write(args.csv, Path(__file__).stem, circumstances, rows, lambda figure: draw(figure, rows))


if __name__ == "__main__":
    main()
