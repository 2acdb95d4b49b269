"""bias_act: errors against fp64, next to torch's; NaN, infinities."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.accuracy import DTYPES, KINDS, assert_as_accurate, assert_as_special, values, with_specials
from tp_ext import _ops

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
SHAPE = (256, 512)
every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def pair(activation):
    """Ours and torch's, of x and bias."""
    return (lambda x, b: _ops.bias_act(x, b, activation)), (lambda x, b: ACTIVATIONS[activation](x + b))


@pytest.mark.thinned
@every_activation
@every_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_at_most_torchs(kind, dtype, activation, device):
    x = values(kind, SHAPE, dtype, device)
    bias = values("random" if kind in ("random", "constant") else kind, SHAPE[1:], dtype, device)
    n = SHAPE[1] if kind == "constant" else None  # columns
    assert_as_accurate(*pair(activation), [x, bias], values("random", SHAPE, dtype, device), independent=n)


@pytest.mark.parametrize("rows", [1, 8, 16, 17, 32, 64, 128, 255, 256, 1000])
def test_bias_gradient_of_any_number_of_rows(rows, device):
    """Chains of 16 rows, of 32 from 256 rows on, are added up in fp32 and the chains in fp64; torch's chains have 16
    rows and are added up in fp32."""
    x, grad = (values("random", (rows, 4096), torch.float32, device) for _ in range(2))
    bias = values("random", (4096,), torch.float32, device)
    assert_as_accurate(*pair("relu"), [x, bias], grad)


@every_activation
@every_dtype
def test_nan_and_infinity_are_torchs(dtype, activation, device):
    x = with_specials(values("random", (11, 77), dtype, device))
    assert_as_special(*pair(activation), [x, torch.zeros_like(x[0])], torch.ones_like(x))


@pytest.mark.parametrize(("activation", "ulps"), [("gelu", 3), ("gelu_tanh", 3), ("silu", 3)])
def test_small_values_keep_their_digits(activation, ulps, device):
    """Relative to each element, not to the largest: from 1 down to the smallest normal numbers, of both signs."""
    x = 10 ** torch.linspace(-37, 0, 20001, dtype=torch.float64)
    x = torch.cat([x, -x]).to(device).float()
    exact = ACTIVATIONS[activation](x.double())
    error = (_ops.bias_act(x, None, activation).double() / exact - 1).abs().max()
    assert error <= ulps * torch.finfo(torch.float32).eps


EXACT = {
    "gelu": lambda x: x * 0.5 * torch.erfc(-x * 0.5**0.5),
    "gelu_tanh": lambda x: x * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)),
    "silu": lambda x: x * torch.sigmoid(x),
}


@pytest.mark.parametrize("activation", EXACT)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_every_half_is_as_good_as_rounded_once(dtype, activation, device):
    """All finite numbers of a half type. Beyond the rounding, values may be wrong by 1e-5 of themselves, in the tail of
    gelu by 1e-4, and slopes, which are sums that cancel, by 1e-6. e^x is 0 where it is subnormal in fp32."""
    x = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(dtype)
    x = x[x.isfinite() & (x.abs() < 1e4)].requires_grad_()
    exact_x = x.detach().double().requires_grad_()
    y, exact = _ops.bias_act(x, None, activation), EXACT[activation](exact_x)
    (slope,), (exact_slope,) = (torch.autograd.grad(f.sum(), v) for f, v in ((y, x), (exact, exact_x)))
    info = torch.finfo(dtype)
    least = max(1e-35, info.smallest_normal * info.eps)
    granted = torch.where((exact_x < -1) & (activation == "gelu"), 1e-4, 1e-5)
    assert ((y.double() - exact).abs() <= (info.eps / 2 + granted) * exact.abs() + least).all()
    assert ((slope.double() - exact_slope).abs() <= info.eps / 2 * exact_slope.abs() + 1e-6).all()
