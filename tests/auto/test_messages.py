"""Wrong arguments, and models that cannot be sharded as they are: each message says what to do."""

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.auto.architectures import build
from tests.auto.test_planner import EXAMPLE, HEADS, WIDTH, Model, scaled
from tp_ext import P, auto


def _plan(**changes: Any) -> auto.Plan:
    options: dict[str, Any] = {"model": Model(), "example": EXAMPLE, "p": 2, **changes}
    return auto.plan(**options)


ARGUMENTS: dict[str, tuple[Callable[[], Any], type[Exception], str]] = {
    "model": (lambda: _plan(model=3), TypeError, "model: int must be an nn.Module"),
    "a linear": (lambda: _plan(model=nn.Linear(4, 4)), ValueError, "model: a Linear must be inside of a module"),
    "attention": (lambda: _plan(model=nn.MultiheadAttention(4, 2)), ValueError, "model: a MultiheadAttention must be"),
    "class": (lambda: _plan(model=Model), TypeError, "model: the class Model must be an nn.Module, an object"),
    "p": (lambda: _plan(p="2"), ValueError, "p: '2' must be an integer of at least 1"),
    "no example": (lambda: _plan(example=None), TypeError, "example: NoneType must be a dict"),
    "example's keys": (lambda: _plan(example={1: 2}), TypeError, "example: the key 1 must be the name of an argument"),
    "incomplete example": (
        lambda: _plan(example={"ids": EXAMPLE["ids"]}), ValueError,
        "example: forward fails on fake tensors like it, in the model: TypeError: .* argument: 'labels'"),
    "other example": (
        lambda: _plan(example={**EXAMPLE, "ids": torch.zeros(3, 5)}), ValueError,
        r"in table: RuntimeError at test_planner.py:\d+: Expected tensor"),
    "hints": (lambda: _plan(hints=["x"]), TypeError, "hints: list must be a dict"),
    "pattern": (lambda: _plan(hints={3: "whole"}), TypeError, "hints: the key 3 must be text"),
    "rules": (lambda: _plan(rules={"a::b": 3}), TypeError, "rules: 'a::b' is 3 and must be a line of notation"),
    "operator": (lambda: _plan(rules={"my::op": "a -> a"}), ValueError, "rules: 'my::op' must be an operator"),
    "operator's name": (lambda: _plan(rules={"op": "a -> a"}), ValueError, "rules: 'op' must be .*'namespace::"),
    "budget": (lambda: _plan(memory_budget="4GB"), ValueError, "memory_budget: '4GB' must be a positive number"),
    "strict": (lambda: _plan(strict=1), TypeError, "strict: 1 must be True or False"),
    "plan": (lambda: auto.apply({}, Model(), None), TypeError, "plan: dict must be a Plan, of tp_ext.auto.plan"),
    "verify": (lambda: auto.apply(_plan(p=1), Model(), None, verify=1), TypeError, "verify: 1 must be True or False"),
    "tp_plan": (lambda: _plan().compare(None), TypeError, "tp_plan: None must be a dict"),
    "constraint": (lambda: auto.constraint(3, P("tp")), TypeError, "x: int must be a tensor"),
}  # fmt: skip


@pytest.mark.parametrize("what", ARGUMENTS)
def test_wrong_arguments(what: str) -> None:
    call, error, words = ARGUMENTS[what]
    with pytest.raises(error, match=words):
        call()


def test_too_many_ranks_name_the_dim_its_factors_and_the_most_that_work() -> None:
    assert f"dim 0 ({3 * WIDTH}) is 3 parts of {HEADS} x 16: p = 5 must be at most 4" in _plan(p=5).why(
        "blocks.0.qkv.weight"
    )
    with pytest.raises(
        ValueError, match=r"hints: table.weight cannot be sharded: dim 0 \(96\) is 96 x 1: p = 97 must be at"
    ):
        _plan(p=97, hints={"head": "sharded"})
    model, inputs = build("llama")
    reason = auto.plan(model, inputs, 3).why("model.layers.0.self_attn.k_proj.weight")
    assert "dim 0 (32) is 2 x 16: p = 3 must be at most 2, or a multiple of 2 up to 4" in reason


class Own(nn.Module):
    """A model of one's own, whose forward is the given function of it."""

    def __init__(self, between: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.between, self.scale = between, nn.Parameter(torch.ones(16))
        self.up, self.down, self.norm = nn.Linear(8, 16), nn.Linear(16, 8), nn.LayerNorm(8)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.down(self.between(self, self.up(x))))


def test_code_that_cannot_be_sharded_is_named_with_its_line() -> None:
    x = (torch.zeros(3, 8),)
    plan = auto.plan(Own(lambda model, h: h.narrow(1, 0, 16)), x, 2)
    words = r"the model: RuntimeError at test_messages.py:\d+: start .* exceeds .*: write -1, or an integer"
    assert not plan.shardings and re.search(words, plan.why("up.weight"))
    with pytest.raises(
        ValueError, match=r"branches on values of tensors, by .* in the model at test_messages.py:\d+; it must"
    ):
        auto.plan(Own(lambda model, h: h if h.sum() > 0 else 2 * h), x, 2)
    with pytest.raises(ValueError, match=r"forward fails on fake tensors like it, .* no fake impl registered"):
        auto.plan(Own(lambda model, h: without_fake(h)), x, 2)
    own = Own(lambda model, h: scaled(h, model.scale))
    assert "no rule for tp_ext_tests::scaled (rules= takes one)" in auto.plan(own, x, 2).why("up.weight")
    assert auto.plan(own, x, 2, rules={"tp_ext_tests::scaled": "b h, h -> b h"}).roles == {
        "up": "column",
        "down": "row",
    }


class HeadOfFunction(nn.Module):
    """A head that is the table of the embedding, by a function in place of a layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(96, 16), nn.Linear(16, 32), nn.Linear(32, 16)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        return nn.functional.linear(x + self.down(self.up(x).tanh()), self.table.weight)


def test_a_table_that_is_a_head_by_a_function_leaves_itself_whole_alone() -> None:
    plan = auto.plan(HeadOfFunction(), (torch.zeros(2, 5, dtype=torch.long),), 2)
    assert plan.roles == {"up": "column", "down": "row"}
    assert re.search(r"linear \(test_messages.py:\d+\) .*; as a head, only an nn.Linear", plan.why("table.weight"))


@torch.library.custom_op("tp_ext_tests::without_fake", mutates_args=())
def without_fake(x: Tensor) -> Tensor:
    return 2 * x
