"""Training in fewer bits, next to training without: losses of the example GPT on real text, a curve per way.

    .venv/bin/python -m tests.soak.low_precision float8 --steps 1000 --plot loss.png

``float8``: bf16 by autocast on one rank, and with linears in 8-bit floating point, a scale per tensor or per row, on 1,
2 and 4 ranks of tensor parallelism. ``gradients``: on 2 and 4 data ranks, DDP, and DDP with compressed gradients (int8,
float8; int8 without feedback for comparison). All start with the same weights and read the same batches. It prints the
mean loss of the last 50 steps and its distance to that of the plain way (of gradients on as many ranks), and ends with
1 if one is above by more than 1 % (``float8``), or 0.2 % (gradients, with feedback), or if a recipe's losses depend on
the number of ranks: by 0.1 % in the first 10 steps, or 1 % at the end.
"""

import argparse
import csv
import importlib
import io
import statistics
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from tests.helpers import ranks
from tests.helpers.paths import ROOT
from tp_ext.low_precision import Float8, compress_gradients, float8

GRADIENTS: dict[str, Any] = {
    "fp32": None,
    "int8": {"compress": "int8"},
    "float8": {"compress": "float8"},
    "int8, no feedback": {"compress": "int8", "feedback": False},
}
FLOAT8 = {"bf16": None, "tensor": Float8("tensor"), "row": Float8("row")}
LENGTH, BATCH, LAST = 64, 8, 50


@dataclass(frozen=True)
class Run:
    steps: int
    seed: int = 0  # of the weights and of the batches
    kv_heads: int = 2


def _gpt(group: Any, seed: int, **sizes: int) -> nn.Module:
    sys.path.insert(0, str(ROOT / "examples"))
    gpt = importlib.import_module("gpt")
    torch.manual_seed(seed)
    config = gpt.GPTConfig(dropout=0.0, num_layers=2, **sizes)
    model: nn.Module = gpt.GPT(config, group)
    return model


def _steps(
    run: Run, model: nn.Module, loss_of: Callable[[Tensor, Tensor], Tensor], rank: int = 0, p: int = 1
) -> list[float]:
    """Trains with a data rank's share of each batch; returns its losses."""
    data = importlib.import_module("data")
    text = torch.frombuffer(bytearray(data.split(data.read_text(None, 4 << 20), LENGTH)[0]), dtype=torch.uint8)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for step in range(run.steps):
        generator = torch.Generator().manual_seed(step + run.seed * 1_000_000)
        starts = torch.randint(len(text) - LENGTH, (BATCH, 1), generator=generator)
        windows = text[starts.tensor_split(p)[rank] + torch.arange(LENGTH + 1)].long()
        loss = loss_of(windows[:, :-1], windows[:, 1:])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_with_gradients(group: Any, run: Run, options: dict[str, Any] | None) -> list[float]:
    """On a data rank: the loss of each step, the mean over all ranks."""
    model = DistributedDataParallel(
        _gpt(None, run.seed, hidden_size=96, num_heads=6, num_kv_heads=3, ffn_hidden_size=256), process_group=group
    )
    if options is not None:
        compress_gradients(model, **options)

    def loss_of(ids: Tensor, target: Tensor) -> Tensor:
        return torch.nn.functional.cross_entropy(model(ids).reshape(-1, 256), target.reshape(-1))

    total = torch.tensor(_steps(run, model, loss_of, group.rank(), group.size()), dtype=torch.float64)
    torch.distributed.all_reduce(total, group=group)
    return (total / group.size()).tolist()


def train_in_float8(group: Any, run: Run, recipe: Float8 | None) -> list[float]:
    """On a rank of tensor parallelism: the loss of each step. With two KV heads four ranks have copies."""
    model: Any = _gpt(group, run.seed, hidden_size=64, num_heads=4, num_kv_heads=run.kv_heads, ffn_hidden_size=176)
    if recipe is not None:
        float8(model, recipe)

    def loss_of(ids: Tensor, target: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            loss: Tensor = model.loss(ids, target)
        return loss

    return _steps(run, model, loss_of)


def draw(curves: dict[str, list[float]], path: Path) -> None:
    """Draws means over 20 steps: of each curve, and its distance to the plain way before it."""
    pyplot: Any = importlib.import_module("matplotlib.pyplot")
    figure, (above, below) = pyplot.subplots(2, 1, sharex=True, figsize=(7, 5))
    for name, losses in curves.items():
        means = torch.tensor(losses).unfold(0, 20, 20).mean(1)
        if name.split(", ")[0] in ("fp32", "bf16"):
            plain = means
        steps = torch.arange(10, len(losses), 20)[: len(means)]
        above.plot(steps, means, label=name, linewidth=1)
        below.plot(steps, 100 * (means / plain - 1), linewidth=1)
    above.set_ylabel("loss")
    below.set_ylabel("distance to the plain way, %")
    below.set_xlabel("step")
    above.legend(fontsize=7)
    figure.tight_layout()
    image = io.BytesIO()
    figure.savefig(image, dpi=90)
    # A palette: a half of the bytes
    importlib.import_module("PIL.Image").open(image).convert("RGB").quantize(200).save(path, optimize=True)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("kind", choices=["float8", "gradients"])
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--ranks", type=int, nargs="+")
    parser.add_argument("--ways", nargs="+", help="some of the ways, the plain one first; default: all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--kv-heads", type=int, default=2, help="of float8's model, which has 4 heads")
    parser.add_argument("--out", type=Path, help="a CSV file of all losses")
    parser.add_argument("--plot", type=Path, help="a picture of the curves")
    options = parser.parse_args()
    in_float8 = options.kind == "float8"
    train, ways, axis, most = (
        (train_in_float8, FLOAT8, "tp", 1e-2) if in_float8 else (train_with_gradients, GRADIENTS, "dp", 2e-3)
    )
    ways = {name: how for name, how in ways.items() if name in (options.ways or ways)}
    run = Run(options.steps, options.seed, options.kv_heads)
    curves: dict[str, list[float]] = {}
    failed, plain = False, 0.0
    for p in options.ranks or ([1, 2, 4] if in_float8 else [2, 4]):
        plain = plain if in_float8 else 0.0
        for name, how in ways.items():
            if in_float8 and how is None and plain:
                continue
            losses = ranks.run(train, p, run, how, timeout=7200)[0]
            curves[f"{name}, {axis} {p}"] = losses
            final = statistics.mean(losses[-LAST:])
            plain = plain or final
            distance = final / plain - 1
            failed |= distance > most and not name.endswith("no feedback")
            print(f"{axis} {p}  {name:<18} {final:.5f}  {100 * distance:+.3f} %", flush=True)
            if in_float8 and name != "bf16":
                failed |= not _agree(losses, next(c for n, c in curves.items() if n.startswith(name)))
    if options.out:
        with options.out.open("w", newline="") as file:
            writer = csv.writer(file)
            writer.writerow(["step", *curves])
            writer.writerows(zip(range(options.steps), *curves.values(), strict=True))
    if options.plot:
        draw(curves, options.plot)
    return int(failed)


def _agree(losses: list[float], others: list[float]) -> bool:
    first = max(abs(a / b - 1) for a, b in zip(losses[:10], others[:10], strict=True))
    last = statistics.mean(losses[-LAST:]) / statistics.mean(others[-LAST:]) - 1
    print(
        f"      from the fewest ranks: first 10 steps {100 * first:.4f} %, last {LAST} {100 * last:+.3f} %", flush=True
    )
    return first < 1e-3 and abs(last) < 1e-2


if __name__ == "__main__":
    sys.exit(main())
