"""Works of gloo and tp_shm: asynchronous calls, their order, futures, dropped ones, several threads and groups."""

import gc
import random
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import run
from tests.shm.backends import group_of, of_all, same, tp_shm_and_gloo, values

pytestmark = pytest.mark.core


def _async(world, backend):
    """Each collective as a work: wait, is_completed, result in the tensor."""
    group, p, rank = group_of(backend), world.size(), world.rank()
    xs = of_all(p, (p, 3), torch.float32)
    x, total = xs[rank], sum(xs)
    a, b, c, d = x.clone(), torch.empty(p * p, 3), torch.empty(1, 3), torch.empty(p, 3)
    e, f = x.clone(), [torch.empty(p, 3) for _ in range(p)]
    g = [torch.empty(p, 3) for _ in range(p)] if rank == 0 else None
    h, i = x.clone(), torch.empty(p, 3)
    works = [
        dist.all_reduce(a, group=group, async_op=True),
        dist.all_gather_into_tensor(b, x, group=group, async_op=True),
        dist.reduce_scatter_tensor(c, x, group=group, async_op=True),
        dist.all_to_all_single(d, x, group=group, async_op=True),
        dist.broadcast(e, 1, group=group, async_op=True),
        dist.all_gather(f, x, group=group, async_op=True),
        dist.gather(x, g, 0, group=group, async_op=True),
        dist.reduce(h, 0, group=group, async_op=True),
        dist.scatter(i, xs if rank == 0 else None, 0, group=group, async_op=True),
        dist.barrier(group=group, async_op=True),
    ]
    for work in works:
        assert work.wait() is not False
        assert work.is_completed() or backend == "gloo"  # whose reduce_scatter never says so
    same(a, total)
    same(b, torch.cat(xs))
    same(c, total[rank : rank + 1])
    same(d, torch.cat([y[rank : rank + 1] for y in xs]))
    same(e, xs[1])
    same(torch.stack(f), torch.stack(xs))
    same(i, xs[rank])
    if rank == 0:
        same(torch.stack(g), torch.stack(xs))
        same(h, total)


@tp_shm_and_gloo
@pytest.mark.parametrize("p", [2, 3])
def test_every_collective_as_a_work(p, backend):
    run(_async, p, backend)


def _in_flight(world, backend, count, seed):
    """Issued in one order on all ranks, waited for in another on each, some more than once."""
    group, p, rank = group_of(backend), world.size(), world.rank()
    xs = [values(rank, 1 + i % 97, torch.float32, i) for i in range(count)]
    works = [dist.all_reduce(x, group=group, async_op=True) for x in xs]
    order = list(range(count)) * 2
    random.Random(seed + rank).shuffle(order)
    for i in order:
        works[i].wait()
        same(xs[i], sum(of_all(p, 1 + i % 97, torch.float32, i)))
    assert all(work.is_completed() for work in works)


@tp_shm_and_gloo
@pytest.mark.parametrize("p", [2, 4])
def test_many_works_waited_for_in_any_order(p, backend):
    run(_in_flight, p, backend, 300, 5)


def _becomes_completed(world, backend):
    """is_completed turns true without a wait, and not before the last rank has come."""
    group, rank = group_of(backend), world.rank()
    dist.barrier(group=group)
    if rank == 1:
        time.sleep(0.3)
    x = torch.full((1000,), rank + 1.0)
    work = dist.all_reduce(x, group=group, async_op=True)
    early = work.is_completed()
    deadline = time.monotonic() + 20
    while not work.is_completed():
        assert time.monotonic() < deadline
        time.sleep(0.001)
    assert bool((x == 3).all())
    return early


@tp_shm_and_gloo
def test_a_work_completes_without_wait(backend):
    assert run(_becomes_completed, 2, backend)[0] is False


def _futures(world, backend):
    group, p, rank = group_of(backend), world.size(), world.rank()
    x = values(rank, 11, torch.float32)
    total = sum(of_all(p, 11, torch.float32))
    future = dist.all_reduce(x, group=group, async_op=True).get_future()
    doubled = future.then(lambda f: f.value()[0] * 2)
    chained = doubled.then(lambda f: f.value() + 1)
    same(chained.wait(), total * 2 + 1)
    same(future.value()[0], total)
    assert future.done()
    out = torch.empty(p * 11)
    gathered = dist.all_gather_into_tensor(out, values(rank, 11, torch.float32), group=group, async_op=True)
    gathered.get_future().wait()
    same(out, torch.cat(of_all(p, 11, torch.float32)))
    futures = [dist.all_reduce(torch.full((2,), float(i)), group=group, async_op=True).get_future() for i in range(20)]
    for i, f in enumerate(torch.futures.wait_all(futures)):
        assert f[0].tolist() == [i * p] * 2
    x = torch.ones(3)
    late = dist.broadcast(x, 0, group=group, async_op=True)
    late.wait()
    assert late.get_future().then(lambda f: 5).wait() == 5  # of a work that is done already


