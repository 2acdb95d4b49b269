"""rms_norm and layer_norm against torch: values, every gradient, determinism, and what they refuse."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.helpers import norms
from tests.helpers.accuracy import assert_same_sums
from tests.helpers.norms import EPS, HALF, KINDS, either, grads, plain, results
from tp_ext import _ops

pytestmark = pytest.mark.core

BOTH = pytest.mark.parametrize("adds", [False, True], ids=["plain", "residual"])
# Around the vector widths and lanes (8, 32), one row per warp and more, above what CUDA keeps in registers (16400)
SIZES = [(3, 1), (5, 7), (4, 8), (33, 9), (2, 31), (9, 33), (70, 128), (3, 1000), (5, 1032), (2, 16400)]


def theirs(kind: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    n = (x.shape[-1],)
    return F.rms_norm(x, n, weight, EPS) if kind == "rms" else F.layer_norm(x, n, weight, bias, EPS)


def inputs(*call) -> list[Tensor | None]:
    """Returns x, weight and bias."""
    x, _, *params = norms.inputs(*call, adds=False)
    return [x, *params]


def assert_as_good(kind: str, tensors: list[Tensor | None], grad: Tensor) -> None:
    """Our largest error against fp64 is at most twice torch's in the same dtype, plus one rounding of the result.

    In fp32 "one rounding" is of the sums: their terms are added in another order, so 8 ulp of the largest value.
    """
    dtype = grad.dtype
    exact = results(theirs, kind, tensors, [grad], torch.float64)
    mine, torchs = (results(f, kind, tensors, [grad], dtype) for f in (plain, theirs))
    slack = (1 if dtype in HALF else 8) * torch.finfo(dtype).eps
    for i, (a, b, e) in enumerate(zip(mine, torchs, exact, strict=True)):
        assert a.dtype == dtype and a.shape == e.shape
        if e.numel():
            # fp64 is its own reference, and rstd enlarges its roundings up to 1 / sqrt(EPS)
            scale = e.abs().max().clamp_min(EPS**-0.5 if dtype == torch.float64 else 0.0)
            error, bound = (a - e).abs().max(), 2 * (b - e).abs().max() + slack * scale
            assert error <= bound, f"result {i}: error {error:.3e} above {bound:.3e}"


@pytest.mark.thinned
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, *HALF], ids=str)
@pytest.mark.parametrize("shape", SIZES, ids=str)
def test_values_and_gradients_match_torch(
    kind: str, dtype: torch.dtype, shape: tuple[int, ...], device: torch.device
) -> None:
    tensors = inputs(kind, shape, dtype, device)
    assert_as_good(kind, tensors, torch.randn(shape, dtype=dtype, device=device))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("params", ["", "w", "b"])
def test_missing_parameters(kind: str, params: str, device: torch.device) -> None:
    tensors = inputs(kind, (6, 40), torch.float32, device, params)
    assert_as_good(kind, tensors, torch.randn(6, 40, device=device))
    x, weight, _ = (t if t is None else t.detach() for t in tensors)
    if kind == "layer" and weight is None:
        _, mean, rstd = _ops.layer_norm_fwd(x, None, None, EPS)
        assert [g.shape for g in _ops.layer_norm_bwd(x, x, None, mean, rstd)[1:]] == [(0,), (0,)]


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_gradcheck(kind: str, adds: bool, device: torch.device) -> None:
    tensors = norms.inputs(kind, (3, 2, 11), torch.float64, device, adds=adds)
    assert torch.autograd.gradcheck(lambda *t: either(kind, *t), tensors)


@pytest.mark.thinned
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", HALF, ids=str)
@pytest.mark.parametrize("n", [24, 33])
def test_half_input_with_fp32_weight(kind: str, dtype: torch.dtype, n: int, device: torch.device) -> None:
    x, weight, bias = inputs(kind, (50, n), torch.float32, device)
    low = x.detach().to(dtype).requires_grad_()
    grad = torch.randn(50, n, device=device).to(dtype)
    y = plain(kind, low, weight, bias)
    assert y.dtype == dtype
    params = [t for t in (weight, bias) if t is not None]
    got = torch.autograd.grad(y, [low, *params], grad)
    assert [g.dtype for g in got] == [dtype, *[torch.float32] * len(params)]
    # The same values widened by hand: only the roundings of y and dx to dtype remain
    wide = results(plain, kind, [low, weight, bias], [grad], torch.float32)
    for a, b in zip([y, *got], wide, strict=True):
        torch.testing.assert_close(a, b.to(a.dtype), rtol=1e-5 if a.dtype == torch.float32 else 0, atol=1e-5)


def test_variance_does_not_cancel(device: torch.device) -> None:
    """Mean 1e4 and deviation 1: E[x^2] - E[x]^2 would lose every digit of the variance in fp32."""
    x = torch.randn(4, 4096, dtype=torch.float64, device=device) + 1e4
    _, _, rstd = _ops.layer_norm_fwd(x.float(), None, None, 0.0)
    exact = x.float().double().var(-1, correction=0).rsqrt()
    # Twice the 1e4 * 2^-24 that the fp32 mean itself is rounded by, squared, is far below 1e-5
    torch.testing.assert_close(rstd.double(), exact, rtol=1e-5, atol=0)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", [(0, 8), (2, 0, 5), (7,)], ids=str)
def test_no_rows_and_one_row(kind: str, shape: tuple[int, ...], device: torch.device) -> None:
    assert_as_good(kind, inputs(kind, shape, torch.float32, device), torch.randn(shape, device=device))


@pytest.mark.thinned
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("n", [24, 32, 160, 200])
def test_any_number_of_rows(kind: str, dtype: torch.dtype, n: int, device: torch.device) -> None:
    """On the CPU several rows are under way at once: the first and last ones come out as each does alone."""
    x, weight, bias = (t if t is None else t.detach() for t in inputs(kind, (6, n), dtype, device))
    grad, added = torch.randn_like(x), torch.randn_like(x)

    def step(rows: slice, norm) -> list[Tensor]:
        leaf = x[rows].clone().requires_grad_()
        y = norm(leaf, added[rows])
        return [y.detach(), *torch.autograd.grad(y, leaf, grad[rows])]

    def of_sum(t: Tensor, other: Tensor) -> Tensor:
        y, total = norms.fused(kind, t, other, weight, bias)
        return y + total

    for norm in (lambda t, other: plain(kind, t, weight, bias), of_sum):
        alone = [step(slice(i, i + 1), norm) for i in range(len(x))]
        for count in range(2, len(x) + 1):
            for got, *want in zip(step(slice(0, count), norm), *alone[:count], strict=True):
                assert torch.equal(got, torch.cat(want)), count


@pytest.mark.parametrize("kind", KINDS)
def test_empty_rows(kind: str, device: torch.device) -> None:
    tensors = inputs(kind, (3, 0), torch.float32, device)
    got = results(plain, kind, tensors, [torch.empty(3, 0, device=device)], torch.float32)
    assert [g.shape for g in got[:3]] == [(3, 0), (3, 0), (0,)]


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_any_strides(kind: str, adds: bool, device: torch.device) -> None:
    """Transposed and misaligned inputs, an expanded gradient and a transposed one: the values of contiguous ones."""
    tensors = norms.inputs(kind, (9, 5, 24), torch.float32, device, adds=adds)
    packed = [t if t is None else t.detach() for t in tensors]
    dys = [
        torch.randn(9, 1, 1, device=device).expand(9, 5, 24),
        torch.randn(24, 5, 9, device=device).mT.mT.transpose(0, 2),
    ]
    turned = [t if t is None else t.transpose(0, 2).contiguous().transpose(0, 2) for t in packed[:2]]
    strided = [*turned, *(t if t is None else F.pad(t, (1, 1))[1:-1] for t in packed[2:])]
    a_results = results(either, kind, strided, dys, torch.float32)
    b_results = results(either, kind, packed, [g.contiguous() for g in dys], torch.float32)
    for a, b in zip(a_results, b_results, strict=True):
        assert_same_sums(a, b)


@pytest.mark.parametrize("kind", KINDS)
def test_nan_stays_in_its_row(kind: str, device: torch.device) -> None:
    x, weight, bias = inputs(kind, (3, 40), torch.float32, device)
    x = x.detach()
    x[1, 7] = torch.nan
    y = plain(kind, x, weight, bias)
    assert y[1].isnan().all() and not y[[0, 2]].isnan().any()


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_deterministic_whatever_the_threads(kind: str, adds: bool, device: torch.device) -> None:
    tensors = norms.inputs(kind, (2000, 96), torch.float32, device, adds=adds)
    dys = grads((2000, 96), torch.float32, device)
    threads, runs = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3, 1):
            torch.set_num_threads(count)
            runs.append(results(either, kind, tensors, dys, torch.float32))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for run in runs[1:] for a, b in zip(runs[0], run, strict=True))


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_backward_twice_and_in_parts(kind: str, adds: bool, device: torch.device) -> None:
    """A second backward, and one for single inputs, give the same bits; nothing that is saved changes."""
    tensors = norms.inputs(kind, (6, 40), torch.float32, device, adds=adds)
    leaves = [t for t in tensors if t is not None]
    outputs = either(kind, *tensors)
    dys = grads((6, 40), torch.float32, device)[: len(outputs)]
    before = [t.detach().clone() for t in (*leaves, *dys)]
    whole = torch.autograd.grad(outputs, leaves, dys, retain_graph=True)
    for leaf, expected in zip(leaves, whole, strict=True):
        assert torch.equal(torch.autograd.grad(outputs, leaf, dys, retain_graph=True)[0], expected)
    assert all(torch.equal(a, b) for a, b in zip((*leaves, *dys), before, strict=True))
    assert not adds or torch.equal(outputs[1], leaves[0] + leaves[1])


@pytest.mark.parametrize("kind", KINDS)
def test_second_derivative_is_refused(kind: str, device: torch.device) -> None:
    x, weight, bias = inputs(kind, (2, 8), torch.float64, device)
    with pytest.raises(NotImplementedError, match=f"{kind}_norm has no second derivative"):
        torch.autograd.grad(plain(kind, x, weight, bias).sum(), x, create_graph=True)


@pytest.mark.parametrize("kind", KINDS)
def test_compiles_whole(kind: str, device: torch.device) -> None:
    tensors = inputs(kind, (4, 40), torch.float32, device)
    grad = torch.randn(4, 40, device=device)
    compiled = torch.compile(plain, fullgraph=True, backend="aot_eager")
    for a, b in zip(
        results(compiled, kind, tensors, [grad], torch.float32),
        results(plain, kind, tensors, [grad], torch.float32),
        strict=True,
    ):
        assert torch.equal(a, b)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("params", ["", "wb"])
def test_opcheck(dtype: torch.dtype, params: str, device: torch.device) -> None:
    ops = torch.ops.tp_ext
    tensors = inputs("layer", (2, 3, 17), dtype, device, params)
    torch.library.opcheck(ops.rms_norm.default, (*tensors[:2], EPS))
    torch.library.opcheck(ops.layer_norm.default, (*tensors, EPS))
    x, weight, bias = (t if t is None else t.detach() for t in tensors)
    torch.library.opcheck(ops._rms_norm_fwd.default, (x, weight, EPS))
    torch.library.opcheck(ops._layer_norm_fwd.default, (x, weight, bias, EPS))
    _, mean, rstd = ops._layer_norm_fwd(x, weight, bias, EPS)
    torch.library.opcheck(ops._rms_norm_bwd.default, (x, x, weight, rstd))
    torch.library.opcheck(ops._layer_norm_bwd.default, (x, x, weight, mean, rstd))


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_as_torch(kind: str, device: torch.device) -> None:
    """fp32 on CUDA, as torch's norms; on CPU torch's autocast leaves norms alone, and so do we."""
    tensors = inputs(kind, (4, 8), torch.bfloat16, device)
    with torch.autocast(device.type, torch.bfloat16):
        y = plain(kind, *tensors)
    assert y.dtype == (torch.float32 if device.type == "cuda" else torch.bfloat16)
    assert y.dtype == torch.float32 or torch.equal(y, plain(kind, *tensors))


def test_errors_name_argument_and_value(device: torch.device) -> None:
    x = torch.randn(2, 8, device=device)
    with pytest.raises(ValueError, match=r"weight: shape \[7\] must be \[8\]"):
        _ops.rms_norm(x, torch.ones(7, device=device), EPS)
    with pytest.raises(TypeError, match="weight: dtype Double must be that of x, Float"):
        _ops.rms_norm(x, torch.ones(8, device=device, dtype=torch.float64), EPS)
    with pytest.raises(TypeError, match="x: dtype Long must be a floating point type"):
        _ops.layer_norm(x.long(), None, None, EPS)
    with pytest.raises(ValueError, match=r"x: shape \[\] must have a last dim"):
        _ops.rms_norm(x[0, 0], None, EPS)
