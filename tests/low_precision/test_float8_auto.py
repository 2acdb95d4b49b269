"""float8 of models that auto has sharded. Not for the oldest torch, whose fake tensors crash on simulated ranks."""

import copy

import pytest
import torch
from torch import nn

import tp_ext
from tests.helpers import simulated
from tests.helpers.on_ranks import on_ranks
from tests.helpers.same_values import same_gradients
from tp_ext.low_precision import Float8, float8


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(11, 16), nn.LayerNorm(16)
        self.gate, self.up, self.down = (nn.Linear(*sizes) for sizes in ((16, 24), (16, 24), (24, 16)))

    def forward(self, ids):
        x = self.table(ids)
        y = self.norm(x)
        return self.norm(x + self.down(torch.relu(self.gate(y)) * self.up(y)))


@pytest.mark.parametrize("scaling", ("tensor", "row"))
@pytest.mark.parametrize("sequence_parallel", [False, True])
@on_ranks(2)
def test_models_of_auto(group, scaling, sequence_parallel):
    """A step of a model that auto has sharded, next to one of the unsharded model, both in float8."""
    torch.manual_seed(0)
    dense, ids = Block(), torch.randint(11, (2, 6))
    plan = tp_ext.auto.plan(dense, {"ids": ids}, group.size(), sequence_parallel=sequence_parallel)
    sharded = tp_ext.auto.apply(plan, copy.deepcopy(dense), group)
    names = [float8(model, Float8(scaling)) for model in (dense, sharded)]
    assert names == [["gate", "up", "down"]] * 2
    results = [model(ids) for model in (dense, sharded)]
    for y in results:
        (y * torch.linspace(-1, 1, 16)).square().sum().backward()
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)
    same_gradients(dense, sharded, rtol=1e-4, atol=1e-4)


def whole_on_its_tokens(group):
    class Mixed(Block):
        def __init__(self):
            super().__init__()
            self.mix = nn.Linear(16, 16)

        def forward(self, ids):
            return super().forward(ids) + self.norm(self.mix(self.norm(self.table(ids))))

    model = Mixed()
    plan = tp_ext.auto.plan(model, {"ids": torch.zeros(2, 6, dtype=torch.long)}, 2, sequence_parallel=True)
    sharded = tp_ext.auto.apply(plan, model, group)
    if type(sharded.mix) is not nn.Linear:
        raise ValueError("mix was sharded")
    float8(sharded)


def planned(group):
    model = Block()
    float8(model)
    tp_ext.auto.plan(model, {"ids": torch.zeros(2, 6, dtype=torch.long)}, 2)


@pytest.mark.parametrize(
    "call, message",
    [
        (whole_on_its_tokens, "mix: must be left out by filter: it is whole, and has the tokens of one rank alone"),
        (planned, "model: 'gate' was converted to float8 or quantised and must not be sharded then: shard first"),
    ],
)
def test_refuses(call, message):
    def on_rank(group):
        with pytest.raises(ValueError) as caught:
            call(group)
        return str(caught.value)

    assert set(simulated.run(on_rank, 2)) == {message}
