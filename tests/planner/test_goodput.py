"""The interval of checkpoints and the share of useful time, against the formulas and against a simulation."""

import math
import random

import pytest

from tp_ext.planner import goodput


def test_intervals_of_young_and_daly():
    mtbf, c, count = 5e7, 60.0, 1000
    mean = mtbf / count
    young = goodput(count, mtbf_per_device=mtbf, checkpoint_time=c, restart_time=300, method="young").interval
    daly = goodput(count, mtbf_per_device=mtbf, checkpoint_time=c, restart_time=300).interval
    assert young == pytest.approx(math.sqrt(2 * c * mean))
    assert daly == pytest.approx(young * (1 + math.sqrt(c / (2 * mean)) / 3 + c / (18 * mean)) - c)
    assert goodput(1, mtbf_per_device=10, checkpoint_time=30, restart_time=0).interval == 10  # c >= 2 M


def test_share_is_that_of_simulated_failures():
    """The restart may fail, too; a failure loses the work since the checkpoint."""
    mean, c, restart, interval = 1000.0, 20.0, 50.0, 200.0
    got = goodput(10, mtbf_per_device=10 * mean, checkpoint_time=c, restart_time=restart, interval=interval)
    draws, wall, rounds = random.Random(0), 0.0, 20000
    for _ in range(rounds):
        while (fails := draws.expovariate(1 / mean)) < interval + c:
            wall += fails
            while (again := draws.expovariate(1 / mean)) < restart:
                wall += again
            wall += restart
        wall += interval + c
    assert got.share == pytest.approx(rounds * interval / wall, rel=0.02)


def test_the_interval_of_daly_is_near_the_best_one():
    options = {"mtbf_per_device": 1e6, "checkpoint_time": 30, "restart_time": 100}
    best = max(goodput(100, interval=t, **options).share for t in range(50, 4000, 5))
    assert goodput(100, **options).share == pytest.approx(best, rel=1e-3)


@pytest.mark.parametrize("count, mean", [(1, 0.0), (2, 0.5642), (10, 1.5388), (100, 2.5076), (1000, 3.2414)])
def test_slowdown_is_the_expected_maximum_of_normal_times(count, mean):
    """Means of the largest of n standard normal numbers: tables of order statistics (Harter, Biometrika 48, 1961)."""
    slow = goodput(count, mtbf_per_device=1e9, checkpoint_time=1, restart_time=1, spread=0.1).slowdown
    assert slow == pytest.approx(1 + 0.1 * mean, abs=1e-4)


def test_a_job_that_never_gets_on():
    got = goodput(10**6, mtbf_per_device=1e6, checkpoint_time=1000, restart_time=1000, interval=1000)
    assert got.share == 0 and got.effective_step_time is None


@pytest.mark.parametrize(
    "change, says",
    [
        ({"prediction": 0}, "count: 0 must be an integer of at least 1"),
        ({"mtbf_per_device": 0}, "mtbf_per_device: 0 must be a finite number above 0"),
        ({"checkpoint_time": -1}, "checkpoint_time: -1 must be a finite number of at least 0"),
        ({"checkpoint_time": 0}, "checkpoint_time: 0 must be above 0 unless interval is given"),
        ({"interval": 0}, "interval: 0 must be a finite number above 0, or None"),
        ({"method": "best"}, "method: 'best' must be one of daly, young"),
        ({"spread": -0.1}, "spread: -0.1 must be"),
    ],
)
def test_bad_input(change, says):
    arguments = {"prediction": 8, "mtbf_per_device": 1e6, "checkpoint_time": 10.0, "restart_time": 10.0, **change}
    with pytest.raises(ValueError, match=says):
        goodput(arguments.pop("prediction"), **arguments)
