"""Cross entropy over a cut vocabulary. p ranks are emulated in one process: each primitive runs on the column slices,
and the stacked statistics stand for the all-gather."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tp_ext import _ops

pytestmark = pytest.mark.core

WIDTHS = [[8], [1], [7, 9], [33, 31], [1, 0, 5], [40, 40, 40], [2049, 2048, 4100], [16, 0]]
HALVES = [torch.bfloat16, torch.float16]


def emulate(
    full: Tensor,
    target: Tensor,
    widths: list[int],
    *,
    grad: Tensor | None = None,
    padding: int = 0,
    eps: float = 0.0,
    z: float = 0.0,
) -> tuple[Tensor, Tensor]:
    """Loss of each row, and the gradient of the full logits for an upstream `grad` per row (default: ones)."""
    size, starts = full.shape[-1], [sum(widths[:r]) for r in range(len(widths))]
    slices = [F.pad(x, (0, padding), value=1e4) for x in full.split(widths, -1)]
    cuts = [(start, width, size, -100) for start, width in zip(starts, widths, strict=True)]
    stats = [_ops.vocab_ce_stats(x, target, *cut) for x, cut in zip(slices, cuts, strict=True)]
    loss, lse = _ops.vocab_ce_loss(torch.stack(stats), target, size, -100, eps, z)
    grad = torch.ones_like(loss) if grad is None else grad
    before = [x.clone() for x in slices]
    pairs = list(zip(slices, cuts, strict=True))
    grads = [_ops.vocab_ce_bwd(grad, x, target, lse, *cut, eps, z) for x, cut in pairs]
    for x, old, g, width in zip(slices, before, grads, widths, strict=True):
        torch.testing.assert_close(x, old, rtol=0, atol=0, equal_nan=True)  # logits were not written
        assert not g[..., width:].any(), "padding has a gradient"
    for (x, cut), g in zip(pairs, grads, strict=True):
        _ops.vocab_ce_bwd_(grad, x, target, lse, *cut, eps, z)
        torch.testing.assert_close(x, g, rtol=0, atol=0, equal_nan=True)
    return loss, torch.cat([g[..., :w] for g, w in zip(grads, widths, strict=True)], -1)


def reference(
    full: Tensor, target: Tensor, *, grad: Tensor | None = None, eps: float = 0.0, z: float = 0.0
) -> tuple[Tensor, Tensor]:
    x = full.detach().requires_grad_()
    rows, flat = x.flatten(0, -2), target.flatten()
    loss = F.cross_entropy(rows, flat, label_smoothing=eps, reduction="none")
    if z:
        loss = loss + z * (rows.logsumexp(-1) ** 2).masked_fill(flat == -100, 0)
    loss.backward(torch.ones_like(loss) if grad is None else grad.to(loss.dtype))
    assert x.grad is not None
    return loss.detach(), x.grad


def problem(
    widths: list[int], device: str, dtype: torch.dtype, scale: float = 1.0, rows: tuple[int, ...] = (3, 5)
) -> tuple[Tensor, Tensor]:
    torch.manual_seed(0)
    logits = torch.randn(*rows, sum(widths), dtype=torch.double) * scale
    target = torch.randint(sum(widths), rows)
    if target.numel() > 1:
        target.view(-1)[1] = -100
    return logits.to(device, dtype), target.to(device)


@pytest.mark.parametrize("widths", WIDTHS)
@pytest.mark.parametrize("eps, z", [(0.0, 0.0), (0.1, 0.0), (0.0, 0.01), (0.2, 0.02), (1.0, 0.0)])
def test_equals_the_full_softmax_in_fp64(widths: list[int], eps: float, z: float, device: str) -> None:
    full, target = problem(widths, device, torch.double)
    grad = torch.randn(target.numel(), dtype=torch.double, device=device)
    for padding in (0, 3):
        ours = emulate(full, target, widths, grad=grad, padding=padding, eps=eps, z=z)
        for a, b in zip(ours, reference(full, target, grad=grad, eps=eps, z=z), strict=True):
            torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("widths", [[33, 31], [2049, 2048, 4100]])
@pytest.mark.parametrize("scale", [1e-30, 1.0, 30.0, 1e4])
def test_rounds_no_worse_than_torch(widths: list[int], scale: float, dtype: torch.dtype, device: str) -> None:
    """Error against fp64 at most twice torch's own, plus a few ulp of the largest value (fp32 sums differ). Where torch
    overflows to NaN, the ulp alone."""
    full, target = problem(widths, device, dtype, scale)
    ours = emulate(full, target, widths, eps=0.1, z=0.001)
    exact = reference(full.double(), target, eps=0.1, z=0.001)
    torchs = reference(full, target, eps=0.1, z=0.001)
    for a, b, t in zip(ours, exact, torchs, strict=True):
        ulp = torch.finfo(a.dtype).eps * b.abs().max()
        slack = 1 if a.dtype in HALVES else 4
        assert (a - b).abs().max() <= 2 * (t - b).abs().nan_to_num(0.0).max() + slack * ulp


def test_logits_of_a_thousand_keep_their_digits(device: str) -> None:
    """|lse| is about 3000: as one fp32 number it would cost the gradient 1e-4."""
    full, target = problem([11, 11], device, torch.float32, 1000.0, (13, 17))
    loss, grad = emulate(full, target, [11, 11])
    exact_loss, exact_grad = reference(full.double(), target)
    torch.testing.assert_close(loss.double(), exact_loss, rtol=1e-6, atol=1e-6)
    assert (grad - exact_grad).abs().max() < 1e-6


def test_minus_inf_nan_and_inf_are_torchs(device: str) -> None:
    full, target = problem([4, 4], device, torch.double, rows=(7,))
    target = torch.tensor([0, 5, 1, 2, -100, 6, 3], device=device)
    inf = float("inf")
    full[0, 4:] = -inf  # a rank whose columns are all masked
    full[1, :5] = -inf
    full[2] = -inf  # nothing left: NaN
    full[3, 6] = float("nan")
    full[5, 6] = -inf  # the target itself: infinite loss
    full[6, 0] = inf
    for a, b in zip(emulate(full, target, [4, 4]), reference(full, target), strict=True):
        torch.testing.assert_close(a, b, equal_nan=True, rtol=1e-12, atol=1e-12)
    full[:] = float("nan")  # an ignored row has no loss and no gradient, whatever is in it (torch: NaN gradient)
    loss, grad = emulate(full, target, [4, 4])
    assert loss[4] == 0 and not grad[4].any() and loss.isnan().sum() == 6


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES], ids=str)
@pytest.mark.parametrize("width", [40, 2100])
def test_masked_rows_and_nan_in_every_dtype(width: int, dtype: torch.dtype, device: str) -> None:
    """A row that is -inf everywhere has no softmax: its loss and gradient are NaN, as torch's; so with a NaN or +inf
    anywhere, first, last or alone in a chunk. Other rows do not notice."""
    full, target = problem([width], device, dtype, rows=(6,))
    full[0] = float("-inf")
    full[1, 0] = full[2, -1] = float("nan")
    full[3, width // 2] = float("inf")
    full[4, :-1] = float("-inf")  # one column is left: the loss is 0 there
    target[:] = torch.tensor([3, 5, 6, 7, width - 1, -100], device=device)
    for eps, z in ((0.0, 0.0), (0.0, 0.1)):
        loss, grad = emulate(full, target, [width // 2, width - width // 2], eps=eps, z=z)
        assert loss[:4].isnan().all() and grad[:4].isnan().any(-1).all()
        assert grad[:3].isnan().all()  # of +inf the others are 0
        torch.testing.assert_close(loss[4], z * full[4, -1].float() ** 2)
        assert not grad[4, :-1].any() and loss[5] == 0 and not grad[5].any()


@pytest.mark.parametrize("rows", [(), (1,), (0,), (2, 0, 3)])
def test_any_leading_dims(rows: tuple[int, ...], device: str) -> None:
    full, target = problem([5, 4], device, torch.double, rows=rows)
    loss, grad = emulate(full, target, [5, 4])
    assert loss.shape == (target.numel(),) and grad.shape == full.shape
    ours = loss_of(full, target, "none")
    assert ours.shape == target.shape
    torch.testing.assert_close(ours.flatten(), loss)
    assert loss_of(full[:0] if rows else full[None][:0], target[:0] if rows else target[None][:0]) == 0


def loss_of(
    logits: Tensor,
    target: Tensor,
    reduction: str = "mean",
    *,
    ignore_index: int = -100,
    eps: float = 0.0,
    z: float = 0.0,
    vocab: int | None = None,
    inplace: bool = False,
) -> Tensor:
    size = logits.shape[-1] if vocab is None else vocab
    return _ops.vocab_parallel_cross_entropy(
        logits, target, "", 0, size, size, ignore_index, eps, z, reduction, inplace
    )


@pytest.mark.parametrize("reduction", ["none", "mean", "sum"])
@pytest.mark.parametrize("dtype", [torch.double, torch.float32, torch.bfloat16])
def test_public_operator_is_cross_entropy(reduction: str, dtype: torch.dtype, device: str) -> None:
    full, target = problem([37], device, dtype)
    ours, theirs = full.clone().requires_grad_(), full.clone()
    exact = full.double().requires_grad_()  # for the gradient: torch's own bf16 one is off by 40 %
    loss = loss_of(ours, target, reduction, eps=0.1)
    flat = F.cross_entropy(theirs.flatten(0, -2), target.flatten(), label_smoothing=0.1, reduction=reduction)
    assert loss.dtype == flat.dtype
    torch.testing.assert_close(loss, flat.view(loss.shape))
    upstream = torch.randn_like(loss)
    loss.backward(upstream, retain_graph=True)
    flat = F.cross_entropy(exact.flatten(0, -2), target.flatten(), label_smoothing=0.1, reduction=reduction)
    flat.backward(upstream.view(flat.shape).double())
    torch.testing.assert_close(ours.grad, exact.grad.to(dtype))
    first, ours.grad = ours.grad, None
    loss.backward(upstream)
    assert torch.equal(ours.grad, first)


@pytest.mark.parametrize("layout", ["transposed", "sliced", "batch_of_slices", "permuted"])
def test_any_strides(layout: str, device: str) -> None:
    full, target = problem([9], device, torch.double, rows=(4, 6))
    x = {
        "transposed": lambda: full.transpose(0, 1).contiguous().transpose(0, 1),
        "sliced": lambda: F.pad(full, (0, 5), value=1e4)[..., :9],
        "batch_of_slices": lambda: F.pad(full, (0, 0, 0, 2), value=1e4)[:, :6],
        "permuted": lambda: full.movedim(-1, 0).contiguous().movedim(0, -1),
    }[layout]()
    assert not x.is_contiguous() and torch.equal(x, full)
    loss, grad = emulate(full, target, [9])
    lse = _ops.vocab_ce_loss(
        _ops.vocab_ce_stats(x, target.T.contiguous().T, 0, 9, 9, -100)[None], target, 9, -100, 0, 0
    )
    torch.testing.assert_close(lse[0], loss)
    ours = _ops.vocab_ce_bwd(torch.ones_like(loss), x, target, lse[1], 0, 9, 9, -100, 0.0, 0.0)
    torch.testing.assert_close(ours, grad)
    _ops.vocab_ce_bwd_(torch.ones_like(loss), x, target, lse[1], 0, 9, 9, -100, 0.0, 0.0)
    torch.testing.assert_close(x, grad)


def test_gradcheck_and_no_second_derivative(device: str) -> None:
    full, target = problem([7], device, torch.double, rows=(4,))
    full.requires_grad_()
    assert torch.autograd.gradcheck(lambda x: loss_of(x, target, "none", eps=0.1, z=0.1), full)
    assert torch.autograd.gradcheck(lambda x: loss_of(x, target, "mean"), full)
    with pytest.raises(NotImplementedError, match="no second derivative"):
        torch.autograd.grad(loss_of(full, target), full, create_graph=True)


def test_mean_counts_rows_and_all_ignored_is_zero(device: str) -> None:
    full, target = problem([7], device, torch.double, rows=(4,))
    target[:] = 3
    x = full.clone().requires_grad_()
    loss = loss_of(x, target, ignore_index=3)  # an index inside the vocabulary may be ignored too
    loss.backward()
    assert loss == 0 and not x.grad.any()


def test_inplace_backward(device: str) -> None:
    full, target = problem([37], device, torch.float32)
    plain = full.clone().requires_grad_()
    loss_of(plain, target, z=0.1).backward()
    leaf = full.clone().requires_grad_()
    logits = leaf * 1.0
    loss = loss_of(logits, target, z=0.1, inplace=True)
    assert torch.equal(logits, full), "logits were written in forward"
    loss.backward(retain_graph=True)
    assert torch.equal(leaf.grad, plain.grad) and torch.equal(logits, plain.grad)
    with pytest.raises(RuntimeError, match=r"a second backward .* inplace_backward=False"):
        loss.backward()
    other = leaf * 1.0
    square = other.pow(2).sum()  # made first, so its backward runs last
    both = loss_of(other, target, inplace=True) + square
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        both.backward()


def test_autocast_returns_fp32(device: str) -> None:
    full, target = problem([37], device, torch.bfloat16)
    x = full.clone().requires_grad_()
    with torch.autocast(device.type, torch.bfloat16):
        loss = loss_of(x, target)
    assert loss.dtype == torch.float32
    # Not torch's under autocast: on CUDA its log_softmax keeps bf16
    torch.testing.assert_close(loss, F.cross_entropy(full.flatten(0, -2).float(), target.flatten()))
    loss.backward()
    assert x.grad.dtype == torch.bfloat16


def test_errors_name_value_and_rule() -> None:
    full, target = problem([7], "cpu", torch.float32, rows=(4,))
    for bad in (7, -1):
        with pytest.raises(IndexError, match=rf"target: {bad} must be in \[0, vocab_size\), \[0, 7\)"):
            loss_of(full, torch.tensor([0, 1, bad, 2]))
    with pytest.raises(ValueError, match=r"target: shape \[3\] must be that of logits"):
        loss_of(full, target[:3])
    with pytest.raises(ValueError, match="reduction: 'avg' must be"):
        loss_of(full, target, "avg")
    with pytest.raises(ValueError, match=r"label_smoothing: 1.5 must be in \[0, 1\]"):
        loss_of(full, target, eps=1.5)
    with pytest.raises(ValueError, match="vocab_local: 9 must be at most the 7 columns"):
        loss_of(full, target, vocab=9)
    with pytest.raises(TypeError, match="target: dtype Int must be int64"):
        loss_of(full, target.int())
    with pytest.raises(ValueError, match="expanded tensor"):
        x = full[:1].expand(4, 7)
        _ops.vocab_ce_bwd_(torch.ones(4), x, target, torch.ones(4, 2), 0, 7, 7, -100, 0.0, 0.0)


def test_opcheck_and_compile(device: str) -> None:
    full, target = problem([7], device, torch.float32, rows=(4,))
    cut, ops = (0, 7, 7, -100), torch.library.opcheck
    stats = _ops.vocab_ce_stats(full, target, *cut)
    loss, lse = _ops.vocab_ce_loss(stats[None], target, 7, -100, 0.1, 0.1)
    ops(_ops.vocab_ce_stats, (full, target, *cut))
    ops(_ops.vocab_ce_loss, (stats[None], target, 7, -100, 0.1, 0.1))
    ops(_ops.vocab_ce_bwd, (loss, full, target, lse, *cut, 0.1, 0.1))
    ops(_ops.vocab_ce_bwd_, (loss, full.clone(), target, lse, *cut, 0.1, 0.1))
    x = full.clone().requires_grad_()
    ops(_ops.vocab_parallel_cross_entropy, (x, target, "", *cut, 0.1, 0.1, "mean", False))
    for inplace in (False, True):
        a, b = (full.clone().requires_grad_() for _ in range(2))
        compiled = torch.compile(
            lambda x, i=inplace: loss_of(x * 2, target, inplace=i), fullgraph=True, backend="aot_eager"
        )
        loss_of(a * 2, target).backward()
        compiled(b).backward()
        torch.testing.assert_close(a.grad, b.grad)
