"""The error bound of a linear of p ranks, element by element: docs/reference/correctness.md."""

import pytest
import torch
from torch import nn

from tests.helpers import ranks
from tp_ext import ColumnParallelLinear, RowParallelLinear

pytestmark = pytest.mark.core

K, OUT, ROWS = 96, 24, 5


def _run(group, dense, x, g):
    """The two results that are sums over ranks: the row's y and the column's dx."""
    p, rank = group.size(), group.rank()
    row = RowParallelLinear.from_linear(dense, group=group)
    y = row(x.tensor_split(p, -1)[rank])
    column = ColumnParallelLinear.from_linear(dense, group=group)
    x = x.clone().requires_grad_()
    column(x).backward(g.tensor_split(p, -1)[rank])
    return y, x.grad


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("p", [1, 2, 4])
def test_sums_over_ranks_are_within_their_bound(p, dtype):
    """Each partial sum has n fp32 products, rounded to the dtype; then p - 1 sums and, in the row, the bias. With u
    the unit roundoff of the dtype and S the sum of the absolute products: |error| <= (p + 2) u S + n u_fp32 S."""
    dense = nn.Linear(K, OUT, dtype=dtype)
    x, g = torch.randn(ROWS, K, dtype=dtype), torch.randn(ROWS, OUT, dtype=dtype)
    w, b = (t.detach().double() for t in dense.parameters())
    exact = x.double() @ w.t() + b, g.double() @ w
    sums = x.double().abs() @ w.abs().t() + b.abs(), g.double().abs() @ w.abs()
    unit, fp32 = torch.finfo(dtype).eps / 2, torch.finfo(torch.float32).eps / 2
    for got in ranks.run(_run, p, dense, x, g):
        for a, want, s, n in zip(got, exact, sums, (K, OUT), strict=True):
            bound = ((p + 2) * unit + n * fp32) * s
            assert ((a.double() - want).abs() <= bound).all()
            assert (bound < 0.05 * s).all(), "a bound that says something"
