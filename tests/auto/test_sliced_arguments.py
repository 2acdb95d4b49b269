"""Arguments with a sharded factor in a dim whose other factors are lengths of a run: Bloom's bias of batch x heads."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.auto.torch_modules import Called, Model, same
from tests.helpers.same_values import same_values
from tests.helpers.simulated import run
from tp_ext import auto

WIDTH, HEADS = 16, 4
close = {"rtol": 1e-11, "atol": 1e-12}


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = HEADS, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        bias = bias.view(-1, self.heads, 1, t)
        return self.out(((q @ k.mT + bias).softmax(-1) @ v).transpose(1, 2).flatten(2))


class Biased(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.attention, self.norm = kind, Attention(), nn.LayerNorm(WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        b, t, _ = x.shape
        bias = torch.linspace(0.1, 1, 4, dtype=x.dtype)[:, None] * torch.arange(t)  # [heads, t]
        if self.kind.startswith("batch"):
            bias = bias.expand(b, HEADS, t)
        shape = {
            "heads": (HEADS, t),
            "heads x tokens": (-1,),
            "batch x heads": (-1, 1, t),
            "batch x heads x tokens": (-1,),
        }
        return self.norm(x + self.attention(x, bias.reshape(shape[self.kind])))


def _trains(group: Any, kind: str) -> bool:
    torch.manual_seed(0)
    model = Biased(kind).double()
    plan = auto.plan(model, (torch.randn(3, 5, WIDTH, dtype=torch.float64),), 2)
    sharded = auto.apply(plan, copy.deepcopy(model), group)
    for shape in ((3, 5), (2, 5), (5, 7), (1, 1), (70, 2), (5, 3)):
        same_values(model, sharded, (torch.randn(*shape, WIDTH, dtype=torch.float64),))
    return bool(plan.slices)


@pytest.mark.parametrize("kind", ["heads", "heads x tokens", "batch x heads"])
def test_an_argument_is_sliced_at_every_batch_and_length(kind: str) -> None:
    assert run(_trains, 2, kind) == [True, True]


def test_a_factor_between_lengths_of_the_run_leaves_the_block_whole() -> None:
    plan = auto.plan(Biased("batch x heads x tokens"), (torch.randn(3, 5, WIDTH),), 2)
    assert not plan.shardings
    assert "has a sharded factor between lengths of the example" in plan.why("attention.qkv.weight")


class Masked(nn.Module):
    """Attention that makes its bias of its number of heads, and combines it with a mask of all heads before use."""

    def __init__(self, combine: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = HEADS, nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.combine = combine

    def forward(self, x: Tensor, mask: Tensor, bias: Tensor | None = None) -> tuple[Tensor, Tensor]:
        b, t, _ = x.shape
        q, k, v = (y.view(b, t, self.heads, -1).transpose(1, 2) for y in self.qkv(x).chunk(3, -1))
        if bias is None:
            bias = x.new_zeros(1, self.heads, t, t)
        scores = F.scaled_dot_product_attention(q, k, v, attn_mask=self.combine(bias, mask[:, None, None, :]))
        return self.out(scores.transpose(1, 2).flatten(2)), bias


def _masked(combine: Callable[[Tensor, Tensor], Tensor]) -> tuple[nn.Module, tuple[Tensor, ...]]:
    def forward(model: Any, x: Tensor, mask: Tensor) -> Tensor:
        y, bias = model.first(x, mask)
        return model.norm(x + y + model.second(y, mask, bias)[0])  # the second layer has the bias of the first

    mask = torch.ones(3, 5, dtype=torch.bool)
    mask[1, 2:] = False
    model = Called(forward, first=Masked(combine), second=Masked(combine), norm=nn.LayerNorm(WIDTH))
    return model, (torch.randn(3, 5, WIDTH), mask)


MASKED: dict[str, Model] = {
    "where": lambda: _masked(lambda bias, mask: torch.where(mask, bias, -1e9)),
    "add": lambda: _masked(lambda bias, mask: bias + (~mask) * -1e9),
    "masked_fill": lambda: _masked(lambda bias, mask: bias.masked_fill(~mask, -1e9)),
    "in place": lambda: _masked(lambda bias, mask: bias.repeat(3, 1, 1, 1).masked_fill_(~mask, -1e9)),
    "expand": lambda: _masked(lambda bias, mask: (bias.expand(3, -1, -1, -1) + (~mask) * -1e9).contiguous()),
    "several": lambda: _masked(lambda bias, mask: torch.where(mask, (bias + 1) * 2, torch.full_like(bias, -1e9))),
    "used before": lambda: _masked(lambda bias, mask: torch.where(mask, bias, -1e9) + (bias * 2 + (bias + 3))),
}


@pytest.mark.parametrize(("name", "p"), [*((name, 2) for name in MASKED), ("where", 3)])
def test_a_constant_that_meets_whole_tensors_first_is_a_shard(name: str, p: int) -> None:
    assert len(run(same, p, name, "MASKED", __name__)[0]) == 6
