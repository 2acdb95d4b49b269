"""Short soaks of tests/soak/checkpoints.py, everything at once, with and without renameat2 and flock."""

import fcntl

import pytest

from tests.soak import checkpoints
from tp_ext.checkpoint.files import atomic_directory


@pytest.mark.timeout(600)  # seconds, but for a machine that starves its 5 processes
@pytest.mark.parametrize(
    "able",
    [True, pytest.param(False, marks=pytest.mark.exhaustive)],  # by default tests/checkpoint/test_directory_kill.py
    ids=["renameat2, flock", "two renames, lock file"],
)
def test_every_load_is_of_one_whole_checkpoint_whatever_is_killed(able, monkeypatch):
    for module, name in ((fcntl, "flock"), (atomic_directory, "_exchange")):
        monkeypatch.setattr(module, name, getattr(module, name))  # put back at the end
    counts, failures = checkpoints.soak(seed=able, seconds=1.5, readers=(2,), exchange=able, flock=able)
    assert not failures, failures
    assert counts["loads"] > 1 and counts["saves"] > 1 and counts["kills"], counts
