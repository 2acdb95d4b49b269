"""Training in fewer bits, next to training without: losses of the example GPT on real text, a curve per way.

    .venv/bin/python -m tests.soak.low_precision --steps 1000 --plot loss.png

On 2 and 4 data ranks over gloo: DDP, and DDP with compressed gradients (int8, float8; int8 without feedback for
comparison). All start with the same weights and read the same batches. It prints the mean loss of the last 50 steps and
its distance to that of plain DDP on as many ranks, and ends with 1 if one with feedback is above 0.2 %.
"""

import argparse
import csv
import importlib
import io
import statistics
import sys
from pathlib import Path
from typing import Any

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.helpers import ranks
from tests.helpers.paths import ROOT
from tp_ext.low_precision import compress_gradients

WAYS: dict[str, dict[str, Any] | None] = {
    "fp32": None,
    "int8": {"compress": "int8"},
    "float8": {"compress": "float8"},
    "int8, no feedback": {"compress": "int8", "feedback": False},
}
LENGTH, BATCH, LAST = 64, 8, 50


def train(group: Any, steps: int, options: dict[str, Any] | None) -> list[float]:
    """On a rank: the loss of each step, the mean over all ranks."""
    sys.path.insert(0, str(ROOT / "examples"))
    data, gpt = importlib.import_module("data"), importlib.import_module("gpt")
    text = torch.frombuffer(bytearray(data.split(data.read_text(None, 4 << 20), LENGTH)[0]), dtype=torch.uint8)
    torch.manual_seed(0)
    sizes = {"hidden_size": 96, "num_layers": 2, "num_heads": 6, "num_kv_heads": 3, "ffn_hidden_size": 256}
    model = DistributedDataParallel(gpt.GPT(gpt.GPTConfig(dropout=0.0, **sizes)), process_group=group)
    if options is not None:
        compress_gradients(model, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    share = BATCH // group.size()
    losses = []
    for step in range(steps):
        starts = torch.randint(
            len(text) - LENGTH, (BATCH, 1), generator=torch.Generator().manual_seed(step)
        ).tensor_split(group.size())[group.rank()]
        windows = text[starts + torch.arange(LENGTH + 1)].long()
        assert len(windows) == share
        loss = torch.nn.functional.cross_entropy(model(windows[:, :-1]).reshape(-1, 256), windows[:, 1:].reshape(-1))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        total = loss.detach().double()
        torch.distributed.all_reduce(total, group=group)
        losses.append(float(total) / group.size())
    return losses


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Draws means over 20 steps: of each curve, and its distance to plain DDP on as many ranks."""
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 5))
    for name, losses in curves.items():
        means = torch.tensor(losses).unfold(0, 20, 20).mean(1)
        plain = torch.tensor(curves["fp32, " + name.rpartition(", ")[2]]).unfold(0, 20, 20).mean(1)
        steps = torch.arange(10, len(losses), 20)[: len(means)]
        above.plot(steps, means, label=name, linewidth=1)
        below.plot(steps, 100 * (means / plain - 1), linewidth=1)
    above.set_ylabel("loss")
    below.set_ylabel("distance to fp32, %")
    below.set_xlabel("step")
    above.legend(fontsize=7)
    figure.tight_layout()
    image = io.BytesIO()
    figure.savefig(image, dpi=90)
    # A palette: a half of the bytes
    importlib.import_module("PIL.Image").open(image).convert("RGB").quantize(200).save(path, optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4])
    parser.add_argument("--out", type=Path, help="a CSV file of all losses")
    parser.add_argument("--plot", type=Path, help="a picture of the curves")
    options = parser.parse_args()
    curves: dict[str, list[float]] = {}
    failed = False
    for p in options.ranks:
        plain = 0.0
        for name, how in WAYS.items():
            losses = ranks.run(train, p, options.steps, how, timeout=3600)[0]
            curves[f"{name}, dp {p}"] = losses
            final = statistics.mean(losses[-LAST:])
            plain = plain or final
            distance = final / plain - 1
            failed |= distance > 2e-3 and how is not None and "feedback" not in how
            print(f"dp {p}  {name:<18} {final:.5f}  {100 * distance:+.3f} %", flush=True)
    if options.out:
        with options.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["step", *curves])
            writer.writerows(zip(range(options.steps), *curves.values(), strict=True))
    if options.plot:
        draw(curves, options.plot)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
