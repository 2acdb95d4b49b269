"""The idle share of pipelines whose stages have a fixed cost, against the formula, and the picture of a step.

Forward, gradient of the input and gradient of the weights of a rank sleep for the same time each, which v stages on a
rank share. So processes need no cores, and what exceeds the formula is the cost of messages and of Python. "measured"
is the median of `schedule.bubble` of three steps. There is no formula for schedules that split the backward: they must
be below 1F1B. `--pictures FOLDER` draws one more step of the schedules on 2 ranks.
"""

import argparse
import statistics
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tp_ext
from benchmarks.lib import interleave, report
from benchmarks.lib.report import Record
from tests.helpers import ranks

CASES = [  # schedule, ranks, microbatches
    *(("GPipe", p, m) for p in (2, 4) for m in (1, 3, 16)),
    *((name, p, 2 * p) for p in (2, 4) for name in ("GPipe", "1F1B", "LoopedBFS", "Interleaved1F1B")),
    *((name, p, 2 * p) for p in (2, 4) for name in ("InterleavedZeroBubble", "ZBVZeroBubble", "DualPipeV")),
]
DRAWN = ("GPipe", "1F1B", "Interleaved1F1B", "ZBVZeroBubble")


class Sleep(torch.autograd.Function):
    """The identity, whose forward (if ``both``) and backward take a fixed time."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float, both: bool) -> Tensor:
        ctx.seconds = seconds
        if both:
            time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return dy, None, None


class SleepingBlock(nn.Module):
    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.weight, self.seconds = nn.Parameter(torch.ones(4)), seconds

    def forward(self, x: Tensor) -> Tensor:
        x = x + 0 * self.weight  # the first one, too, has an input that needs a gradient
        y: Tensor = Sleep.apply(x, self.seconds, True) * Sleep.apply(self.weight, self.seconds, False)
        return y


def _steps(group: Any, name: str, microbatches: int, seconds: float, count: int, picture: str | None) -> Any:
    """On a rank: the idle share of each step, and the formula's."""
    stages = 2 * group.size()
    model = nn.Sequential(*(SleepingBlock(seconds / 2) for _ in range(stages)))
    schedule = tp_ext.parallel.pipeline_stages(
        model, group, schedule=name, microbatches=microbatches, loss=lambda y, t: y.mean()
    )
    x, found = torch.ones(microbatches, 4), []
    schedule.step(x, target=x)
    for _ in range(count):
        dist.barrier()
        schedule.step(x, target=x)
        found.append(schedule.bubble)
    if picture:
        with tp_ext.debug.record_timeline(group) as timeline:
            schedule.step(x, target=x)
        if group.rank() == 0:
            timeline.save(picture, title=f"{name}, {group.size()} ranks, {microbatches} microbatches")
    return found, schedule.ideal_bubble


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_options(parser)
    parser.add_argument("--pictures", type=Path, metavar="FOLDER", help="draw FOLDER/pipeline_<schedule>.svg")
    args = parser.parse_args()
    seconds, count = (0.01, 1) if args.quick else (0.1, 3)
    run_stamp = report.stamp("cpu")
    print(", ".join(f"{key} {value}" for key, value in run_stamp.items()))
    records: list[Record] = []
    for name, p, microbatches in CASES if not args.quick else CASES[:1]:
        drawn = args.pictures and p == 2 and name in DRAWN and microbatches == 2 * p
        picture = str(args.pictures / f"pipeline_{name}.svg") if drawn else None
        found, ideal = ranks.run(_steps, p, name, microbatches, seconds, count, picture, timeout=interleave.TIMEOUT)[0]
        measured = statistics.median(found)
        row: Record = {"case": f"{name}, p = {p}, m = {microbatches}", "measured": measured, "formula": ideal}
        records.append(row | {"of formula": measured / ideal if ideal else None})
    report.print_table(records)
    if args.csv:
        panels = {"idle share": {str(r["case"]): r["measured"] for r in records}}
        report.write(
            args.csv, Path(__file__).stem, run_stamp, records, lambda figure: report.draw_bars(figure, panels, "")
        )


if __name__ == "__main__":
    main()
