"""vocab_parallel_cross_entropy against F.cross_entropy of the full logits. fp64 bound: 1e-12, rounding of short sums.
With the gradient in place of the logits, under autocast, compiled, recomputed.

Its kernels, one by one: kernels/test_vocab_cross_entropy.py.
"""

import itertools

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import counts_by_kind
from tests.helpers.peak_memory import Peak
from tests.helpers.vocabulary import assert_dense, close, columns, dense, make_rows, run_loss, widths
from tp_ext import VocabParallelCrossEntropy, vocab_parallel_cross_entropy

pytestmark = pytest.mark.core

SIZES = (1, 2, 3, 4)


ALL = list(itertools.product((0.0, 0.1, 1.0), (0.0, 1e-2), ("none", "mean", "sum")))


@pytest.mark.thinned
@pytest.mark.parametrize(("smoothing", "z_loss", "reduction"), ALL)
@pytest.mark.parametrize("p", SIZES)
def test_every_option_with_even_uneven_and_padded_vocabularies(p, smoothing, z_loss, reduction):
    options = {"label_smoothing": smoothing, "z_loss": z_loss, "reduction": reduction}
    for vocab in (12, 13, 14, 23):
        for width in widths(p, vocab):
            assert_dense(p, *make_rows(vocab), width, **options)


def test_a_rank_with_padding_alone():
    """V = 9 at p = 4 with width 3 leaves the last rank nothing."""
    assert_dense(4, *make_rows(9), width=3, label_smoothing=0.1, z_loss=1e-2)
    assert_dense(4, *make_rows(5), width=4, label_smoothing=0.1)


@pytest.mark.parametrize("options", [{"reduction": "none"}, {"inplace_backward": True}], ids=str)
@pytest.mark.parametrize("sizes", [[20, 3], [0, 20, 3], [5, 5, 0, 13]], ids=str)
def test_sizes_of_the_ranks(sizes, options):
    assert_dense(len(sizes), *make_rows(23), width=sizes, label_smoothing=0.1, z_loss=1e-2, **options)


@pytest.mark.parametrize("rows", [(), (0,), (1,), (2, 0, 3), (2, 1, 3, 2)], ids=str)
def test_rows_of_any_shape(rows):
    for reduction in ("none", "mean", "sum"):
        full, target = torch.randn(*rows, 7, dtype=torch.float64), torch.randint(0, 7, rows)
        reference = full.unsqueeze(0).requires_grad_()
        want = dense(reference, target.unsqueeze(0), reduction=reduction)
        want.sum().backward()
        got = ranks.run(
            run_loss, 2, full, target, None if want.dim() == 0 else torch.ones(rows), None, {"reduction": reduction}
        )
        torch.testing.assert_close(got[0][0], want.detach().view(got[0][0].shape), **close)
        torch.testing.assert_close(torch.cat([grad for _, grad in got], -1), reference.grad[0], **close)


def _module(group, full, target, options):
    local = columns(full, group.size(), group.rank(), None)
    module = VocabParallelCrossEntropy(group=group, vocab_size=full.shape[-1], **options)
    assert not module.state_dict()
    return module(local, target), vocab_parallel_cross_entropy(
        local, target, group, vocab_size=full.shape[-1], **options
    )


def test_module_is_the_function():
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "reduction": "sum", "ignore_index": 4}
    full, target = make_rows(13)
    for a, b in ranks.run(_module, 2, full, target.clamp(min=0), options):
        assert torch.equal(a, b)


@pytest.mark.parametrize("p", [1, 2, 4])
def test_any_strides(p):
    assert_dense(p, *make_rows(13), odd_strides=True, label_smoothing=0.1)


def _count(group, full, target):
    local = columns(full, group.size(), group.rank(), None).requires_grad_()
    with CommDebugMode() as forward:
        loss = vocab_parallel_cross_entropy(local, target, group, label_smoothing=0.1, z_loss=0.1)
    with CommDebugMode() as backward:
        loss.backward()
    return counts_by_kind(forward), counts_by_kind(backward)


def test_one_all_gather_forward_and_nothing_backward():
    assert ranks.run(_count, 2, *make_rows(12)) == [({"all_gather": 1}, {})] * 2
    assert ranks.run(_count, 1, *make_rows(12)) == [({}, {})]


# In place, under autocast, compiled, recomputed


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)
@on_ranks(2)
def test_autocast_loss_is_fp32_and_gradient_of_the_logits_dtype(group, dtype):
    full, target = _data(13)
    x = full.to(dtype).double()
    want = F.cross_entropy(x.flatten(0, 1), target.flatten(), label_smoothing=0.1)
    want += 0.1 * x.flatten(0, 1).logsumexp(-1).square().mean()
    local = columns(full, group.size(), group.rank(), None).to(dtype).requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        loss = vocab_parallel_cross_entropy(local, target, group, vocab_size=full.shape[-1], **OPTIONS)
    loss.backward()
    assert loss.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    assert local.grad.dtype == dtype
    torch.testing.assert_close(loss.double(), want, rtol=1e-6, atol=1e-6)


def _compile(fn):
    return torch.compile(fn, fullgraph=True, backend="aot_eager")


def _checkpoint(fn):
    return lambda x: checkpoint(fn, x, use_reentrant=False)


@pytest.mark.parametrize("options", [{}, OPTIONS | {"reduction": "none"}], ids=["", "all"])
@pytest.mark.parametrize("wrap", [_compile, _checkpoint])
@on_ranks(1, 2, backend="gloo", timeout=120)
def test_compiled_and_recomputed_as_eager(group, wrap, options):
    full, target = _data(13)
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


@on_ranks(2)
def test_no_grad_and_inference_mode(group):
    full, target = _data(12)
    local = columns(full, group.size(), group.rank(), None)
    want = vocab_parallel_cross_entropy(local.clone().requires_grad_(), target, group)
    with torch.no_grad():
        loss = vocab_parallel_cross_entropy(local.requires_grad_(), target, group)
    with torch.inference_mode():
        inferred = vocab_parallel_cross_entropy(local, target, group)
    assert torch.equal(loss, want) and torch.equal(inferred, want) and not loss.requires_grad


def _second_derivative(group, full, target):
    local = columns(full, group.size(), group.rank(), None).requires_grad_()
    loss = vocab_parallel_cross_entropy(local, target, group)
    (grad,) = torch.autograd.grad(loss, local, create_graph=True)
    grad.sum().backward()


def test_a_second_derivative_is_refused():
    ranks.run_raises(
        _second_derivative, 2, NotImplementedError, "cross_entropy.*second derivative", *_data(12), in_turns=False
    )
