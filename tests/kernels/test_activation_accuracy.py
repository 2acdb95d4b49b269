"""bias_act and gated_act: errors against fp64, next to torch's; NaN, infinities."""

import pytest
import torch

from tests.helpers.accuracy import DTYPES, KINDS, assert_as_accurate, assert_as_special, values, with_specials
from tests.kernels.test_activation import ACTIVATIONS, GATES, every_activation, every_function, every_gate
from tp_ext import _ops

SHAPE = (256, 512)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def pair(activation):
    """Ours and torch's, of x (of gates gate | up) and bias."""

    def gated(x, bias):
        gate, up = (x + bias).chunk(2, -1)
        return GATES[activation](gate) * up

    if activation in GATES:
        return (lambda x, b: _ops.gated_act(x, b, activation)), gated
    return (lambda x, b: _ops.bias_act(x, b, activation)), (lambda x, b: ACTIVATIONS[activation](x + b))


@pytest.mark.thinned
@every_function
@every_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_at_most_torchs(kind, dtype, activation, device):
    x = values(kind, SHAPE, dtype, device)
    bias = values("random" if kind in ("random", "constant") else kind, SHAPE[1:], dtype, device)
    shape = (SHAPE[0], SHAPE[1] // 2) if activation in GATES else SHAPE
    n = shape[1] if kind == "constant" else None  # columns
    assert_as_accurate(*pair(activation), [x, bias], values("random", shape, dtype, device), independent=n)


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


@every_gate
@every_dtype
def test_nan_and_infinity_of_gates_are_torchs(dtype, activation, device):
    """In the gate, in what it gates, and in the gradient."""
    gate, up, grad = (values("random", (11, 77), dtype, device) for _ in range(3))
    bias = torch.zeros(2 * 77, dtype=dtype, device=device)
    for x, g in (
        (torch.cat([with_specials(gate), up], 1), grad),
        (torch.cat([gate, with_specials(up)], 1), grad),
        (torch.cat([gate, up], 1), with_specials(grad)),
    ):
        assert_as_special(*pair(activation), [x, bias], g)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_small_values_keep_their_digits(activation, device):
    """Relative to each element, not to the largest: from 1 down to the smallest normal numbers, of both signs."""
    x = 10 ** torch.linspace(-37, 0, 20001, dtype=torch.float64)
    x = torch.cat([x, -x]).to(device).float()
    exact = ACTIVATIONS[activation](x.double())
    error = (_ops.bias_act(x, None, activation).double() / exact - 1).abs().max()
    assert error <= 3 * torch.finfo(torch.float32).eps


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
