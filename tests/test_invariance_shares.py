"""tp_invariant with shares: the same bits as with equal ones, also where a rank holds no block."""

import pytest
import torch

import tp_ext
from tests.helpers.invariant_model import Model, simulated
from tests.helpers.ranks import run_fresh
from tests.test_invariance import CASES
from tp_ext.invariance import block_sizes

pytestmark = pytest.mark.core

SHARES = [[3, 1], [0, 1], [1, 0.5, 4], [0, 5, 0], [9, 2, 0, 1], [1, 1, 1, 1]]
OF_SHARES = {name: CASES[name] for name in CASES if name not in ("fp64", "bf16", "autocast", "muon")}


def _the_same_bits_in_shares(shares, options):
    expected = simulated(1, **options)
    for sequence_parallel in (False, True):
        found = simulated(len(shares), shares=shares, sequence_parallel=sequence_parallel, **options)
        assert found == expected, sequence_parallel


@pytest.mark.parametrize("case", OF_SHARES)
@pytest.mark.parametrize("shares", SHARES, ids=str)
@pytest.mark.thinned(1)
def test_the_same_bits_for_any_shares(shares, case):
    run_fresh(_the_same_bits_in_shares, shares, CASES[case])


def _sampled_and_loss(group, shares):
    torch.manual_seed(0)
    ids = torch.arange(10).view(2, 5)
    with tp_ext.tp_invariant(), tp_ext.shares(shares):
        model, criterion = Model(group, dropout=0.0), tp_ext.VocabParallelCrossEntropy(group=group, vocab_size=101)
        hidden = model.hidden(ids).detach().requires_grad_()
        value = criterion(model.head(hidden), ids.flatten())
        (gradient,) = torch.autograd.grad(value, hidden)
    texts, numbers = model.rollout(ids, 4)
    return value.item(), gradient.tolist(), texts.tolist(), numbers.tolist(), model.head.argmax(hidden).tolist()


def _sampling_in_shares():
    expected = _sampled_and_loss(None, None)
    for shares in ([3, 1], [0, 2, 1]):
        found = tp_ext.debug.simulate(lambda rank, group, s=shares: _sampled_and_loss(group, s), len(shares))
        assert found == [expected] * len(shares), shares


def test_losses_and_generation_in_shares():
    run_fresh(_sampling_in_shares)


def _attention_bits(group, shares, heads, kv_heads, blocks):
    """Outputs with and without a cache, and gradients, of an attention."""
    tp_ext.manual_seed(0)
    x, dy = (torch.randn(3, 5, 24, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    options = {"num_kv_heads": kv_heads, "head_dim": 4, "qk_norm": True, "rope": 1e4, "dropout": 0.1}
    with tp_ext.tp_invariant(blocks), tp_ext.shares(shares):
        attention = tp_ext.ParallelAttention(24, heads, **options, group=group)
    x.requires_grad_()
    y = attention(x)
    y.backward(dy)
    with torch.no_grad():
        cached = attention.eval()(x, cache=attention.new_cache(3, 8))
    return [tensor.tolist() for tensor in (y, cached, x.grad, *_full_gradients(attention).values())]


def _full_gradients(layer):
    with torch.no_grad():
        for param in layer.parameters():
            param.copy_(param.grad)
    return dict(sorted(tp_ext.full_state_dict(layer).items()))


def _blocks_without_heads():
    for case in ((6, 3, 8), (2, 1, 5), (6, 2, 8), (12, 4, 8), (3, 3, 7), (4, 1, 8)):
        expected = _attention_bits(None, None, *case)
        for shares in ([5, 1, 1], [1, 0, 3], [1, 1, 0, 4], [0, 0, 0, 1]):
            found = tp_ext.debug.simulate(
                lambda rank, group, s=shares, c=case: _attention_bits(group, s, *c), len(shares)
            )
            assert found == [expected] * len(shares), (case, shares)


def test_blocks_without_heads():
    run_fresh(_blocks_without_heads)


PER_TOKEN = {
    "MLP": ([24], lambda **where: tp_ext.ParallelMLP(24, 40, **where)),
    "row linear": ([24], lambda **where: tp_ext.RowParallelLinear(24, 24, input_is_parallel=False, **where)),
    "RMSNorm": ([24], lambda **where: tp_ext.RMSNorm(24, **where)),
    "LayerNorm": ([24], lambda **where: tp_ext.LayerNorm(24, **where)),
    "LayerNorm of two dims": ([4, 6], lambda **where: tp_ext.LayerNorm((4, 6), **where)),
}


def _gradients_of_tokens(name, group, rank, batch):
    """The gradients of a layer's parameters for 15 tokens in a batch of this shape; None: this rank's under SP."""
    tp_ext.manual_seed(0)
    x, dy = (torch.randn(15, 24, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2))
    features, build = PER_TOKEN[name]
    with tp_ext.tp_invariant(8):
        layer = build(group=group, **({} if name == "row linear" else {"sequence_parallel": batch is None}))
    if batch is None:
        x, dy = (tensor.split(block_sizes(15, 8, group.size()))[rank] for tensor in (x, dy))
    options = {"total_tokens": 15} if batch is None and name == "MLP" else {}
    x, dy = (tensor.reshape(*(batch or tensor.shape[:1]), *features) for tensor in (x, dy))
    layer(x, **options).backward(dy)
    return {key: value.tolist() for key, value in _full_gradients(layer).items()}


def _batches_and_their_tokens():
    for name in PER_TOKEN:
        expected = _gradients_of_tokens(name, None, 0, (15,))
        for p in (1, 2, 3, 8):
            for batch in ((3, 5), (15, 1), (1, 3, 5), *([] if name == "row linear" else [None])):
                found = tp_ext.debug.simulate(
                    lambda rank, group, n=name, b=batch: _gradients_of_tokens(n, group, rank, b), p
                )
                assert found == [expected] * p, (name, p, batch)


def test_batches_have_the_bits_of_their_tokens():
    """Gradients of norms and row biases are trees over blocks of tokens, not of sequences: those of SP."""
    run_fresh(_batches_and_their_tokens)
