"""A model built in tp_invariant is compared bit by bit, in its own dtype."""

import torch
from torch import nn

import tp_ext
from tests.helpers.ranks import run_fresh

IDS, TARGET = (torch.randint(101, (2, 13), generator=torch.Generator().manual_seed(i)) for i in (1, 2))


def _language_model(group):
    from tests.helpers.invariant_model import Model  # here: the other test imports no model

    with tp_ext.tp_invariant(6):
        return Model(group, num_kv_heads=4, layers=1)


class Activated(nn.Module):
    """``act`` between two linears, of 37 features: in fp32 torch's sigmoid and GELU by tanh round the last ones of a
    shard in another way."""

    def __init__(self, group, act, blocks=8):
        super().__init__()
        with tp_ext.tp_invariant(blocks):
            self.up = tp_ext.ColumnParallelLinear(16, 37, group=group)
            self.act = act
            self.down = tp_ext.RowParallelLinear(37, 16, group=group)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def _reports():
    x = (torch.randn(5, 16),)
    reports = {
        "model": tp_ext.verify(_language_model, (IDS, TARGET), p=(1, 2, 3, 5)),
        "relu": tp_ext.verify(lambda group: Activated(group, nn.ReLU()), x),
        "gelu": tp_ext.verify(lambda group: Activated(group, nn.GELU("tanh")), x),
        "sum": tp_ext.verify(lambda group: nn.Sequential(Activated(group, nn.ReLU()), Summed(group)), x),
    }
    return {name: (report.bounds, report.rows, report.ok, str(report)) for name, report in reports.items()}


class Summed(nn.Module):
    """A sum over the ranks in their order: right in fp64, and not the same bits."""

    def __init__(self, group):
        super().__init__()
        self.group = group

    def forward(self, x):
        own = tp_ext.scatter_to_region(x, self.group).sum(-1, keepdim=True)
        return x + tp_ext.reduce_from_region(own, self.group)


def test_bits_are_compared():
    reports = run_fresh(_reports)
    for name in ("model", "relu"):
        bounds, rows, ok, text = reports[name]
        assert ok and "all bits must be the same" in bounds, text
        assert {rows[2][column] for column in ("outputs", "gradients")} == {"same bits"}, text
    for name, module in (("gelu", "act"), ("sum", "1")):
        _, _, ok, text = reports[name]
        assert not ok and f"p = 2, {module}, output: bits differ by rounding" in text, text
