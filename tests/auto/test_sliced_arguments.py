"""Arguments with a sharded factor in a dim whose other factors are lengths of a run: Bloom's bias of batch x heads."""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tp_ext
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
    layouts = dict(tp_ext.layouts(sharded))
    for shape in ((3, 5), (2, 5), (5, 7), (1, 1), (70, 2), (5, 3)):
        x = torch.randn(*shape, WIDTH, dtype=torch.float64)
        for one in (model, sharded):
            one.zero_grad()
            (one(x) ** 3).mean().backward()
        for (name, wanted), found in zip(model.named_parameters(), sharded.parameters(), strict=True):
            expected = layouts[name].shard(wanted.grad) if layouts.get(name) else wanted.grad
            torch.testing.assert_close(found.grad, expected, **close, msg=f"{shape} {name}")
    return bool(plan.slices)


@pytest.mark.parametrize("kind", ["heads", "heads x tokens", "batch x heads"])
def test_an_argument_is_sliced_at_every_batch_and_length(kind: str) -> None:
    assert run(_trains, 2, kind) == [True, True]


def test_a_factor_between_lengths_of_the_run_leaves_the_block_whole() -> None:
    plan = auto.plan(Biased("batch x heads x tokens"), (torch.randn(3, 5, WIDTH),), 2)
    assert not plan.shardings
    assert "has a sharded factor between lengths of the example" in plan.why("attention.qkv.weight")
