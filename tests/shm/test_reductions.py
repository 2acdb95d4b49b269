"""Reductions over gloo and tp_shm: every operation in every dtype, the same bits everywhere and from run to run."""

from functools import reduce

import pytest
import torch
import torch.distributed as dist

import tp_ext
from tests.helpers.ranks import run
from tests.shm.backends import COMPLEX, DTYPES, FLOATS, INTEGERS, both_backends, group_of, of_all, same, values

pytestmark = pytest.mark.core
Op = dist.ReduceOp

OPERATIONS = {
    "sum": (Op.SUM, lambda xs: reduce(torch.add, xs), DTYPES),
    "avg": (Op.AVG, lambda xs: reduce(torch.add, xs) / len(xs), (*FLOATS, *COMPLEX)),
    "min": (Op.MIN, lambda xs: reduce(torch.minimum, xs), (*FLOATS, *INTEGERS, torch.bool)),
    "max": (Op.MAX, lambda xs: reduce(torch.maximum, xs), (*FLOATS, *INTEGERS, torch.bool)),
    "product": (Op.PRODUCT, lambda xs: reduce(torch.mul, xs), (*FLOATS, *INTEGERS, torch.bool)),
    "band": (Op.BAND, lambda xs: reduce(torch.bitwise_and, xs), (*INTEGERS, torch.bool)),
    "bor": (Op.BOR, lambda xs: reduce(torch.bitwise_or, xs), (*INTEGERS, torch.bool)),
    "bxor": (Op.BXOR, lambda xs: reduce(torch.bitwise_xor, xs), INTEGERS),
}


def _inputs(operation, p, shape, dtype, salt):
    """The sums of an average are multiples of p: exact, whether one divides or multiplies by 1 / p."""
    xs = of_all(p, shape, dtype, salt)
    return [x * p for x in xs] if operation == "avg" else xs


def _all_reduce(world, backend, operation):
    group, p, rank = group_of(backend), world.size(), world.rank()
    op, expected, dtypes = OPERATIONS[operation]
    for dtype in dtypes:
        for salt, shape in enumerate([1, (3, 5), 1031]):
            xs = _inputs(operation, p, shape, dtype, salt)
            x = xs[rank].clone()
            assert dist.all_reduce(x, op, group=group) is None
            same(x, expected(xs))


@pytest.mark.thinned
@both_backends
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("p", [2, 3, 4])
def test_all_reduce_in_every_dtype(p, operation, backend):
    run(_all_reduce, p, backend, operation)


def _sizes_of_one_step(world):
    """Calls that follow each other write every slot several times."""
    group, p, rank = group_of("tp_shm"), world.size(), world.rank()
    for n in (8191, 8192, 8193, 8256, 65535, 65536):
        for salt in range(6):
            xs = of_all(p, n, torch.uint8, salt)
            x = xs[rank].clone()
            dist.all_reduce(x, group=group)
            same(x, reduce(torch.add, xs))


@pytest.mark.parametrize("p", [2, 3])
def test_sizes_that_are_written_past_the_caches(p):
    run(_sizes_of_one_step, p)


def _into_a_new_tensor(world):
    """reduce_from_region reads x where it is: the bits of the sum in place, counted as one all-reduce of its bytes."""
    group, p, rank = group_of("tp_shm"), world.size(), world.rank()
    for dtype in (*FLOATS, *INTEGERS):
        for salt, shape in enumerate([(0, 3), (3, 5), (7, 40_000)]):  # in one step, and by chunks
            mine = of_all(p, shape, dtype, salt)[rank]
            for x in (mine, mine.t()):
                before, expected = x.clone(), x.contiguous().clone()
                dist.all_reduce(expected, group=group)
                with tp_ext.debug.count_collectives() as counts:
                    y = tp_ext.reduce_from_region(x, group)
                same(y, expected)
                same(x, before)
                assert [(row.kind, row.payload) for row in counts.rows] == [("all_reduce", x.nbytes)] * (
                    p > 1 and x.numel() > 0
                )
    with pytest.raises(ValueError, match="tensors: 2 must be one"):  # a caller cannot ask for it by two tensors
        group.allreduce([torch.ones(2), torch.ones(2)]).wait()


@pytest.mark.parametrize("p", [1, 2, 3])
def test_a_sum_into_a_new_tensor(p):
    run(_into_a_new_tensor, p)


def _reduce(world, backend, operation):
    group, p, rank = group_of(backend), world.size(), world.rank()
    op, expected, dtypes = OPERATIONS[operation]
    for dtype in (dtypes[0], dtypes[-1]):
        for root in range(p):
            xs = _inputs(operation, p, 37, dtype, root)
            x = xs[rank].clone()
            dist.reduce(x, root, op, group=group)
            if rank == root:
                same(x, expected(xs))


@both_backends
@pytest.mark.parametrize("operation", OPERATIONS)
def test_reduce_to_every_root(operation, backend):
    run(_reduce, 3, backend, operation)


def _reduce_scatter(world, backend, operation):
    group, p, rank = group_of(backend), world.size(), world.rank()
    op, expected, dtypes = OPERATIONS[operation]
    for dtype in (dtypes[0], dtypes[-1]):
        xs = _inputs(operation, p, (2 * p, 7), dtype, 1)
        wanted, kept = expected(xs).chunk(p)[rank], xs[rank].clone()
        out = torch.empty(2, 7, dtype=wanted.dtype)
        dist.reduce_scatter_tensor(out, xs[rank], op, group=group)
        same(out, wanted)
        same(xs[rank], kept)
        out = torch.empty(2, 7, dtype=wanted.dtype)
        dist.reduce_scatter(out, list(xs[rank].chunk(p)), op, group=group)
        same(out, wanted)
        same(xs[rank], kept)


