"""examples/lightning_gpt.py: its losses are those of train_gpt.py, also of a run that goes on on other ranks."""

import warnings
from unittest import mock

import lightning_gpt
import pytest
import train_gpt

from tests.helpers import ranks, torchrun
from tests.helpers.example_training import SMALL, held_out_losses, losses, train, write_text

RUN = ["--eval-every", "2", "--eval-batches", "2", "--batch-size", "4", "--lr-decay-steps", "5", "--sample-bytes", "0"]


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "text").mkdir()
    return write_text(tmp_path / "text")


def train_by_lightning(group, out, arguments):
    words = ["lightning_gpt.py", *SMALL, "--out", str(out), *arguments, "--quiet", "--backend", "gloo"]
    with torchrun.variables(group.rank(), group.size()), mock.patch("sys.argv", words), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        options = train_gpt.parse_options("")
        texts = train_gpt.split(train_gpt.read_text(options.data, options.max_mib * 2**20), options.seq_length)
        lightning_gpt.train(options, texts)


def test_losses_are_those_of_train_gpt(folder, tmp_path):
    shared = [*RUN, "--data", str(folder)]
    want = train(1, tmp_path / "want", *shared, "--steps", "5")
    for p, sizes in ((2, ["--tp", "2"]), (4, ["--dp", "2", "--tp", "2"])):
        out = tmp_path / str(p)
        ranks.run(train_by_lightning, p, out, (*shared, *sizes, "--steps", "3", "--timeline"), timeout=120)
        assert (out / "timeline.png").exists() and (out / "loss.png").exists()
    ranks.run(train_by_lightning, 2, out, (*shared, "--dp", "2", "--tp", "1", "--steps", "5", "--resume"), timeout=120)
    assert losses(out) == pytest.approx(want, abs=1e-5)
    assert losses(tmp_path / "2") == pytest.approx(want[:3], abs=1e-5)
    held_out, expected = held_out_losses(out), held_out_losses(tmp_path / "want")
    # and that of the end of the first run
    assert {step: held_out[step] for step in expected} == pytest.approx(expected, abs=1e-5)
