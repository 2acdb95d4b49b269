"""Conformance cases 19 to 26: column and row linears, alone and as a pair, against `nn.Linear`.

The table: docs/reference/correctness.md.

Bounds: fp32 1e-6 and fp64 1e-12, sums of a few dozen products in another order.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import ranks
from tests.helpers.oracle import own_tokens
from tp_ext import ColumnParallelLinear, RowParallelLinear, full_state_dict

pytestmark = pytest.mark.core

EVERY = pytest.mark.parametrize("p", [1, 2, 3, 4])
SP = pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
FP64 = {"rtol": 1e-12, "atol": 1e-12}
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def make_problem(features_in, features_out, *leading, dtype=torch.float32):
    """A dense layer, and x, y, dy, dx of it, its gradients set."""
    dense = nn.Linear(features_in, features_out, dtype=dtype)
    x = torch.randn(*leading, features_in, dtype=dtype, requires_grad=True)
    dy = torch.randn(*leading, features_out, dtype=dtype)
    y = dense(x)
    y.backward(dy)
    return dense, x.detach(), y.detach(), dy, x.grad


def slices(t, p, dim):
    return t.tensor_split(p, dim)


def run(group, kind, dense, xs, dys, options, tokens=None):
    rank = group.rank()
    layer = kind.from_linear(dense, group=group, **options)
    x = xs[rank].clone().requires_grad_()
    y = layer(x, tokens)
    y.backward(dys[rank])
    return y, x.grad, layer.weight.grad, layer.bias.grad


def check(p, kind, problem, xs, dys, ys, dxs, **options):
    """On every rank y, dx and the rank's dw and db; the row's bias is whole."""
    dense = problem[0]
    close = FP64 if dense.weight.dtype == torch.float64 else CLOSE
    column = kind is ColumnParallelLinear
    dws = slices(dense.weight.grad, p, 0 if column else 1)
    dbs = slices(dense.bias.grad, p, 0) if column else [dense.bias.grad] * p
    tokens = len(problem[1]) if options.get("sequence_parallel") else None
    results = ranks.run(run, p, kind, dense, xs, dys, options, tokens)
    for got, want in zip(results, zip(ys, dxs, dws, dbs, strict=True), strict=True):
        for name, a, b in zip(("y", "dx", "dw", "db"), got, want, strict=True):
            torch.testing.assert_close(a, b, **close, msg=lambda m, name=name: f"{name}: {m}")
    if not column:
        assert all(torch.equal(r[3], results[0][3]) for r in results), "db differs between ranks"


@EVERY
@SP
def test_case_19_column_gathers_its_output(sp, p):
    problem = make_problem(13 * p, 17 * p, 7)
    _, x, y, dy, dx = problem
    xs, dxs = (slices(x, p, 0), slices(dx, p, 0)) if sp else ([x] * p, [dx] * p)
    options = {"gather_output": True, "sequence_parallel": sp}
    check(p, ColumnParallelLinear, problem, xs, [dy] * p, [y] * p, dxs, **options)


@EVERY
def test_case_20_column_output_stays_sharded(p):
    problem = make_problem(13, 4 * p + 1, 7)
    _, x, y, dy, dx = problem
    check(p, ColumnParallelLinear, problem, [x] * p, slices(dy, p, -1), slices(y, p, -1), [dx] * p)


@EVERY
@pytest.mark.parametrize("extra", [0, 1], ids=["even", "uneven"])
@pytest.mark.parametrize("leading", [(3,), ()], ids=str)
def test_case_21_column_with_sequence_parallel(p, leading, extra):
    problem = make_problem(6, 2 * p + 1, 2 * p + extra, *leading)
    _, x, y, dy, dx = problem
    xs, dxs = slices(x, p, 0), slices(dx, p, 0)
    check(p, ColumnParallelLinear, problem, xs, slices(dy, p, -1), slices(y, p, -1), dxs, sequence_parallel=True)


@EVERY
def test_case_22_row_adds_its_bias_once(p):
    problem = make_problem(5 * p + 1, 7, 3, 2)
    dense, x, y, dy, dx = problem
    check(p, RowParallelLinear, problem, slices(x, p, -1), [dy] * p, [y] * p, slices(dx, p, -1))
    zeros = ranks.run(run, p, RowParallelLinear, dense, slices(torch.zeros_like(x), p, -1), [dy] * p, {})
    assert all(torch.equal(r[0], dense.bias.detach().expand_as(y)) for r in zeros)


@EVERY
def test_case_23_row_cuts_its_input(p):
    problem = make_problem(5 * p + 1, 7, 3, 2)
    _, x, y, dy, dx = problem
    check(p, RowParallelLinear, problem, [x] * p, [dy] * p, [y] * p, [dx] * p, input_is_parallel=False)


@EVERY
@pytest.mark.parametrize("extra", [0, 1], ids=["even", "uneven"])
def test_case_24_row_with_sequence_parallel(p, extra):
    """The bias's gradient is the whole one on every rank, to the last bit alike."""
    problem = make_problem(3 * p + 1, 5, 2 * p + extra, 3)
    _, x, y, dy, dx = problem
    xs, dxs = slices(x, p, -1), slices(dx, p, -1)
    check(p, RowParallelLinear, problem, xs, slices(dy, p, 0), slices(y, p, 0), dxs, sequence_parallel=True)


