"""Models of modules of torch, trained by shards next to the unsharded model."""

import copy
import importlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

import tp_ext
from tp_ext import auto
from tp_ext.group import parallel_group

close = {"rtol": 1e-10, "atol": 1e-11}
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
    layouts, sharded = dict(tp_ext.layouts(model)), dict(model.named_parameters())
    for _ in range(3):
        wanted, found = dense(*inputs), model(*inputs)
        torch.testing.assert_close(found, wanted, **close)
        for one, optimizer in zip((wanted, found), optimizers, strict=True):
            optimizer.zero_grad()
            loss_of(one).backward()
        for own, parameter in dense.named_parameters():
            expected, gradient = parameter.grad, sharded[own].grad
            assert (expected is None) == (gradient is None), own
            if expected is not None:
                expected = layouts[own].shard(expected) if layouts.get(own) else expected
                torch.testing.assert_close(gradient, expected, **close, msg=lambda text, own=own: f"{own}: {text}")
        for optimizer in optimizers:
            optimizer.step()
    full = tp_ext.full_state_dict(model, group=group)
    assert list(full) == list(dense.state_dict())
    for own, value in dense.state_dict().items():
        torch.testing.assert_close(full[own], value, **close, msg=own)
    with torch.no_grad():
        torch.testing.assert_close(model.eval()(*inputs), dense.eval()(*inputs), **close)
    return sorted(plan.shardings)


def loss_of(output: Any) -> Tensor:
    tensors = [output] if isinstance(output, Tensor) else [t for t in output if t is not None]
    return sum((t.square().mean() for t in tensors), torch.zeros((), dtype=torch.float64))
