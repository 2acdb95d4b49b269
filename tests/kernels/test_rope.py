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


@pytest.mark.parametrize("interleaved", [False, True])
def test_sequences_of_any_strides_need_no_copy(interleaved):
    qkv = torch.randn(3, 6, 7, 16)
    cos, sin = angles(6, 8, qkv.dtype, "cpu")
    for part in (
        qkv[:, :, :5],
        qkv[:, :, 5:6],
        qkv[1:2, ::2],
        torch.randn(3, 7, 6, 16).transpose(1, 2),
        torch.randn(3, 6, 7, 20)[..., 3:19],
        qkv[:1].expand(4, 6, 7, 16),
    ):
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
            y = _ops.rope(part, cos, sin, interleaved)
        assert y.is_contiguous()
        assert torch.equal(y, _ops.rope(part.contiguous(), cos, sin, interleaved))
        names = {event.key for event in profile.key_averages()}
        assert "tp_ext::_rope" in names and not names & {"aten::copy_", "aten::clone", "aten::contiguous"}


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize("rotary, heads", [(64, 3), (30, 1), (0, 2)])
def test_positions_are_rows_of_the_tables(rotary, heads, interleaved, dtype, device):
    """To the bit what tables with a row for each token give, forward and backward, flat and by sequences."""
    torch.manual_seed(0)
    cos, sin = angles(50, rotary, dtype, device)
    x, dy = torch.randn(2, 3, 8, heads, 70, dtype=dtype, device=device)
    leaf = x.clone().requires_grad_()
    positions = torch.randint(50, (3, 8), device=device)
    rows = cos[positions.flatten()], sin[positions.flatten()]
    want = _ops.rope(x.flatten(0, 1), *rows, interleaved)
    want_grad = _ops.rope_rotate(dy.flatten(0, 1), *rows, interleaved, True)
    for where in (positions, positions.t().contiguous().t()):
        y = _ops.rope(leaf, cos, sin, interleaved, where)
        assert torch.equal(y.flatten(0, 1), want)
        (dx,) = torch.autograd.grad(y, leaf, dy)
        assert torch.equal(dx.flatten(0, 1), want_grad)
    assert torch.equal(_ops.rope(x.flatten(0, 1), cos, sin, interleaved, positions.flatten()), want)


@pytest.mark.parametrize("interleaved", [False, True])
def test_every_sequence_starts_at_the_first_row(interleaved, device):
    x, dy = torch.randn(2, 3, 5, 2, 12, device=device)
    leaf = x.clone().requires_grad_()
    for rows in (5, 9):  # a longer table: its first rows
        cos, sin = angles(rows, 8, x.dtype, device)
        y = _ops.rope(leaf, cos, sin, interleaved)
        (dx,) = torch.autograd.grad(y, leaf, dy)
        for i in range(3):
            assert torch.equal(y[i], _ops.rope(x[i], cos[:5], sin[:5], interleaved))
            assert torch.equal(dx[i], _ops.rope_rotate(dy[i], cos[:5], sin[:5], interleaved, True))
    for empty in ((0, 5, 2, 12), (3, 0, 2, 12), (3, 5, 0, 12)):
        assert _ops.rope(torch.zeros(empty, device=device), cos, sin, interleaved).shape == empty


