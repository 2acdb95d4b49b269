"""Ranks that are killed or leave: the others raise, long before their timeout, and say who."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

from tests.shm.backends import collective, launch, results, start, timed_error

pytestmark = pytest.mark.core


def _killed(rank, p, folder, backend, name):
    start(rank, p, folder, backend)
    dist.barrier()
    if rank == 1:
        time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGKILL)
    return timed_error(collective(name, None, p, 1))


@pytest.mark.parametrize(
    "name, backend",
    [
        *(pytest.param(name, "cpu:gloo", marks=pytest.mark.exhaustive) for name in ("all_reduce", "recv")),
        pytest.param("barrier", "cpu:tp_shm", marks=pytest.mark.exhaustive),  # in steps, as all_to_all
        *((name, "cpu:tp_shm") for name in ("all_reduce", "all_to_all", "recv", "recv from any", "async")),
    ],
)
def test_a_killed_rank_is_noticed_at_once(name, backend):
    """Long before the timeout of a minute; by tp_shm with its name."""
    outcomes = launch(_killed, 3, backend, name)
    assert outcomes[1].exitcode == -signal.SIGKILL
    for rank in (0, 2):
        assert outcomes[rank].error is None and outcomes[rank].exitcode == 0, (rank, outcomes[rank])
        seconds, message = outcomes[rank].value
        assert 0 < seconds < 10, (rank, seconds)
        assert backend == "cpu:gloo" or "rank 1" in message, (rank, message)


def _on_and_on(rank, p, folder, backend, n, seconds):
    start(rank, p, folder, backend)
    dist.barrier()
    end = time.monotonic() + seconds
    if rank == 1:
        signal.setitimer(signal.ITIMER_REAL, seconds)
        signal.signal(signal.SIGALRM, signal.SIG_DFL)  # ends the process wherever it is
    x = torch.ones(n)
    try:
        while time.monotonic() < end + 20:
            dist.all_reduce(x.fill_(1))
            assert bool((x == p).all())
    except RuntimeError as e:
        message, late = str(e), time.monotonic() - end
    for call in (lambda: dist.all_reduce(x), lambda: dist.barrier()):
        assert 0 <= timed_error(call)[0] < 5  # the group stays broken
    return late, message


@pytest.mark.thinned(1)
@pytest.mark.parametrize("n", [1, 3_000_000])
@pytest.mark.parametrize("p", [2, 4])
def test_a_rank_killed_in_the_middle(p, n):
    outcomes = launch(_on_and_on, p, "cpu:tp_shm", n, 0.3)
    for rank in set(range(p)) - {1}:
        assert outcomes[rank].error is None and outcomes[rank].exitcode == 0, (rank, outcomes[rank])
        late, message = outcomes[rank].value
        assert late < 10 and "rank 1" in message, (rank, late, message)


def _left(rank, p, folder, backend):
    """Rank 1 ends as a process should, without a call that the others make."""
    start(rank, p, folder, backend)
    dist.barrier()
    return None if rank == 1 else timed_error(lambda: dist.all_reduce(torch.ones(3)))


@pytest.mark.parametrize("backend", [pytest.param("cpu:gloo", marks=pytest.mark.exhaustive), "cpu:tp_shm"])
def test_a_rank_that_left_is_noticed_at_once(backend):
    outcomes = results(launch(_left, 3, backend))
    for rank in (0, 2):
        seconds, message = outcomes[rank]
        assert 0 < seconds < 10, (rank, seconds)
        assert backend == "cpu:gloo" or "rank 1" in message, (rank, message)
