"""The memory that training takes at each stage of ZeRO, against DDP and the formula; 2 and 4 ranks.

A model of 8 equal MLPs with AdamW in fp32 on few tokens, so that parameters, gradients and states are nearly all of it.
"MiB" is the growth of the largest resident set of a rank (VmHWM of /proc), from before the model is made to the end of
the second step. "formula": with n parameters on d ranks, in bytes, 4 n (parameters) + 4 n (gradients) + 8 n (states),
each whole or 1/d; under DDP its buckets, 4 n; with ZeRO-3 the gathered parameters of two blocks of b parameters and the
whole gradients of one, 12 b; with ZeRO-2 all gathered parameters, 4 n, and 4 b. On a CPU the memory of the host is that
of the device: `offload` shows that it costs nothing more. malloc returns what is freed (M_MMAP_THRESHOLD of 64 KiB):
else it keeps the buffers that FSDP2 frees, and ZeRO-3 takes more than DDP.
"""

import argparse
import ctypes
import gc
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import tp_ext
from benchmarks.lib import report
from benchmarks.lib.memory import high_water
from benchmarks.lib.report import Record
from tests.helpers import ranks

BLOCKS = 8
STAGES = {"DDP": (0, False), "ZeRO-1": (1, False), "ZeRO-2": (2, False), "ZeRO-3": (3, False)}
STAGES["ZeRO-3 and offload"] = (3, True)


def mse(output: Tensor, target: Tensor) -> Tensor:
    return (output - target).square().mean()


def _growth(group: Any, zero: int, offload: bool, features: int) -> float:
    """On a rank: the MiB that building and two steps take."""
    ctypes.CDLL(None).mallopt(-3, 65536)  # M_MMAP_THRESHOLD
    mesh = tp_ext.init_mesh("cpu")
    gc.collect()
    before = high_water(reset=True)
    with torch.device("meta"):
        model = nn.Sequential(*(tp_ext.ParallelMLP(features, 4 * features, group=mesh["tp"]) for _ in range(BLOCKS)))
    run = tp_ext.parallelize(model, mesh, loss=mse, count=lambda target: target.numel(), zero=zero, offload=offload)
    optimizer = run.optimizer(torch.optim.AdamW, lr=1e-3, foreach=False)
    x = torch.ones(2, features)
    for _ in range(2):
        run.step(x, x)
        optimizer.step()
        optimizer.zero_grad()
    return (high_water() - before) / 1024


def formula(zero: int, n: int, d: int) -> float:
    """MiB."""
    block = n / BLOCKS
    parameters = n / d if zero > 1 else n
    gradients = n / d if zero > 1 else n
    states = 2 * n / d if zero else 2 * n
    buffers = {2: n + block, 3: 3 * block}.get(zero, n)
    return 4 * (parameters + gradients + states + buffers) / 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_options(parser)
    args = parser.parse_args()
    features = 64 if args.quick else 1024 if args.full else 768
    n = BLOCKS * (8 * features**2 + 5 * features)
    run_stamp = report.stamp("cpu")
    print(", ".join(f"{key} {value}" for key, value in run_stamp.items()))
    records: list[Record] = []
    for d in (2,) if args.quick else (2, 4):
        for name, (zero, offload) in STAGES.items():
            ranks.close()  # a fresh process has no memory to use again
            grown = max(ranks.run(_growth, d, zero, offload, features, timeout=300))
            row: Record = {"case": name, "dp": d, "MiB": grown, "formula_MiB": formula(zero, n, d)}
            first = next((r["MiB"] for r in records if r["dp"] == d), grown)
            records.append(row | {"of DDP": grown / first})  # type: ignore[operator]
    report.print_table(records)
    if args.csv:
        panels: dict[str, dict[str, Any]] = {}
        for r in records:
            panels.setdefault(f"dp = {r['dp']}", {})[str(r["case"])] = r["MiB"]
        report.write(
            args.csv, Path(__file__).stem, run_stamp, records, lambda figure: report.draw_bars(figure, panels, "MiB")
        )


if __name__ == "__main__":
    main()
