"""examples/train_gpt.py as a user starts it: whole runs under torchrun, resumed, misused, and killed in the middle."""

import csv
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).parents[1]
SIZES = {"hidden-size": 24, "num-layers": 1, "num-heads": 4, "num-kv-heads": 2, "ffn-hidden-size": 40}
SIZES |= {"seq-length": 15, "batch-size": 3, "max-mib": 1, "timeout": 20}
SMALL = [word for name, value in SIZES.items() for word in (f"--{name}", str(value))]


def _launch(p: int, out: Path, *arguments: str) -> subprocess.Popen:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(p)]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    return subprocess.Popen(
        [*command, str(ROOT / "examples" / "train_gpt.py"), *SMALL, "--out", str(out), *arguments],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        cwd=out.parent,
    )


def _train(p: int, out: Path, *arguments: str) -> list[float]:
    process = _launch(p, out, *arguments)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    with (out / "loss.csv").open() as file:
        return [float(row["loss"]) for row in csv.DictReader(file)]


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("text")
    (folder / "a.txt").write_text("the quick brown fox jumps over the lazy dog. " * 50)
    (folder / "b.bin").write_bytes(b"\0\1\2" * 100)  # not text: left out
    (folder / "deep").mkdir()
    (folder / "deep" / "c.txt").write_text("pack my box with five dozen liquor jugs. " * 50)
    return folder


def test_resumed_at_another_p_goes_on_as_if_uninterrupted(text, tmp_path):
    """8 steps on one rank = 5 on two, then 3 on one: weights, AdamW's state, dropout and batches all go on."""
    options = ["--data", str(text), "--dtype", "float64", "--sample-bytes", "0"]
    whole = _train(1, tmp_path / "whole", "--steps", "8", *options)
    begun = _train(2, tmp_path / "parts", "--steps", "5", "--sequence-parallel", *options)
    assert begun == pytest.approx(whole[:5], abs=1e-9, rel=0)
    resumed = _train(1, tmp_path / "parts", "--steps", "8", "--resume", *options)
    assert resumed[:5] == begun
    assert resumed == pytest.approx(whole, abs=1e-9, rel=0)


def test_output_files_and_sample(text, tmp_path):
    process = _launch(2, tmp_path / "run", "--data", str(text), "--steps", "3", "--sample-bytes", "8")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert re.search(r"first loss \d\.\d+, last loss \d\.\d+", output)
    assert "--- sample\ndef " in output
    assert (tmp_path / "run" / "sample.txt").read_text().startswith("def ")
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert [file.name for file in (tmp_path / "run").glob("*.tmp")] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--data", "/nowhere"], r"--data: /nowhere must be an existing file or folder"),
        (["--steps", "0"], r"--steps: 0 must be at least 1"),
        (["--num-kv-heads", "3"], r"num_kv_heads: must divide num_heads; num_heads = 4, num_kv_heads = 3, p = 2"),
    ],
    ids=["data", "steps", "heads"],
)
def test_wrong_arguments_are_named(arguments, message, tmp_path):
    process = _launch(2, tmp_path / "run", *arguments)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert re.search(message, output), output


def test_a_killed_rank_ends_the_job_and_the_last_checkpoint_loads(text, tmp_path):
    """kill -9 of one rank in the middle of a step: the launcher ends within the timeout, says which rank and why."""
    out = tmp_path / "run"
    options = ["--data", str(text), "--save-every", "3", "--sample-bytes", "0"]
    process = _launch(2, out, "--steps", "100000", *options)
    deadline = time.monotonic() + 90
    while not (out / "checkpoint").exists():
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
    begin = time.monotonic()
    os.kill(int(children[-1]), signal.SIGKILL)
    output, _ = process.communicate(timeout=60)
    assert process.returncode != 0
    assert time.monotonic() - begin < 40
    assert "SIGKILL" in output and "Root Cause" in output
    steps = len(torch.load(out / "checkpoint" / "extra.pt", weights_only=True)["losses"])
    assert steps and steps % 3 == 0
    resumed = _train(2, out, "--steps", str(steps + 2), "--resume", *options)
    assert len(resumed) == steps + 2
