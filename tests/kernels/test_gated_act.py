"""gated_act: x = gate | up, y = act(gate + bias_gate) * (up + bias_up), its gradients, against torch functions."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tp_ext import _ops

pytestmark = pytest.mark.core

ACTIVATIONS = {"swiglu": F.silu, "geglu": F.gelu}
DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# Halves around the vector widths; (70, 4200) has several row chunks and column tiles; (3, 24000) parts of a row
SHAPES = [(0, 8), (3, 0), (1, 2), (5, 14), (2, 3, 16), (3, 18), (4, 62), (2, 66), (600, 10), (70, 4200), (3, 24000)]

every_activation = pytest.mark.parametrize("activation", ACTIVATIONS)
every_bias = pytest.mark.parametrize("has_bias", [True, False], ids=["bias", "no_bias"])


def torch_all(activation: str, x: Tensor, bias: Tensor | None, grad: Tensor) -> list[Tensor]:
    """y and every gradient, by the plain composition."""
    x = x.detach().requires_grad_()
    inputs = [x] if bias is None else [x, bias.detach().requires_grad_()]
    gate, up = sum(inputs[1:], inputs[0]).chunk(2, -1)
    y = ACTIVATIONS[activation](gate) * up
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


def ours_all(activation: str, x: Tensor, bias: Tensor | None, grad: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    bias = None if bias is None else bias.detach().requires_grad_()
    y = _ops.gated_act(x, bias, activation)
    return [y.detach(), *torch.autograd.grad(y, [x] if bias is None else [x, bias], grad)]


def make(shape, dtype, device, has_bias=True):
    x = 2 * torch.randn(shape, dtype=dtype, device=device)
    bias = torch.randn(shape[-1], dtype=dtype, device=device) if has_bias else None
    return x, bias, torch.randn(*shape[:-1], shape[-1] // 2, dtype=dtype, device=device)


@every_activation
@every_bias
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_torch(device, activation, has_bias, dtype, shape):
    """The error to fp64 is at most twice torch's own in the same dtype, plus one ulp of the largest value, on CUDA
    three, two of which its division takes; fp64, where there is no better reference, may differ by a few ulp of it.
    Half types, which torch rounds after each operation and we round once, are also right to one ulp of each element,
    apart from what fp32 arithmetic loses."""
    x, bias, grad = make(shape, dtype, device, has_bias)
    exact = torch_all(activation, x.double(), None if bias is None else bias.double(), grad.double())
    ours, torchs = ours_all(activation, x, bias, grad), torch_all(activation, x, bias, grad)
    for a, b, e in zip(ours, torchs, exact, strict=True):
        assert a.shape == b.shape and a.dtype == b.dtype
        if a.numel() == 0:
            continue
        error, torch_error = (a.double() - e).abs(), (b.double() - e).abs().max()
        eps, largest = torch.finfo(dtype).eps, e.abs().max()
        ulps = 16 if dtype == torch.float64 else 3 if x.is_cuda else 1
        assert error.max() <= 2 * torch_error + ulps * eps * largest
        if dtype in (torch.bfloat16, torch.float16):
            assert (error <= eps * e.abs() + 4e-6 * largest).all()


@every_activation
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_nan_reaches_the_values_that_depend_on_it(device, activation, dtype):
    """NaN in gate or up makes y NaN and, backward, what the formula says; the neighbours stay finite."""
    x, bias, grad = make((2, 38), dtype, device)
    x[0, 3] = x[1, 19 + 16] = float("nan")
    y, dx, dbias = ours_all(activation, x, bias, grad)
    y_torch, dx_torch, dbias_torch = torch_all(activation, x, bias, grad)
    assert torch.equal(y.isnan(), y_torch.isnan()) and y.isnan().sum() == 2
    assert torch.equal(dx.isnan(), dx_torch.isnan()) and dx.isnan().sum() == 3  # gate: both halves; up: dgate only
    assert torch.equal(dbias.isnan(), dbias_torch.isnan())


@every_activation
@every_bias
def test_gradcheck(device, activation, has_bias):
    x, bias, _ = make((3, 10), torch.float64, device, has_bias)
    inputs = [t.requires_grad_() for t in (x, bias) if t is not None]
    torch.autograd.gradcheck(lambda *a: _ops.gated_act(*a, *[None][has_bias:], activation), inputs)


def test_strides(device):
    """Any strides of x, bias and grad give what contiguous copies give, bit for bit."""
    x = torch.randn(6, 40, 9, device=device).transpose(0, 2)[::2, 1:]
    bias, grad = torch.randn(6, 2, device=device)[:, 1], torch.randn((), device=device).expand(5, 39, 3)
    ours = ours_all("swiglu", x, bias, grad)
    contiguous = ours_all("swiglu", x.contiguous(), bias.contiguous(), grad.contiguous())
    for a, b in zip(ours, contiguous, strict=True):
        assert torch.equal(a, b)
    misaligned = torch.randn(65, device=device)[1:]
    assert torch.equal(_ops.gated_act(misaligned, None, "geglu"), _ops.gated_act(misaligned.clone(), None, "geglu"))


def test_deterministic_whatever_the_threads(device):
    x, bias, grad = make((300, 6000), torch.float32, device)
    threads = torch.get_num_threads()
    try:
        results = []
        for n in (1, 2, 2):
            torch.set_num_threads(n)
            results.append(ours_all("swiglu", x, bias, grad))
    finally:
        torch.set_num_threads(threads)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_backward_twice_and_in_part(device):
    """A graph may be walked again, for some inputs only; saved tensors and upstream gradients stay as they are."""
    x, bias, grad = make((4, 18), torch.float32, device)
    x_before, grad_before = x.clone(), grad.clone()
    x.requires_grad_(), bias.requires_grad_()
    y = _ops.gated_act(x, bias, "geglu")
    dx, dbias = torch.autograd.grad(y, (x, bias), grad, retain_graph=True)
    assert torch.equal(torch.autograd.grad(y, x, grad, retain_graph=True)[0], dx)
    assert torch.equal(torch.autograd.grad(y, bias, grad)[0], dbias)
    assert torch.equal(x, x_before) and torch.equal(grad, grad_before)
    frozen = _ops.gated_act(x.detach(), bias, "geglu")
    assert torch.equal(torch.autograd.grad(frozen, bias, grad)[0], dbias)
    assert not _ops.gated_act(x.detach(), bias.detach(), "geglu").requires_grad


def test_double_backward_is_refused(device):
    x = torch.randn(4, device=device, requires_grad=True)
    with pytest.raises(NotImplementedError, match="gated_act has no second derivative"):
        torch.autograd.grad(_ops.gated_act(x, None, "swiglu").sum(), x, create_graph=True)


@every_bias
def test_opcheck(device, has_bias):
    x, bias, grad = make((2, 3, 16), torch.float32, device, has_bias)
    torch.library.opcheck(_ops.gated_act_fwd, (x, bias, "swiglu"))
    torch.library.opcheck(_ops.gated_act_bwd, (grad, x, bias, "swiglu"))
    assert _ops.gated_act_bwd(grad, x, None, "swiglu")[1].shape == (0,)
    bias = None if bias is None else bias.requires_grad_()
    torch.library.opcheck(torch.ops.tp_ext.gated_act, (x.requires_grad_(), bias, "swiglu"))


def test_compiles_to_one_graph(device):
    x, bias, grad = make((4, 18), torch.float32, device)
    expected = ours_all("geglu", x, bias, grad)
    x.requires_grad_(), bias.requires_grad_()
    y = torch.compile(_ops.gated_act, fullgraph=True)(x, bias, "geglu")
    for a, b in zip([y, *torch.autograd.grad(y, (x, bias), grad)], expected, strict=True):
        assert torch.equal(a, b)


def test_autocast_follows_x(device):
    """Under autocast the bias, an fp32 parameter, is cast to x's dtype and its gradient comes back in fp32."""
    x, bias = torch.randn(4, 8, device=device, dtype=torch.bfloat16), torch.randn(8, device=device, requires_grad=True)
    with torch.autocast(device.type, torch.bfloat16):
        y = _ops.gated_act(x, bias, "swiglu")
    assert torch.equal(y, _ops.gated_act(x, bias.bfloat16(), "swiglu")) and y.dtype == torch.bfloat16
    assert torch.autograd.grad(y.float().sum(), bias)[0].dtype == torch.float32


def test_errors_name_the_argument(device):
    x, bias = torch.randn(2, 8, device=device), torch.randn(8, device=device)
    with pytest.raises(ValueError, match="activation: 'gelu' must be one of swiglu, geglu"):
        _ops.gated_act(x, bias, "gelu")
    with pytest.raises(ValueError, match=r"x: shape \[2, 7\] must have an even last dim"):
        _ops.gated_act(x[:, 1:], None, "swiglu")
    with pytest.raises(ValueError, match=r"bias: shape \[4\] must be \[n\]"):
        _ops.gated_act(x, bias[:4], "swiglu")
    with pytest.raises(TypeError, match="bias: dtype"):
        _ops.gated_act(x.bfloat16(), bias, "swiglu")
    with pytest.raises(ValueError, match=r"grad: shape \[2, 8\] must be"):
        _ops.gated_act_bwd(x, x, bias, "swiglu")
