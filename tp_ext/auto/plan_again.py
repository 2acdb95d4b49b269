"""The plan of another call of a model that is sharded already: whether the same shards serve it, and what it does
otherwise at the boundaries of the model."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from tp_ext.auto.modules.call_edits import CallEdits
from tp_ext.auto.proof.prove_values import Apply, UnprovenError
from tp_ext.auto.proof.proven_plan import BUDGET, prover_of
from tp_ext.auto.record.edits import Draw, Slice
from tp_ext.auto.record.record import tensors
from tp_ext.auto.record.rules import from_notation
from tp_ext.auto.record.trace import arguments
from tp_ext.auto.search.hints import PlanOptions
from tp_ext.auto.search.integers import local_of
from tp_ext.auto.search.localize import argument_names
from tp_ext.auto.search.plans import Plan
from tp_ext.auto.search.reasons import traced
from tp_ext.auto.search.rounds import Planner


def _by_name(structure: nn.Module, edit: Any) -> Any:
    """An edit of an argument of the model by its name: this call's example has names where the plan's may have none."""
    of_argument = isinstance(edit, Slice) or "argument" in (getattr(edit, "kind", ""), getattr(edit, "at", ""))
    if edit.module or not of_argument or edit.path[0]:
        return edit
    names = argument_names(structure)
    number = edit.path[1]
    return dataclasses.replace(edit, path=(1, names[number], *edit.path[2:])) if number < len(names) else edit


def _place_of(draw: Draw | None) -> tuple[Any, ...] | None:
    return None if draw is None else (draw.caller, draw.number, draw.mask)


def _draws_otherwise(plan: Plan, again: Plan, drawing: set[str]) -> str:
    """Returns a module that draws masks in a call which its hooks, of the plan that is carried out, would not draw; or
    "". Draws are found by their tensors where these differ, else by their places."""
    for module in sorted(drawing):
        draws, draws_now = ([draw for draw in of.masks if draw.module == module] for of in (plan, again))
        # In turn, as the hooks take them: a loop may run more often than in the example
        places: Iterator[Draw | None] = itertools.cycle(draws) if draws else itertools.repeat(None)
        for draw, planned in zip(draws_now, places, strict=False):
            fitting = [
                d for d in draws if d.call == draw.call and (None in (d.shape, draw.shape) or d.shape == draw.shape)
            ]
            by_place = planned in fitting and _place_of(planned) == _place_of(draw)
            by_tensor = all(d.mask == draw.mask for d in fitting)
            # In eval mode no hook begins for a module all of whose draws are those of training
            is_begun = fitting and (not draw.always or any(d.always for d in draws))
            if not is_begun or not (by_tensor or by_place):
                return module or "the model"
    return ""


def plan_again(
    plan: Plan, structure: nn.Module, example: Any, apply: Apply, by_values: bool = True
) -> CallEdits | None:
    """Plans an unsharded model again, with another example; returns what that call does otherwise at the boundaries of
    the model, if anything. Not ``by_values``: its shapes alone are proven.

    Raises:
        ValueError: the plan that is carried out cannot serve the call.
    """
    problem, edits = _compared(plan, structure, example, apply, False, by_values)
    # An argument may be a cache that the model has returned whole: sliced where its modules take it. Its gradient would
    # be that of the slice
    if problem and not torch.is_grad_enabled() and any(t.is_floating_point() for _, t in tensors(arguments(example))):
        other, sliced = _compared(plan, structure, example, apply, True, by_values)
        if not other:
            return sliced
    if problem:
        raise ValueError(problem)
    return edits


def _compared(
    plan: Plan, structure: nn.Module, example: Any, apply: Apply, shares_inputs: bool, by_values: bool
) -> tuple[str, CallEdits | None]:
    """Returns how the plan of another example differs from one that is carried out, or "", and what it does
    otherwise."""
    rules = {name: from_notation(line) for name, line in plan.rules.items()}
    record = traced(structure, example, rules, shares_inputs)
    # The caller keeps the whole tensor, into which a write to the slice does not come
    if shares_inputs and any(id(t) in record.writes for _, t in record.inputs):
        return "it writes into an argument that has a sharded dim", None
    # The shards exist: what the new plan may decide is only whether the same shards serve this call, too
    only = {name: sharding.dim for name, sharding in plan.shardings.items()}
    options = PlanOptions(
        sequence_parallel=bool(plan.tokens),
        invariant_blocks=plan.invariant_blocks,
        only=only,
        local=[local_of(plan.patches, plan.sizes, rank) for rank in range(plan.p)],
    )
    planner = Planner(structure, example, plan.p, record, options)
    again = planner.decide()
    called = {call.module for call in record.calls}
    used = {id(t) for step in record.steps for t in step.inputs}
    # Logits have their full shape for any code, and are gathered where it needs that: a head that this code would
    # leave whole may stay sharded, with the sums of its input's gradient
    heads = {f"{head}.{attribute}" for head in plan.heads for attribute in ("weight", "bias")}
    heads |= {name for names in plan.tied if heads.intersection(names) for name in names}
    whole_heads, slices = False, list[Slice]()
    for id_, (name, _) in record.parameters.items():
        if id_ not in used or again.shardings.get(name) == plan.shardings.get(name):
            continue
        if name not in heads or name in again.shardings:
            return f"{name} cannot be sharded then: {again.whole.get(name, 'it is sharded in another way')}", None
        whole_heads = True
    gradients = ("copies",) if torch.is_grad_enabled() else ()
    # Of modules that this call runs: what it does not run cannot be wrong in it. A head that stays sharded may have
    # sums more than the new plan has, none less
    for kind in (*gradients, "sums", "slices", "tokens"):
        edits, edits_now = ({_by_name(structure, edit) for edit in getattr(of, kind)} for of in (plan, again))
        if shares_inputs and kind == "slices":
            edits_now -= (added := {edit for edit in edits_now - edits if edit.module in called})
            slices = [edit for edit in again.slices if edit in added]
        changed = {edit for edit in (edits_now - edits if whole_heads else edits ^ edits_now) if edit.module in called}
        if changed:
            return f"it communicates elsewhere then, in {next(iter(changed)).module or 'the model'}", None
    # The integers of a rank are set in the modules, for all calls of them
    for module in called:
        if again.patches.get(module) != plan.patches.get(module) or again.sizes.get(module) != plan.sizes.get(module):
            return f"{module or 'the model'} reads other integers then", None
    if module := _draws_otherwise(plan, again, {call.module for call in record.random_calls if call.draws}):
        return f"it draws other random numbers then, in {module}", None
    # A gradient that is a rank's part is refused at each call by the plan's list
    wanted = [path for path in again.refused_inputs if path not in plan.refused_inputs]
    if torch.is_grad_enabled() and any(path in wanted and t.requires_grad for path, t in record.inputs):
        return "the gradient of an argument would be a rank's part then", None
    # Hooks of the model give its logits their full shape in every call
    if not {*again.heads} <= {*plan.heads}:
        return "it has other results with a sharded dim then", None
    try:
        proves = by_values and plan.proof == "values" and plan.p > 1
        prover = prover_of(planner, again, rules, BUDGET, apply) if proves else None
        differences = prover.differences(again) if prover is not None else {}
    except UnprovenError as error:
        # The shapes of this call are proven. Its values cannot be on this machine, which is no fault of the call
        warnings.warn(f"model: the values of this call are not proven, its shapes alone: {error}", stacklevel=2)
        differences = {}
    is_same = again.gathers == plan.gathers and not slices
    edits_of_call = None if is_same else CallEdits(tuple(again.gathers), tuple(slices))
    return next(iter(differences.values()), ""), edits_of_call
