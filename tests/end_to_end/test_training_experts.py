"""train_gpt.py with experts: the same losses for every layout of its axes, and checkpoints that move between them."""

import shutil

import pytest

from tests.helpers.example_training import train, write_text

OPTIONS = """--dtype float64 --num-layers 2 --hidden-size 48 --ffn-hidden-size 40 --seq-length 24 --batch-size 8
    --experts 5 --top-k 2 --shared-experts 1 --balance-loss 0.1
    --sample-bytes 0 --eval-batches 1 --eval-every 0 --save-every 0 --lr-decay-steps 20"""
LAYOUTS = {
    "dp2": (2, "--dp 2 --tp 1 --micro-batches 2"),
    "ep2": (2, "--ep 2 --tp 1"),
    "tp2": (2, "--tp 2 --sequence-parallel"),
    "dp2 ep2": (4, "--dp 2 --ep 2 --tp 1"),
    "dp2 tp2": (4, "--dp 2 --tp 2"),
    "ep2 tp2": (4, "--ep 2 --tp 2 --sequence-parallel --zero 3"),
    "ep4": (4, "--ep 4 --tp 1 --recompute full"),
    "dp2 ep2 zero 2": (4, "--dp 2 --ep 2 --tp 1 --zero 2"),
    "pp2 ep2": (4, "--pp 2 --ep 2 --tp 1"),
    "cp2 ep2": (4, "--cp 2 --ep 2 --tp 1 --zero 3"),
    "tp4": (4, "--tp 4"),
    "one": (1, ""),
}


@pytest.fixture(scope="module")
def options(tmp_path_factory):
    return ["--data", str(write_text(tmp_path_factory.mktemp("text"))), *OPTIONS.split()]


@pytest.mark.parametrize("optimizer", [pytest.param("adamw", marks=pytest.mark.exhaustive), "muon"])
def test_one_training_moves_over_all_layouts(optimizer, options, tmp_path):
    options = [*options, "--optimizer", optimizer]
    whole = train(1, tmp_path / "whole", "--steps", "22", *options)
    for i, (p, words) in enumerate(one for name, one in LAYOUTS.items() if name != "one"):
        steps, resumed = 2 * i + 2, ["--resume"] if i else []
        losses = train(p, tmp_path / "parts", "--steps", str(steps), *words.split(), *resumed, *options)
        assert losses == pytest.approx(whole[:steps], abs=1e-10, rel=0), words


@pytest.mark.exhaustive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("first", LAYOUTS)
def test_every_layout_goes_on_in_every_other(first, options, tmp_path):
    """20 steps of each layout, and two more of every other after its first ten."""
    whole = train(1, tmp_path / "whole", "--steps", "20", *options)
    p, words = LAYOUTS[first]
    train(p, tmp_path / "first", "--steps", "10", *words.split(), *options)
    for other, (ranks, others) in LAYOUTS.items():
        steps, copy = 20 if other == first else 12, tmp_path / "copy"
        shutil.copytree(tmp_path / "first", copy)
        losses = train(ranks, copy, "--steps", str(steps), *others.split(), "--resume", *options)
        assert losses == pytest.approx(whole[:steps], abs=1e-10, rel=0), (first, other)
        shutil.rmtree(copy)
