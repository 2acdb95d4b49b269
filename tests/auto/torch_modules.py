"""Models of modules of torch, trained by shards next to the unsharded model."""

import copy
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.helpers.same_values import assert_small, differences_of_states, same_values
from tp_ext import auto
from tp_ext.group import parallel_group

BOUND = 1e-10
Model = Callable[[], tuple[nn.Module, tuple[Any, ...]]]


class Residual(nn.Module):
    def __init__(self, *layers: nn.Module) -> None:
        super().__init__()
        self.inner = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.inner(x)


class Called(nn.Module):
    """Layers and a function of these and of the inputs, which is the forward."""

    def __init__(self, function: Callable[..., Tensor], **layers: nn.Module) -> None:
        super().__init__()
        self.function = function
        for name, layer in layers.items():
            self.add_module(name, layer)

    def forward(self, *inputs: Any) -> Any:
        return self.function(self, *inputs)


def same(group: Any, name: str, table: str, file: str) -> list[str]:
    """Trains the model ``table[name]`` of a file next to a sharded copy, and returns the names of sharded parameters.

    Loss, every gradient, three steps of an optimizer, buffers and the result in evaluation mode are compared."""
    torch.manual_seed(0)
    model, inputs = getattr(importlib.import_module(file), table)[name]()
    model = model.double()
    inputs = tuple(x.double() if x.is_floating_point() else x for x in inputs)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    dense, p = copy.deepcopy(model), parallel_group(group).size
    plan = auto.plan(model, inputs, p)
    auto.apply(plan, model, group)
    # eps: gradients that cancel to rounding, those of biases before a norm or a softmax, Adam would scale up
    optimizers = [torch.optim.AdamW(one.parameters(), lr=1e-2, eps=1e-3) for one in (dense, model)]
    for _ in range(3):
        same_values(dense, model, inputs, bound=BOUND)
        for optimizer in optimizers:
            optimizer.step()
    assert_small(differences_of_states(dense, model), BOUND)
    same_values(dense.eval(), model.eval(), inputs, bound=BOUND, backward=False)
    return sorted(plan.shardings)
