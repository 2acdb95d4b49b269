"""Rotary embedding against its definition, written with plain torch operations."""

import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

from tp_ext import _ops

pytestmark = pytest.mark.core

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# tokens, heads, head_dim, rotary_dim
SHAPES = [
    (0, 2, 8, 8),
    (1, 1, 2, 2),
    (3, 2, 7, 4),
    (5, 3, 9, 0),
    (4, 1, 31, 30),
    (2, 3, 64, 64),
    (3, 2, 64, 32),
    (2, 5, 128, 96),
    (33, 2, 10, 6),
]


def angles(tokens, rotary, dtype, device):
    positions = torch.arange(tokens, dtype=torch.float64, device=device)[:, None]
    frequencies = 10000.0 ** -(torch.arange(rotary // 2, dtype=torch.float64, device=device) * 2 / max(rotary, 1))
    kept = torch.float64 if dtype == torch.float64 else torch.float32
    return (positions * frequencies).cos().to(kept), (positions * frequencies).sin().to(kept)


def reference(x, cos, sin, interleaved, inverse=False):
    half = cos.shape[1]
    turned, rest = x[..., : 2 * half], x[..., 2 * half :]
    a, b = (turned[..., 0::2], turned[..., 1::2]) if interleaved else (turned[..., :half], turned[..., half:])
    cos, sin = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype) * (-1 if inverse else 1)
    pair = a * cos - b * sin, b * cos + a * sin
    turned = torch.stack(pair, -1).flatten(-2) if interleaved else torch.cat(pair, -1)
    return torch.cat([turned, rest], -1)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_gradient(shape, interleaved, dtype, device):
    *size, rotary = shape
    torch.manual_seed(0)
    x = torch.randn(size, dtype=dtype, device=device, requires_grad=True)
    cos, sin = angles(size[0], rotary, dtype, device)
    y = _ops.rope(x, cos, sin, interleaved)
    assert y.dtype == dtype and y.shape == x.shape and y.is_contiguous()
    assert torch.equal(y[..., rotary:], x[..., rotary:])
    dy = torch.randn_like(y)
    exact = reference(x.double(), cos.double(), sin.double(), interleaved)
    exact_grad = reference(dy.double(), cos.double(), sin.double(), interleaved, inverse=True)
    # Two products and a sum of values below 6 in the accumulation type, one rounding to the dtype
    eps = torch.finfo(dtype).eps
    bound = {"rtol": eps, "atol": 12 * min(eps, torch.finfo(torch.float32).eps)}
    torch.testing.assert_close(y.double(), exact, **bound)
    for _ in range(2):
        (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        torch.testing.assert_close(dx.double(), exact_grad, **bound)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_error_is_at_most_that_of_torch(dtype, interleaved, device):
    x = torch.randn(64, 4, 64, dtype=dtype, device=device)
    cos, sin = angles(64, 64, dtype, device)
    exact = reference(x.double(), cos.double(), sin.double(), interleaved)
    ours = (_ops.rope(x, cos, sin, interleaved).double() - exact).abs().max()
    theirs = (reference(x, cos, sin, interleaved).double() - exact).abs().max()
    assert ours <= theirs


@pytest.mark.parametrize("interleaved", [False, True])
def test_slices_of_fused_qkv_need_no_copy(interleaved, device):
    qkv = torch.randn(6, 7, 16, device=device)
    cos, sin = angles(6, 16, qkv.dtype, device)
    for part in (
        qkv[:, :3],
        qkv[:, 3:5],
        qkv[:, 1:2],
        qkv.transpose(0, 1)[:6, :6],
        qkv[:1].expand(6, 7, 16),
        torch.randn(6, 16, 4, device=device).transpose(1, 2),
        torch.randn(6, 2, 32, device=device)[..., ::2],
    ):
        y = _ops.rope(part, cos, sin, interleaved)
        assert y.is_contiguous()
        assert torch.equal(y, _ops.rope(part.contiguous(), cos, sin, interleaved))


def test_gradient_may_be_strided_or_expanded(device):
    x = torch.randn(3, 2, 8, device=device, requires_grad=True)
    cos, sin = angles(3, 8, x.dtype, device)
    y = _ops.rope(x, cos, sin, False)
    for dy in (torch.ones((), device=device).expand(3, 2, 8), torch.randn(8, 2, 3, device=device).permute(2, 1, 0)):
        (dx,) = torch.autograd.grad(y, x, dy, retain_graph=True)
        torch.testing.assert_close(dx, reference(dy, cos, sin, False, inverse=True))


@pytest.mark.parametrize("interleaved", [False, True])
def test_inverse_undoes_it(interleaved, device):
    x = torch.randn(5, 3, 12, dtype=torch.float64, device=device)
    cos, sin = angles(5, 8, x.dtype, device)
    there = _ops.rope_rotate(x, cos, sin, interleaved, False)
    torch.testing.assert_close(_ops.rope_rotate(there, cos, sin, interleaved, True), x)


@pytest.mark.parametrize("interleaved", [False, True])
def test_derivatives_of_any_order(interleaved, device):
    x = torch.randn(3, 2, 6, dtype=torch.float64, device=device, requires_grad=True)
    cos, sin = angles(3, 4, x.dtype, device)
    assert gradcheck(lambda x: _ops.rope(x * x, cos, sin, interleaved), x)
    assert gradgradcheck(lambda x: _ops.rope(x * x, cos, sin, interleaved), x)


def test_angles_are_constants_and_nan_stays_with_its_pair(device):
    x = torch.randn(2, 1, 8, device=device, requires_grad=True)
    cos, sin = (t.requires_grad_() for t in angles(2, 8, x.dtype, device))
    y = _ops.rope(x, cos, sin, False)
    assert torch.autograd.grad(y.sum(), (x, cos, sin), allow_unused=True)[1:] == (None, None)
    bad = x.detach().clone()
    bad[1, 0, 2] = float("nan")
    found = _ops.rope(bad, cos.detach(), sin.detach(), False).isnan().nonzero()
    assert found.tolist() == [[1, 0, 2], [1, 0, 6]]


def test_opcheck_and_compile(device):
    x = torch.randn(4, 3, 8, device=device, requires_grad=True)
    cos, sin = angles(4, 6, x.dtype, device)
    opcheck(torch.ops.tp_ext.rope, (x, cos, sin, True))
    opcheck(torch.ops.tp_ext._rope, (x.detach(), cos, sin, False, True))
    opcheck(torch.ops.tp_ext._rope, (x.detach().transpose(1, 2).contiguous().transpose(1, 2), cos, sin, False, False))
    compiled = torch.compile(_ops.rope, fullgraph=True)
    results = []
    for f in (_ops.rope, compiled):
        y = f(x, cos, sin, False)
        results.append((y, *torch.autograd.grad(y.square().sum(), x)))
    for eager, traced in zip(*results, strict=True):
        torch.testing.assert_close(eager, traced)


@pytest.mark.parametrize(
    "x, cos, sin, error, word",
    [
        ((4, 8), (4, 4), (4, 4), ValueError, "x: shape"),
        ((4, 2, 8), (3, 4), (4, 4), ValueError, "cos: shape"),
        ((4, 2, 8), (4, 5), (4, 5), ValueError, "cos: shape"),
        ((4, 2, 8), (4, 4), (4, 3), ValueError, "sin: shape"),
    ],
)
def test_errors_name_the_argument(x, cos, sin, error, word, device):
    x, cos, sin = (torch.zeros(s, device=device) for s in (x, cos, sin))
    with pytest.raises(error, match=word):
        _ops.rope(x, cos, sin, False)


def test_angles_must_be_fp32_or_fp64_for_fp64(device):
    x, angle = torch.zeros(4, 2, 8, device=device), torch.zeros(4, 4, device=device)
    for bad_x, bad_angle in ((x, angle.bfloat16()), (x.double(), angle), (x, angle.double())):
        with pytest.raises(TypeError, match="cos: dtype"):
            _ops.rope(bad_x, bad_angle, bad_angle, False)
