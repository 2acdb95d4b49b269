"""Checks of an applied plan: ``apply(verify=True)``, a sharded model next to the unsharded one in the real group, and
the share of the model that stays whole."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from tp_ext._object_collectives import all_gather_objects
from tp_ext.auto.modules.random_draws import register_draws
from tp_ext.auto.proof.copies import copied_model
from tp_ext.auto.proof.proven_plan import whole_draws
from tp_ext.auto.record.record import tensors
from tp_ext.auto.record.trace import arguments
from tp_ext.auto.search.plans import Plan
from tp_ext.group import Group, parallel_group, process_group
from tp_ext.model.layouts import layouts_of

# Relative, of verify: sums have another order. Models in fp64 convert to fp32 inside
TOLERANCES = {torch.float64: 1e-6, torch.float32: 1e-4}
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


def loss_or_projection(output: Any) -> tuple[Tensor, float]:
    """The loss of a model's output, or the sum of its floating-point tensors times fixed random numbers, in fp64; and
    the size to which an error is relative. Of a mean of squares after a norm no gradient is more than rounding."""
    loss = getattr(output, "loss", None)
    loss = output if isinstance(output, Tensor) and output.dim() == 0 else loss
    if isinstance(loss, Tensor):
        return loss, abs(loss.item())
    generator, terms = torch.Generator().manual_seed(0), []
    for _, t in tensors(output):
        if t.is_floating_point():
            terms.append(t.double() * torch.randn(t.shape, generator=generator, dtype=torch.float64).to(t.device))
    if not terms:
        raise ValueError("verify: True needs an output with a tensor of floating-point numbers, which the model lacks")
    size = max((term.detach().norm().item() for term in terms), default=0.0)  # a sum of signs may be near zero
    return torch.stack([term.sum() for term in terms]).sum(), size


def compare_with(model: nn.Module, reference: nn.Module, example: Any, group: Group) -> None:
    """Raises the same ValueError on all ranks if a loss or a gradient differs from the unsharded model's."""
    args, kwargs = arguments(example)
    # The caller's gradients are put back: the check must not change a training that goes on
    kept = {name: p.grad for name, p in model.named_parameters()}
    for each in (reference, model):
        each.zero_grad(set_to_none=True)
    devices = sorted({p.device.index for p in model.parameters() if p.is_cuda})
    losses = []
    for each in (reference, model):
        with torch.random.fork_rng(devices):  # the same masks in both, and no draw outside
            losses.append(loss_or_projection(each(*args, **kwargs)))
            losses[-1][0].backward()
    (wanted, size), (loss, _) = losses
    tolerance = TOLERANCES.get(next(p.dtype for p in reference.parameters() if p.is_floating_point()), 5e-2)
    shards = dict(model.named_parameters())
    layouts = {
        f"{name}.{attribute}" if name else attribute: layout
        for name, module in model.named_modules(remove_duplicate=False)
        for attribute, layout in layouts_of(module).items()
    }
    scale = max(
        (p.grad.abs().max().item() for p in reference.parameters() if p.grad is not None and p.grad.numel()),
        default=0.0,
    )
    worst = abs(loss.item() - wanted.item()) / max(size, 1e-6), "the loss"
    for name, full in reference.named_parameters():
        gradient = shards[name].grad
        # A gradient that one of the two lacks is an error of its own kind: it has no value to compare
        if full.grad is None or gradient is None:
            if (full.grad is None) != (gradient is None):
                worst = max(worst, (float("inf"), name))
            continue
        expected = layouts[name].shard(full.grad) if name in layouts else full.grad
        if expected.numel():
            error = (expected - gradient).abs().max().item() / max(full.grad.abs().max().item(), 1e-3 * scale, 1e-10)
            # NaN compares as smaller than nothing, and would pass as no difference
            worst = max(worst, (error if error == error else float("inf"), name))
    for name, parameter in model.named_parameters():
        parameter.grad = kept[name]
    if parallel_group(group).size > 1:
        worst = max(all_gather_objects(worst, process_group(group)))
    if not worst[0] <= tolerance:
        raise ValueError(
            f"verify: {worst[1]} differs from the unsharded model's by {worst[0]:.1e}, more than {tolerance:.1e}"
        )
