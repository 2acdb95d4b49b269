"""torch.nn.init on shards: the numbers of the unsharded tensor, and what debug.check says where it cannot see them."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import init

import tp_ext
from tests.helpers import makers

INITIALISERS = {
    "uniform_": lambda w: init.uniform_(w, -1, 2),
    "normal_": lambda w: init.normal_(tensor=w, std=0.5),
    "trunc_normal_": init.trunc_normal_,
    "xavier_uniform_": init.xavier_uniform_,
    "xavier_normal_": init.xavier_normal_,
    "kaiming_uniform_": lambda w: init.kaiming_uniform_(w, a=5**0.5),
    "kaiming_normal_": lambda w: init.kaiming_normal_(w, mode="fan_out"),
    "orthogonal_": init.orthogonal_,
    "sparse_": lambda w: init.sparse_(w, 0.3),
    "eye_": init.eye_,
    "constant_": lambda w: init.constant_(w, 3.0),
    "data": lambda w: init.xavier_normal_(w.data) is None or w,
    "detached": lambda w: init.kaiming_normal_(w.detach()) is None or w,
    "own generator": lambda w: init.normal_(w, generator=torch.Generator().manual_seed(2)),
}


def _drawn(rank, group):
    found = {}
    for name in ("column", "row", "attention_mqa", "head"):
        for title, draw in INITIALISERS.items():
            module = makers.build(name, group, False, torch.float32)
            torch.manual_seed(5)
            for param in module.parameters():
                if param.dim() == 2:
                    assert draw(param) is param
            found[f"{name} {title}"] = tp_ext.full_state_dict(module) | {"generator": torch.get_rng_state()}
    return found


@pytest.mark.parametrize("p", [2, 3])
def test_numbers_are_those_of_the_unsharded_model(p):
    """On every rank, and the generators are afterwards in the same state."""
    want = _drawn(0, None)
    for got in tp_ext.debug.simulate(_drawn, p):
        for title, state in want.items():
            torch.testing.assert_close(got[title], state, rtol=0, atol=0, msg=title)


def _auto(rank, group):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 4), nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    if group is not None:
        plan = tp_ext.auto.plan(model, (torch.arange(3),), group.size(), prove=False)
        model = tp_ext.auto.apply(plan, copy.deepcopy(model), group)
    torch.manual_seed(1)
    for param in model.parameters():
        init.xavier_uniform_(param) if param.dim() == 2 else init.zeros_(param)
    return tp_ext.full_state_dict(model)


def test_a_model_that_auto_has_sharded():
    want = _auto(0, None)
    for got in tp_ext.debug.simulate(_auto, 2):
        torch.testing.assert_close(got, want, rtol=0, atol=0)


def _unseen(rank, group, features):
    """Another tensor of the same storage: our wrapper cannot know it."""
    layer = tp_ext.ColumnParallelLinear(8, features, group=group)
    torch.manual_seed(3)
    layer.weight.data.normal_()
    return tp_ext.debug.findings(layer)


@pytest.mark.parametrize("features", [8, 9])
def test_check_reports_shards_of_the_same_numbers(features):
    for found in tp_ext.debug.simulate(_unseen, 2, features):
        assert any("weight: ranks 0 and 1 hold the same" in sentence for sentence in found), found
