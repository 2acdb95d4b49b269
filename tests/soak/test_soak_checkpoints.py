"""Short soaks of tests/soak/checkpoints.py: everything at once, and readers of a path that is saved all the time."""

import checkpoints
import pytest


@pytest.mark.parametrize("exchange", [True, False], ids=["exchange", "two renames"])
def test_every_load_is_of_one_whole_checkpoint_whatever_is_killed(exchange):
    counts, failures = checkpoints.soak(seed=exchange, seconds=4, exchange=exchange)
    assert not failures, failures
    assert counts["loads"] > 5 and counts["saves"] > 5 and counts["kills"] > 2, counts
