"""bias_act, y = act(x + bias), and gated_act, y = act(gate + bias_gate) * (up + bias_up) of x = gate | up: values and
gradients, against the torch functions."""

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
GATES = {"swiglu": F.silu, "geglu": F.gelu}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Around the vector widths; (70, 2100) has several row chunks and column tiles; (3, 12001) parts of a row. The widths of
# gates are twice as large
SHAPES = [(0, 8), (3, 0), (1, 1), (5, 7), (2, 3, 8), (3, 9), (4, 31), (2, 33), (600, 5), (70, 2100), (3, 12001)]

every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
every_gate = pytest.mark.parametrize("activation", GATES)
every_function = pytest.mark.parametrize("activation", [*ACTIVATIONS, *GATES])
one_of_each = pytest.mark.parametrize("activation", ["gelu", "swiglu"])
every_bias = pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no_bias"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def name_of(activation: str) -> str:
    return "gated_act" if activation in GATES else "bias_act"


def act(x: Tensor, bias: Tensor | None, activation: str) -> Tensor:
    return getattr(_ops, name_of(activation))(x, bias, activation)


def torch_all(activation: str, x: Tensor, bias: Tensor | None, grad: Tensor) -> list[Tensor]:
    """y and every gradient, by the plain composition."""
    x = x.detach().requires_grad_()
    inputs = [x] if bias is None else [x, bias.detach().requires_grad_()]
    total = sum(inputs[1:], inputs[0])
    if activation in GATES:
        gate, up = total.chunk(2, -1)
        y = GATES[activation](gate) * up
    else:
        y = ACTIVATIONS[activation](total)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


