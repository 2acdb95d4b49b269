"""Ranks that disagree, over tp_shm: each rank gets an error that names the mismatch, before any timeout."""

import re
import time
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist

from tests.shm.backends import launch, results, start, timed_error

pytestmark = pytest.mark.core


# Dtypes of one size, so that the bytes alone would pass
MIXED = {
    "all_gather": lambda g, x: dist.all_gather([torch.empty_like(x) for _ in range(3)], x, group=g),
    "all_gather_into_tensor": lambda g, x: dist.all_gather_into_tensor(x.new_empty(12), x, group=g),
    "broadcast": lambda g, x: dist.broadcast(x, 0, group=g),
    "scatter": lambda g, x: dist.scatter(x, [x, x, x] if g.rank() == 0 else None, 0, group=g),
    "gather": lambda g, x: dist.gather(x, [x, x, x] if g.rank() == 0 else None, 0, group=g),
    "all_to_all": lambda g, x: dist.all_to_all([torch.empty_like(x) for _ in range(3)], [x, x, x], group=g),
    "all_to_all_single": lambda g, x: dist.all_to_all_single(x.new_empty(3), x[:3], group=g),
    "reduce_scatter": lambda g, x: dist.reduce_scatter(x, [x, x, x], group=g),
    "reduce_scatter_tensor": lambda g, x: dist.reduce_scatter_tensor(x.new_empty(4), x.new_ones(12), group=g),
    "reduce": lambda g, x: dist.reduce(x, 0, group=g),
    "batch": lambda g, x: [
        work.wait()
        for work in dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, x, (g.rank() + 1) % 3, g),
                dist.P2POp(dist.irecv, torch.empty_like(x), (g.rank() + 2) % 3, g),
            ]
        )
    ],
}
MISMATCHES = {
    f"dtypes of {name}": lambda g, r, call=call: call(g, torch.ones(4, dtype=torch.int32 if r == 1 else torch.float32))
    for name, call in MIXED.items()
} | {
    "shapes": lambda g, r: dist.all_reduce(torch.ones((3, 2) if r == 1 else (2, 3)), group=g),
    "shapes of reduce": lambda g, r: dist.reduce(torch.ones(6 if r == 1 else (2, 3)), 0, group=g),
    "sizes": lambda g, r: dist.all_reduce(torch.ones(3 + (r == 1)), group=g),
    "large sizes": lambda g, r: dist.all_reduce(torch.ones(2_000_000 + (r == 1)), group=g),
    "dtypes": lambda g, r: dist.all_reduce(torch.ones(4, dtype=torch.int32 if r == 1 else torch.float32), group=g),
    "operations": lambda g, r: dist.all_reduce(
        torch.ones(4), dist.ReduceOp.MAX if r == 1 else dist.ReduceOp.SUM, group=g
    ),
    "collectives": lambda g, r: dist.barrier(group=g) if r == 1 else dist.all_reduce(torch.ones(4), group=g),
    "roots": lambda g, r: dist.broadcast(torch.ones(4), int(r == 1), group=g),
    "roots of reduce": lambda g, r: dist.reduce(torch.ones(4), int(r == 1), group=g),
    "sizes of all_gather": lambda g, r: dist.all_gather_into_tensor(
        torch.ones(9 + 3 * (r == 1)), torch.ones(3 + (r == 1)), group=g
    ),
    "sizes of broadcast": lambda g, r: dist.broadcast(torch.ones(3 + (r == 1)), 0, group=g),
    "sizes of scatter": lambda g, r: dist.scatter(
        torch.ones(3 + (r == 1)), [torch.ones(3)] * 3 if r == 0 else None, 0, group=g
    ),
    "splits": lambda g, r: dist.all_to_all_single(
        torch.ones(6), torch.ones(6), [2, 2, 2], [1, 2, 3] if r == 1 else [2, 2, 2], group=g
    ),
    "works": lambda g, r: [
        work.wait()
        for work in [dist.all_reduce(torch.ones(4 + i * (r == 1)), group=g, async_op=True) for i in range(3)]
    ],
}


def _mismatch(rank, p, folder):
    start(rank, p, folder, "cpu:tp_shm")
    groups = {name: dist.new_group(timeout=timedelta(seconds=3)) for name in MISMATCHES}
    dist.barrier()

    def calls(name):
        """A root need not wait for the ranks that it serves: it gets the error by the next call of the group at the
        latest."""
        MISMATCHES[name](groups[name], rank)
        dist.barrier(groups[name])

    errors = {name: timed_error(lambda n=name: calls(n)) for name in MISMATCHES}
    dist.barrier()
    return errors


def test_a_mismatch_raises_on_every_rank_and_names_the_difference():
    words = {name: "int32.*float32|float32.*int32" for name in MISMATCHES if name.startswith("dtypes")}
    words |= {"shapes": "shape #", "collectives": "barrier.*all_reduce|all_reduce.*barrier"}
    wrong = []
    for rank, errors in enumerate(results(launch(_mismatch, 3))):
        for name, (seconds, message) in errors.items():
            quick = 0 < seconds < 2.5  # an error of the backend, not a timeout
            says = re.search(words.get(name, "rank"), message, re.I | re.S)
            if not (quick and says):
                wrong.append((rank, name, seconds, message))
    assert not wrong, "\n".join(map(str, wrong))


def _too_short(rank, p, folder, sent, expected):
    start(rank, p, folder, "cpu:tp_shm", seconds=3)
    if rank == 0:
        dist.isend(torch.ones(sent), 1)
        time.sleep(1)
        return None
    return timed_error(lambda: dist.recv(torch.ones(expected), 0))


@pytest.mark.parametrize("sent, expected", [(3, 5), (5, 3), (0, 3), (2_000_000, 3)])
def test_a_message_of_another_size_is_refused(sent, expected):
    _, (seconds, message) = results(launch(_too_short, 2, sent, expected))
    assert 0 <= seconds < 2.5, (seconds, message)
    assert str(4 * sent) in message or str(sent) in message, message
