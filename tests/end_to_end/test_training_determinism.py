"""What of a training is the same to the last bit: the same run twice, and a group of one rank against none."""

import pytest
import torch

import tp_ext
from tests.helpers.ranks import run
from tests.helpers.small_gpt import CONFIG, GPT, GPTConfig, checkpointed

pytestmark = pytest.mark.core


def _train(group, sp):
    """Losses, gradient norms and weights of five steps of AdamW."""
    tp_ext.manual_seed(3)
    model = checkpointed(GPT(GPTConfig(**CONFIG, sequence_parallel=sp), group))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    numbers = []
    for _ in range(5):
        ids = torch.randint(61, (3, 8))
        loss = model.loss(ids[:, :-1].contiguous(), ids[:, 1:].contiguous())
        optimizer.zero_grad()
        loss.backward()
        numbers += [loss.detach(), tp_ext.clip_grad_norm_(model, 1.0, group=group)]
        optimizer.step()
    return torch.stack(numbers), {name: param.detach() for name, param in model.named_parameters()}


def _assert_equal(a, b):
    assert torch.equal(a[0], b[0])
    assert all(torch.equal(a[1][name], value) for name, value in b[1].items())


@pytest.mark.thinned(1)
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("p", [2, 4])
def test_the_same_seed_gives_the_same_bits(p, sp):
    """Own shards of every rank; kernels use no atomics, and a group sums in one order."""
    for a, b in zip(run(_train, p, sp), run(_train, p, sp), strict=True):
        _assert_equal(a, b)


@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
def test_a_group_of_one_rank_is_no_group(sp):
    _assert_equal(run(_train, 1, sp)[0], run(_train_alone, 1, sp)[0])


def _train_alone(group, sp):
    return _train(None, sp)
