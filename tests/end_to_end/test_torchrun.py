"""examples/train_gpt.py: a run as a user starts it; runs in forked processes, under torchrun's code or without it:
resumed, misused, and killed in the middle."""

import csv
import math
import os
import re
import signal
import subprocess
import sys
import time
from argparse import Namespace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import train_gpt
from gpt import GPT, GPTConfig
from torch.distributed.checkpoint import FileSystemReader

from tests.helpers import ranks, torchrun
from tests.helpers.example_training import SMALL, held_out_losses, train, train_on_rank, write_text
from tests.helpers.paths import ROOT


def _launch(p: int, out: Path, *arguments: str, cold: bool = False) -> torchrun.Job:
    words = ["--standalone", "--nproc-per-node", str(p), str(ROOT / "examples" / "train_gpt.py"), *SMALL]
    return torchrun.start([*words, "--out", str(out), *arguments], out.with_suffix(".txt"), out.parent, cold=cold)


@pytest.fixture(scope="module")
def text(tmp_path_factory) -> Path:
    return write_text(tmp_path_factory.mktemp("text"))


def test_resumed_at_another_p_goes_on_as_if_uninterrupted(text, tmp_path):
    """8 steps on one rank = 5 on two, then 3 on one: weights, AdamW's state, dropout and batches all go on."""
    options = ["--data", str(text), "--dtype", "float64", "--sample-bytes", "0", "--lr-decay-steps", "8"]
    whole = train(1, tmp_path / "whole", "--steps", "8", *options)
    begun = train(2, tmp_path / "parts", "--steps", "5", "--sequence-parallel", *options)
    assert begun == pytest.approx(whole[:5], abs=1e-9, rel=0)
    resumed = train(1, tmp_path / "parts", "--steps", "8", "--resume", *options)
    assert resumed[:5] == begun
    assert resumed == pytest.approx(whole, abs=1e-9, rel=0)


def test_resumed_on_other_meshes_it_goes_on_as_in_one_process(text, tmp_path):
    """All axes, ZeRO and recomputation; the timeline is drawn in the third step of a run."""
    options = ["--data", str(text), "--dtype", "float64", "--lr-decay-steps", "7", "--num-layers", "2"]
    options += ["--batch-size", "4", "--save-every", "0", "--eval-every", "2", "--eval-batches", "1"]
    whole = train(1, tmp_path / "whole", "--steps", "7", *options)
    out, resumed = tmp_path / "parts", ["--resume", "--sample-bytes", "0", *options]
    pipelined = ["--pp", "2", "--tp", "2", "--sequence-parallel", "--schedule", "GPipe", "--timeline"]
    train(4, out, "--steps", "3", *pipelined, "--sample-bytes", "9", *options)
    assert (out / "timeline.png").read_bytes().startswith(b"\x89PNG")
    train(4, out, "--steps", "5", "--dp", "2", "--cp", "2", "--zero", "2", "--recompute", "full", *resumed)
    losses = train(2, out, "--steps", "7", "--dp", "2", "--zero", "1", "--micro-batches", "2", *resumed)
    assert losses == pytest.approx(whole, abs=1e-9, rel=0)
    held_out = held_out_losses(tmp_path / "whole")
    parts = {step: loss for step, loss in held_out_losses(out).items() if step in held_out}
    assert len(held_out) == 4 and parts == pytest.approx(held_out, abs=1e-9, rel=0)


def test_float8_trains_alike_on_one_rank_and_two(text, tmp_path):
    options = ["--data", str(text), "--steps", "4", "--batch-size", "4", "--save-every", "0", "--sample-bytes", "0"]
    options += ["--warmup-steps", "0"]
    plain = train(1, tmp_path / "plain", *options)
    whole = train(1, tmp_path / "whole", "--float8", "row", *options)
    parts = train(2, tmp_path / "parts", "--float8", "row", "--sequence-parallel", *options)
    assert parts == pytest.approx(whole, rel=1e-4)
    assert whole != plain and whole == pytest.approx(plain, rel=1e-2)


