"""Checks of an applied plan: ``apply(verify=True)``, a sharded model next to the unsharded one in the real group, and
the share of the model that stays whole."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import nn

from tp_ext._object_collectives import all_gather_objects
from tp_ext.auto.modules.random_draws import register_draws
from tp_ext.auto.proof.copies import copied_model
from tp_ext.auto.proof.prove_values import full_logits
from tp_ext.auto.proof.proven_plan import whole_draws
from tp_ext.auto.record.trace import arguments
from tp_ext.auto.search.plans import Plan
from tp_ext.group import Group, parallel_group, process_group
from tp_ext.simulation.comparison import bound_of, differences_of_models

WHOLE_BY_HINT = "dim 0: hints"  # how the reason begins
MAX_REPLICATED_SHARE = 0.1  # of the bytes of matrices, without a warning


def whole_matrices(plan: Plan) -> str:
    """Returns a sentence on the share of the matrices' bytes that every rank holds, hints left out; "" if small."""
    sizes = {name: math.prod(plan.shapes[name]) * size for name, size in plan.bytes_of_element.items()}
    matrices = {name: size for name, size in sizes.items() if len(plan.shapes[name]) > 1}
    whole = [n for n in matrices if n not in plan.shardings and not plan.whole[n].startswith(WHOLE_BY_HINT)]
    share = sum(matrices[name] for name in whole) / max(sum(matrices.values()), 1)
    if plan.p == 1 or share <= MAX_REPLICATED_SHARE:
        return ""
    first = max(whole, key=lambda name: matrices[name])
    text = f"model: {share:.0%} of the bytes of its matrices stay whole on every rank"
    return f"{text}; plan.why({first!r}): {plan.why(first)}"


def reference_of(plan: Plan, model: nn.Module) -> nn.Module:
    """A copy of the unsharded model, which draws the masks of the sharded one."""
    reference: nn.Module = copied_model(model, {})
    register_draws(reference, whole_draws(plan.draws), parallel_group(None))
    return reference


def compare_with(model: nn.Module, reference: nn.Module, example: Any, group: Group) -> None:
    """Raises the same ValueError on all ranks if the loss, an output, a gradient or a buffer differs from the unsharded
    model's."""
    # The caller's gradients are put back: the check must not change a training that goes on
    kept = {name: p.grad for name, p in model.named_parameters()}
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})

    def call(each: nn.Module, *args: Any, **kwargs: Any) -> Any:
        with torch.random.fork_rng(devices):  # the same masks in both, and no draw outside
            return each(*args, **kwargs)

    how: dict[str, Any] = {"seed": None, "call": call, "gather": full_logits, "by_loss": True}
    rows = differences_of_models(reference, model, *arguments(example), input_gradients=False, **how)
    for name, parameter in model.named_parameters():
        parameter.grad = kept[name]
    if not any(name.startswith("the gradient") for _, name in rows):
        raise ValueError("verify: True needs an output that depends on a parameter, which the model lacks")
    error, name = rows[-1]
    if parallel_group(group).size > 1:
        error, name = max(all_gather_objects((error, name), process_group(group)))
    bound = bound_of(next(p.dtype for p in reference.parameters() if p.is_floating_point()), "trained")
    if error > bound:
        raise ValueError(f"verify: {name} differs from the unsharded model's by {error:.1e}, more than {bound:.1e}")
