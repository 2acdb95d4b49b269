"""examples/rl.py: generators that get the weights in memory make the tokens of those that get them from files."""

import argparse

import rl
import torch

from tests.helpers import ranks
from tests.helpers.dtypes import default_dtype
from tests.helpers.example_training import write_text


def _digest(group, folder, files):
    with default_dtype(torch.float64):
        return rl.train(argparse.Namespace(data=folder, rounds=3, batch_size=8, files=files))


def test_the_tokens_are_those_by_files(tmp_path):
    write_text(tmp_path)
    digests = [set(ranks.run(_digest, 4, tmp_path, files)) for files in (False, True)]
    assert digests[0] == digests[1] and len(digests[0]) == 1
