"""Works of gloo and tp_shm go on by themselves: whatever the rank that issued them does, or waits for, meanwhile."""

import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import run
from tests.shm.backends import group_of, tp_shm_and_gloo

pytestmark = pytest.mark.core
LARGE = 2_000_003


def _issue(kind, group, rank, n):
    """An asynchronous call, and whether its result is right."""
    x, ones = torch.full((n,), rank + 1.0), torch.ones(n)
    whole = torch.full((2 * n,), rank + 1.0)
    out, part = torch.empty(2 * n), torch.empty(n)
    a2a = torch.empty(2 * n)
    calls = {
        "all_reduce": lambda: (dist.all_reduce(x, group=group, async_op=True), lambda: (x == 3).all()),
        "all_gather": lambda: (
            dist.all_gather_into_tensor(out, x, group=group, async_op=True),
            lambda: (out[:n] == 1).all() and (out[n:] == 2).all(),
        ),
        "reduce_scatter": lambda: (
            dist.reduce_scatter_tensor(part, whole, group=group, async_op=True),
            lambda: (part == 3).all(),
        ),
        "all_to_all": lambda: (
            dist.all_to_all_single(a2a, whole, group=group, async_op=True),
            lambda: (a2a[:n] == 1).all() and (a2a[n:] == 2).all(),
        ),
        "broadcast": lambda: (dist.broadcast(x, 1, group=group, async_op=True), lambda: (x == 2).all()),
        "message": lambda: (
            dist.isend(ones, 0, group=group) if rank else dist.irecv(x, 1, group=group),
            lambda: rank == 1 or (x == 1).all(),
        ),
        "barrier": lambda: (dist.barrier(group=group, async_op=True), lambda: True),
    }
    return calls[kind]()


KINDS = ["all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "message", "barrier"]


def _computes(world, backend, kinds, n, folder):
    """Rank 1 issues and then makes no call until rank 0, which need not wait for it, is done; the kinds for which it
    has waited in vain."""
    group, rank = group_of(backend), world.rank()
    in_vain = []
    for kind in kinds:
        dist.barrier(group=world)
        work, right = _issue(kind, group, rank, n)
        end = time.monotonic() + 10
        while rank == 1 and not (folder / kind).exists() and kind not in in_vain:
            if time.monotonic() > end:
                in_vain.append(kind)
            time.sleep(0.01)
        work.wait()
        assert right(), kind
        if rank == 0:
            (folder / kind).touch()
    return in_vain


@tp_shm_and_gloo
@pytest.mark.parametrize("n", [3, 200_003], ids=str)
def test_while_its_rank_computes(n, backend, tmp_path):
    kinds = KINDS if n == 3 else ["all_reduce", "all_to_all", "message"]
    _, in_vain = run(_computes, 2, backend, kinds, n, tmp_path, timeout=150)
    assert not in_vain


@tp_shm_and_gloo
@pytest.mark.parametrize("blocking", ["recv", "all_reduce", "of gloo", "recv of the same group"])
@pytest.mark.parametrize("n", [3, LARGE], ids=str)
@on_ranks(2, backend="gloo", timeout=20)
def test_while_its_rank_is_blocked_elsewhere(world, n, blocking, backend):
    """Rank 1 issues, then waits in a call that rank 0 makes only after its own wait."""
    group, other, rank = group_of(backend), group_of(backend, None, "other"), world.rank()
    call = {
        "recv": lambda: dist.recv(torch.ones(4), 0, group=other) if rank else dist.send(torch.ones(4), 1, group=other),
        "all_reduce": lambda: dist.all_reduce(torch.ones(4), group=other),
        "of gloo": lambda: dist.all_reduce(torch.ones(4), group=world),
        "recv of the same group": lambda: (
            dist.recv(torch.ones(4), 0, group=group, tag=9) if rank else dist.send(torch.ones(4), 1, group=group, tag=9)
        ),
    }[blocking]
    for kind in KINDS if n == 3 else ["all_reduce", "all_to_all"]:
        work, right = _issue(kind, group, rank, n)
        if rank == 0:
            work.wait()
            call()
        else:
            call()
            work.wait()
        assert right(), kind


@tp_shm_and_gloo
@on_ranks(2, backend="gloo", timeout=20)
def test_works_of_two_groups_waited_for_crosswise(world, backend):
    """Each rank waits for the work that the other issued last."""
    first, second, rank = group_of(backend), group_of(backend, None, "other"), world.rank()
    for n in (3, LARGE):
        works = [_issue("all_reduce", group, rank, n) for group in (first, second)]
        for work, right in works if rank == 0 else reversed(works):
            work.wait()
            assert right()


@tp_shm_and_gloo
@on_ranks(2, backend="gloo")
def test_a_work_waited_for_long_after_later_ones(world, backend):
    """Nobody looks at a work until long after all others."""
    group, rank = group_of(backend), world.rank()
    old = _issue("all_to_all", group, rank, 1000)
    for _ in range(200):
        dist.all_reduce(torch.ones(1), group=group)
    old[0].wait()
    assert old[1]()
