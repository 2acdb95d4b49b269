"""send and recv over gloo and tp_shm: every pair, tags, order, any source, batches, sizes, many at once."""

import pytest
import torch
import torch.distributed as dist

from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import run
from tests.shm.backends import DTYPES, both_backends, group_of, same, values

pytestmark = pytest.mark.core


def _pairs(world, backend):
    group, p, rank = group_of(backend), world.size(), world.rank()
    for a in range(p):
        for b in range(p):
            if a == b:
                continue
            for dtype in DTYPES:
                x = values(a, (3, 4), dtype, b)
                if rank == a:
                    dist.send(x, b, group=group)
                elif rank == b:
                    out = torch.empty_like(x)
                    assert dist.recv(out, a, group=group) == a
                    same(out, x)


@both_backends
@pytest.mark.parametrize("p", [2, 3])
def test_every_pair_in_every_dtype(p, backend):
    run(_pairs, p, backend)


def _everyone_to_everyone(world, backend, n):
    """As torch's test of gloo: all sends are issued before any recv, none may wait for the other side's wait."""
    group, p, rank = group_of(backend), world.size(), world.rank()
    peers = [r for r in range(p) if r != rank]
    out = {r: torch.empty(n) for r in peers}
    sends = [dist.isend(values(rank, n, torch.float32, r), r, group=group) for r in peers]
    receives = [dist.irecv(out[r], r, group=group) for r in peers]
    for work in [*sends, *receives]:
        work.wait()
        assert work.is_completed()
    for r in peers:
        same(out[r], values(r, n, torch.float32, rank))


@both_backends
@pytest.mark.parametrize("n", [1, 1001, 600_000], ids=str)
def test_everyone_sends_to_everyone_before_it_receives(n, backend):
    run(_everyone_to_everyone, 3, backend, n)


def _tags(world, backend):
    """Sent in the order 0, 1, 2; received by tag, in another order. Equal tags keep their order."""
    group, rank = group_of(backend), world.rank()
    if rank == 0:
        works = [dist.isend(torch.full((4,), float(tag)), 1, group=group, tag=tag) for tag in (0, 1, 2)]
        works += [dist.isend(torch.full((4,), 10.0 + i), 1, group=group, tag=7) for i in range(5)]
        for work in works:
            work.wait()
    else:
        out = torch.empty(4)
        for tag in (2, 0, 1):
            dist.recv(out, 0, group=group, tag=tag)
            assert out.tolist() == [tag] * 4
        for i in range(5):
            dist.recv(out, 0, group=group, tag=7)
            assert out.tolist() == [10.0 + i] * 4


@both_backends
def test_tags(backend):
    run(_tags, 2, backend)


def _any_source(world, backend):
    group, p, rank = group_of(backend), world.size(), world.rank()
    if rank:
        dist.send(torch.full((3,), float(rank)), 0, group=group)
        return None
    out = {}
    for _ in range(p - 1):
        x = torch.empty(3)
        source = dist.recv(x, group=group)
        out[source] = x.tolist()
    return out


@both_backends
def test_recv_from_any_source(backend):
    assert run(_any_source, 3, backend)[0] == {1: [1.0] * 3, 2: [2.0] * 3}


def _batch(world, backend):
    """A ring, as pipelines use it: each rank sends right and receives from the left, both in one batch."""
    group, p, rank = group_of(backend), world.size(), world.rank()
    right, left = (rank + 1) % p, (rank - 1) % p
    for n in (1, 5000):
        out, back = torch.empty(n), torch.empty(n)
        works = dist.batch_isend_irecv(
            [
                dist.P2POp(dist.isend, values(rank, n, torch.float32), right, group),
                dist.P2POp(dist.irecv, out, left, group),
                dist.P2POp(dist.irecv, back, right, group, tag=1),
                dist.P2POp(dist.isend, values(rank, n, torch.float32, 1), left, group, tag=1),
            ]
        )
        for work in works:
            work.wait()
        same(out, values(left, n, torch.float32))
        same(back, values(right, n, torch.float32, 1))


