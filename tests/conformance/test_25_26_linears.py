"""Conformance cases 25 and 26: linears that leave their bias to the caller, and a pair of them.

The table: docs/reference/correctness.md. Cases 19 to 24: rows of tests/nn/test_linear.py. fp64: sums of a few dozen
products in another order.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tests.helpers import ranks
from tests.helpers.oracle import own_tokens
from tp_ext import ColumnParallelLinear, RowParallelLinear, full_state_dict

pytestmark = pytest.mark.core

EVERY = pytest.mark.parametrize("p", [1, 2, 3, 4])
SP = pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
FP64 = {"rtol": 1e-12, "atol": 1e-12}


def slices(t, p, dim):
    return t.tensor_split(p, dim)


def _skip(group, kind, dense, x, used, sp):
    rank, p = group.rank(), group.size()
    layer = kind.from_linear(dense, group=group, skip_bias_add=True, sequence_parallel=sp)
    column = kind is ColumnParallelLinear
    x = x if column else x.tensor_split(p, -1)[rank]
    y, bias = layer(own_tokens(x, group) if column and sp else x)
    (y.sum() + (3 * bias.sum() if used else 0)).backward()
    return y, bias, layer.bias.grad


@EVERY
@SP
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_case_25_bias_is_left_to_the_caller(kind, sp, p):
    dense, x = nn.Linear(5, 6, dtype=torch.float64), torch.randn(2 * p, 5, dtype=torch.float64)
    without, column = F.linear(x, dense.weight), kind is ColumnParallelLinear
    for used in (True, False):
        for rank, (y, bias, grad) in enumerate(ranks.run(_skip, p, kind, dense, x, used, sp)):
            cut = slices(without, p, -1 if column else 0)[rank] if column or sp else without
            torch.testing.assert_close(y, cut, **FP64)
            assert torch.equal(bias, slices(dense.bias, p, 0)[rank] if column else dense.bias)
            # under sequence parallelism each rank used the row's bias once: for its own tokens
            times = 3 * p if sp and not column else 3
            assert torch.equal(grad, torch.full_like(bias, times)) if used else grad is None or not grad.any()


def _block(group, up, down, x, sp):
    first = ColumnParallelLinear.from_linear(up, group=group, sequence_parallel=sp)
    second = RowParallelLinear.from_linear(down, group=group, sequence_parallel=sp)
    x = (own_tokens(x, group) if sp else x).clone().requires_grad_()
    y = second(F.gelu(first(x)))
    (y**2).sum().backward()
    for layer in (first, second):  # a full state dict of gradients
        layer.weight.data, layer.bias.data = layer.weight.grad, layer.bias.grad
    return y, x.grad, *full_state_dict(first, group=group).values(), *full_state_dict(second, group=group).values()


@pytest.mark.smoke
@EVERY
@SP
def test_case_26_column_gelu_row(sp, p):
    up, down, x = nn.Linear(64, 256), nn.Linear(256, 64), torch.randn(12, 64, requires_grad=True)
    y = down(F.gelu(up(x)))
    (y**2).sum().backward()
    params = [up.weight, up.bias, down.weight, down.bias]
    for rank, got in enumerate(ranks.run(_block, p, up, down, x.detach(), sp)):
        want = [slices(t, p, 0)[rank] if sp else t for t in (y.detach(), x.grad)] + [t.grad for t in params]
        for a, b in zip(got, want, strict=True):  # fp32: 1e-5 of the largest, since sums cancel
            torch.testing.assert_close(a, b, rtol=0, atol=1e-5 * float(b.abs().max()))
