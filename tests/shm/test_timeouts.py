"""Ranks that are late: timeouts of the group, of a wait, of the start; they name who is missing."""

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import RankError, run
from tests.shm.backends import collective, group_of, launch, results, start, timed_error, tp_shm_and_gloo

pytestmark = pytest.mark.core


def _late(rank, p, folder, names, seconds):
    """Rank 1 makes the groups and stays away from their collectives, a group each; then all leave in order."""
    start(rank, p, folder, "cpu:tp_shm")
    groups = [dist.new_group(timeout=timedelta(seconds=seconds)) for _ in names]
    dist.barrier()
    errors = []
    if rank != 1:
        errors = [timed_error(collective(name, group, p, 1)) for name, group in zip(names, groups, strict=True)]
    dist.barrier()  # the other groups are whole
    return errors


def test_a_timeout_names_the_missing_rank():
    names = ["all_reduce", "all_to_all", "recv", "async"]
    outcomes = results(launch(_late, 3, names, 1.0))
    assert outcomes[1] == []
    for rank in (0, 2):
        for name, (seconds, message) in zip(names, outcomes[rank], strict=True):
            assert "rank 1" in message and "time" in message, (name, message)
            assert f"rank {rank} of 3" in message, (name, message)
            assert 0.1 < seconds < 6, (name, seconds)


def _patient(world, backend):
    """wait(timeout) gives up waiting, not the work: the late rank still finds it, and a second wait has the result."""
    group, rank = group_of(backend), world.rank()
    dist.barrier(group=group)
    x = torch.ones(5)
    if rank == 1:
        time.sleep(0.5)
        dist.all_reduce(x, group=group)
        return x.tolist()
    work = dist.all_reduce(x, group=group, async_op=True)
    seconds, message = timed_error(lambda: work.wait(timedelta(milliseconds=50)))
    assert seconds < 0.4 and "imed out" in message, message
    work.wait()
    return x.tolist()


@tp_shm_and_gloo
def test_a_wait_with_its_own_timeout(backend):
    assert run(_patient, 2, backend) == [[2.0] * 5] * 2


@tp_shm_and_gloo
@on_ranks(3, backend="gloo")
def test_a_rank_that_is_late_in_time(world, backend):
    """A rank that comes late, but in time."""
    group, rank = group_of(backend), world.rank()
    for late in range(world.size()):
        if rank == late:
            time.sleep(0.2)
        dist.all_reduce(x := torch.ones(1), group=group)
        assert x.item() == world.size()


def _alone(rank, p, folder, backend):
    if rank == 2:
        return 0.0, "stayed away"
    return timed_error(lambda: start(rank, p, folder, backend, seconds=2))


@pytest.mark.parametrize("backend", [pytest.param("cpu:gloo", marks=pytest.mark.exhaustive), "cpu:tp_shm"])
def test_a_rank_that_never_comes(backend):
    *errors, _ = results(launch(_alone, 3, backend))
    for seconds, message in errors:
        assert 0 < seconds < 12 and message
        # on a slow machine another rank may be missing still when the first gives up
        assert backend == "cpu:gloo" or re.search(r"for ranks? ([01], )*2, which", message), message
        assert backend == "cpu:gloo" or "\n" not in message, message


def _monitored(world, backend):
    """[of all present, of those that are, when two are missing]"""
    group = group_of(backend)
    dist.monitored_barrier(group)
    late = dist.new_group(backend=backend)
    seconds, message = 0.0, ""
    if world.rank() in (0, 2):
        call = lambda: dist.monitored_barrier(late, timeout=timedelta(seconds=1), wait_all_ranks=True)  # noqa: E731
        seconds, message = timed_error(call)
    dist.barrier(group)
    return seconds, message


@tp_shm_and_gloo
def test_monitored_barrier_names_all_that_are_missing(backend):
    try:
        answers = run(_monitored, 4, backend)
    except RankError as e:  # torch before 2.13 or so
        assert backend == "tp_shm" and "monitored_barrier is only implemented for GLOO backend" in str(e)
        return
    seconds, message = answers[0]
    assert 0 < seconds < 6 and "1, 3" in message, message
    assert answers[2][0] > 0
