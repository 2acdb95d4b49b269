"""The reason of values that differ names the line of the user's code whose result is the first that does."""

import inspect
import re

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from tp_ext import auto
from tp_ext.auto.proof import proven_plan


class Block(nn.Module):
    """x [n, 16] -> [n, 16] over 64 hidden features; each trap has its own forward."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down, self.out = nn.Linear(16, 64), nn.Linear(64, 16), nn.Linear(16, 16)
        self.gain = nn.Parameter(torch.rand(64))


class LocalMean(Block):
    def forward(self, x):
        h = F.relu(self.up(x))
        h = h / h.shape[-1]  # here
        return self.out(self.down(h))


class Loop(Block):
    def forward(self, x):
        h = self.up(x).tanh()
        scale = float(sum(1 for _ in range(h.size(-1)))) ** -0.5
        return self.out(self.down(torch.mul(h, scale)))  # here


def _scaled(h, by):
    by = by + 1
    return h * float(by)  # here


class Helper(Block):
    def forward(self, x):
        h = self.up(x)
        return self.out(self.down(_scaled(h.sin(), h.shape[-1]) + 1))


class InPlace(Block):
    def forward(self, x):
        h = self.up(x).sin()
        scale = sum(1 / 16 for _ in range(h.size(-1)))
        h.mul_(scale)  # here
        return self.out(self.down(h.clone()))


class OfWeight(Block):
    def forward(self, x):
        w = self.up.weight * float(len(self.up.weight)) ** -0.5  # here
        return self.out(self.down(F.linear(x, w, self.up.bias).relu()))


class OfTorch(Block):
    """A layer of torch with a number of the call before it."""

    def forward(self, x):
        h = self.up(x)
        layer = nn.Softplus(beta=h.shape[-1] / 64)
        return self.out(self.down(layer(h)))  # here


class WrongGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, h):
        return h.clone()

    @staticmethod
    def backward(ctx, dh):
        return dh / dh.shape[-1]


class OnlyGradients(Block):
    def forward(self, x):
        h = self.up(x)  # here
        h = WrongGradient.apply(h)
        return self.out(self.down(h * 2))


class Second(nn.Module):
    """The second of two layers, of another kind, is the wrong one."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([Right(), LocalMean()])

    def forward(self, x):
        for layer in self.layers:
            x = x + layer(x)
        return x


class Right(Block):
    def forward(self, x):
        return self.out(self.down(F.relu(self.up(x)) * self.gain))


TRAPS = {
    LocalMean: "`h / h.shape[-1]`",
    Loop: "`torch.mul(h, scale)`",
    Helper: "`h * float(by)`",
    InPlace: "`h.mul_(scale)`",
    OfWeight: "`self.up.weight * float(len(self.up.weight)) ** -0.5`",
    OfTorch: "`layer(h)`",
    OnlyGradients: "the gradient of the result of `self.up(x)`",
    Second: "`h / h.shape[-1]`",
}


def _marked_line(trap):
    lines, first = inspect.getsourcelines({Helper: _scaled, Second: LocalMean}.get(trap, trap))
    return first + next(i for i, line in enumerate(lines) if line.rstrip().endswith("# here"))


@pytest.mark.parametrize("trap", TRAPS)
def test_the_reason_names_the_line_whose_result_is_the_first_that_differs(trap):
    plan = auto.plan(trap(), {"x": torch.randn(5, 16)}, 2)
    reasons = [why for name, why in plan.whole.items() if why.startswith("values differ when it is sharded")]
    assert reasons, plan.whole
    for reason in reasons:
        assert f"{TRAPS[trap]} at test_first_lines.py:{_marked_line(trap)} " in reason, reason
        assert re.search(r" (depends on a local length: \S+ in place of \S+|is the first that differs)$", reason)


def test_a_local_length_is_named_with_both_numbers():
    plan = auto.plan(LocalMean(), {"x": torch.randn(5, 16)}, 4)
    assert plan.whole["up.weight"].endswith("depends on a local length: 16 in place of 64")


def test_a_right_model_is_run_no_further_time(monkeypatch):
    monkeypatch.setattr(proven_plan, "first_difference_of", lambda *args: pytest.fail("it was run"))
    assert "up.weight" in auto.plan(Right(), {"x": torch.randn(5, 16)}, 2).shardings


def test_a_run_that_fails_leaves_the_reason_without_a_line(monkeypatch):
    def fail(*args):
        raise RuntimeError

    monkeypatch.setattr(proven_plan, "first_difference_of", fail)
    plan = auto.plan(LocalMean(), {"x": torch.randn(5, 16)}, 2)
    assert re.fullmatch(r"values differ when it is sharded: .* differs by \S+ on rank 0", plan.whole["up.weight"])