@both_backends
@pytest.mark.parametrize("operation", OPERATIONS)
@pytest.mark.parametrize("p", [2, 3])
def test_reduce_scatter(p, operation, backend):
    run(_reduce_scatter, p, backend, operation)


def _uneven_reduce_scatter(world, backend):
    """Lengths 0, 1, 3, ..: of each rank another one, as torch's own test of gloo has it."""
    group, p, rank = group_of(backend), world.size(), world.rank()
    lengths = [0, 1, 3, 2][:p]
    parts = [[values(r, n, torch.float32, n) for n in lengths] for r in range(p)]
    out = torch.empty(lengths[rank])
    dist.reduce_scatter(out, parts[rank], group=group)
    same(out, sum(parts[r][rank] for r in range(p)))


@both_backends
@pytest.mark.parametrize("p", [2, 4])
def test_uneven_reduce_scatter(p, backend):
    run(_uneven_reduce_scatter, p, backend)


# The same bits


def _bits(world, backend, dtype, n):
    """Sums of numbers that no order of additions leaves alone, in calls that differ in nothing but time."""
    group, rank, p = group_of(backend), world.rank(), world.size()
    xs = [torch.randn(n, generator=torch.Generator().manual_seed(r)).to(dtype) for r in range(p)]
    sums = []
    for _ in range(3):
        x = xs[rank].clone()
        dist.all_reduce(x, group=group)
        sums.append(x)
    assert all(torch.equal(x, sums[0]) for x in sums)
    exact = torch.stack(xs).double()
    bound = exact.abs().sum(0) * torch.finfo(dtype).eps * p  # of p - 1 roundings of partial sums, and the last
    assert bool(((sums[0].double() - exact.sum(0)).abs() <= bound).all())
    return sums[0]


@both_backends
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_sums_are_the_same_bits_on_all_ranks_and_from_run_to_run(dtype, backend):
    for n in (1, 1000, 300_001):
        first, *others = run(_bits, 3, backend, dtype, n)
        assert all(torch.equal(first, other) for other in others), n


def _place(world, backend):
    """An element's sum does not depend on where it lies in the tensor, nor on the tensor's length."""
    group, rank = group_of(backend), world.rank()
    x = torch.randn(1, generator=torch.Generator().manual_seed(rank)).expand(5003).clone()
    alone = x[:1].clone()
    dist.all_reduce(x, group=group)
    dist.all_reduce(alone, group=group)
    return bool((x == alone).all())


def test_a_sum_does_not_depend_on_the_place():
    """No promise of gloo's: its ring starts each part of a tensor at another rank."""
    assert all(run(_place, 4, "tp_shm"))


def _special(world, backend, dtype):
    group, rank, inf = group_of(backend), world.rank(), float("inf")
    x = torch.tensor([inf, inf, float("nan"), -0.0] if rank else [inf, -inf, 1.0, -0.0], dtype=dtype)
    dist.all_reduce(x, group=group)
    assert x[0] == inf and bool(x[1:3].isnan().all()) and x[3] == 0 and bool(x[3].signbit())


@both_backends
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
def test_infinities_nans_and_minus_zero(dtype, backend):
    run(_special, 2, backend, dtype)


def _with_nan(world, operation, holder):
    x = torch.tensor([float("nan") if world.rank() == holder else 1.0] * 3)
    dist.all_reduce(x, getattr(dist.ReduceOp, operation), group=group_of("tp_shm"))
    return bool(x.isnan().all())


@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("operation", ["MIN", "MAX"])
def test_a_nan_of_any_rank_is_the_minimum_and_the_maximum(operation, p):
    """No promise of gloo's."""
    for holder in range(p):
        assert all(run(_with_nan, p, operation, holder))


def _wraps(world, backend):
    group = group_of(backend)
    x = torch.tensor([100, -100, 127], dtype=torch.int8)
    y = torch.tensor([2**62, -(2**62), 2**63 - 1], dtype=torch.int64)
    dist.all_reduce(x, group=group)
    dist.all_reduce(y, group=group)
    return x.tolist(), y.tolist()


@both_backends
def test_integers_wrap_around(backend):
    assert run(_wraps, 2, backend) == [([-56, 56, -2], [-(2**63), -(2**63), -2])] * 2


# What no backend does


def _refused(world, backend, op, dtype):
    group = group_of(backend)
    errors = (RuntimeError, ValueError, TypeError)
    with pytest.raises(errors) as caught:
        dist.all_reduce(torch.ones(3, dtype=dtype), op, group=group)
    x = torch.ones(3)
    dist.all_reduce(x, group=group)  # the group works on
    assert x.tolist() == [world.size()] * 3
    return str(caught.value)


@both_backends
@pytest.mark.parametrize(
    "op, dtype",
    [
        (Op.BAND, torch.float32),
        (Op.BOR, torch.float64),
        (Op.BXOR, torch.float16),
        (Op.AVG, torch.int64),
        (Op.AVG, torch.bool),
        (Op.MAX, torch.complex64),
        (Op.PRODUCT, torch.complex128),
    ],
    ids=str,
)
def test_operations_that_a_dtype_does_not_have_are_refused(op, dtype, backend):
    first, *others = run(_refused, 2, backend, op, dtype)
    assert all(other == first for other in others)


def _premultiplied(world, backend):
    group = group_of(backend)
    with pytest.raises((RuntimeError, ValueError, TypeError)) as caught:
        dist.all_reduce(torch.ones(3), Op.PREMUL_SUM, group=group)
    return str(caught.value)


@both_backends
def test_operations_of_nccl_alone_are_refused_by_name(backend):
    for message in run(_premultiplied, 2, backend):
        assert "PREMUL_SUM" in message
