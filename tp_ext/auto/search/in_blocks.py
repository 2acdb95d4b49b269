"""Which plans have the same bits for every number of ranks: what is computed on shards must not depend on their cut.

With ``invariant_blocks`` the sharded dims are cut into the blocks of :func:`tp_ext.tp_invariant`. Linear layers and the
cross entropy over a vocabulary sum by one tree over the blocks. What else works on shards is allowed if it moves
elements, or computes each of them by itself with the same bits wherever it lies; some functions of torch are replaced
by others for that. Anything else is refused by name, by the plan and so on every rank alike, before any collective."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tp_ext.auto.record.edits import DirectCall
from tp_ext.auto.record.record import MEMORY_VIEWS, Record, Step
from tp_ext.auto.search.choose import carries
from tp_ext.auto.search.localize import is_conv1d

if TYPE_CHECKING:
    from tp_ext.auto.search.flow import Finder
    from tp_ext.auto.search.plans import Plan

MOVING = MEMORY_VIEWS | {
    "cat", "stack", "clone", "contiguous", "copy", "_to_copy", "to", "repeat", "flip", "roll", "zeros_like",
    "ones_like", "empty_like", "full_like", "new_zeros", "new_ones", "new_empty", "new_full", "fill", "zero",
    "constant_pad_nd", "tril", "triu", "lift_fresh", "narrow", "flatten", "unflatten", "movedim",
}  # fmt: skip
# Measured in fp32, fp64 and bf16, forward and backward, on slices of rows: torch's kernels gave the same bits, and
# others for sigmoid, SiLU, both GELUs, ELU, softplus, mish, and rsqrt in bf16
EXACT = {
    "add", "sub", "rsub", "mul", "div", "neg", "abs", "relu", "tanh", "exp", "erf", "sqrt", "square", "pow", "sin",
    "cos", "log", "log1p", "reciprocal", "clamp", "clamp_min", "clamp_max", "hardtanh", "hardswish", "leaky_relu",
    "threshold", "where", "masked_fill", "eq", "ne", "lt", "le", "gt", "ge", "logical_not", "logical_and",
    "bitwise_not", "bitwise_and", "maximum", "minimum", "sign", "dropout",
}  # fmt: skip
SCALED = {"add", "sub", "rsub"}  # with alpha their last elements are rounded otherwise in bf16
POWERS = (2, 3)
REPLACED = {
    "scaled_dot_product_attention": {F.scaled_dot_product_attention},
    "silu": {F.silu},
    "gelu": {F.gelu},
    "sigmoid": {torch.sigmoid, Tensor.sigmoid},
    "bmm": {torch.matmul, Tensor.matmul, Tensor.__matmul__, torch.bmm, Tensor.bmm},
    "_softmax": {F.softmax, torch.softmax, Tensor.softmax},
}
"""Operators whose result depends on the shard or the number of threads -> the functions that are replaced in calls of
the model (:mod:`tp_ext.auto.modules.block_functions`)."""
ADVICE = "hints={{{name!r}: 'whole'}} leaves it whole for every number of ranks"


def plan_in_blocks(plan: Plan, finder: Finder, modules: Mapping[str, nn.Module], blocks: int) -> Plan:
    """Returns the plan with its blocks and the modules in which functions are replaced.

    Raises:
        ValueError: it computes something whose bits depend on the number of ranks; with the module and the operator.
    """
    _check_layers(plan.roles, modules)
    _check_sums(finder)
    on_shards = list(_steps_on_shards(finder, plan.roles))
    for step in on_shards:
        _check_step(step)
    functions = {step.module for step in finder.record.steps if _base(step) in REPLACED}
    functions |= {draw.module for draw in plan.draws} | {draw.caller for draw in plan.draws if draw.caller is not None}
    return replace(
        plan,
        invariant_blocks=blocks,
        functions=sorted(functions),
        direct_calls=list(map(_without_sums, plan.direct_calls)),
    )


def _refuse(module: str, text: str) -> None:
    advice = ADVICE.format(name=module) if module else "hints leave what it reads whole"
    raise ValueError(f"invariant_blocks: {module or 'the model'} {text}: its bits would depend on the ranks; {advice}")


def _check_layers(roles: Mapping[str, str], modules: Mapping[str, nn.Module]) -> None:
    for name, role in roles.items():
        module = modules[name]
        if role == "attention" or not (isinstance(module, nn.Linear | nn.Embedding) or is_conv1d(module)):
            _refuse(name, f"is an {type(module).__name__} with shards, which has no form in blocks")


def _check_sums(finder: Finder) -> None:
    """Raises for sums of one term of each rank, which layers in blocks do not make."""
    flow, record = finder.flow, finder.record
    for partial in flow.sums:
        _refuse(partial.module, "returns a sum of one term of each rank")
    names = {id_: name for id_, (name, _) in record.parameters.items()}
    for copy, tensor in zip(flow.copies, flow.copied, strict=True):
        if id(tensor) in record.differentiable:
            name = names.get(id(tensor), copy.module)
            place = finder.used[id(tensor)][0][0] if finder.used.get(id(tensor)) else None
            used = "" if place is None else f" in {record.steps[place].reason}"
            _refuse(name, f"has a gradient that is a sum of one term of each rank{used}")


def _steps_on_shards(finder: Finder, roles: Mapping[str, str]) -> Iterable[Step]:
    """The operators on shards outside of layers. Logits keep their full shape for the model's code, which gathers them
    for other functions than those of tp_ext."""
    record: Record = finder.record
    inside = [atom for atom in finder.atoms if atom not in finder.whole_heads]
    for step in record.steps:
        if step.module in roles or step.is_loss:
            continue
        if any(carries(record, tensor, inside) for tensor in (*step.inputs, *step.outputs)):
            yield step


def _base(step: Step) -> str:
    return step.name if step.name in REPLACED else step.name.removesuffix("_")


def _check_step(step: Step) -> None:
    name, function = _base(step), step.function
    if name in REPLACED:
        # An operator inside of another function, such as einsum, is not replaced
        if name != "scaled_dot_product_attention" and function not in REPLACED[name]:
            called = getattr(function, "__name__", "code without a function of torch")
            _refuse(step.module, f"computes {step.reason} on shards by {called}")
        last = step.inputs[0].dim() - 1
        if name == "_softmax" and step.args[1] not in (-1, last):
            _refuse(step.module, f"computes {step.reason} on shards over another dim than the last")
        if name == "scaled_dot_product_attention" and last != 3:
            _refuse(step.module, f"computes {step.reason} on shards that are not 4-D")
        return
    scaled = name in SCALED and step.kwargs.get("alpha", 1) != 1
    exponent = step.args[1] if len(step.args) > 1 else None
    odd_power = name == "pow" and (isinstance(exponent, Tensor) or exponent not in POWERS)
    rounded = name == "div" and step.kwargs.get("rounding_mode") is not None
    if name not in MOVING | EXACT or scaled or odd_power or rounded:
        _refuse(step.module, f"computes {step.reason} on shards{' with alpha' if scaled else ''}")


def _without_sums(direct: DirectCall) -> DirectCall:
    """A direct call, refused if it would add terms of the ranks, or slices of them."""
    if not (direct.sums or direct.copies or direct.partial or direct.slices):
        return direct
    text = "it would add one term of each rank, with invariant_blocks"
    return replace(direct, slices=(), sums=(), gathers=(), copies=(), partial=(), dims=(), refused=text)
