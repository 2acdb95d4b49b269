"""The conformance cases of the linears, by number (`test_case_N_...`)."""

import pytest
import ranks
import torch
import torch.nn.functional as F
from dense import own_tokens
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from tp_ext import ColumnParallelLinear, RowParallelLinear, Sharding, full_state_dict

pytestmark = pytest.mark.core

EVERY = pytest.mark.parametrize("p", [1, 2, 3, 4])
FP64 = {"rtol": 1e-12, "atol": 1e-12}
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def _problem(features_in, features_out, *leading, dtype=torch.float32):
    """A dense layer, and x, y, dy, dx of it, its gradients set."""
    dense = nn.Linear(features_in, features_out, dtype=dtype)
    x = torch.randn(*leading, features_in, dtype=dtype, requires_grad=True)
    dy = torch.randn(*leading, features_out, dtype=dtype)
    y = dense(x)
    y.backward(dy)
    return dense, x.detach(), y.detach(), dy, x.grad


def _slices(t, p, dim):
    return t.tensor_split(p, dim)


def _run(group, kind, dense, xs, dys, options):
    rank = group.rank()
    layer = kind.from_linear(dense, group=group, **options)
    x = xs[rank].clone().requires_grad_()
    y = layer(x)
    y.backward(dys[rank])
    return y, x.grad, layer.weight.grad, layer.bias.grad


def _check(p, kind, problem, xs, dys, ys, dxs, **options):
    """On every rank y, dx and the rank's dw and db; the row's bias is whole."""
    dense = problem[0]
    close = FP64 if dense.weight.dtype == torch.float64 else CLOSE
    column = kind is ColumnParallelLinear
    dws = _slices(dense.weight.grad, p, 0 if column else 1)
    dbs = _slices(dense.bias.grad, p, 0) if column else [dense.bias.grad] * p
    results = ranks.run(_run, p, kind, dense, xs, dys, options)
    for got, want in zip(results, zip(ys, dxs, dws, dbs, strict=True), strict=True):
        for name, a, b in zip(("y", "dx", "dw", "db"), got, want, strict=True):
            torch.testing.assert_close(a, b, **close, msg=lambda m, name=name: f"{name}: {m}")
    if not column:
        assert all(torch.equal(r[3], results[0][3]) for r in results), "db differs between ranks"


@EVERY
def test_case_19_column_gathers_its_output(p):
    problem = _problem(13 * p, 17 * p, 7)
    _, x, y, dy, dx = problem
    _check(p, ColumnParallelLinear, problem, [x] * p, [dy] * p, [y] * p, [dx] * p, gather_output=True)


@EVERY
def test_case_20_column_output_stays_sharded(p):
    problem = _problem(13, 4 * p + 1, 7)
    _, x, y, dy, dx = problem
    _check(p, ColumnParallelLinear, problem, [x] * p, _slices(dy, p, -1), _slices(y, p, -1), [dx] * p)


@EVERY
@pytest.mark.parametrize("leading", [(3,), ()])
def test_case_21_column_with_sequence_parallel(p, leading):
    problem = _problem(6, 2 * p + 1, 2 * p, *leading)
    _, x, y, dy, dx = problem
    xs, dxs = _slices(x, p, 0), _slices(dx, p, 0)
    _check(p, ColumnParallelLinear, problem, xs, _slices(dy, p, -1), _slices(y, p, -1), dxs, sequence_parallel=True)


@EVERY
def test_case_22_row_adds_its_bias_once(p):
    problem = _problem(5 * p + 1, 7, 3, 2)
    dense, x, y, dy, dx = problem
    _check(p, RowParallelLinear, problem, _slices(x, p, -1), [dy] * p, [y] * p, _slices(dx, p, -1))
    zeros = ranks.run(_run, p, RowParallelLinear, dense, _slices(torch.zeros_like(x), p, -1), [dy] * p, {})
    assert all(torch.equal(r[0], dense.bias.detach().expand_as(y)) for r in zeros)


@EVERY
def test_case_23_row_cuts_its_input(p):
    problem = _problem(5 * p + 1, 7, 3, 2)
    _, x, y, dy, dx = problem
    _check(p, RowParallelLinear, problem, [x] * p, [dy] * p, [y] * p, [dx] * p, input_is_parallel=False)


@EVERY
def test_case_24_row_with_sequence_parallel(p):
    problem = _problem(3 * p + 1, 5, 2 * p, 3)
    _, x, y, dy, dx = problem
    xs, dxs = _slices(x, p, -1), _slices(dx, p, -1)
    _check(p, RowParallelLinear, problem, xs, _slices(dy, p, 0), _slices(y, p, 0), dxs, sequence_parallel=True)


def _skip(group, kind, dense, x, used, sp):
    rank, p = group.rank(), group.size()
    layer = kind.from_linear(dense, group=group, skip_bias_add=True, sequence_parallel=sp)
    column = kind is ColumnParallelLinear
    x = x if column else x.tensor_split(p, -1)[rank]
    y, bias = layer(own_tokens(x, group) if column and sp else x)
    (y.sum() + (3 * bias.sum() if used else 0)).backward()
    return y, bias, layer.bias.grad


@EVERY
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_case_25_bias_is_left_to_the_caller(kind, sp, p):
    dense, x = nn.Linear(5, 6, dtype=torch.float64), torch.randn(2 * p, 5, dtype=torch.float64)
    without, column = F.linear(x, dense.weight), kind is ColumnParallelLinear
    for used in (True, False):
        for rank, (y, bias, grad) in enumerate(ranks.run(_skip, p, kind, dense, x, used, sp)):
            cut = _slices(without, p, -1 if column else 0)[rank] if column or sp else without
            torch.testing.assert_close(y, cut, **FP64)
            assert torch.equal(bias, _slices(dense.bias, p, 0)[rank] if column else dense.bias)
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


