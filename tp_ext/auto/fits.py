"""Checks before a plan is carried out: that it fits the model, and that all ranks have the same plan and weights."""

import hashlib
from functools import partial

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from tp_ext._checksum import bits_of, checksum
from tp_ext._object_collectives import all_gather_objects
from tp_ext.auto.record.arguments import autocast, without_modes
from tp_ext.auto.search.integers import local_of
from tp_ext.auto.search.localize import LocalEdits, Localized, MismatchError, digest
from tp_ext.auto.search.plans import Plan, example_for, has_example
from tp_ext.group import Group, parallel_group, process_group
from tp_ext.model.layouts import uncarried
from tp_ext.share_sizes import split_sizes


def trained_buffer(model: nn.Module) -> str:
    """Returns a sentence on a buffer that requires a gradient, which no plan completes over ranks; "": none does."""
    names = (name for name, buffer in model.named_buffers() if buffer.requires_grad)
    return f"{name} is a buffer that requires a gradient; make it an nn.Parameter" if (name := next(names, "")) else ""


def misfit(plan: Plan, model: nn.Module) -> str:
    """Returns a sentence on how the parameters differ from the planned model's."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    shapes = {name: tuple(t.shape) for name, t in parameters.items()}
    for name, shape in plan.shapes.items():
        if shapes.get(name) != shape:
            actual = f"has shape {shapes[name]}" if name in shapes else "is missing"
            return f"{name} {actual} and must have {shape}, as in the plan"
    for name in plan.shardings if plan.p > 1 else ():
        if name in parameters and (problem := uncarried(parameters[name])):
            return f"{name} {problem}"
    if plan.p > 1 and (problem := trained_buffer(model)):
        return problem
    unplanned = sorted(set(shapes) - set(plan.shapes))
    return f"{unplanned[0]} is no parameter of the planned model" if unplanned else ""


def compare_over_group(plan: Plan, model: nn.Module, group: Group, problem: str) -> None:
    """Raises the same ValueError on all ranks unless all have the same plan, and models of the same structure."""
    kinds = [(name, type(module).__qualname__) for name, module in model.named_modules()]
    dtypes = [(name, str(t.dtype), t.requires_grad) for name, t in model.named_parameters()]
    # A rank that fails alone does not raise yet: the others would wait for it in the all-gather
    differing = problem or misfit(plan, model) or _prove(plan, model, group)
    failed = differing if problem or not differing else f"model: {differing}"
    description = plan.fingerprint, hashlib.sha256(repr((kinds, dtypes)).encode()).hexdigest(), failed
    several = parallel_group(group).size > 1
    descriptions = all_gather_objects(description, process_group(group)) if several else [description]
    for _, _, failed in descriptions:
        if failed:
            raise ValueError(failed)
    for rank, other in enumerate(descriptions):
        for name, mine, first in zip(("plan", "model"), other[:2], descriptions[0][:2], strict=True):
            if mine != first:
                raise ValueError(
                    f"{name}: that of rank {rank} differs from that of rank 0; all ranks must have the same"
                )
    if several:
        _compare_weights(model, group)


def _compare_weights(model: nn.Module, group: Group) -> None:
    """Raises the same ValueError on all ranks unless all have the same full weights: shards of others would make one
    model of several."""
    named = [*model.named_parameters(), *model.named_buffers()]
    digests = {n: _digest_of(t.detach()) for n, t in named if not t.is_meta and t.layout == torch.strided}
    described = hashlib.sha256(repr(digests).encode()).hexdigest()
    everyone = all_gather_objects(described, process_group(group))
    if len(set(everyone)) == 1:
        return
    of_ranks = all_gather_objects(digests, process_group(group))
    ranks = [rank for rank, other in enumerate(everyone) if other != everyone[0]]
    first = of_ranks[0]
    names = [n for n in first if any(of_rank.get(n) != first[n] for of_rank in of_ranks)] or ["a tensor on meta"]
    more = f" and {len(names) - 1} more" if len(names) > 1 else ""
    raise ValueError(
        f"model: ranks whose weights differ from rank 0's: {ranks}, in {names[0]}{more}; all must have the same before "
        "they are sharded: build the model after tp_ext.manual_seed(seed) with one seed on all ranks, or load one file"
    )


def _digest_of(tensor: Tensor) -> int:
    if isinstance(tensor, FakeTensor) or not tensor.numel():
        return 0
    bits = bits_of(tensor)
    # Words of 8 bytes, since each costs as much as a smaller one
    aligned = bits.element_size() * bits.numel() % 8 == 0 and bits.data_ptr() % 8 == 0
    return int(checksum(bits.view(torch.int64) if aligned else bits)[0])


def _prove(plan: Plan, model: nn.Module, group: Group) -> str:
    """Runs the local model on fakes; returns an error unless its calls have the shapes with which it was
    proven."""
    parallel = parallel_group(group)
    if plan.p == 1 or not has_example(plan) or not plan.proofs:
        return ""
    with without_modes():
        failed = _failure(plan, model, parallel.rank)
    if failed and autocast():
        failed = _failure(plan, model, parallel.rank)
    if failed and plan.proof == "values":
        # Norms over batches and dropout make other calls in eval mode: planned in one mode, applied in the other. The
        # proof by values ran both
        modes = {module: module.training for module in model.modules()}
        model.train(not model.training)
        try:
            failed = _failure(plan, model, parallel.rank) and failed
        finally:
            for module, mode in modes.items():
                module.training = mode
    return failed


def _failure(plan: Plan, model: nn.Module, rank: int) -> str:
    example = example_for(plan, model)
    edits = LocalEdits(
        p=plan.p,
        token_sizes=partial(split_sizes, p=plan.p, weights=plan.shares),
        roles=plan.roles,
        heads=plan.heads,
        shardings=plan.shardings,
        buffers=plan.buffers,
        conversions=plan.conversions,
    )
    local = Localized(model, example, edits)
    try:
        # Another version of the model's code makes other calls, although its parameters fit the plan
        code = local_of(plan.patches, plan.sizes, rank)
        if digest(local.calls(rank, code.patches, code.sizes)) == plan.proofs[rank]:
            return ""
    except MismatchError as mismatch:
        return f"its local forward on rank {rank} fails: {mismatch}"
    return f"its local forward on rank {rank} makes other calls, or of other shapes, than the planned model's"
