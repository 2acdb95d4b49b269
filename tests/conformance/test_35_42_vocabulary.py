"""Conformance cases 35 to 42: embedding and cross-entropy over a sharded vocabulary (docs/reference/correctness.md).

The loss has no sequence parallelism of its own: its rows are whole on every rank, gathered by the head (case 42).
"""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F

import tp_ext
from tests.helpers import ranks
from tests.helpers.oracle import gathered, local_grads, own_tokens
from tests.helpers.vocabulary import assert_dense, close, make_rows, run_loss
from tp_ext import (
    VocabParallelCrossEntropy,
    VocabParallelEmbedding,
    VocabParallelLMHead,
    vocab_parallel_cross_entropy,
)

pytestmark = pytest.mark.core

EVERY = pytest.mark.parametrize("p", [1, 2, 3, 4])
SP = pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])


def _out_of_range(group, wrong, sp):
    module = VocabParallelEmbedding(10, 4, group=group, sequence_parallel=sp, pad_to_multiple_of=8)
    module(torch.tensor([3, wrong, 4, 5]))


@pytest.mark.thinned
@SP
@pytest.mark.parametrize("wrong", [10, -1, 15, 1 << 40])
@EVERY
def test_case_35_ids_outside_the_vocabulary_raise_on_all_ranks(p, wrong, sp):
    """10 to 31 are padding rows, which exist."""
    ranks.run_raises(_out_of_range, p, IndexError, f"ids.*{wrong}.*10", wrong, sp)


@pytest.mark.smoke
@EVERY
def test_case_36_analytic(p):
    """Each rank holds 32 columns, 0 to 7 four times: log(4 p (1 + e + .. + e^7)), 10.2309 at p = 4."""
    full, target = torch.arange(8.0).repeat(4 * p).repeat(16, 1), torch.arange(0, 32, 2)
    options = {"reduction": "none"}
    losses, grads = zip(*ranks.run(run_loss, p, full, target, torch.ones(16), None, options), strict=True)
    for loss in losses:
        torch.testing.assert_close(loss, 10.2309 + math.log(p / 4) - target % 8, rtol=0, atol=1e-4)
    want = full.softmax(-1) - F.one_hot(target, 32 * p)
    torch.testing.assert_close(torch.cat(grads, -1), want, rtol=0, atol=1e-6)


@EVERY
def test_case_37_large_logits(p):
    full, target = torch.randn(13, 17, 11 * p) * 1000, torch.randint(0, 11 * p, (13, 17))
    assert_dense(p, full, target, bounds={"rtol": 1e-6, "atol": 1e-6})
    losses = ranks.run(run_loss, p, full, target, None, None, {})
    assert all(loss.isfinite() and grad.isfinite().all() for loss, grad in losses)


@pytest.mark.thinned(1)
@EVERY
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_case_38_logits_are_left_as_they_are(dtype, p):
    """assert_dense compares them before the call, after it and after backward. bf16: results round once, 2^-9."""
    bound = 1e-6 if dtype == torch.float32 else 2**-8
    assert_dense(p, *make_rows(13, dtype=dtype), bounds={"rtol": bound, "atol": bound / 10})


@pytest.mark.thinned(1)
@pytest.mark.parametrize("scale", [1, 1000])
@EVERY
def test_case_39_label_smoothing(p, scale):
    """One vocabulary at every p, so that a smoothing over the local one cannot pass."""
    full, target = make_rows(33, scale=scale)
    assert_dense(p, full, target, label_smoothing=0.1)
    results = ranks.run(run_loss, p, full, target, None, None, {"label_smoothing": 0.1})
    assert all(loss.isfinite() and grad.isfinite().all() for loss, grad in results)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("ignore_index", [-100, 3, -1])
@EVERY
def test_case_40_ignored_rows(p, ignore_index):
    full, _ = make_rows(13)
    some = torch.randint(0, 13, (3, 5))
    some[0] = ignore_index
    for target, smoothing in itertools.product((some, torch.full((3, 5), ignore_index)), (0.0, 0.1)):
        options = {"ignore_index": ignore_index, "label_smoothing": smoothing, "z_loss": 0.1}
        for reduction in ("none", "mean", "sum"):
            assert_dense(p, full, target, reduction=reduction, **options)


@EVERY
def test_case_40_ignored_rows_may_hold_anything(p):
    full, target = make_rows(12)
    full[0], target[0] = float("nan"), -100
    full[1, 0], target[1, 0] = float("inf"), -100
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 0.1}):
        losses, grads = zip(*ranks.run(run_loss, p, full, target, None, None, options), strict=True)
        assert losses[0].isfinite()
        assert all(not grad[0].any() and not grad[1, 0].any() and grad.isfinite().all() for grad in grads)


def _gathered_logits(group, p):
    full, target = torch.tensor([[0.0, 1, 2, 3]]), torch.tensor([3])
    if p > 1:
        VocabParallelCrossEntropy(group=group, vocab_size=4)(full, target)
    return vocab_parallel_cross_entropy(full, target, group, vocab_size=4)


@pytest.mark.parametrize("p", [2, 3, 4])
def test_case_41_gathered_logits_are_refused(p):
    """Taken for shards they would give 0.4401897 + log(p) in silence."""
    ranks.run_raises(_gathered_logits, p, ValueError, rf"logits_local: 4 columns.*vocab_size = 4.*p = {p}", p)


def test_case_41_one_rank_holds_them_all():
    torch.testing.assert_close(ranks.run(_gathered_logits, 1, 1)[0], torch.tensor(0.4401897), rtol=0, atol=1e-7)


@EVERY
def test_case_42_vocabulary_of_gpt_2_padded(p):
    width = -(-50257 // (128 * p)) * 128
    full, target = make_rows(50257, rows=(4,))
    assert_dense(p, full, target, width, label_smoothing=0.1)
    assert_dense(p, full, target)


def _padded_head(group, weight, x, target, sp):
    """The loss and its gradients through a head whose vocabulary is padded to a multiple of 128 on each rank."""
    vocab, hidden = weight.shape
    head = VocabParallelLMHead(
        hidden, vocab, group=group, sequence_parallel=sp, pad_to_multiple_of=128, dtype=weight.dtype
    )
    tp_ext.load_full_state_dict(head, {"weight": weight}, group=group)
    own = (own_tokens(x, group) if sp else x).clone().requires_grad_()
    logits = head(own, len(x))
    assert logits.shape[-1] * group.size() > vocab
    loss = vocab_parallel_cross_entropy(logits, target, group, vocab_size=vocab, label_smoothing=0.1)
    loss.backward()
    return loss, own.grad, local_grads(head), dict(tp_ext.shardings(head))


@pytest.mark.thinned(1)
@EVERY
@SP
def test_case_42_no_gradient_reaches_the_padding_rows_of_the_head(sp, p):
    """`gathered` asserts that they hold zeros."""
    weight = torch.randn(50257, 4, dtype=torch.float64, requires_grad=True)
    x, target = torch.randn(5, 4, dtype=torch.float64, requires_grad=True), torch.randint(0, 50257, (5,))
    want = F.cross_entropy(x @ weight.T, target, label_smoothing=0.1)
    want.backward()
    results = ranks.run(_padded_head, p, weight.detach(), x.detach(), target, sp)
    losses, dxs, grads, tables = zip(*results, strict=True)
    for loss in losses:
        torch.testing.assert_close(loss, want.detach(), **close)
    for dx in [torch.cat(dxs)] if sp else dxs:
        torch.testing.assert_close(dx, x.grad, **close)
    torch.testing.assert_close(gathered(grads, tables[0])["weight"], weight.grad, **close)
