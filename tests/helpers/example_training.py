"""Runs of examples/train_gpt.py in the pool of ranks, without torchrun and its imports of torch."""

import csv
from pathlib import Path
from unittest import mock

import torch
import train_gpt

from tests.helpers import ranks

SIZES = {"hidden-size": 24, "num-layers": 1, "num-heads": 4, "num-kv-heads": 2, "ffn-hidden-size": 40}
SIZES |= {"seq-length": 15, "batch-size": 3, "max-mib": 1, "timeout": 20}
SMALL = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]


def write_text(folder: Path) -> Path:
    """Makes a folder of text to train with, and returns it."""
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 50)
    (folder / "b.bin").write_bytes(b"\0\1\2" * 100)  # not text: left out
    (folder / "deep").mkdir()
    (folder / "deep" / "c.txt").write_text("the five boxing wizards jump quickly. " * 50)
    return folder


def losses(out: Path) -> list[float]:
    with (out / "loss.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


def held_out_losses(out: Path) -> dict[str, float]:
    with (out / "loss.csv").open() as file:
        return {row["step"]: float(row["held_out_loss"]) for row in csv.DictReader(file) if row["held_out_loss"]}


def train_on_rank(group, out: Path, arguments: tuple[str, ...]) -> None:
    words = ["train_gpt.py", *SMALL, "--out", str(out), *arguments, "--quiet"]
    environment = {"LOCAL_RANK": str(group.rank()), "WORLD_SIZE": str(group.size())}
    with mock.patch("sys.argv", words), mock.patch.dict("os.environ", environment):
        options = train_gpt.parse_options("")
    texts = train_gpt.split(train_gpt.read_text(options.data, options.max_mib * 2**20), options.seq_length)
    try:
        with mock.patch("signal.signal"):
            train_gpt.train(options, texts, torch.device("cpu"))
    finally:
        torch.set_default_dtype(torch.float32)


def train(p: int, out: Path, *arguments: str) -> list[float]:
    """Trains on p ranks; returns the losses."""
    ranks.run(train_on_rank, p, out, arguments, timeout=180)
    return losses(out)
