"""RMS norms of a model's own classes, replaced by the fused one.

Which modules are RMS norms is read from the operators that they call, not from names: x to the power of 2, its mean
over the last dim, plus epsilon, the reciprocal root, times x, times the weight."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from tp_ext.auto.record.record import Record
from tp_ext.auto.record.trace import trace
from tp_ext.nn.norm import RMSNorm

CONVERSIONS = ("_to_copy", "to")
CALLS = ["pow", "mean", "add", "rsqrt", "mul", "mul"]


def fused_norm(module: nn.Module) -> RMSNorm | None:
    """The RMSNorm that computes what a module does, with its weight; None: it is none."""
    weight = module._parameters.get("weight")
    is_alone = len(module._parameters) == 1 and not module._modules and not module._buffers
    if not is_alone or weight is None or weight.dim() != 1 or isinstance(module, RMSNorm):
        return None
    if len(inspect.signature(module.forward).parameters) != 1:  # a gate, for example
        return None
    epsilon = epsilon_of(module, weight)
    if epsilon is None:
        return None
    norm = RMSNorm(len(weight), eps=epsilon, group=None, device="meta")
    norm._parameters["weight"] = weight
    return norm


def epsilon_of(module: nn.Module, weight: Tensor) -> float | None:
    """The epsilon of a module that computes an RMS norm of one argument; None: it computes something else."""
    record = Record()
    x = torch.empty(2, 3, len(weight), dtype=weight.dtype, device="meta")
    try:
        trace(module, (x,), record=record)
    except Exception:  # it takes other arguments, or branches on values
        return None
    if any(tensor.dtype.itemsize < weight.dtype.itemsize for step in record.steps for tensor in step.outputs):
        return None  # it computes in fp32 what is fp64
    steps = [step for step in record.steps if step.name not in CONVERSIONS]
    if [step.name for step in steps] != CALLS:
        return None

    def source(tensor: Any) -> Any:
        while id(tensor) in record.maker and record.maker[id(tensor)].name in CONVERSIONS:
            tensor = record.maker[id(tensor)].inputs[0]
        return tensor

    power, mean, plus = steps[:3]
    own_x, own_weight = record.inputs[0][1], next(t for _, t in record.parameters.values())
    makes = [source(step.outputs[0]) for step in steps]
    takes = [[source(tensor) for tensor in step.inputs] for step in steps]
    follows = (
        takes[0][0] is own_x,
        takes[1][0] is makes[0],
        takes[2][0] is makes[1] and len(takes[2]) == 1,
        takes[3][0] is makes[2],
        _same_two(takes[4], own_x, makes[3]),
        _same_two(takes[5], own_weight, makes[4]),
        source(record.output) is makes[5] and record.output.dtype == weight.dtype,
        power.args[1] == 2,
        list(mean.args[1]) == [-1] and mean.args[2:3] == (True,),
        isinstance(plus.args[1], float) and len(plus.args) == 2,
    )
    return float(plus.args[1]) if all(follows) else None


def _same_two(found: list[Tensor], one: Tensor, other: Tensor) -> bool:
    return len(found) == 2 and {id(found[0]), id(found[1])} == {id(one), id(other)}
