"""Operators in graphs of torch.export keep lengths that the caller keeps open."""

import pytest
import torch
from torch import nn
from torch.export import Dim

from tp_ext import _ops


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
