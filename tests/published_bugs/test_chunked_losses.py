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
    for x, target, scale in zip(*(one.chunk(CHUNKS) for one in (x, target, scale)), strict=True):
        logits = x @ weight.t()
        probabilities = logits.softmax(-1) - F.one_hot(target.clamp(min=0), VOCAB)
        dlogits = probabilities * (scale * (target != -100))[:, None]
        yield dlogits @ weight, dlogits.t() @ x


def _mean_of_chunks(group, *args):
    x, weight, target, _ = args
    x, weight = x.clone().requires_grad_(), weight.clone().requires_grad_()
    means = [F.cross_entropy(a @ weight.t(), b) for a, b in zip(x.chunk(CHUNKS), target.chunk(CHUNKS), strict=True)]
    means = [one.nan_to_num() for one in means]  # a chunk without tokens that count
    return ours(group, *args[:3], None), list(torch.autograd.grad(sum(means) / CHUNKS, (x, weight)))


def test_chunks_with_unequal_numbers_of_tokens():
    """A chunked loss is not the mean of the chunks' means where chunks have different numbers of valid tokens; the
    gradients of chunks were wrong under sequence parallelism and compiled:
    https://github.com/pytorch/torchtitan/issues/3412."""
    args = batch()
    check(ranks.run(_mean_of_chunks, 2, *args), of_one_process(*args))


def _upstream_left_out(group, *args):
    x, weight, target, upstream = args
    parts = list(chunk_gradients(x, weight, target, torch.ones_like(upstream)))
    dx = torch.cat([one for one, _ in parts]) * upstream[:, None]
    published = [dx, sum(one for _, one in parts) * upstream.sum()]  # dw has no rows of tokens to multiply
    return ours(group, *args, "none"), published


def test_upstream_gradients_of_single_tokens_reach_the_weight():
    """With reduction="none" the gradient of the weight was accumulated in forward, where the gradients of the tokens'
    losses are not known: https://github.com/linkedin/Liger-Kernel/pull/1298."""
    args = batch()
    check(ranks.run(_upstream_left_out, 2, *args), of_one_process(*args, "none"))


def _hidden_scaled_per_chunk(group, *args):
    x, weight, target, _ = args
    kept = (target != -100).double()
    own = torch.cat([one.sum().clamp(min=1).expand(len(one)) for one in kept.chunk(CHUNKS)])  # of each chunk
    dx = torch.cat([one for one, _ in chunk_gradients(x, weight, target, 1 / own)])
    dw = sum(one for _, one in chunk_gradients(x, weight, target, torch.ones_like(kept) / kept.sum()))
    return ours(group, *args[:3], None), [dx, dw]


def test_the_gradient_of_the_hidden_states_is_scaled_by_all_tokens():
    """Under vocabulary tiling the gradient of the hidden states was scaled otherwise than that of the weight:
    https://github.com/AI-Hypercomputer/maxtext/pull/4959."""
    args = batch()
    check(ranks.run(_hidden_scaled_per_chunk, 2, *args), of_one_process(*args))


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