@pytest.mark.parametrize("base, rotary", [(10000.0, 128), (500000.0, 6), (2.0, 2), (1.5, 0)])
def test_tables_are_cosines_and_sines(base, rotary, device):
    """In fp64 within 2 ulp of 1 and that of the angle, which the power takes part in; in fp32 those, rounded."""
    positions = torch.cat([torch.arange(5000), torch.tensor([131071, 10**7, 2**31, -3])]).to(device)
    exponents = torch.arange(0, rotary, 2, dtype=torch.float64, device=device) / max(rotary, 1)
    angle = positions.double()[:, None] * base**-exponents
    eps = torch.finfo(torch.float64).eps
    tables = _ops.rope_tables(positions, rotary, base, torch.float64)
    for table, want in zip(tables, (angle.cos(), angle.sin()), strict=True):
        assert table.shape == (len(positions), rotary // 2)
        assert ((table - want).abs() <= 2 * eps * (1 + angle.abs())).all()
    for single, double in zip(_ops.rope_tables(positions, rotary, base, torch.float32), tables, strict=True):
        assert torch.equal(single, double.float())
    for other in (positions.double(), positions[:5000].int()):
        short = _ops.rope_tables(other, rotary, base, torch.float64)
        assert all(torch.equal(t, full[: len(other)]) for t, full in zip(short, tables, strict=True))


def test_tables_of_given_frequencies(device):
    """Frequencies of the geometric series, when given, yield the default's bits; the amplitude multiplies in fp64."""
    positions = torch.cat([torch.arange(5000), torch.tensor([131071, -3])]).to(device)
    frequencies = [1.0, 0.3, 0.0, 1e-5]
    angles = positions.double()[:, None] * torch.tensor(frequencies, dtype=torch.float64, device=device)
    unit = _ops.rope_tables(positions, 8, 10000.0, torch.float64, frequencies)
    for table, want in zip(unit, (angles.cos(), angles.sin()), strict=True):
        torch.testing.assert_close(table, want, rtol=0, atol=1e-15)
    for table, half in zip(_ops.rope_tables(positions, 8, 1.0, torch.float32, frequencies, 1.3), unit, strict=True):
        assert torch.equal(table, (1.3 * half).float())
    ones = _ops.rope_tables(positions, 8, 1.0, torch.float32)
    for table, want in zip(_ops.rope_tables(positions, 8, 2.0, torch.float32, [1.0] * 4), ones, strict=True):
        assert torch.equal(table, want)


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
    positions = torch.tensor([3, 0, 0, 1], device=device)
    opcheck(torch.ops.tp_ext.rope, (x, cos, sin, False, positions))
    opcheck(torch.ops.tp_ext.rope, (x.detach()[None].requires_grad_(), cos, sin, False, positions[None]))
    opcheck(torch.ops.tp_ext._rope_tables, (positions, 6, 100.0, torch.float32))
    opcheck(torch.ops.tp_ext._rope_tables, (positions, 6, 100.0, torch.float64, [1.0, 0.5, 0.25], 1.5))
    opcheck(torch.ops.tp_ext._rope, (x.detach().transpose(1, 2).contiguous().transpose(1, 2), cos, sin, False, False))
    compiled = torch.compile(_ops.rope, fullgraph=True)
    for more in ((), (positions,)):
        results = []
        for f in (_ops.rope, compiled):
            y = f(x, cos, sin, False, *more)
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


def test_errors_name_the_positions(device):
    x, angle = torch.zeros(4, 2, 8, device=device), torch.zeros(5, 4, device=device)
    for bad, error, word in (
        (torch.zeros(3, dtype=torch.long), ValueError, r"positions: shape \[3\] must be one for each token of x"),
        (torch.zeros(4, 1, dtype=torch.long), ValueError, "positions: shape"),
        (torch.zeros(4, dtype=torch.int32), TypeError, "positions: dtype Int must be int64"),
    ):
        with pytest.raises(error, match=word):
            _ops.rope(x, angle, angle, False, bad.to(device))
    for bad in (5, -1):
        with pytest.raises(IndexError, match=rf"positions: {bad} must be in \[0, 5\), the rows of cos and sin"):
            _ops.rope(x.cpu(), angle.cpu(), angle.cpu(), False, torch.tensor([0, 4, bad, 0]))
    for args, error, word in (
        ((torch.zeros(2, 2), 4, 2.0, torch.float32), ValueError, "positions: shape"),
        ((torch.zeros(2, dtype=torch.bool), 4, 2.0, torch.float32), TypeError, "positions: dtype"),
        ((torch.zeros(2), 3, 2.0, torch.float32), ValueError, "rotary_dim: 3 must be even"),
        ((torch.zeros(2), 4, 0.0, torch.float32), ValueError, "base: 0"),
        ((torch.zeros(2), 4, 2.0, torch.half), TypeError, "dtype: Half"),
        (
            (torch.zeros(2), 4, 2.0, torch.float32, [1.0]),
            ValueError,
            "frequencies: 1 numbers must be rotary_dim / 2 = 2",
        ),
        ((torch.zeros(2), 514, 2.0, torch.float32, [1.0] * 257), ValueError, "frequencies: 257 .* at most 256"),
    ):
        with pytest.raises(error, match=word):
            _ops.rope_tables(args[0].to(device), *args[1:])


def test_angles_must_be_fp32_or_fp64_for_fp64(device):
    x, angle = torch.zeros(4, 2, 8, device=device), torch.zeros(4, 4, device=device)
    for bad_x, bad_angle in ((x, angle.bfloat16()), (x.double(), angle), (x, angle.double())):
        with pytest.raises(TypeError, match="cos: dtype"):
            _ops.rope(bad_x, bad_angle, bad_angle, False)
