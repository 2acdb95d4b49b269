"""bias_act: y = act(x + bias) and its gradients, against the torch functions."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tp_ext import _ops

pytestmark = pytest.mark.core

ACTIVATIONS = {
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Around the vector widths; (70, 2100) has several row chunks and column tiles; (3, 12001) parts of a row
SHAPES = [(0, 8), (3, 0), (1, 1), (5, 7), (2, 3, 8), (3, 9), (4, 31), (2, 33), (600, 5), (70, 2100), (3, 12001)]

every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
every_bias = pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no_bias"])


def torch_all(activation: str, x: Tensor, bias: Tensor | None, grad: Tensor) -> list[Tensor]:
    """y and every gradient, by the plain composition."""
    x = x.detach().requires_grad_()
    inputs = [x] if bias is None else [x, bias.detach().requires_grad_()]
    y = ACTIVATIONS[activation](sum(inputs[1:], inputs[0]))
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


def ours_all(activation: str, x: Tensor, bias: Tensor | None, grad: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    bias = None if bias is None else bias.detach().requires_grad_()
    y = _ops.bias_act(x, bias, activation)
    return [y.detach(), *torch.autograd.grad(y, [x] if bias is None else [x, bias], grad)]


def assert_as_good_as_torch(ours: list[Tensor], torchs: list[Tensor], exact: list[Tensor]) -> None:
    """The error to fp64 is at most twice torch's own in the same dtype, plus one ulp of the largest value; fp64, where
    there is no better reference, may differ by a few ulp of it. Half types, which torch rounds after each operation
    and we round once, are also right to one ulp of each element, apart from what fp32 arithmetic loses."""
    for a, b, e in zip(ours, torchs, exact, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if a.numel() == 0:
            continue
        error, torch_error = (a.double() - e).abs(), (b.double() - e).abs().max()
        eps, largest = torch.finfo(a.dtype).eps, e.abs().max()
        assert error.max() <= 2 * torch_error + (16 if a.dtype == torch.float64 else 1) * eps * largest
        if a.dtype in (torch.bfloat16, torch.float16):
            assert (error <= eps * e.abs() + 4e-6 * largest).all()


@pytest.mark.thinned
@every_activation
@every_bias
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_torch(device, activation, has_bias, dtype, shape):
    x, grad = (3 * torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
    bias = torch.randn(shape[-1], dtype=dtype, device=device) if has_bias else None
    exact = torch_all(activation, x.double(), None if bias is None else bias.double(), grad.double())
    ours = ours_all(activation, x, bias, grad)
    assert_as_good_as_torch(ours, torch_all(activation, x, bias, grad), exact)


@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_negative_tail_keeps_its_relative_accuracy(device, activation):
    """1 + erf and 1 + tanh lose every digit out there; e^-(x^2)/2 loses the rounding of its argument only."""
    x = torch.linspace(-8, -1, 1001, dtype=torch.float64, device=device)
    p = {"gelu": 0.5 * torch.erfc(-x * 0.5**0.5), "silu": torch.sigmoid(x)}
    p["gelu_tanh"] = torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))
    y = _ops.bias_act(x.float(), None, activation).double()
    # the argument of e is rounded to fp32, up to 70 in size: 70 half ulps, and as much for x itself being rounded
    assert ((y / (x * p[activation]) - 1).abs() <= 140 * torch.finfo(torch.float32).eps).all()


@every_activation
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_special_values_as_torch(device, activation, dtype):
    """NaN in, NaN out; infinities and both zeros as torch has them, forward and backward (relu: slope 0 at 0). As torch
    has them in fp64, that is: its vectorised fp32 gelu turns inf into NaN."""
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 30.0, -30.0], dtype=dtype, device=device)
    x = x.repeat(11)  # vector body and tail alike
    y, dx = ours_all(activation, x, None, torch.ones_like(x))
    y_torch, dx_torch = torch_all(activation, x.double(), None, torch.ones_like(x).double())
    torch.testing.assert_close(y.double(), y_torch, equal_nan=True, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dx.double(), dx_torch, equal_nan=True, rtol=1e-6, atol=1e-6)


def test_relu_closed_unit_stops_nan_gradient(device):
    x = torch.tensor([-1.0, 0.0, 1.0], device=device)
    grad = torch.full_like(x, float("nan"))
    _, dx = ours_all("relu", x, None, grad)
    torch.testing.assert_close(dx, torch.tensor([0.0, 0.0, float("nan")], device=device), equal_nan=True)


@every_activation
@every_bias
def test_gradcheck(device, activation, has_bias):
    shapes = [(3, 5), (5,)] if has_bias else [(3, 5)]
    inputs = [torch.randn(s, dtype=torch.float64, device=device, requires_grad=True) for s in shapes]
    torch.autograd.gradcheck(lambda *a: _ops.bias_act(*a, *[None][has_bias:], activation), inputs)


def test_strides_and_zero_dim(device):
    """Any strides of x, bias and grad give what contiguous copies give, bit for bit."""
    x = torch.randn(6, 40, 9, device=device).transpose(0, 2)[::2, 1:]
    bias, grad = torch.randn(6, 2, device=device)[:, 1], torch.randn((), device=device).expand(x.shape)
    ours = ours_all("gelu", x, bias, grad)
    contiguous = ours_all("gelu", x.contiguous(), bias.contiguous(), grad.contiguous())
    for a, b in zip(ours, contiguous, strict=True):
        assert torch.equal(a, b)
    misaligned = torch.randn(65, device=device)[1:]
    assert torch.equal(_ops.bias_act(misaligned, None, "silu"), _ops.bias_act(misaligned.clone(), None, "silu"))
    scalar = torch.tensor(0.5, device=device)
    torch.testing.assert_close(_ops.bias_act(scalar, None, "gelu"), F.gelu(scalar))


@every_activation
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_an_element_has_the_same_bits_in_a_vector_and_alone(device, activation, dtype):
    """Loops read half types in their own ways, and what is left of a row in another: every half, NaNs among them."""
    if dtype.itemsize == 2:
        x = torch.arange(-(2**15), 2**15, dtype=torch.int16, device=device).view(dtype)
    else:
        x = 3 * torch.randn(5001, dtype=dtype, device=device)
    grad, zero = torch.randn(x.shape, dtype=dtype, device=device), torch.zeros(1, dtype=dtype, device=device)

    def both(x: Tensor, grad: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor]:
        return _ops.bias_act(x, bias, activation), _ops.bias_act_bwd(grad, x, bias, activation)[0]

    whole, alone = both(x, grad, None), both(x[:, None], grad[:, None], zero)
    for a, b in zip(whole, alone, strict=True):
        assert torch.equal(a.isnan(), b[:, 0].isnan())
        assert torch.equal(a.nan_to_num(7), b[:, 0].nan_to_num(7))
    assert torch.equal(whole[0].isnan(), ACTIVATIONS[activation](x.double()).isnan())


def test_deterministic_whatever_the_threads(device):
    x, grad, bias = (torch.randn(s, device=device) for s in ((300, 3000), (300, 3000), (3000,)))
    threads = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2, 2):
            torch.set_num_threads(n)
            results.append(ours_all("gelu", x, bias, grad))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_backward_twice_and_in_part(device):
    """A graph may be walked again, for some inputs only; saved tensors and upstream gradients stay as they are."""
    x, bias = (torch.randn(s, device=device, requires_grad=True) for s in ((4, 9), (9,)))
    grad = torch.randn(4, 9, device=device)
    x_before, grad_before = x.detach().clone(), grad.clone()
    y = _ops.bias_act(x, bias, "silu")
    dx, dbias = torch.autograd.grad(y, (x, bias), grad, retain_graph=True)
    assert torch.equal(torch.autograd.grad(y, x, grad, retain_graph=True)[0], dx)
    assert torch.equal(torch.autograd.grad(y, bias, grad)[0], dbias)
    assert torch.equal(x, x_before) and torch.equal(grad, grad_before)
    frozen = _ops.bias_act(x.detach(), bias, "silu")
    assert torch.equal(torch.autograd.grad(frozen, bias, grad)[0], dbias)
    assert not _ops.bias_act(x.detach(), bias.detach(), "silu").requires_grad


def test_double_backward_is_refused(device):
    x = torch.randn(4, device=device, requires_grad=True)
    with pytest.raises(NotImplementedError, match="bias_act has no second derivative"):
        torch.autograd.grad(_ops.bias_act(x, None, "gelu").sum(), x, create_graph=True)


@pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no_bias"])
def test_opcheck(device, has_bias):
    x, bias = (torch.randn(s, device=device, requires_grad=True) for s in ((2, 3, 8), (8,)))
    bias = bias if has_bias else None
    torch.library.opcheck(torch.ops.tp_ext.bias_act, (x, bias, "gelu"))
    x, bias = x.detach(), None if bias is None else bias.detach()
    torch.library.opcheck(_ops.bias_act_fwd, (x, bias, "gelu"))
    torch.library.opcheck(_ops.bias_act_bwd, (torch.randn_like(x), x, bias, "gelu"))
    assert _ops.bias_act_bwd(torch.randn_like(x), x, None, "gelu")[1].shape == (0,)


def test_compiles_to_one_graph(device):
    x, grad = (torch.randn(4, 9, device=device) for _ in range(2))
    bias = torch.randn(9, device=device)
    expected = ours_all("gelu_tanh", x, bias, grad)
    x.requires_grad_(), bias.requires_grad_()
    y = torch.compile(_ops.bias_act, fullgraph=True)(x, bias, "gelu_tanh")
    for a, b in zip([y, *torch.autograd.grad(y, (x, bias), grad)], expected, strict=True):
        assert torch.equal(a, b)


def test_autocast_follows_x(device):
    """Under autocast the bias, an fp32 parameter, is cast to x's dtype and its gradient comes back in fp32."""
    x, bias = torch.randn(4, 8, device=device, dtype=torch.bfloat16), torch.randn(8, device=device, requires_grad=True)
    with torch.autocast(device.type, torch.bfloat16):
        y = _ops.bias_act(x, bias, "gelu")
        assert _ops.bias_act(x.float(), bias, "gelu").dtype == torch.float32
    assert torch.equal(y, _ops.bias_act(x, bias.bfloat16(), "gelu")) and y.dtype == torch.bfloat16
    assert torch.autograd.grad(y.float().sum(), bias)[0].dtype == torch.float32


def test_errors_name_the_argument(device):
    x, bias = torch.randn(2, 8, device=device), torch.randn(8, device=device)
    with pytest.raises(ValueError, match="activation: 'swish' must be one of gelu, gelu_tanh, relu, silu"):
        _ops.bias_act(x, bias, "swish")
    with pytest.raises(ValueError, match=r"bias: shape \[7\] must be \[n\]"):
        _ops.bias_act(x, bias[1:], "gelu")
    with pytest.raises(TypeError, match="bias: dtype"):
        _ops.bias_act(x.bfloat16(), bias, "gelu")
    with pytest.raises(TypeError, match="x: dtype"):
        _ops.bias_act(x.long(), None, "gelu")
    with pytest.raises(ValueError, match=r"grad: shape \[2, 7\] must be"):
        _ops.bias_act_bwd(x[:, 1:], x, bias, "gelu")
