"""The plan of another call of a model that is sharded already: whether the same shards serve it, and what it does
otherwise at the boundaries of the model."""

from __future__ import annotations

import dataclasses
import itertools
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tp_ext.auto.proof.prove_values import Apply, UnprovenError
from tp_ext.auto.proof.proven_plan import BUDGET, prover_of
from tp_ext.auto.record.edits import CallEdits, Conversion, Draw
from tp_ext.auto.record.forwards import argument_names
from tp_ext.auto.record.record import Record, tensors
from tp_ext.auto.record.rules import from_notation
from tp_ext.auto.record.trace import arguments
from tp_ext.auto.search.hints import PlanOptions
from tp_ext.auto.search.integers import local_of
from tp_ext.auto.search.plans import Plan
from tp_ext.auto.search.reasons import traced
from tp_ext.auto.search.rounds import POSSIBLE, Planner
from tp_ext.conversions import I, R, S


def _by_name(structure: nn.Module, edit: Conversion) -> Conversion:
    """An edit of an argument of the model by its name: this call's example has names where the plan's may have none."""
    if edit.module or edit.at != "argument" or edit.path[0]:
        return edit
    names = argument_names(structure)
    number = edit.path[1]
    if isinstance(number, str) or number >= len(names):
        return edit
    return dataclasses.replace(edit, path=(1, names[number], *edit.path[2:]))


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


@dataclass(frozen=True)
class OtherCall:
    """A call that a plan which is carried out may serve.

    Attributes:
        structure: the unsharded model. by_values: whether its values are proven, too. shares_inputs: an argument may
            be a whole tensor that is sliced where modules take it. whole_tokens: no tokens are sharded.
    """

    structure: nn.Module
    example: Any
    apply: Apply
    by_values: bool
    shares_inputs: bool = False
    whole_tokens: bool = False


def plan_again(
    plan: Plan, structure: nn.Module, example: Any, apply: Apply, by_values: bool = True
) -> tuple[CallEdits | None, bool]:
    """Plans an unsharded model again, with another example.

    Args:
        by_values: whether values are proven, and not the shapes alone.

    Returns:
        What that call does otherwise at the boundaries of the model, if anything; whether calls of other lengths with
        the same flow are proven by it.

    Raises:
        ValueError: the plan that is carried out cannot serve the call.
    """
    gradients = torch.is_grad_enabled()
    call = OtherCall(structure, example, apply, by_values, whole_tokens=not gradients)
    problem, edits, changed = _compared(plan, call)
    others = []
    # Other code may read the lengths of tokens, or return them
    if plan.tokens and gradients:
        others.append(dataclasses.replace(call, whole_tokens=True))
    # An argument may be a cache that the model has returned whole: sliced where its modules take it. Its gradient would
    # be that of the slice
    if not gradients and any(t.is_floating_point() for _, t in tensors(arguments(example))):
        others.append(dataclasses.replace(call, shares_inputs=True))
    for other in others if problem else ():
        other_problem, edits, changed = _compared(plan, other)
        if not other_problem:
            return edits, True
    if problem:
        raise ValueError(problem)
    return edits, not (changed and plan.tokens)


def _compared(plan: Plan, call: OtherCall) -> tuple[str, CallEdits | None, set[Conversion]]:
    """Returns how the plan of another call differs from one that is carried out, or ""; what it does otherwise; and the
    edits that differ, which are right by their values."""
    rules = {name: from_notation(line) for name, line in plan.rules.items()}
    record = traced(call.structure, call.example, rules, call.shares_inputs)
    # The caller keeps the whole tensor, into which a write to the slice does not come
    if call.shares_inputs and any(id(t) in record.writes for _, t in record.inputs):
        return "it writes into an argument that has a sharded dim", None, set()
    # The shards exist: what the new plan may decide is only whether the same shards serve this call, too
    only = {name: sharding.dim for name, sharding in plan.shardings.items()}
    carried = on_whole_tokens(plan) if call.whole_tokens else plan
    options = PlanOptions(
        sequence_parallel=POSSIBLE if carried.tokens else False,
        invariant_blocks=plan.invariant_blocks,
        only=only,
        local=[local_of(plan.patches, plan.sizes, rank) for rank in range(plan.p)],
        shares=plan.shares,
    )
    planner = Planner(call.structure, call.example, plan.p, record, options)
    again = planner.decide()
    called = {module_call.module for module_call in record.calls}
    whole_heads, text = _shards_otherwise(plan, again, record)
    # Of modules that this call runs: what it does not run cannot be wrong in it
    slices, changed = list[Conversion](), set[Conversion]()
    for kind in ("slices", "copies", "sums", "tokens") if torch.is_grad_enabled() else ("slices", "sums"):
        edits, edits_now = ({_by_name(call.structure, edit) for edit in getattr(of, kind)} for of in (carried, again))
        if call.shares_inputs and kind == "slices":
            edits_now -= (added := {edit for edit in edits_now - edits if edit.module in called})
            slices = [edit for edit in again.slices if edit in added]
        # A head that stays sharded may have sums more than the new plan has, none less
        differing = edits_now - edits if whole_heads else edits ^ edits_now
        changed |= {edit for edit in differing if edit.module in called}
    if not text and any(edit.types == (I, S) and not edit.tokens for edit in changed):
        text = _elsewhere(changed)
    if text := text or _otherwise(carried, again, record):
        return text, None, changed
    whole = call.whole_tokens and torch.is_grad_enabled()
    is_same = again.gathers == plan.gathers and not slices and not whole
    edits_of_call = None if is_same else CallEdits(tuple(again.gathers), tuple(slices), whole)
    return _difference(carried, planner, again, call, changed), edits_of_call, changed


