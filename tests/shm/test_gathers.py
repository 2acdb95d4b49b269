"""Collectives that move values, over gloo and tp_shm: gathers, broadcasts, scatters, exchanges, objects."""

import itertools

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import run
from tests.shm.backends import DTYPES, both_backends, group_of, of_all, same, values

pytestmark = pytest.mark.core


def _every_dtype(world, backend):
    group, p, rank = group_of(backend), world.size(), world.rank()
    others = () if backend == "gloo" else (torch.int16, torch.uint16, torch.float8_e4m3fn)
    for dtype in (*DTYPES, *others):
        xs = [x.float().to(dtype) for x in of_all(p, (p, 3), torch.float32)] if dtype in others else None
        xs = xs or of_all(p, (p, 3), dtype)
        x, out = xs[rank], torch.empty(p * p, 3, dtype=dtype)
        dist.all_gather_into_tensor(out, x, group=group)
        assert _bytes(out) == b"".join(map(_bytes, xs))
        outs = [torch.empty_like(x) for _ in range(p)]
        dist.all_gather(outs, x, group=group)
        assert [_bytes(o) for o in outs] == [_bytes(o) for o in xs]
        out = x.clone()
        dist.broadcast(out, p - 1, group=group)
        assert _bytes(out) == _bytes(xs[-1])
        out = torch.empty_like(x)
        dist.all_to_all_single(out, x, group=group)
        assert _bytes(out) == b"".join(_bytes(o[rank : rank + 1]) for o in xs)


def _bytes(x):
    return x.contiguous().view(torch.uint8).numpy().tobytes()


@both_backends
@pytest.mark.parametrize("p", [2, 3])
def test_every_dtype_is_moved_as_it_is(p, backend):
    """tp_shm moves what gloo does not know too: moving takes no arithmetic."""
    run(_every_dtype, p, backend)


def _all_gather(world, backend):
    group, p, rank = group_of(backend), world.size(), world.rank()
    xs = of_all(p, (2, 3), torch.float64)
    out = torch.empty(2 * p, 3, dtype=torch.float64)
    dist.all_gather_into_tensor(out, xs[rank], group=group)
    same(out, torch.cat(xs))
    outs = list(torch.empty(p, 2, 3, dtype=torch.float64))  # views of one tensor
    dist.all_gather(outs, xs[rank], group=group)
    same(torch.stack(outs), torch.stack(xs))
    with torch.inference_mode():
        x = xs[rank].clone()
        outs = [torch.empty_like(x) for _ in range(p)]
        dist.all_gather(outs, x, group=group)
        same(torch.stack(outs), torch.stack(xs))


@both_backends
@pytest.mark.parametrize("p", [2, 3, 4])
def test_all_gather(p, backend):
    run(_all_gather, p, backend)


def _all_gather_forms(world, backend):
    group, p, rank = group_of(backend), world.size(), world.rank()
    xs = of_all(p, (2, 3), torch.float64)
    out = torch.empty(p, 2, 3, dtype=torch.float64)  # stacked
    dist.all_gather_into_tensor(out, xs[rank], group=group)
    same(out, torch.stack(xs))
    whole = torch.empty(p, 2, 3, dtype=torch.float64)  # the input is this rank's part of the output
    whole[rank] = xs[rank]
    dist.all_gather_into_tensor(whole, whole[rank], group=group)
    same(whole, torch.stack(xs))


def test_all_gather_into_a_stack_or_around_the_input():
    """torch promises both of all_gather_into_tensor; gloo takes none."""
    run(_all_gather_forms, 3, "tp_shm")


def _uneven_all_gather(world, backend, lengths):
    group, rank = group_of(backend), world.rank()
    xs = [values(r, n, torch.float32) for r, n in enumerate(lengths)]
    outs = [torch.full((n,), -9.0) for n in lengths]
    dist.all_gather(outs, xs[rank], group=group)
    for out, x in zip(outs, xs, strict=True):
        same(out, x)


@pytest.mark.parametrize("lengths", [(3, 5), (0, 4, 1), (100_000, 1, 0, 3)], ids=str)
def test_uneven_all_gather(lengths):
    """More than gloo has: it refuses outputs that differ in size from the input."""
    run(_uneven_all_gather, len(lengths), "tp_shm", lengths)


