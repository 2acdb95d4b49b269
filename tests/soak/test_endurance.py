"""Thousands of steps leave nothing behind: the short form of tests/soak/endurance.py."""

import os
from pathlib import Path

import pytest
import torch
from torch import distributed as dist

from tests.helpers.ranks import run, run_fresh
from tests.soak.endurance import LEAKS, findings, train

pytestmark = pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="/proc and glibc's mallinfo2 are Linux's")


def _train(group, backend, steps):
    if backend != "gloo":
        group = dist.new_group(backend=backend)
    return findings(train(group, steps), steps)


# What is ours around the collectives is the same over gloo
@pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.exhaustive), "tp_shm"])
def test_nothing_grows(backend):
    assert run(_train, 2, backend, 1200, timeout=120) == [[], []]


def _leaks():
    torch.set_num_threads(1)
    steps = {leak: 1200 if leak == "bytes" else 300 for leak in LEAKS}
    try:
        return {leak: findings(train(None, n, leak, warm_up=50), n) for leak, n in steps.items()}
    finally:
        for file in Path("/dev/shm").glob(f"endurance.{os.getpid()}.*"):
            file.unlink()


def test_growth_is_found():
    for leak, found in run_fresh(_leaks, timeout=120).items():
        assert any(sentence.startswith(LEAKS[leak][0]) for sentence in found), (leak, found)
