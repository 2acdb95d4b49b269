"""Saving a model and its AdamW on 1 and 2 ranks: 300 small parameters, and a few large ones. Seconds, and memory.

"torch.save" writes the full state of the unsharded model in one process, "and fsync" waits for the disk as all others
do; before each save nothing is left to write. "returns" is the time until an asynchronous save returns, the other times
those until the checkpoint is on disk. Memory is the growth of the largest resident set of a rank during a call (VmHWM
of /proc), in MiB, next to the MiB that it writes. Each checkpoint is loaded and compared before any measurement.
"""

import functools
import os
import shutil
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import tp_ext
from benchmarks.lib import interleave, report
from benchmarks.lib.memory import high_water
from benchmarks.lib.report import Record
from tests.helpers import ranks

CASES = {"300 small parameters": (150, 32), "8 large parameters": (4, 1536)}  # linears with a bias, features
SUBJECTS = ("torch.save", "torch.save and fsync", "dcp.save", "save_checkpoint")
RETURNS = ("copy", "dcp.async_save, returns", "save_checkpoint(asynchronous=True), returns")


@functools.cache
def trained(linears: int, features: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """On a rank: a model and its optimizer after a step."""
    group = dist.group.WORLD
    model = nn.ModuleList(tp_ext.ColumnParallelLinear(features, features, group=group) for _ in range(linears))
    optimizer = torch.optim.AdamW(model.parameters())
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


@functools.cache
def own_group() -> Any:
    return dist.new_group(backend="gloo")


@functools.cache
def on_rank(subject: str, linears: int, features: int, folder: str) -> Callable[[], Callable[[], object]]:
    """On a rank: a call that returns what waits for the end of a save."""
    model, optimizer = trained(linears, features)
    path = Path(folder) / subject
    if subject == "copy":
        tensors = [*model.state_dict().values(), *(t for s in optimizer.state.values() for t in s.values())]
        return lambda: [tensor.clone() for tensor in tensors] and (lambda: None)
    if subject.startswith("torch.save"):
        full = tp_ext.full_state_dict(model), tp_ext.full_optimizer_state_dict(model, optimizer)

        def write() -> Callable[[], object]:
            if dist.get_rank() == 0:
                with open(path, "wb") as file:
                    torch.save(full, file)
                    if "fsync" in subject:
                        file.flush()
                        os.fsync(file.fileno())
            return lambda: None

        return write
    if subject.startswith("dcp"):

        def save() -> Callable[[], object]:
            warnings.simplefilter("ignore")  # that an earlier checkpoint is there
            state = tp_ext.sharded_state_dict(model, optimizer)
            if "async" not in subject:
                dcp.save(state, checkpoint_id=path)
                return lambda: None
            return dcp.async_save(state, checkpoint_id=path, process_group=own_group()).result

        return save

    def ours() -> Callable[[], object]:
        saving = tp_ext.save_checkpoint(path, model, optimizer, step=1, asynchronous="async" in subject)
        return (lambda: None) if saving is None else saving.result

    ours()()
    before = [param.detach().clone() for param in model.parameters()]
    tp_ext.load_checkpoint(path, model, optimizer)
    assert all(map(torch.equal, before, model.parameters()))
    return ours


def _times(group: Any, subject: str, args: tuple, count: int) -> list[tuple[float, float, float]]:
    """For each call the seconds until it returns and until it is done, and the MiB of memory that it takes."""
    call, found = on_rank(subject, *args), []
    for _ in range(count):
        if dist.get_rank() == 0:
            os.sync()  # else an fsync waits for data of the save before it, which did not
        dist.barrier()
        before = high_water(reset=True)
        ends: list[Callable[[], object]] = []
        returned = interleave.seconds_of(lambda: ends.append(call()), 1)[0]  # noqa: B023
        done = returned + interleave.seconds_of(ends[0], 1)[0]
        found.append((returned, done, (high_water() - before) / 1024))
    return found


def measure(of: tuple[str, int], seconds: float, block: float) -> list[Record]:
    case, p = of
    turns, count = (1, 1) if not seconds else (9, 3) if seconds > 20 else (5, 1)
    folder = tempfile.mkdtemp(prefix="bench_checkpoint_")
    found: dict[str, list[tuple[float, ...]]] = {name: [] for name in SUBJECTS + RETURNS}
    try:
        for _ in range(turns):
            for name, times in found.items():
                each = ranks.run(_times, p, name, (*CASES[case], folder), count, timeout=interleave.TIMEOUT)
                times += [tuple(map(max, zip(*calls, strict=True))) for calls in zip(*each, strict=True)]
    finally:
        shutil.rmtree(folder)
    linears, features = CASES[case]
    written = 3 * 4 * linears * (features + 1) * features / p / 2**20
    base = statistics.median(done for _, done, _ in found["torch.save"])
    rows: list[Record] = []
    for name, times in found.items():
        returned, done, memory = (statistics.median(values) for values in zip(*times, strict=True))
        taken = returned if name in RETURNS else done
        rows.append(
            {
                "case": name,
                "parameters": case,
                "ranks": p,
                "median_ms": taken * 1e3,
                "done_ms": done * 1e3,
                "of torch.save": taken / base,
                "memory_MiB": memory,
                "written_MiB": written,
            }
        )
    return rows


draw = report.bars("{parameters}, ranks: {ranks}", "of torch.save", "times of torch.save, medians")


def main() -> None:
    report.run(__file__, __doc__, lambda quick: [(case, p) for case in CASES for p in (1, 2)], measure, draw)


if __name__ == "__main__":
    main()
