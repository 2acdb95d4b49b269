"""rms_norm_residual and layer_norm_residual: bit for bit our own norm of x + residual; gradients against fp64."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers.norms import EPS, HALF, KINDS, fused, grads, inputs, plain, results
from tp_ext import _ops

pytestmark = pytest.mark.core

# Around the tile (64), vectors and blocks of rows (4); above what CUDA keeps in registers (16400) and shared memory
SIZES = [(3, 1), (5, 7), (9, 33), (70, 128), (3, 1000), (2, 16400), (1, 70000)]


def composed(kind: str, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None):
    total, n = x + residual, (x.shape[-1],)
    return (F.rms_norm(total, n, weight, EPS) if kind == "rms" else F.layer_norm(total, n, weight, bias, EPS)), total


@pytest.mark.thinned
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_bits_of_add_and_norm(kind: str, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    x, residual, weight, bias = inputs(kind, shape, dtype, device)
    y, total = fused(kind, x, residual, weight, bias)
    assert torch.equal(total, x + residual)
    assert torch.equal(y, plain(kind, x + residual, weight, bias))


@pytest.mark.thinned
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_gradients_match_fp64(kind: str, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device) -> None:
    """Ours is at most twice as far from fp64 as torch's composition in the same dtype, plus one rounding of the largest
    value (8 in fp32 and fp64, whose sums are added in another order): as in test_norm.py.
    """
    tensors, dys = inputs(kind, shape, dtype, device), grads(shape, dtype, device)
    exact = results(composed, kind, tensors, dys, torch.float64)
    mine, torchs = (results(f, kind, tensors, dys, dtype) for f in (fused, composed))
    slack = (1 if dtype in HALF else 8) * torch.finfo(dtype).eps
    for i, (a, b, e) in enumerate(zip(mine, torchs, exact, strict=True)):
        assert a.dtype == dtype and a.shape == e.shape
        scale = e.abs().max().clamp_min(EPS**-0.5 if dtype == torch.float64 else 0.0)
        error, bound = (a - e).abs().max(), 2 * (b - e).abs().max() + slack * scale
        assert error <= bound, f"result {i}: error {error:.3e} above {bound:.3e}"


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", ["", "w", "b"])
def test_missing_parameters(kind: str, params: str, device: torch.device) -> None:
    tensors, dys = inputs(kind, (6, 40), torch.float64, device, params), grads((6, 40), torch.float64, device)
    for a, b in zip(*(results(f, kind, tensors, dys, torch.float64) for f in (fused, composed)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", HALF, ids=str)
def test_half_with_fp32_weight(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    _, _, weight, bias = inputs(kind, (50, 33), torch.float32, device)
    x, residual, _, _ = inputs(kind, (50, 33), dtype, device)
    y, total = fused(kind, x, residual, weight, bias)
    assert torch.equal(total, x + residual) and torch.equal(y, plain(kind, x + residual, weight, bias))
    params = [t for t in (weight, bias) if t is not None]
    assert [g.dtype for g in torch.autograd.grad((y, total), params, grads((50, 33), dtype, device))] == [
        torch.float32
    ] * len(params)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 5), (3, 0), (7,)], ids=str)
def test_no_rows_empty_rows_and_one_row(kind: str, shape: tuple[int, ...], device: torch.device) -> None:
    tensors, dys = inputs(kind, shape, torch.float64, device), grads(shape, torch.float64, device)
    got = results(fused, kind, tensors, dys, torch.float64)
    if shape[-1] == 0:
        assert [t.shape for t in got[:4]] == [shape] * 4
        return
    for a, b in zip(got, results(composed, kind, tensors, dys, torch.float64), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# One tensor is the gradient of both terms


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", ["y", "sum", "both"])
def test_either_gradient_may_be_missing(kind: str, given: str, device: torch.device) -> None:
    tensors, dys = inputs(kind, (6, 40), torch.float64, device), grads((6, 40), torch.float64, device)
    got, want = [], []
    for function, into in ((fused, got), (composed, want)):
        leaves = [t for t in (None if t is None else t.detach().requires_grad_() for t in tensors) if t is not None]
        y, total = function(kind, *[*leaves, None][:4])
        loss = sum(
            (t * g).sum() for name, t, g in (("y", y, dys[0]), ("sum", total, dys[1])) if given in (name, "both")
        )
        loss.backward()
        into.extend(t.grad for t in leaves)
    for a, b in zip(got, want, strict=True):
        assert (a is None) == (b is None)
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", ["sum", "both"])
def test_accumulating_one_gradient_leaves_the_other(kind: str, given: str, device: torch.device) -> None:
    """x and residual are handed the same tensor. Autograd may keep it as .grad, and adds to .grad in place: twice, with
    and without an earlier .grad, with hooks that add in place to what was kept, and for gradients held elsewhere.
    """
    x, residual, weight, bias = inputs(kind, (6, 40), torch.float64, device)
    dys = grads((6, 40), torch.float64, device)
    kept = [g.clone() for g in dys]
    used = slice(1 if given == "sum" else 0, 2)

    def backward() -> None:
        torch.autograd.backward(fused(kind, x, residual, weight, bias)[used], dys[used])

    want = torch.autograd.grad(composed(kind, x, residual, weight, bias)[used], x, dys[used])[0]
    for times in (1, 2, 3):
        backward()
        assert x.grad.data_ptr() != residual.grad.data_ptr()
        for leaf in (x, residual):
            torch.testing.assert_close(leaf.grad, times * want, rtol=1e-12, atol=1e-12)
    x.grad.mul_(0)  # what an optimizer does to one
    torch.testing.assert_close(residual.grad, 3 * want, rtol=1e-12, atol=1e-12)
    residual.grad = None  # one starts anew, the other goes on
    backward()
    for leaf in (x, residual):
        torch.testing.assert_close(leaf.grad, want, rtol=1e-12, atol=1e-12)
    assert all(torch.equal(g, k) for g, k in zip(dys, kept, strict=True))


@pytest.mark.parametrize("kind", KINDS)
def test_x_is_the_residual(kind: str, device: torch.device) -> None:
    """Both gradients meet in one leaf, or in one tensor that more was computed from."""
    for inner in (False, True):
        got = []
        for function in (fused, composed):
            x, _, weight, bias = inputs(kind, (6, 40), torch.float64, device)
            dys = grads((6, 40), torch.float64, device)
            h = x * 2 if inner else x
            y, total = function(kind, h, h, weight, bias)
            for _ in range(2):
                torch.autograd.backward((y, total, h), (*dys, dys[0]), retain_graph=True)
            got.append([t.grad for t in (x, weight, bias) if t is not None])
        for a, b in zip(*got, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


# Modes


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivative(kind: str, device: torch.device) -> None:
    """Refused through y; sum alone is an addition."""
    x, residual, weight, bias = inputs(kind, (2, 8), torch.float64, device)
    y, total = fused(kind, x, residual, weight, bias)
    with pytest.raises(NotImplementedError, match=f"{kind}_norm has no second derivative"):
        torch.autograd.grad((y + total).sum(), x, create_graph=True)
    (once,) = torch.autograd.grad(total.pow(3).sum(), x, create_graph=True)
    (twice,) = torch.autograd.grad(once.sum(), residual)
    torch.testing.assert_close(twice, 6 * (x + residual).detach())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("given", [slice(0, 1), slice(1, 2), slice(0, 2)], ids=["y", "sum", "both"])
def test_compiles_whole(kind: str, given: slice, device: torch.device) -> None:
    tensors, dys = inputs(kind, (4, 40), torch.float32, device), grads((4, 40), torch.float32, device)
    torch._dynamo.reset()
    compiled = torch.compile(fused, fullgraph=True, backend="aot_eager")
    got, want = [], []
    for function, into in ((compiled, got), (fused, want)):
        leaves = [t if t is None else t.detach().requires_grad_() for t in tensors]
        outputs = function(kind, *leaves)
        torch.autograd.backward(outputs[given], dys[given])
        into.extend([*outputs, *(t.grad for t in leaves if t is not None)])
    for a, b in zip(got, want, strict=True):
        # An output without a gradient gets zeros there: the parameters' gradients are zeros, not None
        assert torch.equal(a, torch.zeros_like(a) if b is None else b)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("params", ["", "wb"])
def test_opcheck(dtype: torch.dtype, params: str, device: torch.device) -> None:
    ops, check = torch.ops.tp_ext, torch.library.opcheck
    tensors = inputs("layer", (2, 3, 17), dtype, device, params)
    check(ops.rms_norm_residual.default, (*tensors[:3], EPS))
    check(ops.layer_norm_residual.default, (*tensors, EPS))
    x, residual, weight, bias = (t if t is None else t.detach() for t in tensors)
    check(ops._rms_norm_residual_fwd.default, (x, residual, weight, EPS))
    check(ops._layer_norm_residual_fwd.default, (x, residual, weight, bias, EPS))
    _, mean, rstd = _ops.layer_norm_fwd(x, weight, bias, EPS)
    for dx, params_too in ((True, False), (False, True)):
        mask = [dx, params_too]
        check(ops._rms_norm_bwd.default, (x, x, weight, rstd, residual, mask))
        check(ops._layer_norm_bwd.default, (x, x, weight, mean, rstd, residual, [*mask, params_too]))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_as_torch(kind: str, device: torch.device) -> None:
    """fp32 on CUDA; on CPU, where torch's autocast leaves norms alone, a half x on an fp32 residual makes fp32."""
    _, residual, weight, bias = inputs(kind, (4, 8), torch.float32, device)
    x = inputs(kind, (4, 8), torch.bfloat16, device)[0]
    with torch.autocast(device.type, torch.bfloat16):
        y, total = fused(kind, x, residual, weight, bias)
        low, low_total = fused(kind, x, x, weight, bias)
    assert y.dtype == total.dtype == torch.float32
    want = fused(kind, x.float(), residual, weight, bias)
    assert torch.equal(y, want[0]) and torch.equal(total, want[1])
    assert low.dtype == low_total.dtype == (torch.float32 if device.type == "cuda" else torch.bfloat16)
    y.sum().backward()
    assert x.grad.dtype == torch.bfloat16 and residual.grad.dtype == torch.float32


def test_errors_name_argument_and_value(device: torch.device) -> None:
    x = torch.randn(2, 8, device=device)
    for kind in KINDS:
        with pytest.raises(ValueError, match=r"residual: shape \[8\] must be that of x, \[2, 8\]"):
            fused(kind, x, x[0], None, None)
        with pytest.raises(TypeError, match="residual: dtype Double must be that of x, Float"):
            fused(kind, x, x.double(), None, None)
        with pytest.raises(TypeError, match="x: dtype Long must be a floating point type"):
            fused(kind, x.long(), x.long(), None, None)
    stat = torch.ones(2, device=device)
    with pytest.raises(ValueError, match=r"grad_sum: shape \[2, 7\] must be that of x"):
        _ops.rms_norm_bwd(x, x, None, stat, x[:, :7], [True] * 2)
