"""Published bugs of losses that are computed by chunks of tokens together with the head's product."""

import torch
import torch.nn.functional as F

import tp_ext
from tests.helpers import ranks
from tests.helpers.right_and_wrong import check

TOKENS, HIDDEN, VOCAB, CHUNKS = 8, 5, 12, 4


def batch():
    torch.manual_seed(3)
    target = torch.randint(VOCAB, (TOKENS,))
    target[1:4] = -100
    return (
        torch.randn(TOKENS, HIDDEN).double(),
        torch.randn(VOCAB, HIDDEN).double(),
        target,
        torch.rand(TOKENS).double(),
    )


def of_one_process(x, weight, target, upstream, reduction="mean"):
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    loss = F.cross_entropy(x @ weight.t(), target, reduction=reduction)
    dx, dw = torch.autograd.grad(loss, (x, weight), upstream if reduction == "none" else None)
    return [dx, dw]


def ours(group, x, weight, target, upstream, reduction="mean", times=1):
    """The gradients of x and of the whole weight, of the last of several backwards."""
    x, own = x.clone().requires_grad_(), weight.chunk(2)[group.rank()].clone().requires_grad_()
    loss = tp_ext.linear_cross_entropy(x, own, target, group, reduction=reduction, chunk_tokens=TOKENS // CHUNKS)
    for _ in range(times):
        dx, dw = torch.autograd.grad(loss, (x, own), upstream, retain_graph=True)
    return [dx, tp_ext.gather_from_region(dw, group, 0)]


def chunk_gradients(x, weight, target, scale):
    """dx and dw of each chunk; scale: of the loss of each row, of all rows."""
    for rows, ids, factor in zip(*(one.chunk(CHUNKS) for one in (x, target, scale)), strict=True):
        differences = (rows @ weight.t()).softmax(-1) - F.one_hot(ids.clamp(min=0), VOCAB)
        dlogits = differences * (factor * (ids != -100))[:, None]
        yield dlogits @ weight, dlogits.t() @ rows


def _partial_taken_for_the_sum(group, *args):
    x, weight, target, _ = args
    whole = list(chunk_gradients(x, weight, target, torch.full((TOKENS,), 1 / int((target != -100).sum())).double()))
    # This rank's columns of the logits: what the head's product gives before the sum over the ranks
    own = slice(*(VOCAB // 2 * k for k in (group.rank(), group.rank() + 1)))
    dlogits = (x @ weight.t()).softmax(-1) - F.one_hot(target.clamp(min=0), VOCAB)
    dlogits *= ((target != -100) / (target != -100).sum())[:, None]
    dx = torch.cat([one @ weight[own] for one in dlogits[:, own].chunk(CHUNKS)])
    return ours(group, *args[:3], None), [dx, sum(dw for _, dw in whole)]


def test_the_gradient_of_the_hidden_states_is_summed_over_the_ranks():
    """The accumulated gradient of the hidden states of a chunked loss was labelled replicated, though each
    tensor-parallel rank had the part of its columns: https://github.com/pytorch/torchtitan/issues/3412."""
    args = batch()
    check(ranks.run(_partial_taken_for_the_sum, 2, *args), of_one_process(*args))


def _first_upstream_for_all(group, *args):
    x, weight, target, upstream = args
    parts = list(chunk_gradients(x, weight, target, torch.ones_like(upstream)))  # as forward computes them
    published = [torch.cat([one for one, _ in parts]) * upstream[0], sum(one for _, one in parts) * upstream[0]]
    return ours(group, *args, "none"), published


def test_upstream_gradients_of_single_tokens():
    """With reduction="none" all gradients were multiplied by the upstream gradient of the first token; that of the
    weight, summed over tokens in forward, could not be right: https://github.com/linkedin/Liger-Kernel/pull/1298."""
    args = batch()
    check(ranks.run(_first_upstream_for_all, 2, *args), of_one_process(*args, "none"))


def _hidden_unscaled(group, *args):
    x, weight, target, _ = args
    parts = list(chunk_gradients(x, weight, target, torch.ones(TOKENS).double()))  # of the sum of the losses
    dx, dw = torch.cat([one for one, _ in parts]), sum(one for _, one in parts)
    return ours(group, *args[:3], None), [dx, dw / (target != -100).sum()]


def test_the_upstream_gradient_scales_the_hidden_states_too():
    """Under vocabulary tiling the upstream gradient, 1 / tokens, scaled the gradient of the weight and not that of the
    hidden states: https://github.com/AI-Hypercomputer/maxtext/pull/4959."""
    args = batch()
    check(ranks.run(_hidden_unscaled, 2, *args), of_one_process(*args))


def _second_backward(group, *args):
    x, weight, target, _ = args
    scale = torch.full((TOKENS,), 1 / int((target != -100).sum())).double()
    parts = list(chunk_gradients(x, weight, target, scale))
    saved = [torch.cat([one for one, _ in parts]), sum(one for _, one in parts)]
    for _ in range(2):
        published = [one.mul_(2.0) for one in saved]  # upstream gradient 2
    return ours(group, *args[:3], torch.tensor(2.0).double(), times=2), published


def test_a_second_backward_finds_what_the_first_one_found():
    """The backward of the fused loss multiplied its saved gradients in place, so that a second one through the same
    graph was wrong: https://github.com/deepspeedai/DeepSpeed/pull/8540."""
    args = batch()
    check(ranks.run(_second_backward, 2, *args), [2 * one for one in of_one_process(*args)])
