"""Which gradients the backward of rms_norm and layer_norm, with and without a residual, computes, and what is kept for
them.
"""

import itertools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.helpers.norms import EPS, KINDS, fused, inputs, plain
from tp_ext import _ops

pytestmark = pytest.mark.core


class Masks(TorchDispatchMode):
    """Keeps the output_mask of every norm backward, and how many elements the results have."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[list[bool], list[int]]] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        if func in (torch.ops.tp_ext._rms_norm_bwd.default, torch.ops.tp_ext._layer_norm_bwd.default):
            full = [a.default_value for a in func._schema.arguments]  # arguments like their default are left out
            mask = [*args, *full[len(args) :]][-1]
            self.seen.append(([*mask], [t.numel() for t in result]))
        return result


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("adds", [False, True], ids=["plain", "residual"])
def test_computes_the_gradients_that_are_asked_for(kind: str, adds: bool, device: torch.device) -> None:
    """Trained or frozen, all at once or one by one as a zero-bubble pipeline asks: the kernel gets the mask."""
    names = ["x", "residual", "weight", "bias"]
    for trained in (["x"], ["residual"], ["weight"], ["x", "weight"], ["residual", "bias"], ["weight", "bias"], names):
        tensors = dict(zip(names, inputs(kind, (6, 40), torch.float32, device), strict=True))
        if not adds:
            tensors["residual"] = None
        for name, t in tensors.items():
            if t is not None:
                t.requires_grad_(name in trained)
        trained = [name for name in trained if tensors[name] is not None]
        if not trained:
            continue
        x, residual, *params = tensors.values()
        y = fused(kind, x, residual, *params)[0] if adds else plain(kind, x, *params)
        for some in [trained, *([name] for name in trained)]:
            with Masks() as masks:
                torch.autograd.grad(y, [tensors[name] for name in some], torch.ones_like(y), retain_graph=True)
            mask = [bool({"x", "residual"} & {*some}), "weight" in some, "bias" in some][: 3 if kind == "layer" else 2]
            if trained == ["bias"]:  # the sum of the upstream gradient
                assert masks.seen == []
                continue
            assert masks.seen == [(mask, [m * n for m, n in zip(mask, (240, 40, 40), strict=False)])]


def test_output_mask(device: torch.device) -> None:
    """The bits of a gradient do not depend on which other gradients are computed."""
    x, grad_sum, weight, bias = (t.detach() for t in inputs("layer", (70, 33), torch.float32, device))
    grad = torch.randn_like(x)
    _, mean, rstd = _ops.layer_norm_fwd(x, weight, bias, EPS)
    whole = _ops.layer_norm_bwd(grad, x, weight, mean, rstd, grad_sum, [True] * 3)
    for mask in itertools.product([False, True], repeat=3):
        some = _ops.layer_norm_bwd(grad, x, weight, mean, rstd, grad_sum, mask)
        for wanted, got, want in zip(mask, some, whole, strict=True):
            assert torch.equal(got, want) if wanted else got.shape == (0,)
    whole = _ops.rms_norm_bwd(grad, x, weight, rstd, grad_sum, [True] * 2)
    for mask in itertools.product([False, True], repeat=2):
        some = _ops.rms_norm_bwd(grad, x, weight, rstd, grad_sum, mask)
        for wanted, got, want in zip(mask, some, whole, strict=True):
            assert torch.equal(got, want) if wanted else got.shape == (0,)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("adds", [False, True], ids=["plain", "residual"])
def test_a_bias_trained_alone_keeps_no_activation(dtype: torch.dtype, adds: bool, device: torch.device) -> None:
    x, residual, weight, bias = inputs("layer", (6, 40), dtype, device)
    bias = bias.detach().float().requires_grad_()
    for t in (x, residual, weight):
        t.requires_grad_(False)
    weight = weight.float()
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        y = fused("layer", x, residual, weight, bias)[0] if adds else plain("layer", x, weight, bias)
    assert all(t.data_ptr() == weight.data_ptr() for t in kept)
    (got,) = torch.autograd.grad(y, bias, dy := torch.randn_like(y))
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.double(), dy.double().sum(0), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", KINDS)
def test_saves_the_sum_alone(kind: str, device: torch.device) -> None:
    x, residual, weight, bias = inputs(kind, (6, 40), torch.bfloat16, device)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        _, total = fused(kind, x, residual, weight, bias)
    activations = {t.data_ptr() for t in kept if t.numel() == x.numel()}
    assert activations == {total.data_ptr()}
    small = sum(t.nbytes for t in kept if t.numel() != x.numel() and t.data_ptr() != weight.data_ptr())
    assert small == 6 * (4 if kind == "rms" else 8)


@pytest.mark.parametrize("kind", KINDS)
def test_the_sum_must_not_be_changed_in_place(kind: str, device: torch.device) -> None:
    x, residual, weight, bias = inputs(kind, (6, 40), torch.float32, device)
    y, total = fused(kind, x, residual, weight, bias)
    total.mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()
