"""The log of a run of ``train_gpt.py``: a row of ``loss.csv`` per step, a progress bar or lines, a plot at the end."""

import argparse
import csv
import sys
from pathlib import Path
from typing import Any

from tqdm import tqdm

COLUMNS = ["step", "loss", "held_out_loss", "lr", "tokens_per_s"]


class RunLog:
    """Rank 0's log; on other ranks it does nothing. Rows are flushed as they are written, so a killed run keeps them.

    A resumed run continues ``loss.csv`` at ``first_step``: rows of later steps, which no checkpoint has, are dropped.
    """

    def __init__(self, options: argparse.Namespace, first_step: int, rank: int) -> None:
        self.options, self.rank, self.rows = options, rank, list[dict[str, Any]]()
        if rank != 0:
            return
        path = options.out / "loss.csv"
        if first_step and path.exists():
            self.rows = [row for row in read_rows(path) if int(row["step"]) < first_step]
        self._file = path.open("w", newline="")
        self._writer = csv.DictWriter(self._file, COLUMNS)
        self._writer.writeheader()
        self._writer.writerows(self.rows)
        self._file.flush()
        bar = sys.stderr.isatty() and not options.quiet
        self._bar = tqdm(total=options.steps, initial=first_step, mininterval=1.0) if bar else None

    def print(self, text: str) -> None:
        if self.rank == 0:
            print(text, flush=True)

    def step(self, step: int, loss: float, held_out: float | None, lr: float, rate: float, memory_mib: float) -> None:
        if self.rank != 0:
            return
        values = [step, loss, "" if held_out is None else held_out, f"{lr:.3e}", f"{rate:.0f}"]
        self.rows.append(dict(zip(COLUMNS, values, strict=True)))
        self._writer.writerow(self.rows[-1])
        self._file.flush()
        figures = f"loss {loss:.4f}, {rate:,.0f} tokens/s, {memory_mib:,.0f} MiB"
        figures += "" if held_out is None else f", held-out loss {held_out:.4f}"
        if self._bar is not None:
            self._bar.set_postfix_str(figures, refresh=False)
            self._bar.update()
        elif not self.options.quiet and ((step + 1) % self.options.log_every == 0 or held_out is not None):
            self.print(f"step {step + 1}/{self.options.steps}: {figures}")

    def close(self) -> None:
        if self.rank == 0:
            self._file.close()
            if self._bar is not None:
                self._bar.close()

    def summary(self) -> str:
        first, last = self.rows[0], self.rows[-1]
        held_out = f", held-out loss {float(last['held_out_loss']):.4f}" if last["held_out_loss"] != "" else ""
        return f"first loss {float(first['loss']):.4f}, last loss {float(last['loss']):.4f}{held_out}"

    def plot(self, path: Path) -> None:
        """Both losses over the steps."""
        import matplotlib

        matplotlib.use("Agg")
        import matplotlib.pyplot as plt

        figure, axes = plt.subplots(figsize=(7, 4))
        axes.plot([int(row["step"]) for row in self.rows], [float(row["loss"]) for row in self.rows], label="training")
        held_out = [row for row in self.rows if row["held_out_loss"] != ""]
        values = [float(row["held_out_loss"]) for row in held_out]
        axes.plot([int(row["step"]) for row in held_out], values, "o-", label="held-out text")
        axes.set(xlabel="step", ylabel="loss (nats per byte)", title="Loss")
        axes.grid(alpha=0.3)
        axes.legend()
        figure.savefig(path, dpi=120, bbox_inches="tight")


def read_rows(path: Path) -> list[dict[str, Any]]:
    """The rows of a ``loss.csv``; a last one that was cut off by a kill is left out."""
    with path.open() as file:
        return [row for row in csv.DictReader(file) if row["tokens_per_s"]]
