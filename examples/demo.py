"""``make demo``: trains on two ranks and on one, and compares the losses and the text that the trained models write.

``make demo-3d`` (``--all-axes``) trains on three meshes of 8 ranks and on one rank. All in fp64: training amplifies
rounding errors, so in fp32 the losses of two correct runs would soon differ visibly.
"""

import argparse
import csv
import os
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent


class Run(NamedTuple):
    """A training on a mesh: the line of the table, the folder, the ranks, further options."""

    title: str
    folder: str
    ranks: int
    options: str = ""


ONE = Run("1 rank", "1-ranks", 1)
TWO = [Run("2 ranks (tensor and sequence parallel)", "2-ranks", 2, "--sequence-parallel"), ONE]
ALL_AXES = [
    Run("pp 2 x dp 2 x tp 2, ZeRO-1, timeline", "pp-dp-tp", 8, "--pp 2 --dp 2 --tp 2 --sequence-parallel --zero 1"),
    Run("dp 2 x cp 2 x tp 2, ZeRO-2", "dp-cp-tp", 8, "--dp 2 --cp 2 --tp 2 --sequence-parallel --zero 2"),
    Run("pp 2 x cp 2 x tp 2", "pp-cp-tp", 8, "--pp 2 --cp 2 --tp 2 --sequence-parallel --schedule GPipe"),
    ONE,
]


def train(run: Run, out: Path, steps: int) -> list[float]:
    """Losses of a run of ``train_gpt.py``, whose ranks share the cores."""
    cores = len(os.sched_getaffinity(0))
    environment = os.environ | {
        "OMP_NUM_THREADS": str(max(1, cores // run.ranks)),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(run.ranks)]
    script = [str(HERE / "train_gpt.py"), "--steps", str(steps), "--out", str(out / run.folder)]
    script += ["--dtype", "float64", "--batch-size", "8", "--overwrite", *run.options.split()]
    script += ["--timeline"] if "timeline" in run.title else []
    print(f"\n=== {run.title}", flush=True)
    subprocess.run(launch + script, env=environment, check=True)
    with (out / run.folder / "loss.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, help="default 50; 20 with --all-axes")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--all-axes", action="store_true", help="meshes of 8 ranks instead of two ranks")
    arguments = parser.parse_args()
    runs = ALL_AXES if arguments.all_axes else TWO
    steps = arguments.steps or (20 if arguments.all_axes else 50)
    losses = [train(run, arguments.out, steps) for run in runs]
    apart = max(abs(a - b) for one in losses for a, b in zip(one, losses[-1], strict=True))
    print(f"\nloss, nats per byte, over {steps} steps in fp64".ljust(50) + "first    last")
    for run, own in zip(runs, losses, strict=True):
        print(f"{run.title:<49}{own[0]:.4f}  {own[-1]:.4f}")
    print(f"{'largest difference at any step':<49}{apart:.1e}")
    texts = {(arguments.out / run.folder / "sample.txt").read_text() for run in runs}
    print(f"{'text sampled after training':<49}{'the same' if len(texts) == 1 else 'DIFFERENT'}")
    print(f"loss curve: {arguments.out / runs[0].folder / 'loss.png'}")
    if arguments.all_axes:
        print(f"timeline of a step: {arguments.out / runs[0].folder / 'timeline.png'}")


if __name__ == "__main__":
    main()