def test_bf16_trains_near_fp32(text, tmp_path):
    """Autocast over fp32 parameters, and parameters of bf16."""
    options = ["--data", str(text), "--steps", "4", "--batch-size", "4", "--save-every", "0", "--sample-bytes", "2"]
    exact = train(1, tmp_path / "fp32", *options)
    options += ["--dtype", "bfloat16", "--sequence-parallel"]
    for name, dtype in (("float32", torch.float32), ("bfloat16", torch.bfloat16)):
        losses = train(2, tmp_path / name, "--param-dtype", name, *options)
        assert losses != exact and losses == pytest.approx(exact, rel=1e-2)
        metadata = FileSystemReader(tmp_path / name / "checkpoint").read_metadata().state_dict_metadata
        assert metadata["model.blocks.0.mlp.up.weight"].properties.dtype == dtype


@pytest.mark.exhaustive  # by default tests/end_to_end/test_training_experts.py, with experts
def test_muon_goes_on_over_other_meshes_as_in_one_process(text, tmp_path):
    options = ["--data", str(text), "--dtype", "float64", "--lr-decay-steps", "5", "--num-layers", "2", "--optimizer"]
    options += ["muon", "--batch-size", "4", "--save-every", "0", "--sample-bytes", "0"]
    whole = train(1, tmp_path / "whole", "--steps", "5", *options)
    out = tmp_path / "parts"
    train(4, out, "--steps", "2", "--pp", "2", "--tp", "2", *options)
    train(4, out, "--steps", "4", "--dp", "2", "--tp", "2", "--zero", "3", "--resume", *options)
    losses = train(2, out, "--steps", "5", "--dp", "2", "--resume", *options)
    assert losses == pytest.approx(whole, abs=1e-9, rel=0)
    other = [word.replace("muon", "adamw") for word in options]
    assert train(1, tmp_path / "other", "--steps", "2", *other)[1] != pytest.approx(whole[1], abs=1e-4)


# In processes that are forked, and as a user starts it
STARTED = pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["", "cold"])


@pytest.mark.parametrize(
    ("p", "cold"), [(2, False), *(pytest.param(p, True, marks=pytest.mark.exhaustive) for p in (1, 2))], ids=str
)
def test_output_files_lines_and_sample(p, cold, text, tmp_path):
    options = ["--data", str(text), "--steps", "4", "--eval-every", "2", "--log-every", "3", "--sample-bytes", "8"]
    job = _launch(p, tmp_path / "run", *options, "--plan", "0.01", cold=cold)
    code, output = job.wait(120), job.output
    assert code == 0, output
    assert re.search(r"^a step: \d\S* s predicted, \d\S* s measured, the least of all$", output, re.M)
    assert re.search(r"first loss \d\.\d+, last loss \d\.\d+, held-out loss \d\.\d+", output)
    assert re.findall(r"^step (\d)/4: loss \d", output, re.M) == ["2", "3", "4"] and "\r" not in output
    assert "--- sample\ndef " in output
    assert (tmp_path / "run" / "sample.txt").read_text().startswith("def ")
    assert (tmp_path / "run" / "loss.png").read_bytes().startswith(b"\x89PNG")
    with (tmp_path / "run" / "loss.csv").open() as file:
        assert [bool(row["held_out_loss"]) for row in csv.DictReader(file)] == [False, True, False, True]
    assert [file.name for file in (tmp_path / "run").glob("*.tmp")] == []


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--help"], "Trains a byte-level language model with data, pipeline, context, expert and tensor"),
        (["--data", "/nowhere"], "--data: /nowhere must be an existing file or folder"),
        (["--data", "EMPTY"], "--data: must hold text; there is no file, or all are empty or binary"),
        (["--data", "BINARY"], "--data: must hold text; there is no file, or all are empty or binary"),
        (["--data", "SHORT"], "--data: 10 bytes of text must be at least 258, for a training and a held-out sequence"),
        (["--steps", "0"], "--steps: 0 must be at least 1"),
        (["--num-layers", "0"], "--num-layers: 0 must be at least 1"),
        (["--lr", "-1"], "--lr: -1 must be positive and finite"),
        (["--save-every", "-3"], "--save-every: -3 must be at least 0"),
        (["--sample-bytes", "-1"], "--sample-bytes: -1 must be at least 0"),
        (["--plan", "0"], "--plan: 0 must be positive and finite"),
        (["--dropout", "1"], "--dropout: 1 must be at least 0 and less than 1"),
        (["--batch-size", "many"], "--batch-size: 'many' must be a number"),
        (["--pp", "2"], "--pp: --pp 2 --dp 1 --ep 1 --cp 1 --tp -1 must multiply to the 1 ranks of this run"),
        (
            ["--tp", "2", "--dp", "1"],
            "--pp: --pp 1 --dp 1 --ep 1 --cp 1 --tp 2 must multiply to the 1 ranks of this run",
        ),
        (["--dp", "-1"], "--tp: only one of --pp 1 --dp -1 --ep 1 --cp 1 --tp -1 may be -1"),
        (["--param-dtype", "bfloat16"], "--param-dtype: bfloat16 must not be given with --dtype float32"),
        (["--optimizer", "muon", "--zero", "1"], "--zero: 1 must not be given with --optimizer muon; take 0, 2 or 3"),
        (["--experts", "2", "--top-k", "3"], "--top-k: 3 must be at most --experts = 2"),
        (["--shared-experts", "1"], "--shared-experts: 1 must be 0 without --experts"),
        (["--dp", "0"], "--dp: 0 must be at least 1, or -1"),
        (
            ["--batch-size", "6", "--micro-batches", "4"],
            "--batch-size: 6 must be a multiple of --dp x --micro-batches = 1 x 4",
        ),
    ],
    ids=lambda value: "-".join(value).strip("-") if isinstance(value, list) else "",
)
def test_help_and_mistakes_are_answered_before_torch_is_imported(arguments, message, tmp_path):
    (tmp_path / "torch.py").write_text("raise RuntimeError('torch is imported')")
    (tmp_path / "EMPTY").mkdir()
    (tmp_path / "BINARY").write_bytes(b"\0" * 1000)
    (tmp_path / "SHORT").write_text("ten bytes\n")
    paths = [str(tmp_path / word) if word.isupper() else word for word in arguments]
    command = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), *paths]
    environment = os.environ | {"LOCAL_RANK": "0", "PYTHONPATH": str(tmp_path)}
    result = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert (result.returncode == 0) == (arguments == ["--help"])
    output = result.stdout + result.stderr
    assert message in output and "torch is imported" not in output
    assert len(output.splitlines()) < 5 or arguments == ["--help"]