@tp_shm_and_gloo
def test_futures(backend):
    run(_futures, 2, backend)


def _collective_in_a_callback(world, backend):
    """As a communication hook of DDP does: a second collective, issued when the first is done."""
    group, other = group_of(backend), group_of(backend, None, "other")
    results = []
    for i in range(10):
        x, y = torch.ones(5), torch.full((5,), float(i))
        future = dist.all_reduce(x, group=group, async_op=True).get_future()
        second = future.then(lambda f, y=y: dist.all_reduce(y, group=other, async_op=True))
        second.wait().wait()
        results.append((x[0].item(), y[0].item()))
    assert results == [(2.0, 2.0 * i) for i in range(10)]


@tp_shm_and_gloo
def test_a_collective_issued_by_a_callback(backend):
    run(_collective_in_a_callback, 2, backend)


def _dropped(world, backend):
    """Works that nobody waits for, and tensors that nobody holds: the barrier has seen them all."""
    group, p = group_of(backend), world.size()
    kept = [torch.full((100, 100), float(i)) for i in range(16)]
    for i, x in enumerate(kept):
        dist.all_reduce(x, group=group, async_op=True)
        dist.all_reduce(torch.full((1000 * i,), 1.0), group=group, async_op=True)
    gc.collect()
    dist.barrier(group=group)
    assert all(bool((x == i * p).all()) for i, x in enumerate(kept))


@tp_shm_and_gloo
@pytest.mark.parametrize("p", [2, 3])
def test_works_that_are_dropped(p, backend):
    run(_dropped, p, backend)


# Several groups


@tp_shm_and_gloo
@on_ranks(3, backend="gloo")
def test_groups_interleaved(world, backend):
    """Three groups over the same ranks; works of all of them in flight, waited for in another order on each rank."""
    groups = [group_of(backend, None, str(i)) for i in range(3)]
    p, rank = world.size(), world.rank()
    for salt in range(50):
        xs = [values(rank, 10 + i, torch.float32, salt) for i in range(3)]
        works = [dist.all_reduce(x, group=g, async_op=True) for x, g in zip(xs, groups, strict=True)]
        order = [0, 1, 2]
        random.Random(salt * p + rank).shuffle(order)
        for i in order:
            works[i].wait()
            same(xs[i], sum(of_all(p, 10 + i, torch.float32, salt)))


@tp_shm_and_gloo
@on_ranks(2, backend="gloo")
def test_groups_in_another_order_on_each_rank(world, backend):
    """Two groups called in opposite orders by the ranks: works are independent from group to group."""
    groups = [group_of(backend, None, str(i)) for i in range(2)]
    rank = world.rank()
    x = [torch.full((1000,), 1.0 + rank + i) for i in range(2)]
    works = {}
    for i in (0, 1) if rank == 0 else (1, 0):
        works[i] = dist.all_reduce(x[i], group=groups[i], async_op=True)
    for i in range(2):
        works[i].wait()
    assert [y[0].item() for y in x] == [3.0, 5.0]


@tp_shm_and_gloo
@on_ranks(3, backend="gloo")
def test_threads_with_a_group_each(world, backend):
    """Each thread has a group of its own; nothing orders the threads, and the ranks' threads differ in speed."""
    p, rank = world.size(), world.rank()
    groups = [group_of(backend, None, f"thread {i}") for i in range(4)]
    wrong = []

    def work(i):
        sleeper = random.Random(i * p + rank)
        try:
            for salt in range(60):
                x = values(rank, 1 + 500 * i, torch.float32, salt)
                dist.all_reduce(x, group=groups[i])
                same(x, sum(of_all(p, 1 + 500 * i, torch.float32, salt)))
                if salt % 10 == 0:
                    time.sleep(sleeper.random() / 1000)
        except BaseException as e:
            wrong.append(e)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong, wrong[0]


def _read_after_wait(world, backend):
    """Inputs may be written once a call returns; no rank reads another's later values."""
    group, p, rank = group_of(backend), world.size(), world.rank()
    x, out = torch.empty(3000), torch.empty(p * 3000)
    for i in range(100):
        x.fill_(i * p + rank)
        dist.all_gather_into_tensor(out, x, group=group)
        x.fill_(-1)
        assert out.view(p, 3000)[:, ::1000].tolist() == [[i * p + r] * 3 for r in range(p)], i


@tp_shm_and_gloo
@pytest.mark.parametrize("p", [2, 4])
def test_inputs_may_be_written_after_the_call(p, backend):
    run(_read_after_wait, p, backend)
