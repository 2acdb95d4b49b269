"""A dense tensor in the place of a shard: a shape error that names the parameter, in the next forward."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tp_ext
from tests.helpers import makers

HOWS = {
    "attribute": lambda layer, name, full: setattr(layer, name, nn.Parameter(full)),
    "data": lambda layer, name, full: setattr(layer._parameters[name], "data", full),
    "swap_tensors": lambda layer, name, full: torch.utils.swap_tensors(layer._parameters[name], nn.Parameter(full)),
}


class Unchanged(nn.Module):
    """For auto: with q, k and v, whose input is entered once, an embedding and an MLP."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(9, 8), nn.LayerNorm(8)
        self.q, self.k, self.v, self.out = (nn.Linear(8, 8) for _ in range(4))
        self.up, self.down = nn.Linear(8, 12), nn.Linear(12, 8)

    def forward(self, ids):
        x = self.table(ids)
        q, k, v = (one(self.norm(x)).view(2, 3, 4, 2).transpose(1, 2) for one in (self.q, self.k, self.v))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(2, 3, 8))
        return x + self.down(F.gelu(self.up(x)))


def _auto(group, **options):
    torch.manual_seed(1)
    model, ids = Unchanged(), torch.arange(6).view(2, 3)
    plan = tp_ext.auto.plan(model, (ids,), group.size(), prove=False, **options)
    return tp_ext.auto.apply(plan, copy.deepcopy(model), group), lambda made: made(ids)


def _of(model, shape):
    return model, lambda made: made(torch.ones(shape))


def _case(name, group, sp):
    module = makers.build(name, group, sp)
    return module, lambda made: makers.caller(name, made)(makers.own_input(name, made, group, sp))


def _makers(group):
    for name in makers.CASES:
        for sp in (False, True):
            yield f"{name} {sp}", lambda name=name, sp=sp: _case(name, group, sp)
    yield "auto", lambda: _auto(group)
    yield "auto, tokens", lambda: _auto(group, sequence_parallel=True)
    for axis in ("group", "expert_group"):
        groups = {"group": None, axis: group}
        yield axis, lambda groups=groups: _of(tp_ext.ParallelMoE(8, 12, 4, 2, bias=True, **groups), (6, 8))
    for kind in (tp_ext.ColumnParallelLinear, tp_ext.RowParallelLinear):
        yield kind.__name__, lambda kind=kind: _of(kind(8, 8, group=None, weight_group=group), (6, 8))


def _all(rank, group):
    found, tried = [], 0
    for title, make in _makers(group):
        model, _ = make()
        for path, layer in model.named_modules():
            for name, layout in getattr(layer, "tp_layouts", {}).items():
                if layer._parameters.get(name) is None or all(axis.size == 1 for _, axis in layout):
                    continue
                how = list(HOWS)[tried % len(HOWS)]  # each in turn
                model, call = make()
                layer, tried = model.get_submodule(path), tried + 1
                shard = layer._parameters[name].detach()
                HOWS[how](layer, name, torch.ones(layout.full_shape(shard.shape), dtype=shard.dtype))
                try:
                    call(model)
                    found.append(f"{title}: {path}.{name}, {how}: silent")
                except ValueError as error:
                    if not str(error).startswith(f"{name}: "):
                        found.append(f"{title}: {path}.{name}, {how}: {error}")
    return found, tried


@pytest.mark.parametrize("p", [2, pytest.param(3, marks=pytest.mark.exhaustive)])
def test_every_shard_of_every_layer(p):
    for found, tried in tp_ext.debug.simulate(_all, p):
        assert not found and tried > 60


def _assigned(rank, group):
    layer = tp_ext.ColumnParallelLinear(4, 8, group=group)
    with pytest.raises(RuntimeError, match="load_full_state_dict"):
        layer.load_state_dict(nn.Linear(4, 8).state_dict(), assign=True)
    layer(torch.ones(1, 4))


def test_load_state_dict_with_assign_of_a_dense_state():
    tp_ext.debug.simulate(_assigned, 2)
