"""Linears whose parts have padding: whole features, in or out, are the unsharded layer's, in fp64 within 1e-12."""

import pytest
import torch
from torch import nn

import tp_ext
from tests.helpers import ranks
from tests.helpers.oracle import gathered
from tp_ext import ColumnParallelLinear, Part, RowParallelLinear

pytestmark = pytest.mark.core

PARTS = {"one": [Part(5, padding=3)], "two": [Part(3, padding=1), Part(2, padding=6)]}  # 4 ranks: whole units of 1


def _pair(group, dense, x, parts):
    """y = row(column(x)), its features whole in between; and all gradients."""
    column = ColumnParallelLinear.from_linear(dense[0], group=group, parts=parts, gather_output=True)
    row = RowParallelLinear.from_linear(dense[1], group=group, parts=parts, input_is_parallel=False)
    model = nn.Sequential(column, row)
    x = x.clone().requires_grad_()
    h = column(x)
    y = row(h.cos())
    y.sin().sum().backward()
    grads = {name: param.grad for name, param in model.named_parameters()}
    return h, y, x.grad, grads, dict(tp_ext.shardings(model))


@pytest.mark.parametrize("parts", PARTS)
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_padding_is_never_seen(p, parts):
    """The cosine of a feature that were padding is 1: it would show in y and in the row's gradient."""
    dense = nn.Sequential(nn.Linear(4, 5), nn.Linear(5, 3)).double()
    x = torch.randn(6, 4, dtype=torch.float64, requires_grad=True)
    h = dense[0](x)
    y = dense[1](h.cos())
    y.sin().sum().backward()
    wanted = {name: param.grad for name, param in dense.named_parameters()}
    results = ranks.run(_pair, p, dense, x.detach(), PARTS[parts])
    close = {"rtol": 1e-12, "atol": 1e-12}
    for got in results:
        assert got[0].shape == h.shape
        torch.testing.assert_close(got[:3], (h, y, x.grad), **close)
    torch.testing.assert_close(gathered([got[3] for got in results], results[0][4]), wanted, **close)