def _otherwise(plan: Plan, again: Plan, record: Record) -> str:
    """Returns what a plan does otherwise that no proof by values accepts, or ""."""
    # The integers of a rank are set in the modules, for all calls of them
    for module in dict.fromkeys(module_call.module for module_call in record.calls):
        if again.patches.get(module) != plan.patches.get(module) or again.sizes.get(module) != plan.sizes.get(module):
            return f"{module or 'the model'} reads other integers then"
    called = {module_call.module for module_call in record.calls}
    # The number of a call is that of the plan's example
    if _summed_calls(plan, called) != _summed_calls(again, called):
        return "it sums over sharded dims in other calls of functions then"
    # Few tokens stay whole, for which the hooks of the plan draw
    plans = (plan, again) if again.tokens else (on_whole_tokens(plan), again)
    if module := _draws_otherwise(*plans, {call.module for call in record.random_calls if call.draws}):
        return f"it draws other random numbers then, in {module}"
    # A gradient that is a rank's part is refused at each call by the plan's list
    wanted = [path for path in again.refused_inputs if path not in plan.refused_inputs]
    if torch.is_grad_enabled() and any(path in wanted and t.requires_grad for path, t in record.inputs):
        return "the gradient of an argument would be a rank's part then"
    # Hooks of the model give its logits their full shape in every call
    return "" if {*again.heads} <= {*plan.heads} else "it has other results with a sharded dim then"


def _shards_otherwise(plan: Plan, again: Plan, record: Record) -> tuple[bool, str]:
    """Returns whether the new plan leaves heads whole that are sharded, and what it cannot shard, or ""."""
    used = {id(t) for step in record.steps for t in step.inputs}
    # Logits have their full shape for any code, and are gathered where it needs that: a head that this code would
    # leave whole may stay sharded, with the sums of its input's gradient
    heads = {f"{head}.{attribute}" for head in plan.heads for attribute in ("weight", "bias")}
    heads |= {name for names in plan.tied if heads.intersection(names) for name in names}
    whole_heads = False
    for id_, (name, _) in record.parameters.items():
        if id_ not in used or again.shardings.get(name) == plan.shardings.get(name):
            continue
        if name not in heads or name in again.shardings:
            return False, f"{name} cannot be sharded then: {again.whole.get(name, 'it is sharded in another way')}"
        whole_heads = True
    return whole_heads, ""


def _summed_calls(plan: Plan, modules: set[str]) -> set[Conversion]:
    """The calls of functions in these modules that sum over a sharded dim; alike without gradients."""
    calls = (edit for edit in plan.conversions if edit.at == "call" and edit.module in modules)
    return {edit if torch.is_grad_enabled() else dataclasses.replace(edit, after=I) for edit in calls}


def _elsewhere(changed: set[Conversion]) -> str:
    return f"it communicates elsewhere then, in {min(edit.module for edit in changed) or 'the model'}"


def on_whole_tokens(plan: Plan) -> Plan:
    """A plan as its hooks carry it out in a call whose tokens are not sharded."""
    if not plan.tokens:
        return plan
    edits = [edit for edit in plan.conversions if not edit.tokens]
    edits += [Conversion(e.module, e.at, e.path, I, R) for e in plan.tokens if e.types == (S, R)]
    draws = [dataclasses.replace(d, dim=None, factor=None, tokens=False) if d.tokens else d for d in plan.draws]
    return dataclasses.replace(plan, conversions=edits, draws=draws)


def _difference(plan: Plan, planner: Planner, again: Plan, call: OtherCall, changed: set[Conversion]) -> str:
    """Returns how the values of a call differ, or "". The edits that are not those of the new plan are carried out:
    whether they are right, too, the values decide."""
    if plan.proof != "values" or not (call.by_values or changed):
        return _elsewhere(changed) if changed else ""
    rules = {name: from_notation(line) for name, line in plan.rules.items()}
    planner.proves_tokens = bool(again.tokens)
    try:
        prover = prover_of(planner, again, rules, BUDGET, call.apply, plan if changed else None)
        if changed:
            return prover.difference_with(again, plan) and _elsewhere(changed)
        return next(iter(prover.differences(again).values()), "")
    except UnprovenError as error:
        if changed:
            return _elsewhere(changed)
        # The shapes of this call are proven. Its values cannot be on this machine, which is no fault of the call
        warnings.warn(f"model: the values of this call are not proven, its shapes alone: {error}", stacklevel=2)
        return ""
