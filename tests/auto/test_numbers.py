"""Models whose code reads parameters and buffers as numbers."""

import copy
import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.same_gradients import same_gradients
from tests.helpers.simulated import run
from tp_ext import auto

WIDTH = 8


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)
        self.scale = nn.Parameter(torch.tensor(0.7))
        self.register_buffer("table", torch.tensor([2.0, 3.0]))
        self.register_buffer("count", torch.tensor(3))
        self.register_buffer("flag", torch.tensor(True))

    def mlp(self, x: Tensor, factor: Any = 1) -> Tensor:
        return self.down(F.gelu(self.up(x)) * factor)


class Item(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x, self.scale.item()) / float(self.table[1])


class Function(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * math.log(self.scale.item()) ** int(self.count)


class Unpacked(Base):
    def forward(self, x: Tensor) -> Tensor:
        a, b = self.table.tolist()
        return self.mlp(x, a) * b


class Largest(Base):  # of rows that a rank would have its part of
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x, self.up.weight.abs().max().item())


class Total(Base):  # partial, were the columns sharded
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x, self.down.weight.sum().item())


class Product(Base):  # a term of it on each rank
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x, (self.up.bias[None] @ self.up.bias[:, None]).item())


class Branches(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) if self.scale.item() > 0 else x


class Lengths(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x)[..., : int(self.count)]


class Truth(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) if self.flag else x


class OfInputs(Base):
    def forward(self, x: Tensor) -> Tensor:
        return self.mlp(x) * x.max().item()


def _compare(group: Any, made: type[Base], on_meta: bool) -> list[str]:
    torch.manual_seed(0)
    model, x = made().double(), torch.randn(3, WIDTH, dtype=torch.float64)
    # The rules alone, without the proof that would catch what they let through
    prove = "values" if on_meta else "shapes"
    plan = auto.plan(copy.deepcopy(model).to("meta") if on_meta else model, (x,), 2, prove=prove)
    sharded = auto.apply(plan, copy.deepcopy(model), group)
    for each in (model, sharded):
        (each(x) ** 2).sum().backward()
    torch.testing.assert_close(sharded(x), model(x), rtol=1e-12, atol=1e-12)  # ranks sum in another order
    same_gradients(model, sharded, rtol=1e-11, atol=1e-12)
    return sorted(plan.shardings)


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize(
    ("made", "sharded"),
    [
        (Item, ["down.weight", "up.bias", "up.weight"]),
        (Function, ["down.weight", "up.bias", "up.weight"]),
        (Unpacked, ["down.weight", "up.bias", "up.weight"]),
        (Largest, ["down.bias", "down.weight"]),
        (Total, []),
        (Product, []),
    ],
)
def test_a_number_of_a_parameter_or_buffer(made: type[Base], sharded: list[str], on_meta: bool):
    assert run(_compare, 2, made, on_meta)[0] == sharded


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (Branches, "branches on numbers that it reads from parameters or buffers, at test_numbers.py:"),
        (Lengths, "branches on numbers that it reads from parameters or buffers, at test_numbers.py:"),
        (Truth, "branches on values of tensors, by .* at test_numbers.py:"),
        (OfInputs, "branches on values of tensors, by .* at test_numbers.py:"),
    ],
)
def test_what_follows_of_the_value_is_refused(made: type[Base], text: str):
    with pytest.raises(ValueError, match=text):
        auto.plan(made(), (torch.randn(3, WIDTH),), 2)
