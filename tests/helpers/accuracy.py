"""Errors of a kernel against fp64, next to those of torch's operators in the same dtype; its results for NaN and
infinity.

The reference is the composition of torch's operators in fp64, from the same (rounded) inputs; the measure is the same
composition in the inputs' dtype. Compared are the output and every gradient, each by the root of its mean square error
and by its largest error. Ours may be no larger than torch's, but for what no implementation can be held to:

- *One rounding.* A result as good as the exact one rounded to the dtype is good enough.
- *Luck.* The two root mean squares are drawn from N errors each, or fewer if few elements are large or independent, so
  their ratio is known to 0.7 / sqrt(N): three times that is granted. A largest error is a single draw: 1.25, and 1.4
  for a sum over rows (a parameter's gradient), whose errors have no sharp end.
- *CUDA.* There torch's and our arithmetic differ from the CPU's (fast division, another order of sums): twice torch's.
"""

from collections.abc import Callable

import torch
from torch import Tensor

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
KINDS = ["random", "small", "constant", "huge", "tiny", "subnormal"]

Function = Callable[..., Tensor]


def values(kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """An input of that kind, drawn on the CPU: the same on all devices."""
    info = torch.finfo(dtype)
    random = torch.randn(shape, dtype=torch.float64)
    made = {
        "random": lambda: 3 * random,
        "small": lambda: 1e-3 * random,
        "constant": lambda: torch.full(shape, 0.7, dtype=torch.float64),
        "huge": lambda: min(1e30, info.max) * random.sign(),
        "tiny": lambda: max(1e-30, info.smallest_normal) * random.sign(),
        "subnormal": lambda: info.smallest_normal / 8 * random,
    }[kind]()
    return made.to(device, dtype)


def results(function: Function, inputs: list[Tensor], grad: Tensor, dtype: torch.dtype) -> list[Tensor]:
    """The output of function(*inputs) and the gradients of the inputs, computed in dtype."""
    leaves = [x.detach().to(dtype).requires_grad_() for x in inputs]
    y = function(*leaves)
    return [y.detach(), *torch.autograd.grad(y, leaves, grad.to(dtype))]


def _error(x: Tensor, exact: Tensor) -> tuple[float, float, float]:
    """Root mean square, largest, and how many errors of equal size would have these second and fourth moments."""
    error = (x.double() - exact).abs()
    largest = error.max().item()
    if largest == 0:
        return 0.0, 0.0, float(error.numel())
    squares = (error / largest).square()
    count = squares.sum().item() ** 2 / squares.square().sum().item()
    return largest * squares.mean().item() ** 0.5, largest, count


def assert_as_accurate(
    ours: Function,
    theirs: Function,
    inputs: list[Tensor],
    grad: Tensor,
    *,
    independent: int | None = None,
) -> None:
    """independent: how many errors are, if others only repeat them. Elements that torch does not get as finite numbers,
    or that are none in the dtype, are left out; ours have to be finite where torch's are."""
    dtype = grad.dtype
    references = results(theirs, inputs, grad, torch.float64)
    mine, torchs = (results(f, inputs, grad, dtype) for f in (ours, theirs))
    for i, (a, b, e) in enumerate(zip(mine, torchs, references, strict=True)):
        assert a.dtype == dtype and a.shape == e.shape
        finite = b.isfinite() & e.to(dtype).isfinite()
        if not finite.any():
            continue
        a, b, e = a[finite], b[finite], e[finite]
        assert a.isfinite().all(), f"result {i} is not finite where torch's is"
        limit = 2.0 if a.is_cuda else 1.0
        (rms, most, count), (torch_rms, torch_most, torch_count) = _error(a, e), _error(b, e)
        rounding = _error(e.to(dtype), e)
        luck = 1 + 2.1 / min(count, torch_count, independent or a.numel()) ** 0.5
        is_sum = i > 0 and inputs[i - 1].dim() < grad.dim()
        for kind, error, torchs_error, slack, rounded in (
            ("rms", rms, torch_rms, luck, rounding[0]),
            ("largest", most, torch_most, 1.4 if is_sum else 1.25, rounding[1]),
        ):
            ratio = error / torchs_error if torchs_error else torch.inf
            assert error <= max(limit * torchs_error * slack, rounded), (
                f"result {i}: {kind} error {error:.3e}, {ratio:.3f} of torch's; {limit * slack:.3f} granted"
            )


def assert_as_special(
    ours: Function, theirs: Function, inputs: list[Tensor], grad: Tensor, either: bool = False, on_cpu: bool = False
) -> None:
    """NaN where torch in fp64 has NaN and infinity where it has that, in output and gradients, nowhere else; `either`:
    whichever of the two; `on_cpu`: where torch on the CPU has that."""
    dtype = grad.dtype
    mine = [t.cpu() for t in results(ours, inputs, grad, dtype)]
    reference = [t.cpu() if on_cpu else t for t in (*inputs, grad)]
    exact = [t.cpu() for t in results(theirs, reference[:-1], reference[-1], torch.float64)]
    for i, (a, e) in enumerate(zip(mine, exact, strict=True)):
        assert torch.equal(a.isfinite(), e.isfinite()), f"result {i}: finite elsewhere than torch's"
        if either:
            continue
        assert torch.equal(a.isnan(), e.isnan()), f"result {i}: NaN elsewhere than torch's"
        inf = e.isinf()
        assert torch.equal(a.isinf(), inf) and torch.equal(a[inf].double(), e[inf]), f"result {i}: other infinities"


def assert_same_sums(a: Tensor, b: Tensor) -> None:
    """Equal to the bit; on CUDA, where alignment decides which thread adds what, up to 8 ulp of the largest value."""
    if not a.is_cuda:
        assert torch.equal(a, b)
        return
    bound = 8 * torch.finfo(a.dtype).eps * b.abs().max().item()
    torch.testing.assert_close(a, b, rtol=0, atol=bound)


def with_specials(x: Tensor) -> Tensor:
    """x [rows, n] with NaN and both infinities in its first rows, one each, at places where vectors and their tails
    meet."""
    x, special = x.clone(), [torch.nan, torch.inf, -torch.inf]
    for row, value in enumerate(special * 3):
        x[row, (0, -1, x.shape[1] // 2)[row // 3]] = value
    return x
