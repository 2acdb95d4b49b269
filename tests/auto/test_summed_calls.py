"""Calls that sum over a sharded dim: their collectives, other types and calls, and what is refused."""

import copy
import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import tp_ext
from tests.auto.traps.designed_norms import NORMS, OfHidden, OverHeads, Pooled, RmsNorm
from tests.auto.traps.trap import WIDTH
from tests.helpers.simulated import run
from tp_ext import auto
from tp_ext.conversions import I, P, R


def _applied(model: nn.Module, group: Any, p: int, x: Tensor, **options: Any) -> tuple[nn.Module, auto.Plan]:
    """A copy of the model, sharded, and its plan, which shards all of its matrices."""
    sharded = copy.deepcopy(model)
    plan = auto.plan(sharded, (x,), p, **options)
    assert all(name in plan.shardings for name, t in model.named_parameters() if t.dim() > 1), plan.whole
    return auto.apply(plan, sharded, group), plan


def _same(model: nn.Module, sharded: Callable[[Tensor], Tensor], x: Tensor, bound: float, call: Any = None) -> None:
    call = call or (lambda module, x: module(x))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    results = [call(module, t) for module, t in zip((model, sharded), inputs, strict=True)]
    for result in results:
        result.float().sin().sum().backward()
    assert results[0].dtype == results[1].dtype
    for one, other in (results, [t.grad for t in inputs]):
        assert (one - other).abs().max() <= bound * one.abs().max().clamp(min=1)


def _autocast(module: nn.Module, x: Tensor) -> Tensor:
    with torch.autocast("cpu", torch.bfloat16):
        return module(x)


CALLS: dict[str, Callable[[nn.Module, Tensor], Tensor]] = {
    "plain": lambda module, x: module(x),
    "autocast": _autocast,
    "checkpoint": lambda module, x: checkpoint(module, x, use_reentrant=False),
    "another_length": lambda module, x: module(torch.cat([x, x[:, :3]], 1)),
}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "by_mean": functools.partial(OverHeads, NORMS["by_mean"]),
    "layer_norm": functools.partial(OverHeads, NORMS["layer_norm"]),
    "rms_norm": functools.partial(OverHeads, NORMS["rms_norm"]),
    "module": functools.partial(OfHidden, nn.LayerNorm),
}


def _called(group: Any, p: int, make: str, call: str, dtype: torch.dtype, shares: Any) -> None:
    torch.manual_seed(0)
    model, x = MODELS[make]().to(dtype), torch.randn(2, 5, WIDTH, dtype=dtype)
    sharded, _ = _applied(model, group, p, x, shares=shares)
    bound = 1e-12 if dtype == torch.float64 else 3e-2 if call == "autocast" or dtype == torch.bfloat16 else 1e-5
    _same(model, sharded, x, bound, CALLS[call])
    _same(model, copy.deepcopy(sharded), x, bound, CALLS[call])


@pytest.mark.parametrize("make", MODELS)
@pytest.mark.parametrize(
    ("p", "call", "dtype", "shares"),
    [
        (2, "plain", torch.bfloat16, None),
        (3, "plain", torch.float64, (1, 2, 1)),
        (2, "autocast", torch.float32, None),
        (3, "checkpoint", torch.float64, None),
        (2, "another_length", torch.float64, None),
    ],
)
def test_calls_are_those_of_one_rank(make: str, p: int, call: str, dtype: torch.dtype, shares: Any) -> None:
    run(functools.partial(_called, p=p, make=make, call=call, dtype=dtype, shares=shares), p)


def _counted(group: Any) -> None:
    model, x = MODELS["by_mean"]().double(), torch.randn(2, 5, WIDTH, dtype=torch.float64, requires_grad=True)
    sharded, plan = _applied(model, group, 2, x)
    calls = [edit for edit in plan.conversions if edit.at == "call"]
    assert [(edit.module, edit.path, edit.before, edit.after) for edit in calls] == [
        ("", ("mean", 0, 2), P, R),
        ("", ("mean", 1, 2), P, R),
    ]
    planned = [c.bytes for c in plan.collectives if c.kind == "all-reduce"]
    with tp_ext.debug.count_collectives() as counts:
        sharded(x).sum().backward()
    assert planned.count(2 * 5 * 8) == 4  # a number of a token, of q and of k, forward and backward
    assert counts.payload_bytes == sum(planned), (counts, plan.collectives)


def test_a_statistic_is_one_number_of_a_token() -> None:
    run(_counted, 2)


def test_a_complete_gradient_is_not_summed() -> None:
    plan = auto.plan(Pooled(), (torch.randn(2, 5, WIDTH),), 2)
    assert [(edit.before, edit.after) for edit in plan.conversions if edit.at == "call"] == [(P, I)]


class Switched(OfHidden):
    """Another number of means where a switch is on, over tokens that all ranks have."""

    def __init__(self) -> None:
        super().__init__(RmsNorm)
        self.more = False

    def forward(self, x: Tensor) -> Tensor:
        h = F.silu(self.gate(x)) * self.up(x)
        h = h - h.mean(1, keepdim=True) if self.more else h
        return self.down(h / (1 + h.abs().mean(-1, keepdim=True)))


def _switched(group: Any) -> None:
    model, x = Switched().double(), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    sharded, _ = _applied(model, group, 2, x, hints={"norm.weight": "whole"})
    model.more = sharded.more = True
    try:
        _same(model, sharded, x, 1e-12)
    except (ValueError, RuntimeError) as error:
        assert "sums over sharded dims" in str(error) or "forward calls mean" in str(error), error


def test_other_calls_are_right_or_refused() -> None:
    run(_switched, 2)


class Checkpointed(OfHidden):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(checkpoint(self.hidden, x, use_reentrant=False))

    def hidden(self, x: Tensor) -> Tensor:
        h = F.silu(self.gate(x)) * self.up(x)
        return h / (1 + h.abs().mean(-1, keepdim=True))


def _checkpointed(group: Any) -> None:
    model, x = Checkpointed(RmsNorm).double(), torch.randn(2, 5, WIDTH, dtype=torch.float64)
    sharded = copy.deepcopy(model)
    auto.apply(auto.plan(sharded, (x,), 2), sharded, group)
    _same(model, sharded, x, 1e-12)


def test_a_checkpoint_inside_of_the_forward_is_whole_or_right() -> None:
    run(_checkpointed, 2)


def test_blocks_and_copied_heads_leave_them_whole() -> None:
    x = torch.randn(2, 5, WIDTH)
    of_blocks = auto.plan(OfHidden(RmsNorm), (x,), 2, invariant_blocks=4)
    copied = auto.plan(MODELS["by_mean"](), (x,), 8)  # of four heads
    assert not any(edit.at == "call" for plan in (of_blocks, copied) for edit in plan.conversions)