@EVERY
@pytest.mark.parametrize("sp", [False, True])
def test_case_26_column_gelu_row(sp, p):
    up, down, x = nn.Linear(64, 256), nn.Linear(256, 64), torch.randn(12, 64, requires_grad=True)
    y = down(F.gelu(up(x)))
    (y**2).sum().backward()
    params = [up.weight, up.bias, down.weight, down.bias]
    for rank, got in enumerate(ranks.run(_block, p, up, down, x.detach(), sp)):
        want = [_slices(t, p, 0)[rank] if sp else t for t in (y.detach(), x.grad)] + [t.grad for t in params]
        for a, b in zip(got, want, strict=True):  # fp32: 1e-5 of the largest, since sums cancel
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(b.abs().max()))


def _frozen(group, kind, sp):
    p, rank, column = group.size(), group.rank(), kind is ColumnParallelLinear
    dense = nn.Linear(8, 8)
    nn.init.ones_(dense.weight)
    dense.weight.requires_grad_(False)
    layer = kind.from_linear(dense, group=group, sequence_parallel=sp)
    layer.bias.data.zero_()
    x = torch.eye(8)
    x = x.tensor_split(p, -1)[rank].contiguous() if not column else own_tokens(x, group) if sp else x
    saved = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x.requires_grad_())
    assert all(t.data_ptr() != x.data_ptr() and t.shape == layer.weight.shape for t in saved), "the input is saved"
    assert {t.data_ptr() for t in saved} <= {layer.weight.data_ptr()}
    rows = 8 // p if sp and not column else 8
    assert torch.equal(y, torch.ones(rows, 8 // p if column else 8))
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 8))
    assert layer.weight.grad is None
    saved.clear()  # and the other way round: an input without gradient needs no weight; what is kept is the shard
    layer.weight.requires_grad_(True)
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x.detach()).sum().backward()
    assert {t.untyped_storage().data_ptr() for t in saved} == {x.untyped_storage().data_ptr()}
    assert layer.weight.grad is not None


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_case_28_frozen_weight_saves_no_input(kind, sp, p):
    ranks.run(_frozen, p, kind, sp)


def _tied(group, dense, x):
    first = ColumnParallelLinear.from_linear(dense, group=group)
    second = ColumnParallelLinear(5, 6, group=group, dtype=torch.float64)
    second.weight, second.bias = first.weight, first.bias
    (first(x) + second(x) ** 2 + first(2 * x)).sum().backward()
    return first.weight.grad, first.bias.grad


@EVERY
def test_case_29_tied_weights_add_their_gradients(p):
    dense, x = nn.Linear(5, 6, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    (dense(x) + dense(x) ** 2 + dense(2 * x)).sum().backward()
    got = ranks.run(_tied, p, dense, x)
    for i, param in enumerate(dense.parameters()):
        torch.testing.assert_close(Sharding(0, (6,)).unshard([g[i] for g in got]), param.grad, **FP64)


def _twice(group, kind, sp):
    layer = kind(8, 8, group=group, sequence_parallel=sp)
    rows = torch.randn(4, 8)
    x = rows if kind is ColumnParallelLinear else rows.tensor_split(group.size(), -1)[group.rank()].contiguous()
    x.requires_grad_()
    y = layer(x)
    g = torch.randn_like(y)
    tensors = [x, layer.weight, layer.bias]
    before = [t.detach().clone() for t in (*tensors, g)]
    y.backward(g, retain_graph=True)
    once = [t.grad.clone() for t in tensors]
    y.backward(g)
    assert all(torch.equal(t.grad, 2 * a) for t, a in zip(tensors, once, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((*tensors, g), before, strict=True))


@EVERY
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_case_30_backward_twice_doubles_the_gradients(kind, sp, p):
    ranks.run(_twice, p, kind, sp)


@pytest.mark.parametrize("p", [1, 2, 4])
def test_case_33_bf16_of_whole_numbers(p):
    """Sums of a column's products in fp32 are exact, so its result is the fp32 one rounded once. A row's addends are
    rounded before they are summed: exact for sums of fewer than 256 ones."""
    for kind, k, high in ((ColumnParallelLinear, 512, 8), (RowParallelLinear, 128, 1)):
        dense = nn.Linear(k, 16, dtype=torch.bfloat16)
        with torch.no_grad():
            for param in dense.parameters():
                param.copy_(torch.randint(-high, high + 1, param.shape))
        x, dy = (torch.randint(-high, high + 1, (8, n)).bfloat16() for n in (k, 16))
        y = F.linear(x.float(), dense.weight.float(), dense.bias.float()).bfloat16()
        dx, dw = (dy.float() @ dense.weight.float()).bfloat16(), (dy.float().t() @ x.float()).bfloat16()
        column = kind is ColumnParallelLinear
        xs, dys = ([x] * p, _slices(dy, p, -1)) if column else (_slices(x, p, -1), [dy] * p)
        ys, dxs = (_slices(y, p, -1), [dx] * p) if column else ([y] * p, _slices(dx, p, -1))
        for rank, got in enumerate(ranks.run(_run, p, kind, dense, xs, dys, {})):
            assert all(t.dtype == torch.bfloat16 for t in got)
            assert torch.equal(got[0], ys[rank])
            assert torch.equal(got[2], _slices(dw, p, 0 if column else 1)[rank])
            if not column or p == 1:  # a column's dx is a sum of rounded addends, of at most 16 * 64 / p
                assert torch.equal(got[1], dxs[rank])
            else:
                torch.testing.assert_close(got[1], dxs[rank], rtol=2**-8, atol=p * 2**-8 * 1024)
