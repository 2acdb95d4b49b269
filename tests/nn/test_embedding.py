"""VocabParallelEmbedding and VocabParallelLMHead against nn.Embedding and nn.Linear.

The embedding is exact: of its terms all but one are zeros. The head is bounded by 1e-12 in fp64, rounding.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import tp_ext
from tests.helpers import ranks
from tests.helpers.oracle import counts_by_kind, gathered, local_grads
from tests.helpers.vocabulary import assert_embedded, close
from tp_ext import VocabParallelEmbedding, VocabParallelLMHead

pytestmark = pytest.mark.core

SIZES = (1, 2, 3, 4)
PADDING = [None, 1, 8]


@pytest.mark.thinned
@pytest.mark.parametrize("pad", PADDING)
@pytest.mark.parametrize("vocab", [4, 7, 50, 65])
@pytest.mark.parametrize("p", SIZES)
def test_any_vocabulary_and_padding(p, vocab, pad):
    ids = torch.cat([torch.arange(vocab), torch.randint(0, vocab, (9,))]).view(-1, 1)
    assert_embedded(p, vocab, ids, pad=pad)
    assert_embedded(p, vocab, ids, sp=True, pad=pad)


@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 0, 3), (1, 2, 3, 2)], ids=str)
def test_ids_of_any_shape(shape):
    assert_embedded(2, 9, torch.randint(0, 9, shape))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_every_dtype(dtype):
    assert_embedded(2, 9, torch.randperm(9).int(), dtype)  # no repeats: the gradient is exact too


def _padding(group):
    module = VocabParallelEmbedding(9, 4, group=group, pad_to_multiple_of=8)
    head = VocabParallelLMHead(4, 9, bias=True, group=group, pad_to_multiple_of=8)
    return module.weight, head.weight, head.bias


@pytest.mark.parametrize("p", [1, 2, 4])
def test_all_ranks_hold_equally_many_rows_and_padding_starts_at_zero(p):
    width = {1: 16, 2: 8, 4: 8}[p]
    for tensors in zip(*ranks.run(_padding, p), strict=True):
        full = torch.cat(tensors)
        assert [len(t) for t in tensors] == [width] * p
        assert (full[:9] != 0).all() and (full[9:] == 0).all()


def _count(group, sp):
    module = VocabParallelEmbedding(10, 4, group=group, sequence_parallel=sp)
    with CommDebugMode() as forward:
        y = module(torch.arange(8))
    with CommDebugMode() as backward:
        y.sum().backward()
    return counts_by_kind(forward), counts_by_kind(backward)


def test_one_collective():
    assert ranks.run(_count, 2, False) == [({"all_reduce": 1}, {})] * 2
    assert ranks.run(_count, 2, True) == [({"reduce_scatter": 1}, {"all_gather": 1})] * 2
    assert ranks.run(_count, 1, False) == [({}, {})]


# The head


def _head(group, state, x, g, sp, pad):
    vocab, hidden = state["weight"].shape
    options = {"bias": "bias" in state, "pad_to_multiple_of": pad, "sequence_parallel": sp, "dtype": x.dtype}
    module = VocabParallelLMHead(hidden, vocab, group=group, **options)
    tp_ext.load_full_state_dict(module, state, group=group)
    own = (x.tensor_split(group.size())[group.rank()] if sp else x).clone().requires_grad_()
    y = module(own, total_tokens=len(x))
    columns = module.sharding.slices(group.rank(), group.size())[0]
    upstream = torch.ones_like(y)  # what comes from padding columns must change nothing: a loss gives 0
    upstream[..., module.vocab_local :] = 0
    upstream[..., : module.vocab_local] = g[..., columns]
    y.backward(upstream)
    return y[..., : module.vocab_local], own.grad, local_grads(module), dict(tp_ext.shardings(module))


@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("pad", PADDING)
@pytest.mark.parametrize("p", SIZES)
def test_head_is_a_linear_with_sharded_columns(p, pad, sp):
    dense = nn.Linear(6, 13, bias=pad != 1, dtype=torch.float64)
    x, g = torch.randn(5, 6, dtype=torch.float64, requires_grad=True), torch.randn(5, 13, dtype=torch.float64)
    want = dense(x)
    want.backward(g)
    results = ranks.run(_head, p, dense.state_dict(), x.detach(), g, sp, pad)
    ys, dxs, grads, tables = zip(*results, strict=True)
    torch.testing.assert_close(torch.cat(ys, -1), want, **close)
    for dx in [torch.cat(dxs)] if sp else dxs:
        torch.testing.assert_close(dx, x.grad, **close)
    torch.testing.assert_close(gathered(grads, tables[0]), {k: v.grad for k, v in dense.named_parameters()}, **close)


def _tied(group, weight, ids, target, pad):
    vocab, hidden = weight.shape
    options = {"group": group, "pad_to_multiple_of": pad, "dtype": weight.dtype}
    model = nn.ModuleDict(
        {
            "embedding": VocabParallelEmbedding(vocab, hidden, **options),
            "head": VocabParallelLMHead(hidden, vocab, **options),
        }
    )
    model["head"].weight = model["embedding"].weight
    tp_ext.load_full_state_dict(model["embedding"], {"weight": weight}, group=group)
    logits = model["head"](model["embedding"](ids).tanh())
    loss = tp_ext.vocab_parallel_cross_entropy(logits, target, group, vocab_size=vocab)
    loss.backward()
    return loss, local_grads(model), dict(tp_ext.shardings(model))


@pytest.mark.parametrize("pad", PADDING)
@pytest.mark.parametrize("p", SIZES)
def test_gradients_of_a_tied_weight_add_up(p, pad):
    weight = torch.randn(13, 6, dtype=torch.float64, requires_grad=True)
    ids, target = torch.randint(0, 13, (2, 7)), torch.randint(0, 13, (2, 7))
    want = F.cross_entropy((F.embedding(ids, weight).tanh() @ weight.T).flatten(0, 1), target.flatten())
    want.backward()
    losses, grads, tables = zip(*ranks.run(_tied, p, weight.detach(), ids, target, pad), strict=True)
    torch.testing.assert_close(losses[0], want, **close)
    assert list(tables[0]) == ["embedding.weight"]
    torch.testing.assert_close(gathered(grads, tables[0])["embedding.weight"], weight.grad, **close)


def _tied_wrongly(group, which):
    embedding = VocabParallelEmbedding(13, 6, group=group, pad_to_multiple_of=8)
    head = VocabParallelLMHead(6, 13, group=group)
    if which == "head":
        head.weight = embedding.weight
        head(torch.ones(2, 6))
    embedding.weight = head.weight
    embedding(torch.arange(3))


@pytest.mark.parametrize("which", ["head", "embedding"])
def test_a_tied_weight_of_another_shape_is_refused(which):
    ranks.run_raises(_tied_wrongly, 2, ValueError, r"weight: shape \(\d+, 6\) must be \(\d+, 6\).*13", which)
