"""sha256: one digest for every number of ranks, another one for every changed bit."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import tp_ext
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import run, run_raises
from tp_ext.debug import sha256

pytestmark = pytest.mark.core


def _model(group):
    tp_ext.manual_seed(3)
    attention = tp_ext.ParallelAttention(8, 4, num_kv_heads=1, group=group)  # its KV head is on every rank
    model = nn.Sequential(tp_ext.VocabParallelEmbedding(13, 8, group=group), attention, nn.BatchNorm1d(8))
    model.head = tp_ext.VocabParallelLMHead(8, 13, group=group)
    model.head.weight = model[0].weight
    return model


def _states(model, optimizer):
    """Gives an optimizer states that do not depend on the number of ranks, as sums of gradients do."""
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


def _digests(group):
    model = _model(group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    digests = [sha256(model), sha256(model, optimizer)]
    _states(model, optimizer)
    return [*digests, sha256(model), sha256(model, optimizer)]


def test_every_number_of_ranks():
    (expected,) = run(_digests, 1)
    assert expected[0] == expected[1] and len(set(expected)) == 3 and all(len(digest) == 64 for digest in expected)
    for p in (2, 3, 4):
        assert run(_digests, p) == [expected] * p


def _wrapped(group):
    mesh = tp_ext.init_mesh("cpu", dp=2, tp=2)
    model = _model(mesh["tp"])
    expected = sha256(model)
    compiled = sha256(torch.compile(copy.deepcopy(model)))
    for layer in (model[1], model):
        fully_shard(layer, mesh=mesh["dp"])
    return expected, compiled, sha256(model), sha256(model, mesh=mesh)


def test_wrappers():
    (expected, *_), *_ = run(_digests, 1)
    assert run(_wrapped, 4) == [(expected,) * 4] * 4


CHANGES = {
    "a bit of a shard": lambda model: model[1].out.weight.data[-1, -1].mul_(1 + 2**-23),
    "the sign of a zero": lambda model: model[2].bias.data[0].fill_(-0.0),
    "a buffer": lambda model: model[2].running_mean[0].add_(1e-7),
    "a dtype": lambda model: model[2].half(),
    "a name": lambda model: model.add_module("last", model._modules.pop("2")),
}


@pytest.mark.parametrize("name", CHANGES)
@on_ranks(2)
def test_any_change(group, name):
    model = _model(group)
    before = sha256(model)
    if group.rank() == 1 or "shard" not in name:
        CHANGES[name](model)
    assert before != sha256(model)


class _Extra(nn.Linear):
    def get_extra_state(self):
        return self.extra


def _with_extra(group, values):
    model, digests = _Extra(2, 2), []
    nn.init.ones_(model.weight)
    nn.init.ones_(model.bias)
    for model.extra in values:
        digests.append(sha256(model))
    return digests


def test_extra_state():
    ((one, again, other),) = run(_with_extra, 1, [{"seen": [1, None]}, {"seen": [1, None]}, {"seen": (1, None)}])
    assert one == again != other
    run_raises(_with_extra, 1, ValueError, r"entry '_extra_state', set, must be a tensor or a plain value", [{1}])
