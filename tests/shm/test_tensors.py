"""Tensors over gloo and tp_shm: sizes around every boundary, empty, 0-d and strided ones, views, other devices."""

import pytest
import torch
import torch.distributed as dist

from tests.helpers.ranks import run
from tests.shm.backends import both_backends, group_of, of_all, same, values

pytestmark = pytest.mark.core
POWERS = [1 << i for i in range(24)]
SIZES = sorted({n + d for n in POWERS for d in (-1, 0, 1)} | {3, 1000, 12_345, 1_000_003})


def _sizes(world, backend, sizes):
    """Bytes, so that every length modulo every alignment is there."""
    group, p, rank = group_of(backend), world.size(), world.rank()
    pattern = (torch.arange(max(sizes) + p) % 61).to(torch.uint8)
    total = sum(pattern[r : r + max(sizes)] for r in range(p))
    for n in sizes:
        x = pattern[rank : rank + n].clone()
        y = x.clone()
        dist.all_reduce(y, group=group)
        assert torch.equal(y, total[:n]), n
        out = torch.empty(p * n, dtype=torch.uint8)
        dist.all_gather_into_tensor(out, x, group=group)
        assert all(torch.equal(out[r * n : (r + 1) * n], pattern[r : r + n]) for r in range(p)), n
        y = x.clone()
        dist.broadcast(y, p - 1, group=group)
        assert torch.equal(y, pattern[p - 1 : p - 1 + n]), n
        m = n - n % p
        if m:
            part = torch.empty(m // p, dtype=torch.uint8)
            dist.reduce_scatter_tensor(part, x[:m].clone(), group=group)
            assert torch.equal(part, total[:m].chunk(p)[rank]), n


@both_backends
@pytest.mark.parametrize("p", [2, 3])
def test_sizes_up_to_a_megabyte(p, backend):
    run(_sizes, p, backend, [n for n in SIZES if n < 300_000] if backend == "gloo" else [n for n in SIZES if n < 1.1e6])


def test_sizes_up_to_eight_megabytes():
    run(_sizes, 2, "tp_shm", [n for n in SIZES if n >= 1.1e6])


def _large(world, backend, dtype, n):
    group, p, rank = group_of(backend), world.size(), world.rank()
    x = torch.arange(n, dtype=torch.int32).remainder_(1000).add_(rank)
    total = torch.arange(n, dtype=torch.int32).remainder_(1000).mul_(p).add_(p * (p - 1) // 2)
    y = x.to(dtype)
    dist.all_reduce(y, group=group)
    assert torch.equal(y, total.to(dtype))
    out = torch.empty(n, dtype=torch.int32)
    m = n - n % p
    dist.all_to_all_single(out[:m], x[:m], group=group)
    wanted = torch.arange(n, dtype=torch.int32)[:m].chunk(p)[rank].remainder(1000)
    assert all(torch.equal(part, wanted + r) for r, part in enumerate(out[:m].chunk(p)))


@both_backends
@pytest.mark.parametrize("p", [2, 4])
def test_forty_megabytes_and_an_odd_bit(p, backend):
    run(_large, p, backend, torch.float32, 10_000_019 if (p, backend) == (2, "tp_shm") else 1_500_007)


def _empty(world, backend):
    group, p, rank = group_of(backend), world.size(), world.rank()
    for shape in ((0,), (0, 3), (3, 0, 2)):
        x = torch.empty(shape)
        dist.all_reduce(x, group=group)
        dist.broadcast(x, 0, group=group)
        outs = [torch.empty(shape) for _ in range(p)]
        dist.all_gather(outs, x, group=group)
        out = torch.empty(p * shape[0], *shape[1:])
        dist.all_gather_into_tensor(out, x, group=group)
        dist.reduce_scatter_tensor(torch.empty(shape), torch.empty(p * shape[0], *shape[1:]), group=group)
        dist.reduce(x, 0, group=group)
        dist.gather(x, outs if rank == 0 else None, 0, group=group)
        dist.scatter(x, outs if rank == 0 else None, 0, group=group)
        if shape[0] == 0:
            dist.all_to_all_single(torch.empty(shape), x, [0] * p, [0] * p, group=group)


@both_backends
@pytest.mark.parametrize("p", [2, 3])
def test_empty_tensors(p, backend):
    run(_empty, p, backend)


def _scalars(world, backend):
    group, p, rank = group_of(backend), world.size(), world.rank()
    x = torch.tensor(rank + 1.0, dtype=torch.float64)
    y = x.clone()
    dist.all_reduce(y, group=group)
    same(y, torch.tensor(p * (p + 1) / 2, dtype=torch.float64))
    dist.broadcast(y := x.clone(), 1, group=group)
    same(y, torch.tensor(2.0, dtype=torch.float64))
    outs = [torch.zeros((), dtype=torch.float64) for _ in range(p)]
    dist.all_gather(outs, x, group=group)
    assert [out.item() for out in outs] == [r + 1.0 for r in range(p)]
    dist.gather(x, outs if rank == 1 else None, 1, group=group)
    dist.scatter(y, outs if rank == 1 else None, 1, group=group)
    same(y, x)


@both_backends
def test_scalars(backend):
    run(_scalars, 2, backend)


# Strides

STRIDED = {
    "transposed": lambda x: x.t().contiguous().t(),
    "column": lambda x: torch.stack([x, x - 1], -1)[..., 0],
    "rows of a larger one": lambda x: torch.cat([x, x, x])[len(x) : 2 * len(x)],
    "every second row": lambda x: x.repeat_interleave(2, 0)[::2],
    "columns of a larger one": lambda x: torch.cat([x, x], 1)[:, : x.shape[1]],
    "unaligned": lambda x: torch.cat([x.new_zeros(1), x.flatten()])[1:].view(x.shape),
    "requires grad": lambda x: x.clone().requires_grad_(),
}


def _strided(world, backend, make):
    group, p, rank = group_of(backend), world.size(), world.rank()
    xs = of_all(p, (2 * p, 5), torch.float32)
    taken = {"gloo": make in ("rows of a larger one", "unaligned", "requires grad", "transposed")}.get(backend, True)
    make = STRIDED[make]
    with torch.no_grad():
        x = make(xs[rank])
        same(x, xs[rank])
        outs = [make(torch.zeros(2 * p, 5)) for _ in range(p)]
        dist.all_gather(outs, x, group=group)
        for out, wanted in zip(outs, xs, strict=True):
            same(out, wanted)
        dist.gather(x, outs if rank == 0 else None, 0, group=group)
        if taken:
            y = make(xs[rank])
            dist.all_reduce(y, group=group)
            same(y, sum(xs))
            y = make(xs[rank])
            dist.broadcast(y, 1, group=group)
            same(y, xs[1])
            y = make(xs[rank])
            dist.reduce(y, 0, group=group)
            same(y, sum(xs) if rank == 0 else y)
        x = make(xs[rank])
        same(x, xs[rank])  # what is only read stays as it is


@both_backends
@pytest.mark.parametrize("make", STRIDED)
def test_strided_tensors(make, backend):
    """tp_shm takes any strides; gloo wants what fills its memory, in the operations that write their input."""
    run(_strided, 2, backend, make)


def _around(world, backend):
    """Nothing outside of an output is written."""
    group, p, rank = group_of(backend), world.size(), world.rank()
    memory = torch.full((10_000,), -7.0)
    for n in (1, 3, 1000, 4097):
        memory.fill_(-7)
        memory[100 : 100 + n] = values(rank, n, torch.float32)
        dist.all_reduce(memory[100 : 100 + n], group=group)
        same(memory[100 : 100 + n], sum(of_all(p, n, torch.float32)))
        assert bool((memory[:100] == -7).all()) and bool((memory[100 + n :] == -7).all())


@both_backends
def test_only_the_output_is_written(backend):
    run(_around, 2, backend)


def _shared_storage(world, backend):
    """Several works in flight write parts of one tensor."""
    group, p, rank = group_of(backend), world.size(), world.rank()
    x = values(rank, 5000, torch.float32)
    works = [dist.all_reduce(part, group=group, async_op=True) for part in x.split(617)]
    for work in works:
        work.wait()
    same(x, sum(of_all(p, 5000, torch.float32)))


@both_backends
def test_parts_of_one_tensor_in_flight(backend):
    run(_shared_storage, 3, backend)


def _inference(world, backend):
    group, p, rank = group_of(backend), world.size(), world.rank()
    with torch.inference_mode():
        x = values(rank, 10, torch.float32)
        dist.all_reduce(x, group=group)
        same(x, sum(of_all(p, 10, torch.float32)))


@both_backends
def test_inference_mode(backend):
    run(_inference, 2, backend)


def _on(world, backend, device):
    group = group_of(backend)
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)) as caught:
        # The backend itself: torch makes nothing of a call with meta tensors
        group._get_backend(torch.device("cpu")).allreduce([torch.empty(3, device=device)]).wait()
    dist.all_reduce(x := torch.ones(1), group=group)
    assert x.item() == world.size()
    return str(caught.value)


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.cuda)])
def test_other_devices_are_refused_by_name(device):
    for message in run(_on, 2, "tp_shm", device):
        assert device in message


def _sparse(world, backend):
    x = torch.eye(3).to_sparse()
    with pytest.raises((RuntimeError, ValueError, NotImplementedError)) as caught:
        dist.broadcast(x, 0, group=group_of(backend))
    return str(caught.value)


def test_sparse_tensors_are_refused_by_name():
    for message in run(_sparse, 2, "tp_shm"):
        assert "parse" in message
