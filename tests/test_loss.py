"""vocab_parallel_cross_entropy against F.cross_entropy of the full logits. fp64 bound: 1e-12, rounding of short sums.

Its kernels, one by one: kernels/test_vocab_cross_entropy.py.
"""

import itertools

import pytest
import ranks
import torch
import torch.nn.functional as F
from reference import talk
from torch.distributed.tensor.debug import CommDebugMode

from tp_ext import VocabParallelCrossEntropy, vocab_parallel_cross_entropy
from tp_ext.sharding import split_sizes

pytestmark = pytest.mark.core

SIZES = (1, 2, 3, 4)
close = {"rtol": 1e-12, "atol": 1e-12}


def dense(logits, target, *, z_loss=0.0, ignore_index=-100, reduction="mean", label_smoothing=0.0):
    """F.cross_entropy + z_loss * logsumexp^2; the mean over no rows is 0."""
    rows, ids = logits.flatten(0, -2), target.flatten()
    loss = F.cross_entropy(
        rows, ids, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    ) + z_loss * rows.logsumexp(-1).square() * (ids != ignore_index)
    if reduction == "none":
        return loss.view(target.shape)
    return loss.sum() / (max(int((ids != ignore_index).sum()), 1) if reduction == "mean" else 1)


def columns(full, p, rank, width):
    """The rank's columns: dealt like tensor_split, or, given a width, padded with rubbish."""
    if width is None:
        return full.split(split_sizes(full.shape[-1], p), -1)[rank].clone()
    rubbish = torch.full((*full.shape[:-1], p * width - full.shape[-1]), 1e4, dtype=full.dtype)
    return torch.cat([full, rubbish], -1).split(width, -1)[rank].clone()


def _run(group, full, target, g, width, options, odd_strides=False):
    local = columns(full, group.size(), group.rank(), width)
    if odd_strides:
        local = torch.stack([local, local + 1], -1)[..., 0].transpose(0, 1).contiguous().transpose(0, 1)
    before = local.clone()
    local.requires_grad_()
    loss = vocab_parallel_cross_entropy(local, target, group, vocab_size=full.shape[-1], **options)
    assert torch.equal(local.detach().nan_to_num(), before.nan_to_num())
    loss.backward(g)
    if not options.get("inplace_backward"):
        assert torch.equal(local.detach().nan_to_num(), before.nan_to_num())
    return loss, local.grad


def assert_dense(p, full, target, width=None, bounds=close, odd_strides=False, **options):
    """Loss and gradient, on all ranks to the last bit alike, and those of the full logits."""
    reference = full.double().clone().requires_grad_()
    known = ("z_loss", "ignore_index", "reduction", "label_smoothing")
    want = dense(reference, target, **{k: v for k, v in options.items() if k in known})
    g = torch.rand(want.shape, dtype=full.dtype)
    want.backward(g.double())
    losses, grads = zip(*ranks.run(_run, p, full, target, g, width, options, odd_strides), strict=True)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    assert losses[0].dtype == grads[0].dtype == full.dtype and losses[0].shape == want.shape
    grad = torch.cat(grads, -1)
    vocab = full.shape[-1]
    assert not grad[..., vocab:].any()
    torch.testing.assert_close(losses[0].double(), want.detach(), **bounds)
    torch.testing.assert_close(grad[..., :vocab].double(), reference.grad, **bounds)


def _data(vocab, rows=(3, 5), scale=1.0, dtype=torch.float64):
    full, target = scale * torch.randn(*rows, vocab, dtype=dtype), torch.randint(0, vocab, rows)
    if target.numel() > 1:
        target.view(-1)[1] = -100
    return full, target


