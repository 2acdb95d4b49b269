"""Kinds of arguments of a forward: any number by position, dataclasses."""

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses import FakeTensorMode

from tests.helpers.simulated import run
from tp_ext import auto
from tp_ext.auto.proof.prove_values import examples, filled

WIDTH = 8
close = {"rtol": 1e-12, "atol": 1e-12}  # ranks sum in another order


@dataclasses.dataclass
class Scaled:
    x: Tensor
    scale: float = 2.0


class Mlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)


class AnyNumber(Mlp):
    def forward(self, *xs: Tensor, mixes: bool = False, added: Tensor | None = None) -> Tensor:
        h = self.up(xs[0])
        y = self.down(h.softmax(-1) if mixes else F.gelu(h))
        return y if added is None else y + added


class ByName(Mlp):
    def forward(self, x: Tensor) -> Tensor:
        return self.down(input=F.gelu(self.up(input=x)))


class OfDataclass(Mlp):
    def forward(self, of: Scaled) -> Tensor:
        return self.down(F.gelu(self.up(of.x) * of.scale))


def _models(group: Any, made: type[Mlp], example: tuple[Any, ...]) -> tuple[Mlp, Mlp]:
    torch.manual_seed(0)
    model = made().double()
    plan = auto.plan(model, example, 2)
    assert set(plan.shardings) == {"up.weight", "up.bias", "down.weight"}
    return model, auto.apply(plan, copy.deepcopy(model), group)


def _by_position_and_name(group: Any, kind: str) -> None:
    x = torch.arange(24, dtype=torch.float64).view(3, WIDTH)
    model, sharded = _models(group, AnyNumber, (x,))
    options = {"mixes": True} if kind == "mixes" else {"added": x}
    torch.testing.assert_close(sharded(x, **options), model(x, **options), **close)


def test_options_of_a_forward_that_takes_any_number_by_position():
    run(_by_position_and_name, 2, "added")
    with pytest.raises(RuntimeError, match=r"up.weight cannot be sharded then: dim 0 \(24\) is pinned by _softmax"):
        run(_by_position_and_name, 2, "mixes")


def _dataclass(group: Any) -> None:
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(3, WIDTH)
    model, sharded = _models(group, OfDataclass, (Scaled(x.clone().requires_grad_()),))
    inputs = [x.clone().requires_grad_() for _ in range(2)]
    for each, argument in zip((model, sharded), inputs, strict=True):
        (each(Scaled(argument)) ** 2).sum().backward()
    torch.testing.assert_close(inputs[1].grad, inputs[0].grad, **close)


def test_a_tensor_of_a_dataclass_has_a_complete_gradient():
    run(_dataclass, 2)


def _by_name(group: Any) -> None:
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(3, WIDTH)
    model, sharded = _models(group, ByName, (x,))
    torch.testing.assert_close(sharded(x), model(x), **close)


def test_linear_layers_called_with_the_name_of_their_argument():
    run(_by_name, 2)


def test_a_proof_runs_on_the_host():
    with FakeTensorMode():
        module = nn.BatchNorm1d(4, device="cuda")
        module.factor = torch.ones(3, device="cuda")
        filled(module, torch.float64)
        mask = torch.ones(2, dtype=torch.bool, device="cuda")
        ((given,), _), *_ = (call for _, call in examples((mask,), None))
    of_module = [*module.parameters(), *module.buffers(), module.factor, given]
    assert {tensor.device.type for tensor in of_module} == {"cpu"} and len(of_module) == 7
