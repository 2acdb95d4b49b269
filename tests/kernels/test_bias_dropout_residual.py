"""residual + dropout(x + bias): the mask is exactly that of the global index, on every path."""

import math

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

from tests.helpers.philox_numpy import dropout_numbers, kept
from tp_ext import _ops

pytestmark = pytest.mark.core

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SIZES = [(0, 5), (1, 1), (3, 7), (2, 8), (5, 9), (31, 33), (4, 64), (3, 2055)]


def seed_of(value, device):
    return torch.tensor(value, dtype=torch.int64, device=device)


def whole(x):
    """local_inner, full_inner, offset of a tensor that is the full one."""
    return max(x.numel(), 1), max(x.numel(), 1), 0


def mask_of(shape, p, seed):
    """Kept elements of the full tensor, by a generator in numpy."""
    mask = kept(int(seed), p, np.arange(math.prod(shape)).reshape(shape))
    return torch.from_numpy(mask).to(seed.device)


def reference(x, bias, residual, mask, p):
    y = x if bias is None else x + bias
    y = torch.where(mask, y / (1 - p), y * 0) if p < 1 else y * 0
    return y if residual is None else y + residual


def ulp(dtype):
    return torch.finfo(dtype).eps


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("with_residual", [False, True])
@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("shape", SIZES)
def test_forward_and_gradients(shape, with_bias, with_residual, dtype, device):
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=dtype, device=device)
    bias = torch.randn(shape[-1:], dtype=dtype, device=device) if with_bias else None
    residual = torch.randn(shape, dtype=dtype, device=device) if with_residual else None
    inputs = [t.requires_grad_() for t in (x, bias, residual) if t is not None]
    seed, p = seed_of(-77, device), 0.25
    y = _ops.bias_dropout_residual(x, bias, residual, seed, p, *whole(x))
    exact = [t.detach().double().requires_grad_() for t in inputs]
    parts = iter(exact)
    x64, b64, r64 = (None if t is None else next(parts) for t in (x, bias, residual))
    y64 = reference(x64, b64, r64, mask_of(shape, p, seed), p)
    assert y.dtype == dtype and y.shape == x.shape
    # One rounding, of a sum whose terms are below 8: 3 fp32 roundings and one to the dtype
    accuracy = {"rtol": 2 * ulp(dtype), "atol": 8 * ulp(min(dtype, torch.float32, key=ulp))}
    torch.testing.assert_close(y.double(), y64, **accuracy)
    dy = torch.randn(shape, dtype=dtype, device=device)
    for _ in range(2):
        grads = torch.autograd.grad(y, inputs, dy, retain_graph=True)
        expected = torch.autograd.grad(y64, exact, dy.double(), retain_graph=True)
        for t, got, want in zip(inputs, grads, expected, strict=True):
            assert got.dtype == dtype
            # A bias gradient sums rows that were rounded to the dtype before
            rows = shape[0] if t is bias else 1
            bound = {"rtol": 2 * ulp(dtype), "atol": 8 * rows**0.5 * ulp(dtype) if t is bias else 0}
            torch.testing.assert_close(got.double(), want, **bound)
    if with_residual:
        assert torch.equal(grads[-1], dy)


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "full, dim, start, length",
    [
        ((6, 40), 0, 2, 3),
        ((6, 40), 1, 8, 16),
        ((6, 40), 1, 3, 17),
        ((5, 33), 1, 32, 1),
        ((7, 9), 0, 1, 5),
        ((3, 5000), 1, 1001, 3333),
        ((3, 4, 24), 1, 1, 2),
    ],
)
def test_a_slice_gets_its_part_of_the_full_mask(full, dim, start, length, dtype, device):
    seed, p = seed_of(2**61 + 5, device), 0.4
    x = torch.rand(full, device=device).add(0.5).to(dtype)
    bias = torch.rand(full[-1], device=device).to(dtype)
    whole_y = _ops.bias_dropout_residual(x, bias, None, seed, p, *whole(x))
    part = x.narrow(dim, start, length)
    part_bias = bias.narrow(0, start, length) if dim == x.dim() - 1 else bias
    inner = x[0].numel() if dim == 0 else x.stride(dim)
    index = (length * inner, full[dim] * inner, start * inner)
    y = _ops.bias_dropout_residual(part, part_bias, None, seed, p, *index)
    assert torch.equal(y, whole_y.narrow(dim, start, length))
    assert torch.equal(y != 0, mask_of(full, p, seed).narrow(dim, start, length))
    dx = _ops.dropout_bwd(torch.ones_like(part), seed, p, *index)
    assert torch.equal(dx != 0, y != 0)


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape, start, length", [((9, 40), 0, 40), ((9, 40), 8, 16), ((11, 33), 5, 7), ((5, 1), 0, 1)])
def test_rows_come_with_the_seed(shape, start, length, dtype, device):
    """Rows from a first one on, and rows in any order, whole or cut, forward and backward."""
    seed, p, (rows, n) = 2**61 + 5, 0.4, shape
    bias = torch.rand(length, device=device).add(0.5).to(dtype)
    full = mask_of(shape, p, seed_of(seed, device))[:, start : start + length]
    order = torch.randperm(rows, device=device)[: rows // 2]
    for numbers, own in (([2], full[2:]), (order.tolist(), full[order])):
        given = seed_of([seed, *numbers], device)
        x = torch.rand(own.shape, device=device).add(0.5).to(dtype).requires_grad_()
        index = (length, n, start)
        y = _ops.bias_dropout_residual(x, bias, None, given, p, *index)
        assert torch.equal(y != 0, own)
        dy = torch.ones_like(x)
        assert torch.equal(torch.autograd.grad(y, x, dy)[0] != 0, own)
        dx, dbias = _ops.bias_dropout_bwd(dy, given, p, *index)
        assert torch.equal(dx != 0, own)
        torch.testing.assert_close(dbias.double(), dx.double().sum(0), rtol=2 * ulp(dtype), atol=0)


def test_rate_and_edges(device):
    x = torch.ones(1 << 20, device=device)
    for p in (0.0, 0.1, 0.5, 0.9, 1.0):
        y = _ops.bias_dropout_residual(x, None, None, seed_of(3, device), p, *whole(x))
        rate = (y != 0).double().mean().item()
        # Five standard deviations of the rate of n independent draws
        assert abs(rate - (1 - p)) <= 5 * (p * (1 - p) / x.numel()) ** 0.5
        if 0 < p < 1:
            assert torch.unique(y).tolist() == pytest.approx([0.0, 1 / (1 - p)])
    a, b = (_ops.bias_dropout_residual(x, None, None, seed_of(s, device), 0.5, *whole(x)) for s in (3, 4))
    assert not torch.equal(a, b)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_probability_is_exact(dtype, device):
    """As far as 32 bits go, of which 16 are drawn at first: masks at, above and below the numbers of some elements, and
    for probabilities below and between multiples of 2^-16."""
    n, seed = 1 << 16, seed_of(-9, device)
    x = torch.ones(n, dtype=dtype, device=device)
    numbers = [int(number) + above for number in dropout_numbers(-9, np.arange(0, n, 5001)) for above in (-1, 0, 1)]
    some = [1, 2**15, 2**16 - 1, 2**16, 2**31 + 1, 2**32 - 2**16 - 1, 2**32 - 2**16, 2**32 - 2, 2**32 - 1]
    for number in numbers + some:
        y = _ops.bias_dropout_residual(x, None, None, seed, number / 2**32, *whole(x))
        assert torch.equal(y != 0, mask_of((n,), number / 2**32, seed))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("edge", [2**34, 2**35, 3 * 2**35])
def test_masks_go_on_where_counters_get_longer(edge, dtype, device):
    """Counters from 2^32 on have a second number: rows across the edge, which is at their middle or near an end."""
    n, p, seed = 1000, 0.4, seed_of(77, device)
    for before in (n // 2, 3, n - 5):
        index = (n, 2**38, edge - before)
        x = torch.ones(n, dtype=dtype, device=device)
        mask = torch.from_numpy(kept(77, p, edge - before + np.arange(n))).to(device)
        assert torch.equal(_ops.bias_dropout_residual(x, None, None, seed, p, *index) != 0, mask)
        dx, _ = _ops.bias_dropout_bwd(x, seed, p, *index)
        assert torch.equal(dx != 0, mask)


def test_nan_stays_nan(device):
    x = torch.full((64,), float("nan"), device=device)
    for p in (0.0, 0.5, 1.0):
        assert _ops.bias_dropout_residual(x, None, None, seed_of(1, device), p, 64, 64, 0).isnan().all()


def test_strided_inputs_and_expanded_gradients(device):
    x = torch.randn(9, 12, device=device).t().requires_grad_()
    residual = torch.randn(12, 1, device=device).expand(12, 9)
    seed = seed_of(5, device)
    y = _ops.bias_dropout_residual(x, None, residual, seed, 0.5, *whole(x))
    dense = _ops.bias_dropout_residual(x.contiguous(), None, residual.contiguous(), seed, 0.5, *whole(x))
    assert torch.equal(y, dense)
    (dx,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(dx, mask_of((12, 9), 0.5, seed).float() * 2)


def test_only_the_gradients_asked_for(device):
    x, residual = (torch.randn(3, 8, device=device) for _ in range(2))
    bias = torch.randn(8, device=device, requires_grad=True)
    y = _ops.bias_dropout_residual(x, bias, residual.requires_grad_(), seed_of(5, device), 0.5, *whole(x))
    dy = torch.randn_like(y)
    dbias, dresidual = torch.autograd.grad(y, (bias, residual), dy)
    want = (dy * mask_of((3, 8), 0.5, seed_of(5, device)) * 2).sum(0)
    torch.testing.assert_close(dbias, want)
    assert torch.equal(dresidual, dy)


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape, index", [((0, 5), (1, 1, 0)), ((70, 0), (1, 1, 0)), ((70, 33), (33, 99, 65))])
@pytest.mark.parametrize("p", [0.0, 0.3, 1.0])
def test_gradient_of_the_bias_is_the_sum_of_the_gradient_of_the_input(p, shape, index, dtype, device):
    """Of a slice of columns, as of a bias that is cut; the sum in fp32 of what dx rounds: half its last place a row."""
    grad, seed = torch.randn(shape, device=device).to(dtype), seed_of(-5, device)
    dx, dbias = _ops.bias_dropout_bwd(grad, seed, p, *index)
    assert torch.equal(dx, _ops.dropout_bwd(grad, seed, p, *index))
    assert dbias.shape == shape[-1:] and dbias.dtype == dtype
    bound = dx.double().abs().sum(0) * (ulp(dtype) + 32 * ulp(min(dtype, torch.float32, key=ulp))) * 2
    assert ((dbias.double() - dx.double().sum(0)).abs() <= bound).all()
    with pytest.raises(ValueError, match="grad: shape"):
        _ops.bias_dropout_bwd(torch.zeros((), device=device), seed, p, 1, 1, 0)


def test_derivatives_of_any_order(device):
    x, bias, residual = (
        torch.randn(s, dtype=torch.float64, device=device, requires_grad=True) for s in ((3, 5), (5,), (3, 5))
    )
    seed = seed_of(9, device)

    def f(x, bias, residual):
        return _ops.bias_dropout_residual(x * x, bias, residual, seed, 0.3, *whole(x))

    assert gradcheck(f, (x, bias, residual))
    assert gradgradcheck(f, (x, bias, residual))


def test_dtypes_follow_torch(device):
    x = torch.randn(4, 8, device=device, dtype=torch.bfloat16)
    bias, residual = torch.randn(8, device=device), torch.randn(4, 8, device=device)
    seed = seed_of(0, device)
    assert _ops.bias_dropout_residual(x, bias, None, seed, 0.1, *whole(x)).dtype == torch.bfloat16
    assert _ops.bias_dropout_residual(x, bias, residual, seed, 0.1, *whole(x)).dtype == torch.float32


def test_opcheck_and_compile(device):
    x, bias, residual = (torch.randn(s, device=device, requires_grad=True) for s in ((4, 6), (6,), (4, 6)))
    seed = seed_of(9, device)
    index = (6, 12, 6)
    opcheck(torch.ops.tp_ext.bias_dropout_residual, (x, bias, residual, seed, 0.3, *index))
    x0, bias0, residual0 = x.detach(), bias.detach(), residual.detach()
    opcheck(torch.ops.tp_ext._bias_dropout_residual_fwd, (x0, bias0, residual0, seed, 0.3, *index))
    opcheck(torch.ops.tp_ext._bias_dropout_residual_fwd, (x0, None, None, seed, 0.3, *index))
    opcheck(torch.ops.tp_ext._dropout_bwd, (x0, seed, 0.3, *index))
    opcheck(torch.ops.tp_ext._bias_dropout_bwd, (x0, seed, 0.3, *index))

    def f(x, bias, residual):
        return _ops.bias_dropout_residual(x, bias, residual, seed, 0.3, *index)

    y, compiled = f(x, bias, residual), torch.compile(f, fullgraph=True)(x, bias, residual)
    assert torch.equal(y, compiled)
    for eager, traced in zip(
        *(torch.autograd.grad(t.square().sum(), (x, bias, residual)) for t in (y, compiled)), strict=True
    ):
        torch.testing.assert_close(eager, traced)


@pytest.mark.parametrize(
    "change, error, word",
    [
        ({"p": 1.5}, ValueError, "p: 1.5"),
        ({"p": float("nan")}, ValueError, "p: nan"),
        ({"bias": torch.zeros(5)}, ValueError, "bias: shape"),
        ({"residual": torch.zeros(4, 5)}, ValueError, "residual: shape"),
        ({"seed": torch.zeros(1, dtype=torch.int64)}, ValueError, "seed: shape"),
        ({"seed": torch.zeros(())}, TypeError, "seed: dtype"),
        ({"seed": torch.zeros(3, dtype=torch.int64)}, ValueError, r"seed: shape \[3\] must be 0-dim.*or \[2\]"),
        ({"seed": torch.zeros(2)}, TypeError, "seed: dtype"),
        ({"local_inner": 7}, ValueError, "local_inner: 7"),
        ({"full_inner": 20}, ValueError, "local_inner: 24 must be at most full_inner = 20"),
        ({"offset": -1}, ValueError, "offset: -1"),
        ({"x": torch.zeros(4, 6, dtype=torch.int64)}, TypeError, "x: dtype"),
    ],
)
def test_errors_name_the_argument(change, error, word, device):
    good = {
        "x": torch.zeros(4, 6),
        "bias": None,
        "residual": None,
        "seed": torch.tensor(0),
        "p": 0.5,
        "local_inner": 24,
        "full_inner": 24,
        "offset": 0,
    }
    args = [v.to(device) if isinstance(v, torch.Tensor) else v for v in (good | change).values()]
    with pytest.raises(error, match=word):
        _ops.bias_dropout_residual(*args)
