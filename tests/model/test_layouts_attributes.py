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
        param.grad = 3 * param.detach() if i % 4 == 0 else None
    return dense


def _keeps(group: Any, how: str) -> int:
    dense = CONVERSIONS[how](group, _tagged())
    expected, sharded = dict(_tagged().named_parameters(remove_duplicate=False)), 0
    for name, param in dense.named_parameters(remove_duplicate=False):
        full = expected[name]
        assert (param.tag, param.lr_scale, param.other.tolist()) == (full.tag, full.lr_scale, [0.0] * 3)
        assert param.requires_grad == full.requires_grad
        # A layer that copies weights begins without a gradient: its model's own may be wanted by the dense one
        assert (param.grad is None) == (full.grad is None or how != "auto")
        assert param.grad is None or torch.equal(param.grad, 3 * param.detach())
        assert torch.equal(param.mask, param.detach() > 0)
        sharded += param.shape != full.shape
    return sharded


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("how", CONVERSIONS)
def test_shards_have_the_attributes_of_their_parameters(how: str, p: int) -> None:
    sharded = {"auto": 7, "column": 2, "row": 1, "embedding": 1, "head": 1}[how]
    assert run(_keeps, p, how) == [sharded if p > 1 else 0] * p


def _step(model: nn.Module) -> None:
    model(IDS).square().mean().backward()


@on_ranks(1, 2)
def test_gradients_from_before_are_added_to(group: Any) -> None:
    torch.manual_seed(0)
    dense, model = Mixed().double(), Mixed().double()
    model.load_state_dict(dense.state_dict())
    _step(dense), _step(model)
    auto.apply(auto.plan(model, (IDS,), parallel_group(group).size), model, group)
    _step(dense), _step(model)
    layouts = dict(tp_ext.layouts(model))
    for name, param in dense.named_parameters():
        assert param.grad is not None
        expected = layouts[name].shard(param.grad) if name in layouts else param.grad
        torch.testing.assert_close(model.get_parameter(name).grad, expected)


@on_ranks(2)
def test_gradients_of_another_type_stay_of_it(group: Any) -> None:
    dense = nn.Sequential(nn.Linear(8, 16), nn.Linear(16, 8)).bfloat16()
    if not hasattr(dense[0].weight, "grad_dtype"):
        pytest.skip("this torch has gradients of the parameters' types alone")
    for linear in dense:
        linear.weight.grad_dtype = torch.float32
        linear.weight.grad = torch.randn(linear.weight.shape)
    grads, rank = [linear.weight.grad for linear in dense], parallel_group(group).rank
    auto.apply(auto.plan(dense, (torch.randn(3, 8).bfloat16(),), 2), dense, group)
    for dim, (layer, full) in enumerate(zip(dense, grads, strict=True)):
        assert layer.weight.grad is not None and layer.weight.grad_dtype == layer.weight.grad.dtype == torch.float32
        assert torch.equal(layer.weight.grad, full.chunk(2, dim)[rank])


@on_ranks(2)
def test_a_sparse_gradient_is_refused_by_name(group: Any) -> None:
    dense = Mixed()
    dense.weights.first.grad = torch.zeros_like(dense.weights.first).to_sparse()
    before = [*dense.parameters()]
    with pytest.raises(ValueError, match=r"model: weights\.first has a sparse gradient"):
        CONVERSIONS["auto"](group, dense)
    assert all(a is b for a, b in zip(before, dense.parameters(), strict=True))


class _TrainedBuffer(nn.Module):
    def __init__(self, requires_grad: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("scale", torch.ones(16).requires_grad_(requires_grad))

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x).relu() * self.scale)


@on_ranks(2)
def test_a_buffer_that_is_trained_is_refused_by_name(group: Any) -> None:
    x = torch.randn(3, 8)
    with pytest.raises(ValueError, match="model: scale is a buffer that requires a gradient"):
        auto.plan(_TrainedBuffer(True), (x,), 2)
    plan, model = auto.plan(_TrainedBuffer(False), (x,), 2), _TrainedBuffer(True)
    before = [*model.parameters()]
    with pytest.raises(ValueError, match="model: scale is a buffer that requires a gradient"):
        auto.apply(plan, model, group)
    assert all(a is b for a, b in zip(before, model.parameters(), strict=True))


@on_ranks(2)
def test_shards_of_buffers_have_their_attributes(group: Any) -> None:
    x, model = torch.randn(3, 8), _TrainedBuffer(False)
    model.scale.tag, model.scale.mask = "scale", torch.arange(16)
    auto.apply(auto.plan(_TrainedBuffer(False), (x,), 2), model, group)
    rank = parallel_group(group).rank
    assert model.scale.tag == "scale" and model.scale.mask.tolist() == [*range(16)][8 * rank : 8 * rank + 8]


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
