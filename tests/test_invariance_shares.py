"""tp_invariant with shares: the same bits as with equal ones, also where a rank holds no block."""

import pytest
import torch

import tp_ext
from tests.helpers.invariant_model import Model, simulated
from tests.helpers.ranks import run_fresh
from tests.test_invariance import CASES

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
