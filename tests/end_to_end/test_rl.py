"""examples/rl.py: generators that get the weights in memory make the tokens of those that get them from files."""

import argparse

import rl
import torch

from tests.helpers import ranks
from tests.helpers.dtypes import default_dtype
from tests.helpers.example_training import write_text


def _digest(group, folder, files=False, tp_invariant=False):
    with default_dtype(torch.float32 if tp_invariant else torch.float64):
        options = {"files": files, "tp_invariant": tp_invariant}
        return rl.train(argparse.Namespace(data=folder, rounds=3, batch_size=8, **options))


def test_the_tokens_are_those_by_files(tmp_path):
    write_text(tmp_path)
    digests = [set(ranks.run(_digest, 4, tmp_path, files)) for files in (False, True)]
    assert digests[0] == digests[1] and len(digests[0]) == 1


def test_log_probabilities_of_all_layouts_have_the_same_bits(tmp_path):
    write_text(tmp_path)
    assert len(set(ranks.run(_digest, 4, tmp_path, tp_invariant=True))) == 1  # train() compares them