def _roots(world, backend):
    group, p, rank = group_of(backend), world.size(), world.rank()
    for root in range(p):
        xs = of_all(p, (3, 2), torch.float32, root)
        x = xs[rank].clone()
        dist.broadcast(x, root, group=group)
        same(x, xs[root])
        outs = [torch.empty(3, 2) for _ in range(p)] if rank == root else None
        dist.gather(xs[rank], outs, root, group=group)
        if rank == root:
            same(torch.stack(outs), torch.stack(xs))
        out = torch.empty(3, 2)
        dist.scatter(out, xs if rank == root else None, root, group=group)
        same(out, xs[rank])
    x = xs[rank].clone()
    dist.broadcast(x, group_src=p - 1, group=group)
    same(x, xs[-1])


@both_backends
@pytest.mark.parametrize("p", [2, 3, 4])
def test_broadcast_gather_scatter_with_every_root(p, backend):
    run(_roots, p, backend)


# All to all


def _all_to_all_single(world, backend):
    group, p, rank = group_of(backend), world.size(), world.rank()
    xs = of_all(p, (2 * p, 3), torch.float32)
    out = torch.empty(2 * p, 3)
    dist.all_to_all_single(out, xs[rank], group=group)
    same(out, torch.cat([x[2 * rank : 2 * rank + 2] for x in xs]))
    for salt, rows in enumerate([lambda a, b: a + b, lambda a, b: (a * 2 + b) % 3, lambda a, b: 4 * (a == 0)]):
        sent = [[rows(a, b) for b in range(p)] for a in range(p)]
        xs = [values(a, (sum(sent[a]), 2), torch.int64, salt) for a in range(p)]
        received = [sent[a][rank] for a in range(p)]
        out = torch.empty(sum(received), 2, dtype=torch.int64)
        dist.all_to_all_single(out, xs[rank], received, sent[rank], group=group)
        same(out, torch.cat([xs[a].split(sent[a])[rank] for a in range(p)]))


@both_backends
@pytest.mark.parametrize("p", [2, 3, 4])
def test_all_to_all_single_with_even_and_uneven_splits(p, backend):
    run(_all_to_all_single, p, backend)


def _all_to_all(world, backend):
    group, p, rank = group_of(backend), world.size(), world.rank()
    sent = [[values(a, (b + 1, a + 2), torch.float32, b) for b in range(p)] for a in range(p)]
    out = [torch.empty_like(sent[a][rank]) for a in range(p)]
    dist.all_to_all(out, sent[rank], group=group)
    for a in range(p):
        same(out[a], sent[a][rank])
    strided = [torch.empty(x.shape[::-1]).t() for x in out]
    columns = [x.t().contiguous().t() for x in sent[rank]]
    dist.all_to_all(strided, columns, group=group)
    for a in range(p):
        same(strided[a], sent[a][rank])
    # Rows of others, of more bytes than a slot of the shared memory has
    rows, columns = 700, 900
    sent = [
        [values(a, (2, rows, columns + 9), torch.float32, b)[..., a : a + columns] for b in range(p)] for a in range(p)
    ]
    wholes = [torch.full((2, rows, columns + 5), 9.0) for _ in range(p)]
    dist.all_to_all([whole[..., 2 : 2 + columns] for whole in wholes], sent[rank], group=group)
    for a in range(p):
        expected = torch.full((2, rows, columns + 5), 9.0)
        expected[..., 2 : 2 + columns] = sent[a][rank]
        same(wholes[a], expected)


@pytest.mark.parametrize("p", [2, 4])
def test_all_to_all(p):
    """More than older gloos have. Every shape is another one."""
    run(_all_to_all, p, "tp_shm")


# Objects


