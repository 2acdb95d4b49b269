"""``make demo``: trains on two ranks and on one, and compares the losses and the text that the trained models write.

In fp64: training amplifies rounding errors about a millionfold in 200 steps, so in fp32 the losses of two correct runs
would differ visibly at the end.
"""

import argparse
import csv
import os
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent


def train(ranks: int, out: Path, steps: int) -> list[float]:
    """Losses of a run of ``train_gpt.py`` on ``ranks`` ranks, which share the cores."""
    cores = len(os.sched_getaffinity(0))
    environment = os.environ | {
        "OMP_NUM_THREADS": str(max(1, cores // ranks)),
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
    }
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    script = [str(HERE / "train_gpt.py"), "--steps", str(steps), "--out", str(out)]
    script += ["--sequence-parallel", "--dtype", "float64", "--overwrite"]
    print(f"\n=== {ranks} rank{'s' * (ranks > 1)}", flush=True)
    subprocess.run(launch + script, env=environment, check=True)
    with (out / "loss.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    arguments = parser.parse_args()
    two, one = (train(ranks, arguments.out / f"{ranks}-ranks", arguments.steps) for ranks in (2, 1))
    apart = max(abs(a - b) for a, b in zip(two, one, strict=True))
    print(f"\nloss, nats per byte, over {arguments.steps} steps in fp64   first    last")
    print(f"2 ranks (tensor and sequence parallel)           {two[0]:.4f}  {two[-1]:.4f}")
    print(f"1 rank                                           {one[0]:.4f}  {one[-1]:.4f}")
    print(f"largest difference at any step                   {apart:.1e}")
    texts = [(arguments.out / f"{ranks}-ranks" / "sample.txt").read_text() for ranks in (2, 1)]
    print(f"text sampled after training                      {'the same' if texts[0] == texts[1] else 'DIFFERENT'}")
    print(f"loss curve: {arguments.out / '2-ranks' / 'loss.png'}")


if __name__ == "__main__":
    main()