def _widths(p, vocab):
    return [None, -(-vocab // p)] + ([-(-vocab // p) + 3] if p == 1 or -(-vocab // p) + 3 < vocab else [])


ALL = list(itertools.product((0.0, 0.1, 1.0), (0.0, 1e-2), ("none", "mean", "sum")))


@pytest.mark.parametrize(("smoothing", "z_loss", "reduction"), ALL)
@pytest.mark.parametrize("p", SIZES)
def test_every_option_with_even_uneven_and_padded_vocabularies(p, smoothing, z_loss, reduction):
    options = {"label_smoothing": smoothing, "z_loss": z_loss, "reduction": reduction}
    for vocab in (12, 13, 14, 23):
        for width in _widths(p, vocab):
            assert_dense(p, *_data(vocab), width, **options)


def test_a_rank_with_padding_alone():
    """V = 9 at p = 4 with width 3 leaves the last rank nothing."""
    assert_dense(4, *_data(9), width=3, label_smoothing=0.1, z_loss=1e-2)
    assert_dense(4, *_data(5), width=4, label_smoothing=0.1)


@pytest.mark.parametrize("rows", [(), (0,), (1,), (2, 0, 3), (2, 1, 3, 2)], ids=str)
def test_rows_of_any_shape(rows):
    for reduction in ("none", "mean", "sum"):
        full, target = torch.randn(*rows, 7, dtype=torch.float64), torch.randint(0, 7, rows)
        reference = full.unsqueeze(0).requires_grad_()
        want = dense(reference, target.unsqueeze(0), reduction=reduction)
        want.sum().backward()
        got = ranks.run(
            _run, 2, full, target, None if want.dim() == 0 else torch.ones(rows), None, {"reduction": reduction}
        )
        torch.testing.assert_close(got[0][0], want.detach().view(got[0][0].shape), **close)
        torch.testing.assert_close(torch.cat([grad for _, grad in got], -1), reference.grad[0], **close)


def test_case_36_analytic():
    full = torch.arange(8.0).repeat(16).repeat(16, 1)  # each of 4 ranks holds 32 columns, 0..7 four times
    target = torch.arange(0, 32, 2)
    losses, grads = zip(*ranks.run(_run, 4, full, target, torch.ones(16), None, {"reduction": "none"}), strict=True)
    torch.testing.assert_close(losses[0], 10.2309 - target % 8, rtol=0, atol=1e-4)
    want = full.softmax(-1) - F.one_hot(target, 128)
    torch.testing.assert_close(torch.cat(grads, -1), want, rtol=0, atol=1e-6)


@pytest.mark.parametrize("p", SIZES)
def test_case_37_large_logits(p):
    full, target = torch.randn(13, 17, 11 * p) * 1000, torch.randint(0, 11 * p, (13, 17))
    assert_dense(p, full, target, bounds={"rtol": 1e-6, "atol": 1e-6})
    losses = ranks.run(_run, p, full, target, None, None, {})
    assert all(loss.isfinite() and grad.isfinite().all() for loss, grad in losses)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_case_38_logits_are_left_as_they_are(dtype):
    """`_run` compares before and after, of the call and of backward. bf16: loss and gradient round once, 2^-9."""
    bound = 1e-6 if dtype == torch.float32 else 2**-8
    assert_dense(2, *_data(13, dtype=dtype), bounds={"rtol": bound, "atol": bound / 10})


@pytest.mark.parametrize("scale", [1, 1000])
@pytest.mark.parametrize("p", SIZES)
def test_case_39_label_smoothing(p, scale):
    assert_dense(p, *_data(11 * p, scale=scale), label_smoothing=0.1)


@pytest.mark.parametrize("ignore_index", [-100, 3, -1])
@pytest.mark.parametrize("p", SIZES)
def test_case_40_ignored_rows(p, ignore_index):
    full, _ = _data(13)
    some = torch.randint(0, 13, (3, 5))
    some[0] = ignore_index
    for target, smoothing in itertools.product((some, torch.full((3, 5), ignore_index)), (0.0, 0.1)):
        options = {"ignore_index": ignore_index, "label_smoothing": smoothing, "z_loss": 0.1}
        for reduction in ("none", "mean", "sum"):
            assert_dense(p, full, target, reduction=reduction, **options)


def test_case_40_ignored_rows_may_hold_anything():
    full, target = _data(12)
    full[0], target[0] = float("nan"), -100
    full[1, 0], target[1, 0] = float("inf"), -100
    for options in ({}, {"label_smoothing": 0.1, "z_loss": 0.1}):
        losses, grads = zip(*ranks.run(_run, 2, full, target, None, None, options), strict=True)
        assert losses[0].isfinite()
        assert all(not grad[0].any() and not grad[1, 0].any() and grad.isfinite().all() for grad in grads)


def _gathered_logits(group, with_size):
    full = torch.tensor([[0.0, 1, 2, 3]])
    vocab_parallel_cross_entropy(full, torch.tensor([3]), group, vocab_size=4 if with_size else None)


def test_case_41_gathered_logits_are_refused():
    ranks.run_raises(_gathered_logits, 2, ValueError, r"logits_local: 4 columns.*vocab_size = 4.*p = 2", True)


@pytest.mark.parametrize("p", SIZES)
def test_case_42_vocabulary_of_gpt_2_padded(p):
    width = -(-50257 // (128 * p)) * 128
    full, target = _data(50257, rows=(4,))
    assert_dense(p, full, target, width, label_smoothing=0.1)
    assert_dense(p, full, target)


def _twice(group, full, target):
    local = columns(full, group.size(), group.rank(), None).requires_grad_()
    loss = vocab_parallel_cross_entropy(local, target, group, label_smoothing=0.1, z_loss=0.1)
    loss.backward(retain_graph=True)
    once = local.grad.clone()
    loss.backward()
    assert torch.equal(local.grad, 2 * once)


@pytest.mark.parametrize("p", [1, 2])
def test_case_30_backward_twice_doubles(p):
    ranks.run(_twice, p, *_data(12))


def _module(group, full, target, options):
    local = columns(full, group.size(), group.rank(), None)
    module = VocabParallelCrossEntropy(group=group, vocab_size=full.shape[-1], **options)
    assert not module.state_dict()
    return module(local, target), vocab_parallel_cross_entropy(
        local, target, group, vocab_size=full.shape[-1], **options
    )


def test_module_is_the_function():
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "reduction": "sum", "ignore_index": 4}
    full, target = _data(13)
    for a, b in ranks.run(_module, 2, full, target.clamp(min=0), options):
        assert torch.equal(a, b)


@pytest.mark.parametrize("p", [1, 2, 4])
def test_any_strides(p):
    assert_dense(p, *_data(13), odd_strides=True, label_smoothing=0.1)


def _count(group, full, target):
    local = columns(full, group.size(), group.rank(), None).requires_grad_()
    with CommDebugMode() as forward:
        loss = vocab_parallel_cross_entropy(local, target, group, label_smoothing=0.1, z_loss=0.1)
    with CommDebugMode() as backward:
        loss.backward()
    return talk(forward), talk(backward)


def test_one_all_gather_forward_and_nothing_backward():
    assert ranks.run(_count, 2, *_data(12)) == [({"all_gather": 1}, {})] * 2
    assert ranks.run(_count, 1, *_data(12)) == [({}, {})]