def ours_all(activation: str, x: Tensor, bias: Tensor | None, grad: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    bias = None if bias is None else bias.detach().requires_grad_()
    y = act(x, bias, activation)
    return [y.detach(), *torch.autograd.grad(y, [x] if bias is None else [x, bias], grad)]


def make(activation, shape, device, dtype=torch.float32, has_bias=True):
    """x, bias and the gradient of y, for y of this shape."""
    *rows, n = shape
    width = 2 * n if activation in GATES else n
    x = 3 * torch.randn(*rows, width, dtype=dtype, device=device)
    bias = torch.randn(width, dtype=dtype, device=device) if has_bias else None
    return x, bias, 3 * torch.randn(shape, dtype=dtype, device=device)


@pytest.mark.thinned
@every_function
@every_bias
@every_dtype
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_torch(device, activation, has_bias, dtype, shape):
    """The error to fp64 is at most twice torch's own in the same dtype, plus one ulp of the largest value, of gates on
    CUDA three, two of which its division takes; fp64, where there is no better reference, may differ by a few ulp of
    it. Half types, which torch rounds after each operation and we round once, are also right to one ulp of each
    element, apart from what fp32 arithmetic loses."""
    x, bias, grad = make(activation, shape, device, dtype, has_bias)
    exact = torch_all(activation, x.double(), None if bias is None else bias.double(), grad.double())
    ours, torchs = ours_all(activation, x, bias, grad), torch_all(activation, x, bias, grad)
    for a, b, e in zip(ours, torchs, exact, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if a.numel() == 0:
            continue
        error, torch_error = (a.double() - e).abs(), (b.double() - e).abs().max()
        eps, largest = torch.finfo(dtype).eps, e.abs().max()
        ulps = 16 if dtype == torch.float64 else 3 if x.is_cuda and activation in GATES else 1
        assert error.max() <= 2 * torch_error + ulps * eps * largest
        if dtype in (torch.bfloat16, torch.float16):
            assert (error <= eps * e.abs() + 4e-6 * largest).all()


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
@every_dtype
def test_special_values_as_torch(device, activation, dtype):
    """NaN in, NaN out; infinities and both zeros as torch has them, forward and backward (relu: slope 0 at 0). As torch
    has them in fp64, that is: its vectorised fp32 gelu turns inf into NaN."""
    x = torch.tensor([float("nan"), float("inf"), float("-inf"), 0.0, -0.0, 30.0, -30.0], dtype=dtype, device=device)
    x = x.repeat(11)  # vector body and tail alike
    y, dx = ours_all(activation, x, None, torch.ones_like(x))
    y_torch, dx_torch = torch_all(activation, x.double(), None, torch.ones_like(x).double())
    torch.testing.assert_close(y.double(), y_torch, equal_nan=True, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dx.double(), dx_torch, equal_nan=True, rtol=1e-6, atol=1e-6)


@every_gate
@every_dtype
def test_nan_reaches_the_values_that_depend_on_it(device, activation, dtype):
    """NaN in gate or up makes y NaN and, backward, what the formula says; the neighbours stay finite."""
    x, bias, grad = make(activation, (2, 19), device, dtype)
    x[0, 3] = x[1, 19 + 16] = float("nan")
    y, dx, dbias = ours_all(activation, x, bias, grad)
    y_torch, dx_torch, dbias_torch = torch_all(activation, x, bias, grad)
    assert torch.equal(y.isnan(), y_torch.isnan()) and y.isnan().sum() == 2
    assert torch.equal(dx.isnan(), dx_torch.isnan()) and dx.isnan().sum() == 3  # gate: both halves; up: dgate only
    assert torch.equal(dbias.isnan(), dbias_torch.isnan())


def test_relu_closed_unit_stops_nan_gradient(device):
    x = torch.tensor([-1.0, 0.0, 1.0], device=device)
    grad = torch.full_like(x, float("nan"))
    _, dx = ours_all("relu", x, None, grad)
    torch.testing.assert_close(dx, torch.tensor([0.0, 0.0, float("nan")], device=device), equal_nan=True)


@every_function
@every_bias
def test_gradcheck(device, activation, has_bias):
    x, bias, _ = make(activation, (3, 5), device, torch.float64, has_bias)
    inputs = [tensor.requires_grad_() for tensor in (x, bias) if tensor is not None]
    torch.autograd.gradcheck(lambda *a: act(*a, *[None][has_bias:], activation), inputs)


@one_of_each
def test_strides_and_zero_dim(device, activation):
    """Any strides of x, bias and grad give what contiguous copies give, bit for bit."""
    x = torch.randn(6, 40, 9, device=device).transpose(0, 2)[::2, 1:]
    bias, columns = torch.randn(6, 2, device=device)[:, 1], 3 if activation in GATES else 6
    grad = torch.randn((), device=device).expand(*x.shape[:-1], columns)
    ours = ours_all(activation, x, bias, grad)
    contiguous = ours_all(activation, x.contiguous(), bias.contiguous(), grad.contiguous())
    for a, b in zip(ours, contiguous, strict=True):
        assert torch.equal(a, b)
    misaligned = torch.randn(65, device=device)[1:]
    assert torch.equal(act(misaligned, None, activation), act(misaligned.clone(), None, activation))
    if activation not in GATES:
        scalar = torch.tensor(0.5, device=device)
        torch.testing.assert_close(_ops.bias_act(scalar, None, "gelu"), F.gelu(scalar))


@every_activation
@every_dtype
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


@one_of_each
def test_deterministic_whatever_the_threads(device, activation):
    x, bias, grad = make(activation, (300, 3000), device)
    threads = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2, 2):
            torch.set_num_threads(n)
            results.append(ours_all(activation, x, bias, grad))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


@pytest.mark.parametrize("activation", ["silu", "geglu"])
def test_backward_twice_and_in_part(device, activation):
    """A graph may be walked again, for some inputs only; saved tensors and upstream gradients stay as they are."""
    x, bias, grad = make(activation, (4, 9), device)
    x_before, grad_before = x.clone(), grad.clone()
    x.requires_grad_(), bias.requires_grad_()
    y = act(x, bias, activation)
    dx, dbias = torch.autograd.grad(y, (x, bias), grad, retain_graph=True)
    assert torch.equal(torch.autograd.grad(y, x, grad, retain_graph=True)[0], dx)
    assert torch.equal(torch.autograd.grad(y, bias, grad)[0], dbias)
    assert torch.equal(x, x_before) and torch.equal(grad, grad_before)
    frozen = act(x.detach(), bias, activation)
    assert torch.equal(torch.autograd.grad(frozen, bias, grad)[0], dbias)
    assert not act(x.detach(), bias.detach(), activation).requires_grad


@one_of_each
def test_double_backward_is_refused(device, activation):
    x = torch.randn(4, device=device, requires_grad=True)
    with pytest.raises(NotImplementedError, match=f"{name_of(activation)} has no second derivative"):
        torch.autograd.grad(act(x, None, activation).sum(), x, create_graph=True)


@one_of_each
@every_bias
def test_opcheck(device, activation, has_bias):
    x, bias, grad = make(activation, (2, 3, 8), device, has_bias=has_bias)
    forward, backward = (getattr(_ops, f"{name_of(activation)}_{way}") for way in ("fwd", "bwd"))
    torch.library.opcheck(forward, (x, bias, activation))
    torch.library.opcheck(backward, (grad, x, bias, activation))
    assert backward(grad, x, None, activation)[1].shape == (0,)
    bias = None if bias is None else bias.requires_grad_()
    public = getattr(torch.ops.tp_ext, name_of(activation))
    torch.library.opcheck(public, (x.requires_grad_(), bias, activation))


@pytest.mark.parametrize("activation", ["gelu_tanh", "geglu"])
def test_compiles_to_one_graph(device, activation):
    x, bias, grad = make(activation, (4, 9), device)
    expected = ours_all(activation, x, bias, grad)
    x.requires_grad_(), bias.requires_grad_()
    y = torch.compile(getattr(_ops, name_of(activation)), fullgraph=True)(x, bias, activation)
    for a, b in zip([y, *torch.autograd.grad(y, (x, bias), grad)], expected, strict=True):
        assert torch.equal(a, b)


@one_of_each
def test_autocast_follows_x(device, activation):
    """Under autocast the bias, an fp32 parameter, is cast to x's dtype and its gradient comes back in fp32."""
    x, bias = torch.randn(4, 8, device=device, dtype=torch.bfloat16), torch.randn(8, device=device, requires_grad=True)
    with torch.autocast(device.type, torch.bfloat16):
        y = act(x, bias, activation)
        assert act(x.float(), bias, activation).dtype == torch.float32
    assert torch.equal(y, act(x, bias.bfloat16(), activation)) and y.dtype == torch.bfloat16
    assert torch.autograd.grad(y.float().sum(), bias)[0].dtype == torch.float32


@one_of_each
def test_errors_name_the_argument(device, activation):
    x, bias = torch.randn(2, 8, device=device), torch.randn(8, device=device)
    other, names = ("gelu", "swiglu, geglu") if activation in GATES else ("swish", "gelu, gelu_tanh, relu, silu")
    with pytest.raises(ValueError, match=f"activation: '{other}' must be one of {names}"):
        getattr(_ops, name_of(activation))(x, bias, other)
    with pytest.raises(ValueError, match=r"bias: shape \[4\] must be \[n\]"):
        act(x, bias[:4], activation)
    with pytest.raises(TypeError, match="bias: dtype"):
        act(x.bfloat16(), bias, activation)
    with pytest.raises(TypeError, match="x: dtype"):
        act(x.long(), None, activation)
    with pytest.raises(ValueError, match=r"grad: shape \[2, 7\] must be"):
        getattr(_ops, f"{name_of(activation)}_bwd")(x[:, 1:], x, bias, activation)


def test_gates_need_an_even_width(device):
    with pytest.raises(ValueError, match=r"x: shape \[2, 7\] must have an even last dim"):
        _ops.gated_act(torch.randn(2, 7, device=device), None, "swiglu")