def test_every_option_has_help():
    command = [sys.executable, str(ROOT / "examples" / "train_gpt.py"), "--help"]
    page = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"COLUMNS": "1000"}).stdout
    entries = re.findall(r"^  (--[\w-]+)(.*\n(?:   .*\n)*)", page, re.M)
    assert len(entries) > 25
    for name, rest in entries:
        assert re.search(r"\s{2,}\w.*\(default: .+\)$", rest), f"{name}: no help or no default"


def test_wrong_heads_are_named(text, tmp_path):
    message = "num_kv_heads: must divide num_heads; num_heads = 4, num_kv_heads = 3, p = 2"
    arguments = ("--data", str(text), "--num-kv-heads", "3")
    ranks.run_raises(train_on_rank, 2, ValueError, message, tmp_path / "run", arguments, in_turns=False)


# What --out holds is looked at before anything is computed

SAVED = {"num_heads": 6, "num_kv_heads": 3, "lr": 1.0, "data": "a.txt", "text_sha256": "1", "seed": 0}


def _check_output(group, out: Path, now: dict, **flags: bool) -> str | None:
    """The end of the job on this rank."""
    options = Namespace(out=out, **{"resume": False, "overwrite": False} | flags)
    names = dict.fromkeys(("hidden_size", "num_layers", "ffn_hidden_size", "dtype"))
    try:
        train_gpt.check_output(options, SAVED | names | now)
    except SystemExit as error:
        return error.code
    return None


@pytest.mark.parametrize(
    ("out", "now", "flags", "message"),
    [
        ("new/deep", {}, {}, None),
        ("file", {}, {}, "--out: .*file must be a folder that can be written: .*File exists"),
        ("run", {}, {}, "--out: .*run holds a checkpoint: pass --resume, --overwrite, or another --out"),
        ("run", {}, {"overwrite": True}, None),
        ("run", {"lr": 2.0, "data": "b.txt"}, {"resume": True}, None),
        ("run", {"num_heads": 3}, {"resume": True}, "--num-heads: 3 must be 6, as in the run to resume"),
        ("run", {"text_sha256": "2"}, {"resume": True}, "--data: must be the text of the run .* read from a.txt"),
    ],
)
def test_output_is_checked_first(out, now, flags, message, tmp_path):
    (tmp_path / "file").touch()
    (tmp_path / "run" / "checkpoint").mkdir(parents=True)
    torch.save({"options": SAVED}, tmp_path / "run" / "checkpoint" / "extra.pt")
    first, second = ranks.run(_check_output, 2, tmp_path / out, now, **flags)
    assert (first is None and second is None) if message is None else (re.search(message, first) and second == 1)
    assert message is not None or list((tmp_path / out).glob("*")) == list((tmp_path / out).glob("checkpoint"))


