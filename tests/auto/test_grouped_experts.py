"""Experts as grouped GEMMs, whose rows must be multiples of 16 bytes: sharded in units of these."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.helpers.same_values import same_values
from tests.helpers.simulated import run
from tp_ext import auto
from tp_ext.group import parallel_group

EXPERTS, WIDTH, INNER = 3, 8, 12  # in fp32: 2 and 3 units of four


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_up = nn.Parameter(torch.randn(EXPERTS, 2 * INNER, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) / 3)
        self.bias = nn.Parameter(torch.randn(EXPERTS, WIDTH) / 3)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        gate, up = torch._grouped_mm(x, self.gate_up.transpose(-2, -1), offs=ends).chunk(2, -1)
        y = torch._grouped_mm(torch.tanh(gate) * up, self.down.transpose(-2, -1), offs=ends)
        return y.add_(self.bias[torch.searchsorted(ends, torch.arange(len(x)), right=True)])  # that of a token's expert


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.experts, self.norm = nn.Linear(5, WIDTH), Experts(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor, ends: Tensor) -> Tensor:
        return self.norm(self.experts(self.first(x), ends))


def _trains(group: Any) -> list[int]:
    torch.manual_seed(0)
    model, p = Model(), parallel_group(group).size
    inputs = torch.randn(9, 5), torch.tensor([2, 2, 9], dtype=torch.int32)
    dense, plan = copy.deepcopy(model), auto.plan(model, inputs, p)
    auto.apply(plan, model, group)
    same_values(dense, model, inputs, bound=1e-5)  # grouped GEMMs know no fp64
    return plan.shardings["experts.down"].local_sizes(p)


@pytest.mark.parametrize(("p", "lengths"), [(2, [8, 4]), (3, [4, 4, 4])])
def test_experts_are_sharded_in_units_of_16_bytes(p: int, lengths: list[int]) -> None:
    assert run(_trains, p)[0] == lengths


def test_too_few_units_are_the_reason_of_whole_experts() -> None:
    plan = auto.plan(Model(), (torch.randn(9, 5), torch.tensor([2, 2, 9], dtype=torch.int32)), 4)
    assert "is 3 x 4: p = 4 must be at most 3" in plan.whole["experts.down"]