def _objects(world, backend):
    group, p, rank = group_of(backend), world.size(), world.rank()
    things = [{"rank": r, "text": "x" * 1000 * r, "tensor": torch.full((r,), r)} for r in range(p)]
    out = [None] * p
    dist.all_gather_object(out, things[rank], group=group)
    assert str(out) == str(things)
    for root in range(p):
        listed = [things[root], root] if rank == root else [None, None]
        dist.broadcast_object_list(listed, root, group=group)
        assert str(listed) == str([things[root], root])
        out = [None] * p if rank == root else None
        dist.gather_object(things[rank], out, root, group=group)
        assert rank != root or str(out) == str(things)
        out = [None]
        dist.scatter_object_list(out, things if rank == root else [], root, group=group)
        assert str(out[0]) == str(things[rank])
    if rank < 2:
        listed = [things[0]] if rank == 0 else [None]
        (dist.send_object_list if rank == 0 else dist.recv_object_list)(listed, 1 - rank, group=group)
        assert str(listed) == str(things[:1])


@both_backends
@pytest.mark.parametrize("p", [2, 3])
def test_objects(p, backend):
    run(_objects, p, backend)


# Coalesced forms


def _coalesced(world, backend):
    group, p, rank = group_of(backend), world.size(), world.rank()
    shapes = [(5, 5), (1,), (2, 3), (0,), (1000,)]
    xs = [of_all(p, shape, torch.float32, salt) for salt, shape in enumerate(shapes)]
    mine = [x[rank].clone() for x in xs]
    dist.all_reduce_coalesced(mine, group=group)
    for x, out in zip(xs, mine, strict=True):
        same(out, sum(x))

    mine = [x[rank] for x in xs]
    outs = [torch.empty(p * shape[0], *shape[1:]) for shape in shapes]
    group.allgather_into_tensor_coalesced(outs, mine).wait()
    for x, out in zip(xs, outs, strict=True):
        same(out, torch.cat(x))

    whole = [of_all(p, (p * shape[0], *shape[1:]), torch.float32) for shape in shapes]
    outs = [torch.empty(shape) for shape in shapes]
    group.reduce_scatter_tensor_coalesced(outs, [x[rank] for x in whole]).wait()
    for x, out, shape in zip(whole, outs, shapes, strict=True):
        same(out, sum(x).split(shape[0])[rank] if shape[0] else torch.empty(0))

    lists = [[torch.empty(shape) for shape in shapes] for _ in range(p)]
    dist.all_gather_coalesced(lists, mine, group=group)
    for r, x in itertools.product(range(p), range(len(xs))):
        same(lists[r][x], xs[x][r])


@both_backends
@pytest.mark.parametrize("p", [2, 3])
def test_coalesced_forms(p, backend):
    run(_coalesced, p, backend)


def _managed(world, backend, async_ops):
    """torch.distributed._coalescing_manager: one kind of collective, many tensors, one wait."""
    group, p, rank = group_of(backend), world.size(), world.rank()
    xs = [of_all(p, n, torch.float32) for n in (1, 100, 7)]
    outs = [x[rank].clone() for x in xs]
    with dist._coalescing_manager(group, async_ops=async_ops) as manager:
        for out in outs:
            dist.all_reduce(out, group=group)
    if async_ops:
        manager.wait()
    for out, x in zip(outs, xs, strict=True):
        same(out, sum(x))
    outs = [torch.empty(p * n) for n in (1, 100, 7)]
    with dist._coalescing_manager(group, async_ops=async_ops) as manager:
        for out, x in zip(outs, xs, strict=True):
            dist.all_gather_into_tensor(out, x[rank], group=group)
    if async_ops:
        manager.wait()
    for out, x in zip(outs, xs, strict=True):
        same(out, torch.cat(x))
    xs = [of_all(p, p * n, torch.float32) for n in (1, 100, 7)]
    outs = [torch.empty(n) for n in (1, 100, 7)]
    with dist._coalescing_manager(group, async_ops=async_ops) as manager:
        for out, x in zip(outs, xs, strict=True):
            dist.reduce_scatter_tensor(out, x[rank], group=group)
    if async_ops:
        manager.wait()
    for out, x in zip(outs, xs, strict=True):
        same(out, sum(x).chunk(p)[rank])


@both_backends
@pytest.mark.parametrize("async_ops", [False, True], ids=["", "async"])
def test_the_coalescing_manager(async_ops, backend):
    run(_managed, 2, backend, async_ops)
