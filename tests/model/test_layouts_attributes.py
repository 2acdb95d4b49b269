"""Attributes that users put on parameters, before these become shards, and hooks on their gradients."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import tp_ext
from tests.helpers.on_ranks import on_ranks
from tests.helpers.simulated import run
from tp_ext import auto
from tp_ext.group import parallel_group

WIDTH = 16


class Weights(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Parameter(torch.randn(24, WIDTH)), nn.Parameter(torch.randn(WIDTH, 24))

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(nn.functional.linear(x, self.first).relu(), self.second)


class Mixed(nn.Module):
    """Weights in linear layers, a table, and the module itself; two of them tied."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(12, WIDTH), nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 32), nn.Linear(32, WIDTH)
        self.weights, self.head = Weights(), nn.Linear(WIDTH, 12, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        x = self.norm(self.table(ids))
        x = x + self.down(self.up(x).relu())
        return self.head(x + self.weights(x))


IDS = torch.arange(6).reshape(2, 3)


def _by_auto(group: Any, dense: nn.Module) -> nn.Module:
    return auto.apply(auto.plan(Mixed(), (IDS,), parallel_group(group).size), dense, group)


def _by_layer(kind: Any, name: str) -> Callable[[Any, nn.Module], nn.Module]:
    def convert(group: Any, dense: nn.Module) -> nn.Module:
        from_dense = kind.from_embedding if name == "table" else kind.from_linear
        return nn.ModuleDict({name: from_dense(dense.get_submodule(name), group=group)})

    return convert


CONVERSIONS: dict[str, Callable[[Any, nn.Module], nn.Module]] = {
    "auto": _by_auto,
    "column": _by_layer(tp_ext.ColumnParallelLinear, "up"),
    "row": _by_layer(tp_ext.RowParallelLinear, "down"),
    "embedding": _by_layer(tp_ext.VocabParallelEmbedding, "table"),
    "head": _by_layer(tp_ext.VocabParallelLMHead, "head"),
}


def _tagged() -> nn.Module:
    torch.manual_seed(0)
    dense = Mixed()
    for i, (name, param) in enumerate(dense.named_parameters()):
        param.tag, param.lr_scale, param.mask, param.other = name, {"scale": i}, param.detach() > 0, torch.zeros(3)
        param.requires_grad_(i % 2 == 0)
    return dense


def _keeps(group: Any, how: str) -> int:
    dense = CONVERSIONS[how](group, _tagged())
    expected, sharded = dict(_tagged().named_parameters(remove_duplicate=False)), 0
    for name, param in dense.named_parameters(remove_duplicate=False):
        full = expected[name]
        assert (param.tag, param.lr_scale, param.other.tolist()) == (full.tag, full.lr_scale, [0.0] * 3)
        assert param.requires_grad == full.requires_grad
        assert param.grad is None
        assert torch.equal(param.mask, param.detach() > 0)
        sharded += param.shape != full.shape
    return sharded


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("how", CONVERSIONS)
def test_shards_have_the_attributes_of_their_parameters(how: str, p: int) -> None:
    sharded = {"auto": 7, "column": 2, "row": 1, "embedding": 1, "head": 1}[how]
    assert run(_keeps, p, how) == [sharded if p > 1 else 0] * p


def _refuses(group: Any, how: str, post: bool) -> list[str]:
    dense = Mixed()
    for param in dense.parameters():
        hook = param.register_post_accumulate_grad_hook if post else param.register_hook
        hook(lambda *_: None)
    before = {name: id(param) for name, param in dense.named_parameters()}
    with pytest.raises(ValueError, match="has hooks on its gradient") as error:
        CONVERSIONS[how](group, dense)
    assert before == {name: id(param) for name, param in dense.named_parameters()}
    return str(error.value).split()[:2]


@pytest.mark.parametrize("post", [False, True])
@pytest.mark.parametrize("how", CONVERSIONS)
def test_hooks_on_gradients_are_refused_by_name(how: str, post: bool) -> None:
    first, second = run(_refuses, 2, how, post)
    assert first == second == (["model:", "up.weight"] if how == "auto" else ["weight:", "has"])


@on_ranks(2)
def test_parallelize_keeps_them_on_meta_and_under_fsdp(group: Any) -> None:
    mesh = tp_ext.init_mesh("cpu", dp=2)
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    for name, param in model.named_parameters():
        param.tag = name
    step = tp_ext.parallelize(model, mesh, zero=3, loss=lambda output, target: (output - target).square().sum())
    assert [param.tag for param in step.parameters()] == ["0.weight", "0.bias", "1.weight", "1.bias"]
