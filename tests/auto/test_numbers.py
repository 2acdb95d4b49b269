"""Models whose code reads parameters, buffers and floating-point arguments as numbers."""

import copy
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.helpers.on_ranks import on_ranks
from tests.helpers.same_values import same_values
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


class Total(Base):  # partial, as the columns are sharded: the call sums it over the ranks
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


class OfActivations(Base):
    def forward(self, x: Tensor) -> Tensor:
        y = self.mlp(x)
        return y * y.max().item()


def _compare(group: Any, made: type[Base], on_meta: bool) -> list[str]:
    torch.manual_seed(0)
    model, x = made().double(), torch.randn(3, WIDTH, dtype=torch.float64)
    # The rules alone, without the proof that would catch what they let through
    prove = "values" if on_meta else "shapes"
    plan = auto.plan(copy.deepcopy(model).to("meta") if on_meta else model, (x,), 2, prove=prove)
    sharded = auto.apply(plan, copy.deepcopy(model), group)
    same_values(model, sharded, (x,))
    return sorted(plan.shardings)


@pytest.mark.parametrize("on_meta", [False, True])
@pytest.mark.parametrize(
    ("made", "sharded"),
    [
        (Item, ["down.weight", "up.bias", "up.weight"]),
        (Function, ["down.weight", "up.bias", "up.weight"]),
        (Unpacked, ["down.weight", "up.bias", "up.weight"]),
        (Largest, ["down.bias", "down.weight"]),
        (Total, ["down.weight", "up.bias", "up.weight"]),
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
        (OfActivations, "branches on values of tensors, by .* at test_numbers.py:"),
    ],
)
def test_what_follows_of_the_value_is_refused(made: type[Base], text: str):
    with pytest.raises(ValueError, match=text):
        auto.plan(made(), (torch.randn(3, WIDTH),), 2)


class OfArgument(Base):
    """A row of the table names the number that code reads of a floating-point argument, or of the features."""

    def __init__(self, row: str) -> None:
        super().__init__()
        self.row = row

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        return FLOATS[self.row][0](self, x, t)

    def softmax(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).softmax(-1))


def _of(*numbers: float, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.tensor(numbers if len(numbers) > 1 else numbers[0], dtype=dtype)


NAN, SINGLE = _of(1.0, math.nan), torch.float32
# forward, the example's value, those of other calls, those with which the shards do not serve
FLOATS: dict[str, tuple[Callable[..., Tensor], Tensor, list[Tensor], list[Tensor]]] = {
    "temperature": (lambda m, x, t: m.mlp(x / t.item()), _of(0.7), [_of(1.3), _of(0.2)], []),
    "temperature in fp32": (lambda m, x, t: m.mlp(x) / float(t), _of(0.7, dtype=SINGLE), [_of(1.3, dtype=SINGLE)], []),
    "branch": (lambda m, x, t: m.mlp(x) if t > 0 else m.softmax(x), _of(0.7), [_of(0.1)], [_of(-1.0), _of(0.0)]),
    "tie": (
        lambda m, x, t: m.mlp(x, 1 / m.up(x).shape[-1] if t <= 0.1 else 1),  # on a rank another number
        _of(0.1000001, dtype=SINGLE),
        [_of(2.0, dtype=SINGLE)],
        [_of(0.1, dtype=SINGLE)],  # which is larger than 0.1 in fp64
    ),
    "other path": (lambda m, x, t: m.mlp(x) if t > 0 else m.mlp(2 * x), _of(0.7), [_of(-1.0), _of(-2.0)], []),
    "list": (lambda m, x, t: m.mlp(x * t.tolist()[0]) * t.tolist()[1], _of(0.7, 2.0), [_of(1.0, 3.0)], []),
    "length": (lambda m, x, t: m.mlp(x[: int(t)]), _of(3.0), [_of(2.0), _of(4.5)], []),
    "dim": (lambda m, x, t: m.down(m.up(x) - m.up(x).mean(int(t), True)), _of(0.0), [_of(0.5)], [_of(1.0)]),
    "NaN": (lambda m, x, t: m.softmax(x) if t.isnan().any() else m.mlp(x), _of(1.0, 2.0), [_of(3.0, 4.0)], [NAN]),
    "planned with NaN": (lambda m, x, t: m.mlp(x) * len(t[~t.isnan()].tolist()), NAN, [_of(1.0, 2.0)], []),
    "rows": (lambda m, x, t: m.mlp(x[x.sum(-1) > float(t)]), _of(0.0), [_of(1.0), _of(-1.0)], []),
    "not zero": (lambda m, x, t: m.mlp(x[t.nonzero()[:, 0]]), _of(0.0, 1.0, 0.5), [_of(1.0, 0.0, 2.0)], []),
    "clip": (lambda m, x, t: m.down(m.up(x).clamp(max=t.item())), _of(0.5), [_of(i / 64) for i in range(1, 40)], []),
    "size of the features": (lambda m, x, t: m.mlp(x / x.abs().max().item()), _of(0.0), [_of(1.0)], []),
    "finite features": (lambda m, x, t: m.mlp(x) if x.isfinite().all() else x, _of(0.0), [_of(1.0)], []),
    "close": (
        lambda m, x, t: m.mlp(x) if torch.allclose(t, torch.ones_like(t)) else m.softmax(x),
        _of(1.0, 1.0),
        [_of(1.0, 1.0 + 1e-9)],
        [_of(1.0, 2.0)],
    ),
}


@pytest.mark.thinned(1)
@pytest.mark.parametrize("p", [3, 2])
@pytest.mark.parametrize("row", FLOATS)
@on_ranks()
def test_a_number_of_a_floating_point_argument(group: Any, row: str) -> None:
    _, value, others, refused = FLOATS[row]
    torch.manual_seed(0)
    model = OfArgument(row).double()
    rows = [torch.randn(5, WIDTH, dtype=torch.float64) for _ in range(len(others) + 2)]
    plan = auto.plan(model, (rows[0], value), group.size())
    assert plan.proof == "values" and {"up.weight", "down.weight"} <= {*plan.shardings}
    sharded = auto.apply(plan, copy.deepcopy(model), group)
    for x, t in zip(rows, [value, *others, value], strict=True):
        same_values(model, sharded, (x,), bound=1e-12, call=lambda m, x, t=t: m(x, t))
    for t in refused:
        with pytest.raises(RuntimeError, match="no call with these numbers of t: plan with one"):
            sharded(rows[0], t)
