"""A model and an example on CUDA: what a plan proves on the host."""

import pytest
import torch
from torch import Tensor, nn

from tp_ext import auto

pytestmark = pytest.mark.cuda


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(16, 64), nn.Linear(64, 16)
        self.register_buffer("table", torch.arange(4.0))
        self.factor = torch.tensor(2.0, device="cuda")

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu() * self.factor) + self.table[1]


def test_values_are_proven():
    plan = auto.plan(Mlp().to("cuda"), (torch.randn(4, 16, device="cuda"),), 2)
    assert plan.proof == "values" and set(plan.shardings) == {"up.weight", "up.bias", "down.weight"}
