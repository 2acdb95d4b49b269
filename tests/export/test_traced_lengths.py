"""Operators, and forwards that `auto` edits, keep lengths that the caller of torch.export keeps open."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.export import Dim

from tests.helpers.on_ranks import on_ranks
from tp_ext import _ops, auto


@pytest.mark.parametrize("length", [1, 5])
def test_a_fused_norm_keeps_a_traced_length(length):
    """all_reduce_rms_norm read the lengths of all dims, which made them constants."""

    class Norm(nn.Module):
        def forward(self, x, residual, weight):
            return _ops.all_reduce_rms_norm(x, residual, weight, 1e-6, "")

    x, weight = torch.randn(3, 8), torch.ones(8)
    n = Dim("n", min=1, max=9)
    program = torch.export.export(Norm(), (x, x, weight), dynamic_shapes=({0: n}, {0: n}, None))
    y = torch.randn(length, 8)
    for got, expected in zip(program.module()(y, y, weight), Norm()(y, y, weight), strict=True):
        assert torch.equal(got, expected)


class WritesSizes(nn.Module):
    """Attention that passes sizes of its input to views, alone and together with numbers."""

    def __init__(self):
        super().__init__()
        self.qkv, self.out = nn.Linear(8, 24), nn.Linear(8, 8)

    def forward(self, x):
        batch, tokens, width = x.shape
        heads = [h.view(batch, tokens, 4, -1).transpose(1, 2) for h in self.qkv(x).split(width, -1)]
        a = F.scaled_dot_product_attention(*heads).transpose(1, 2)
        return self.out(a.reshape(-1, width)).view(batch, tokens, width)


@on_ranks(2)
def test_sizes_that_forward_writes(group):
    model, x = WritesSizes(), torch.randn(2, 3, 8)
    plan = auto.plan(model, (x,), 2)
    assert plan.sizes and set(plan.shardings) >= {"qkv.weight", "out.weight"}
    auto.apply(plan, model, group)
    lengths = {0: Dim("b", min=1, max=64), 1: Dim("n", min=2, max=64)}
    exported = torch.export.export(model, (x,), dynamic_shapes=(lengths,)).module()
    for shape in ((2, 3, 8), (5, 7, 8), (1, 2, 8)):
        x = torch.randn(shape)
        torch.testing.assert_close(exported(x), model(x))
