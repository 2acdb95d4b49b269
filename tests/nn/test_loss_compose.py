"""vocab_parallel_cross_entropy with the gradient in place of the logits, under autocast, compiled, recomputed."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from tests.helpers import ranks
from tests.helpers.peak_memory import Peak
from tests.helpers.vocabulary import assert_dense, columns
from tp_ext import vocab_parallel_cross_entropy

pytestmark = pytest.mark.core

OPTIONS = {"label_smoothing": 0.1, "z_loss": 0.1}


def _data(vocab, dtype=torch.float64):
    return torch.randn(3, 5, vocab, dtype=dtype), torch.randint(0, vocab, (3, 5))


@pytest.mark.parametrize("p", [1, 2, 3])
def test_inplace_backward_is_the_same_gradient(p):
    for width in (None, 8):
        assert_dense(p, *_data(13) if p > 1 else _data(8), width, inplace_backward=True, **OPTIONS)


def _inplace(group, full, target, how):
    leaf = columns(full, group.size(), group.rank(), None).requires_grad_()
    logits = leaf * 1
    loss = vocab_parallel_cross_entropy(logits, target, group, inplace_backward=True)
    if how == "memory":
        (grad,) = torch.autograd.grad(loss, logits)
        assert grad.data_ptr() == logits.data_ptr()
        return
    if how == "saved elsewhere":
        loss = loss + logits.square().sum()  # pow saved the logits, which backward finds overwritten or not yet
    loss.backward(retain_graph=True)
    loss.backward()


@pytest.mark.parametrize("p", [1, 2])
def test_inplace_backward_reuses_the_memory_and_refuses_a_second(p):
    ranks.run(_inplace, p, *_data(12), "memory")
    match = "second backward.*inplace_backward"
    ranks.run_raises(_inplace, p, RuntimeError, match, *_data(12), "twice", in_turns=False)
    match = "second backward.*inplace_backward|modified by an inplace operation"
    ranks.run_raises(_inplace, p, RuntimeError, match, *_data(12), "saved elsewhere", in_turns=False)


def _peak(group, dtype, inplace, reduction):
    logits = torch.randn(64, 4096 // group.size(), dtype=dtype, requires_grad=True)
    target = torch.randint(4096, (64,))
    leaf = logits * 1  # as from a linear: not a leaf, its gradient goes on to the layer below
    with Peak() as peak:
        loss = vocab_parallel_cross_entropy(leaf, target, group, inplace_backward=inplace, reduction=reduction)
        (grad,) = torch.autograd.grad(loss, leaf, torch.ones_like(loss))
    assert (grad.data_ptr() == leaf.data_ptr()) == inplace
    return peak.most / leaf.untyped_storage().nbytes()


@pytest.mark.parametrize("reduction", ["mean", "none"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [1, 2])
def test_inplace_backward_takes_no_second_copy_of_the_logits(p, dtype, reduction):
    """Beyond the logits, forward and backward take 2 % of them at their peak; the plain backward takes a copy."""
    assert max(ranks.run(_peak, p, dtype, True, reduction)) <= 0.02
    assert 1 <= min(ranks.run(_peak, p, dtype, False, reduction)) <= 1.02


def _autocast(group, full, target, dtype):
    local = columns(full, group.size(), group.rank(), None).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = vocab_parallel_cross_entropy(local, target, group, vocab_size=full.shape[-1], **OPTIONS)
    loss.backward()
    return loss, local.grad


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
def test_autocast_loss_is_fp32_and_gradient_of_the_logits_dtype(dtype):
    full, target = _data(13)
    x = full.to(dtype).double()
    want = F.cross_entropy(x.flatten(0, 1), target.flatten(), label_smoothing=0.1)
    want += 0.1 * x.flatten(0, 1).logsumexp(-1).square().mean()
    for loss, grad in ranks.run(_autocast, 2, full, target, dtype):
        assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
        assert grad.dtype == dtype
        torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=1e-6)


def _wrapped(group, full, target, wrap, options):
    torch._dynamo.reset()

    def fn(x):
        return vocab_parallel_cross_entropy(x.sin(), target, group, vocab_size=full.shape[-1], **options) * 2

    results = []
    for f in (fn, wrap(fn)):
        local = columns(full, group.size(), group.rank(), None).requires_grad_()
        loss = f(local)
        results.append((loss, *torch.autograd.grad(loss.sum(), local)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def _compile(fn):
    return torch.compile(fn, fullgraph=True, backend="aot_eager")


def _checkpoint(fn):
    return lambda x: checkpoint(fn, x, use_reentrant=False)


@pytest.mark.parametrize("options", [{}, OPTIONS | {"reduction": "none"}], ids=["", "all"])
@pytest.mark.parametrize("wrap", [_compile, _checkpoint])
@pytest.mark.parametrize("p", [1, 2])
def test_compiled_and_recomputed_as_eager(p, wrap, options):
    ranks.run(_wrapped, p, *_data(13), wrap, options, timeout=120)


def _no_grad(group, full, target):
    local = columns(full, group.size(), group.rank(), None)
    want = vocab_parallel_cross_entropy(local.clone().requires_grad_(), target, group)
    with torch.no_grad():
        loss = vocab_parallel_cross_entropy(local.requires_grad_(), target, group)
    with torch.inference_mode():
        inferred = vocab_parallel_cross_entropy(local, target, group)
    assert torch.equal(loss, want) and torch.equal(inferred, want) and not loss.requires_grad


def test_no_grad_and_inference_mode():
    ranks.run(_no_grad, 2, *_data(12))


def _second_derivative(group, full, target):
    local = columns(full, group.size(), group.rank(), None).requires_grad_()
    loss = vocab_parallel_cross_entropy(local, target, group)
    (grad,) = torch.autograd.grad(loss, local, create_graph=True)
    grad.sum().backward()


def test_a_second_derivative_is_refused():
    ranks.run_raises(
        _second_derivative, 2, NotImplementedError, "cross_entropy.*second derivative", *_data(12), in_turns=False
    )
