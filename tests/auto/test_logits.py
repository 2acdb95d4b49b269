"""Code of a model that writes into its logits, which are sharded."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.on_ranks import on_ranks
from tests.helpers.same_values import same_gradients
from tp_ext import auto


def _scaled(x: Tensor) -> Tensor:
    x.div_(2.0)
    return x


def _operator(x: Tensor) -> Tensor:
    x *= 3
    return x


def _added_to_itself(x: Tensor) -> Tensor:
    y = x.mul_(3.0)
    return x + y


def _capped(x: Tensor) -> Tensor:  # tanh_ needs all columns here: the object has them afterwards
    x /= 2
    x.tanh_()
    return x * x


def _loss(x: Tensor) -> Tensor:
    x.add_(1.0)
    return F.cross_entropy(x.flatten(0, 1), torch.arange(x.shape[0] * x.shape[1]) % 5)


def _loss_of_no_row(x: Tensor) -> Tensor:  # NaN, without a gradient
    return F.cross_entropy(x.flatten(0, 1), torch.full((x.shape[0] * x.shape[1],), -100))


class _Model(nn.Module):
    def __init__(self, written):
        super().__init__()
        self.table, self.norm, self.head = nn.Embedding(12, 8), nn.LayerNorm(8), nn.Linear(8, 12, bias=False)
        self.written = written

    def forward(self, ids: Tensor) -> Tensor:
        return self.written(self.head(self.norm(self.table(ids))))


@pytest.mark.parametrize("written", [_scaled, _operator, _added_to_itself, _capped, _loss, _loss_of_no_row])
@on_ranks(2)
def test_what_code_writes_into_sharded_logits_is_written_into_all_of_them(group, written):
    dense, ids = _Model(written).double(), torch.arange(15).view(3, 5) % 12
    plan = auto.plan(dense, (ids,), 2)
    assert plan.heads == ["head"]
    sharded = auto.apply(plan, copy.deepcopy(dense), group)
    expected, found = dense(ids), sharded(ids)
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12, equal_nan=True)
    expected.square().sum().backward()
    found.square().sum().backward()
    same_gradients(dense, sharded, rtol=1e-11, atol=1e-12)