def test_learning_rate_is_warmed_up_and_decays_by_a_cosine():
    options = Namespace(lr=2.0, warmup_steps=4, lr_decay_steps=12, min_lr_ratio=0.1)
    rates = [train_gpt.learning_rate(step, options) for step in (0, 3, 4, 8, 12, 100)]
    assert rates == pytest.approx([0.5, 2.0, 2.0, 1.1, 0.2, 0.2])
    options.warmup_steps = 0
    assert train_gpt.learning_rate(0, options) == 2.0 and math.isfinite(train_gpt.learning_rate(12, options))


@STARTED
def test_a_killed_rank_ends_the_job_and_the_last_checkpoint_loads(cold, text, tmp_path):
    """kill -9 of one rank in the middle of a step: the launcher ends within the timeout, says which rank and why."""
    out = tmp_path / "run"
    options = ["--data", str(text), "--save-every", "3", "--sample-bytes", "0"]
    job = _launch(2, out, "--steps", "100000", *options, cold=cold)
    deadline = time.monotonic() + 90
    while not (out / "checkpoint").exists():
        assert job.poll() is None and time.monotonic() < deadline, job.output
        time.sleep(0.05)
    begin = time.monotonic()
    os.kill(job.ranks()[-1], signal.SIGKILL)
    code, output = job.wait(60), job.output
    assert code != 0
    assert time.monotonic() - begin < 40
    assert "SIGKILL" in output and "Root Cause" in output
    steps = torch.load(out / "checkpoint" / "extra.pt", weights_only=True)["step"]
    assert steps and steps % 3 == 0
    assert len((out / "loss.csv").read_text().splitlines()) > steps  # a header and a row for each step
    resumed = train(2, out, "--steps", str(steps + 2), "--resume", *options)
    assert len(resumed) == steps + 2


@STARTED
def test_a_signal_saves_a_checkpoint_and_ends_without_tracebacks_of_the_ranks(cold, text, tmp_path):
    out = tmp_path / "run"
    job = _launch(2, out, "--steps", "100000", "--data", str(text), "--save-every", "0", "--quiet", cold=cold)
    deadline = time.monotonic() + 90
    while not (out / "loss.csv").exists() or len((out / "loss.csv").read_text().splitlines()) < 3:
        assert job.poll() is None and time.monotonic() < deadline, job.output
        time.sleep(0.05)
    job.terminate()  # torchrun passes it on to the ranks
    job.wait(30)
    output = job.output
    steps = int(re.search(r"stopped by SIGTERM after step (\d+): continue with --resume", output)[1])
    assert torch.load(out / "checkpoint" / "extra.pt", weights_only=True)["step"] == steps
    assert len((out / "loss.csv").read_text().splitlines()) == steps + 1
    assert output.count("Traceback") == 1, output  # torchrun's own


def _build_default(p):
    """The sizes of the defaults on any rank of p, without communication."""
    for rank in range(p):
        dist.init_process_group("fake", rank=rank, world_size=p, store=dist.HashStore())
        with torch.device("meta"):
            GPT(GPTConfig(), dist.group.WORLD)
        dist.destroy_process_group()


def test_the_default_sizes_fit_these_numbers_of_ranks():
    for p in (1, 2, 3, 4, 5, 6, 12):
        ranks.run_fresh(_build_default, p)


def test_generate_restores_the_mode_and_refuses_an_empty_prompt():
    model = GPT(GPTConfig(hidden_size=8, num_layers=1, num_heads=2, num_kv_heads=1, ffn_hidden_size=8))
    for training in (True, False):
        assert model.train(training).generate(torch.ones(1, 2, dtype=torch.long), 3).shape == (1, 5)
        assert all(module.training == training for module in model.modules())
    with pytest.raises(ValueError, match=r"ids: shape \(1, 0\) must be \[batch, seq\] with at least one token"):
        model.generate(torch.ones(1, 0, dtype=torch.long), 3)