def _skip(group, kind, dense, x, used, sp):
    rank, p = group.rank(), group.size()
    layer = kind.from_linear(dense, group=group, skip_bias_add=True, sequence_parallel=sp)
    column = kind is ColumnParallelLinear
    x = x if column else x.tensor_split(p, -1)[rank]
    y, bias = layer(own_tokens(x, group) if column and sp else x)
    (y.sum() + (3 * bias.sum() if used else 0)).backward()
    return y, bias, layer.bias.grad


@EVERY
@SP
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_case_25_bias_is_left_to_the_caller(kind, sp, p):
    dense, x = nn.Linear(5, 6, dtype=torch.float64), torch.randn(2 * p, 5, dtype=torch.float64)
    without, column = F.linear(x, dense.weight), kind is ColumnParallelLinear
    for used in (True, False):
        for rank, (y, bias, grad) in enumerate(ranks.run(_skip, p, kind, dense, x, used, sp)):
            cut = slices(without, p, -1 if column else 0)[rank] if column or sp else without
            torch.testing.assert_close(y, cut, **FP64)
            assert torch.equal(bias, slices(dense.bias, p, 0)[rank] if column else dense.bias)
            # under sequence parallelism each rank used the row's bias once: for its own tokens
            times = 3 * p if sp and not column else 3
            assert torch.equal(grad, torch.full_like(bias, times)) if used else grad is None or not grad.any()


def _block(group, up, down, x, sp):
    first = ColumnParallelLinear.from_linear(up, group=group, sequence_parallel=sp)
    second = RowParallelLinear.from_linear(down, group=group, sequence_parallel=sp)
    x = (own_tokens(x, group) if sp else x).clone().requires_grad_()
    y = second(F.gelu(first(x)))
    (y**2).sum().backward()
    for layer in (first, second):  # a full state dict of gradients
        layer.weight.data, layer.bias.data = layer.weight.grad, layer.bias.grad
    return y, x.grad, *full_state_dict(first, group=group).values(), *full_state_dict(second, group=group).values()


@pytest.mark.smoke
@EVERY
@SP
def test_case_26_column_gelu_row(sp, p):
    up, down, x = nn.Linear(64, 256), nn.Linear(256, 64), torch.randn(12, 64, requires_grad=True)
    y = down(F.gelu(up(x)))
    (y**2).sum().backward()
    params = [up.weight, up.bias, down.weight, down.bias]
    for rank, got in enumerate(ranks.run(_block, p, up, down, x.detach(), sp)):
        want = [slices(t, p, 0)[rank] if sp else t for t in (y.detach(), x.grad)] + [t.grad for t in params]
        for a, b in zip(got, want, strict=True):  # fp32: 1e-5 of the largest, since sums cancel
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(b.abs().max()))
