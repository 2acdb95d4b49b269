"""Weights from one layout to another in memory: a refit, a save and a load, a broadcast of the full state; 2 ranks.

The source are linears over 2 ranks; the target is the same on rank 0 alone, so that half of its bytes move ("to one
rank"), or sharded on the other dim, so that each rank receives a quarter of all ("other dim"). As many bytes are copied
within the ranks. "all-to-all" is one call of the backend with the bytes that move, from and to memory that is there;
"with copies" copies in addition what the rank has received and what it has itself to the target: what no refit that
keeps old weights until all have confirmed can do without. "broadcast" gathers each full tensor and loads it. MiB are
those that all ranks receive in a refit. Every subject is compared with the source before it is measured. Files are in
the folder for temporary ones. All keep the memory of freed tensors (``keep_memory``).
"""

import functools
import tempfile
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import tp_ext
from benchmarks.lib import interleave, report
from benchmarks.lib.report import Record

SUBJECTS = (
    "refit, tp_shm",
    "refit, gloo",
    "all-to-all, tp_shm",
    "all-to-all, gloo",
    "with copies, tp_shm",
    "with copies, gloo",
    "save and load",
    "broadcast, tp_shm",
)
TARGETS = ("to one rank", "other dim")


@functools.cache
def models(layers: int, features: int, target: str, over: str) -> tuple[nn.Module, nn.Module | None]:
    """On a rank: source and target, the target with other weights."""
    group = interleave.group_on(over)
    column, row = tp_ext.ColumnParallelLinear, tp_ext.RowParallelLinear

    def model(kind: type[nn.Module], group: Any) -> nn.Module:
        options = {"bias": False, "group": group}
        return nn.ModuleList(kind(features, features, **options) for _ in range(layers))

    torch.manual_seed(0)
    source = model(column, group)
    torch.manual_seed(1)
    if target == "other dim":
        return source, model(row, group)
    return source, model(column, None) if dist.get_rank() == 0 else None


def check(source: nn.Module, target: nn.Module | None) -> None:
    """Raises unless the target has the weights of the source, and gives it others again."""
    full = tp_ext.full_state_dict(source)
    for name, param in () if target is None else target.named_parameters():
        layout = dict(tp_ext.layouts(target))[name]
        assert torch.equal(param, layout.shard(full[name])), name
        param.data.zero_()


@functools.cache
def on_rank(subject: str, layers: int, features: int, to: str, folder: str) -> Callable[[], object]:
    """On a rank: the call that is measured."""
    tp_ext.keep_memory()
    way, _, over = subject.partition(", ")
    group = interleave.group_on(over or "tp_shm")
    source, target = models(layers, features, to, over or "tp_shm")
    if way.startswith("refit"):
        plan = tp_ext.refit.plan(source, target, process_group=group, atomic="False" not in way)
        call: Callable[[], object] = plan.run
    elif way in ("all-to-all", "with copies"):
        bytes_ = 4 * layers * features**2 // 4
        sent = [0, 0]
        if to == "other dim":
            sent[1 - group.rank()] = bytes_
        elif group.rank() == 1:
            sent[0] = 2 * bytes_
        received = list(sent) if to == "other dim" else [0, 2 * bytes_ * (group.rank() == 0)]
        a, b = torch.ones(sum(sent), dtype=torch.uint8), torch.ones(sum(received), dtype=torch.uint8)
        if way == "all-to-all":
            return lambda: dist.all_to_all_single(b, a, received, sent, group=group)
        # Half of the target comes from other ranks, the other half from this one
        half = [torch.ones(sum(received), dtype=torch.uint8) for _ in range(3)]

        def both() -> None:
            dist.all_to_all_single(b, a, received, sent, group=group)
            half[0].copy_(b)
            half[1].copy_(half[2])

        return both
    elif way == "save and load":

        def call() -> None:
            tp_ext.save_checkpoint(f"{folder}/{to}", source)
            if target is not None:
                alone = group_of_one() if to == "to one rank" else None
                tp_ext.load_checkpoint(f"{folder}/{to}", target, process_group=alone)
            elif to == "to one rank":
                group_of_one()
    else:

        def call() -> None:
            state = tp_ext.full_state_dict(source, rank0_only=to == "to one rank")
            if target is not None:
                tp_ext.load_full_state_dict(target, state)

    call()
    check(source, target)
    return call


@functools.cache
def group_of_one() -> Any:
    return dist.new_group([0])


def measure(case: tuple[int, int, str], seconds: float, block: float) -> list[Record]:
    with tempfile.TemporaryDirectory(prefix="bench_refit_") as folder:
        subjects = {name: interleave.on_ranks(2, on_rank, name, *case, folder) for name in SUBJECTS}
        times = interleave.take(subjects, seconds, block)
    layers, features, to = case
    parameters, moved = f"{layers} of {features} x {features}", 4 * layers * features**2 / 2 / 2**20
    return interleave.rows(
        times,
        {"target": to, "parameters": parameters, "MiB": moved},
        lambda of, name: {"of with copies": of[name] / of[f"with copies, {name.partition(', ')[2] or 'tp_shm'}"]},
    )


draw = report.bars("{parameters}, {target}", "median_ms", "ms, medians", None)


def main() -> None:
    def cases(quick: bool) -> list[tuple[int, int, str]]:
        sizes = [(2, 64)] if quick else [(8, 2048), (200, 64)]
        return [(*size, to) for size in sizes for to in TARGETS]

    report.run(__file__, __doc__, cases, measure, draw)


if __name__ == "__main__":
    main()