@both_backends
@pytest.mark.parametrize("p", [2, 3, 4])
def test_batch_isend_irecv(p, backend):
    run(_batch, p, backend)


def _between(world, backend):
    """A send and its recv lie apart, with collectives of the same group between them."""
    group, rank = group_of(backend), world.rank()
    x, total = values(rank, 1000, torch.float32, 3), torch.ones(1)
    if rank == 0:
        work = dist.isend(x, 1, group=group)
    for _ in range(3):
        dist.all_reduce(total, group=group)
    if rank == 1:
        work = dist.irecv(out := torch.empty(1000), 0, group=group)
    dist.barrier(group=group)
    work.wait()
    if rank == 1:
        same(out, values(0, 1000, torch.float32, 3))
    return total.item()


@both_backends
def test_collectives_between_a_send_and_its_recv(backend):
    assert run(_between, 2, backend) == [8.0, 8.0]


def _empty_and_scalar(world, backend):
    group, rank = group_of(backend), world.rank()
    for x in (torch.empty(0), torch.tensor(3.5), torch.ones(2, 0, 3)):
        if rank == 0:
            dist.send(x, 1, group=group)
        else:
            out = torch.zeros_like(x)
            dist.recv(out, 0, group=group)
            same(out, x)


@both_backends
def test_empty_tensors_and_scalars(backend):
    run(_empty_and_scalar, 2, backend)


def _many(world, backend, count):
    """More messages than any buffer holds, none of them waited for until all are issued."""
    group, rank = group_of(backend), world.rank()
    if rank == 0:
        works = [dist.isend(torch.full((i % 50,), float(i)), 1, group=group) for i in range(count)]
    else:
        outs = [torch.empty(i % 50) for i in range(count)]
        works = [dist.irecv(out, 0, group=group) for out in outs]
    for work in reversed(works):
        work.wait()
    if rank:
        assert all(bool((out == i).all()) for i, out in enumerate(outs))


@both_backends
def test_many_messages_waited_for_from_the_last(backend):
    run(_many, 2, backend, 500)


@both_backends
@pytest.mark.parametrize("n", [65_536, 1_048_577, 5_000_011])
@on_ranks(2, backend="gloo")
def test_large_messages(world, backend, n):
    group, rank = group_of(backend), world.rank()
    x = torch.arange(n, dtype=torch.int32) if rank == 0 else torch.empty(n, dtype=torch.int32)
    if rank == 0:
        dist.send(x, 1, group=group)
    else:
        dist.recv(x, 0, group=group)
        same(x, torch.arange(n, dtype=torch.int32))


def _buffer_after_wait(world, backend):
    """Once wait of a send returns, its tensor is the caller's again, received or not."""
    group, rank = group_of(backend), world.rank()
    for i in range(50):
        if rank == 0:
            x = torch.full((300,), float(i))
            dist.isend(x, 1, group=group).wait()
            x.fill_(-1)
        else:
            out = torch.empty(300)
            dist.recv(out, 0, group=group)
            assert bool((out == i).all()), i


@both_backends
def test_a_sent_tensor_may_be_written_after_wait(backend):
    run(_buffer_after_wait, 2, backend)


def _wrong_peer(world, backend, peer):
    group, x = group_of(backend), torch.ones(1)
    for call in (dist.send, dist.recv):
        with pytest.raises((ValueError, RuntimeError)):
            call(x, peer, group=group)


@both_backends
def test_oneself_and_unknown_ranks_are_refused(backend):
    run(_wrong_peer, 2, backend, 7)
    for rank in range(2):
        run(_send_to_oneself, 2, backend, rank)


def _send_to_oneself(world, backend, rank):
    if world.rank() == rank:
        with pytest.raises((ValueError, RuntimeError)):
            dist.send(torch.ones(1), rank, group=group_of(backend))
