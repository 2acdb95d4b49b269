"""Optimizers that look beyond an element are refused over shards, by their first step and by `debug.check`; their
updates of shards are indeed others.
"""

import pytest
import torch
from torch.distributed.optim import ZeroRedundancyOptimizer

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of

WRONG = "must not update {}, which is sharded over 2 ranks: .*take tp_ext.optim.Muon, or .*torch.optim.AdamW"


class DistributedShampoo(torch.optim.SGD):
    """A stranger known by its name."""


class Lambda(torch.optim.SGD):
    """No LAMB."""


OPTIMIZERS = {"Muon": torch.optim.Muon, "Adafactor": torch.optim.Adafactor, "DistributedShampoo": DistributedShampoo}


def _layer(group):
    tp_ext.manual_seed(1)
    layer = tp_ext.ColumnParallelLinear(4, 8, bias=False, group=group)
    full = torch.arange(32.0).view(8, 4).sin()
    layer.weight.grad = layer.weight.tp_layout.shard(full)
    return layer


def _first_step(group, name):
    OPTIMIZERS[name](_layer(group).parameters()).step()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_first_step_over_shards(name):
    ranks.run_raises(
        _first_step, 2, ValueError, f"optimizer: {name} " + WRONG.format(r"a parameter of shape \(4, 4\)"), name
    )
    ranks.run(_first_step, 1, name)


def _checked(group):
    layer = _layer(group)
    found = [tp_ext.debug.findings(layer, optimizer=kind(layer.parameters())) for kind in OPTIMIZERS.values()]
    mesh = mesh_of(1, 1, 1, group.size())
    zero = ZeroRedundancyOptimizer(layer.parameters(), torch.optim.Muon, process_group=mesh["dp"].get_group())
    found.append(tp_ext.debug.findings(layer, optimizer=zero))
    for kind in (Lambda, torch.optim.AdamW, tp_ext.optim.Muon):
        tp_ext.debug.check(layer, optimizer=kind(layer.parameters(), lr=0.1))
    return found


def test_check_of_an_optimizer():
    for found in ranks.run(_checked, 2):
        assert [len(sentences) for sentences in found] == [1, 1, 1, 1]
        for (sentence,), name in zip(found, [*OPTIMIZERS, "Muon"], strict=True):
            assert sentence.startswith(f"optimizer: {name} must not update weight, which is sharded over 2 ranks")
    assert not any(ranks.run(_checked, 1)[0])


def _updated(group, kind):
    """The full weight after a step without the guard."""
    layer = _layer(group)
    del layer.weight.tp_layout  # what the guard looks at
    kind(layer.parameters(), lr=0.1).step()
    return tp_ext.full_state_dict(layer)["weight"]


@pytest.mark.parametrize("name", ["Muon", "Adafactor"])
def test_what_is_refused_is_another_update(name):
    want = _updated(None, OPTIMIZERS[name])
    for got in ranks.run(_updated, 2, OPTIMIZERS[name]):
        assert (got - want).abs().max() > 1e-3
