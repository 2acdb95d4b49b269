"""What the tests of embedding, head and loss share: both against torch's, and the ways to cut a vocabulary."""

import torch
import torch.nn.functional as F

import tp_ext
from tests.helpers import ranks
from tests.helpers.oracle import gathered, local_grads
from tp_ext import VocabParallelEmbedding, vocab_parallel_cross_entropy
from tp_ext.sharding import split_sizes

close = {"rtol": 1e-12, "atol": 1e-12}


def embed(group, weight, ids, g, sp, pad):
    module = VocabParallelEmbedding(
        *weight.shape, group=group, sequence_parallel=sp, pad_to_multiple_of=pad, dtype=weight.dtype
    )
    tp_ext.load_full_state_dict(module, {"weight": weight}, group=group)
    y = module(ids)
    y.backward(g.flatten(0, -2).tensor_split(group.size())[group.rank()] if sp else g)
    return y, local_grads(module), dict(tp_ext.shardings(module)), tp_ext.full_state_dict(module, group=group)


def assert_embedded(p, vocab, ids, dtype=torch.float64, sp=False, pad=None):
    """Exactly nn.Embedding, since all terms but one are zeros; its gradient, sums over repeated ids, within 1e-12."""
    weight = torch.randn(vocab, 16, dtype=dtype)
    g = torch.randn(*ids.shape, 16, dtype=dtype)
    table = weight.clone().requires_grad_()
    want = F.embedding(ids, table)
    want.backward(g)
    ys, grads, tables, states = zip(*ranks.run(embed, p, weight, ids, g, sp, pad), strict=True)
    if sp:
        assert torch.equal(torch.cat(ys), want.flatten(0, -2))
    else:
        assert all(torch.equal(y, want) for y in ys)
    grad = gathered(grads, tables[0])["weight"]
    torch.testing.assert_close(grad, table.grad, **({} if dtype != torch.float64 else close))
    for state in states:
        assert torch.equal(state["weight"], weight)


def dense(logits, target, *, z_loss=0.0, ignore_index=-100, reduction="mean", label_smoothing=0.0):
    """F.cross_entropy + z_loss * logsumexp^2; the mean over no rows is 0."""
    rows, ids = logits.flatten(0, -2), target.flatten()
    loss = F.cross_entropy(
        rows, ids, ignore_index=ignore_index, label_smoothing=label_smoothing, reduction="none"
    ) + z_loss * rows.logsumexp(-1).square() * (ids != ignore_index)
    if reduction == "none":
        return loss.view(target.shape)
    return loss.sum() / (max(int((ids != ignore_index).sum()), 1) if reduction == "mean" else 1)


def columns(full, p, rank, width=None):
    """The rank's columns: sharded like tensor_split, by a list of sizes, or, given a width, padded with rubbish."""
    if width is None or isinstance(width, list):
        return full.split(width or split_sizes(full.shape[-1], p), -1)[rank].clone()
    rubbish = torch.full((*full.shape[:-1], p * width - full.shape[-1]), 1e4, dtype=full.dtype)
    return torch.cat([full, rubbish], -1).split(width, -1)[rank].clone()


def run_loss(group, full, target, g, width, options, odd_strides=False):
    local = columns(full, group.size(), group.rank(), width)
    if odd_strides:
        local = torch.stack([local, local + 1], -1)[..., 0].transpose(0, 1).contiguous().transpose(0, 1)
    before = local.clone()
    local.requires_grad_()
    sizes = width if isinstance(width, list) else None
    loss = vocab_parallel_cross_entropy(local, target, group, vocab_size=full.shape[-1], sizes=sizes, **options)
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
    losses, grads = zip(*ranks.run(run_loss, p, full, target, g, width, options, odd_strides), strict=True)
    assert all(torch.equal(loss, losses[0]) for loss in losses)
    assert losses[0].dtype == grads[0].dtype == full.dtype and losses[0].shape == want.shape
    grad = torch.cat(grads, -1)
    vocab = full.shape[-1]
    assert not grad[..., vocab:].any()
    torch.testing.assert_close(losses[0].double(), want.detach(), **bounds)
    torch.testing.assert_close(grad[..., :vocab].double(), reference.grad, **bounds)


def make_rows(vocab, rows=(3, 5), scale=1.0, dtype=torch.float64):
    full, target = scale * torch.randn(*rows, vocab, dtype=dtype), torch.randint(0, vocab, rows)
    if target.numel() > 1:
        target.view(-1)[1] = -100
    return full, target


def widths(p, vocab):
    return [None, -(-vocab // p)] + ([-(-vocab // p) + 3] if p == 1 or -(-vocab // p) + 3 < vocab else [])
