"""Derives a plan from a model and an example: traces it, chooses what to shard, places the collectives, and proves the
result by shapes and by values. What cannot be proven stays replicated."""

from __future__ import annotations

import contextlib
import gc
import itertools
import warnings
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from tp_ext.auto.argument_checks import (
    check_example,
    check_is_no_layer,
    check_plan_options,
    check_planned_model,
    shares_of_plan,
)
from tp_ext.auto.check_applied import WHOLE_BY_HINT
from tp_ext.auto.execute import apply_in_proof
from tp_ext.auto.fits import trained_buffer
from tp_ext.auto.proof.prove_values import UnprovenError
from tp_ext.auto.proof.proven_plan import BUDGET, alone, prover_of
from tp_ext.auto.record import progress
from tp_ext.auto.record.arguments import autocast, without_modes
from tp_ext.auto.record.rules import Rule, from_notation
from tp_ext.auto.record.unchanged import unchanged
from tp_ext.auto.search.hints import PlanOptions, check_hints, hint_of
from tp_ext.auto.search.in_blocks import whole_advice
from tp_ext.auto.search.plans import Plan, example_for, has_example
from tp_ext.auto.search.reasons import TOKEN_SUMS, kind_of, traced
from tp_ext.auto.search.rounds import Planner
from tp_ext.mesh_program.partition_spec import P

LARGE_SHARE = 0.01  # of all parameter bytes: what strict=True does not leave whole


def plan(
    model: nn.Module,
    example: Mapping[str, Any] | tuple[Any, ...],
    p: int,
    *,
    hints: Mapping[str, str | P] | None = None,
    rules: Mapping[str, str] | None = None,
    memory_budget: float | None = None,
    sequence_parallel: bool | str = False,
    strict: bool = False,
    prove: str | bool = "values",
    budget: float = BUDGET,
    invariant_blocks: int | None = None,
    shares: Iterable[float] | None = None,
) -> Plan:
    """Derives how a model is sharded over p ranks, from one run of its forward on fake tensors.

    Every dim is a product of atoms; every operator unifies, divides or pins atoms; those that nothing pins may be
    sharded, and of these the set is chosen that leaves the fewest bytes on a rank. Integers that the code reads, such
    as ``num_heads``, are found, and the shapes of all calls on a rank proven, before the plan is returned
    (docs/guide/auto.md).

    Args:
        model: any module, also on meta; it is not changed. Its forward must not branch on the values of activations.
        example: arguments of forward: a dict of keyword arguments, or a tuple; those of which forward reads numbers,
            such as masks and lengths, with their values. With ``labels=`` or the like the loss is
            part of the plan, and logits stay sharded up to it.
        p: number of ranks.
        hints: pattern of names of modules or parameters -> ``"whole"``, ``"sharded"``, or the :class:`~tp_ext.P` of a
            parameter, such as ``P("tp", None)``. Of several patterns that fit, the longest counts.
        rules: ``"ns::op"`` -> a line of notation (:mod:`tp_ext.auto.record.rules`), for operators of your own.
        memory_budget: bytes of parameters that a rank may hold.
        sequence_parallel: whether activations between the sharded blocks are sharded on their tokens, where every
            operator there treats these one by one: True: wherever that is possible, and an error if it is nowhere;
            ``"auto"``: if it also makes activations smaller, and communicates at most 5 % more bytes of activations
            than without. The example must have at least p tokens.
        strict: a weight above 1 % of all parameter bytes that stays whole is an error, and so are values that could not
            be proven, of which a warning says so otherwise.
        prove: ``"values"``: the model, of equal layers the first two, is run with random weights on p ranks, all in
            this process, and on one; weights by which outputs, gradients or buffers differ stay whole, with the reason.
            ``"shapes"``: only the shapes of all calls on a rank are compared, as they are in any case; this cannot see
            a number that is wrong. False: as ``"shapes"``, and ranks do not repeat it in :func:`apply`.
        budget: bytes of parameters that the proof by values may run; a larger model is run with fewer layers, else with
            fewer heads and features, or is proven by shapes alone, which its table says.
        invariant_blocks: the number of blocks into which sharded dims are cut, as in :func:`tp_ext.tp_invariant`, also
            for p = 1: the model that :func:`apply` makes then trains to the same bits for every p up to it.
        shares: one number above 0 for each rank, which has that share of each sharded dim, and of tokens, as in
            :func:`tp_ext.shares`; default: that of the context. What would leave a rank without a unit stays whole.

    Returns:
        The :class:`Plan`, the same on every rank of every process.

    Communicates nothing; needs no process group.

    Raises:
        ValueError: a rule that is no notation, or for no operator; a hint that fits nothing, or that cannot hold; a
            budget that cannot; a forward that branches on data, or that fails with the example; a buffer that requires
            a gradient; with ``strict``, weights that stay whole; with ``sequence_parallel=True``, a model in which no
            activation can be sharded on its tokens; a model that is itself a linear or an ``nn.MultiheadAttention``;
            with ``invariant_blocks``: fewer than p, sequence parallelism, a rank that would have no unit of a sharded
            dim, and operators whose bits would depend on p, by module, name and line; shares that are not p numbers
            above 0, others than those of the context, or with ``invariant_blocks``. TypeError: an argument of another
            type.
    """
    check_planned_model(model)
    check_example(example)
    options = PlanOptions({} if hints is None else hints, memory_budget, sequence_parallel, invariant_blocks)
    check_plan_options(p, options, rules, strict, prove, budget)
    options = replace(options, shares=shares_of_plan(shares, p, options))
    check_is_no_layer(model)
    if p > 1 and (problem := trained_buffer(model)):
        raise ValueError(f"model: {problem}")
    user_rules = {name: from_notation(line) for name, line in (rules or {}).items()}
    check_hints(model, options.hints)
    with progress.shown(), _old_objects_apart():
        try:
            with without_modes():
                result, planner = _planned(model, example, p, user_rules, options, prove, budget)
        except ValueError:
            if not autocast():
                raise
            # It may have no other types with which it runs
            result, planner = _planned(model, example, p, user_rules, options, prove, budget)
    result.rules = dict(rules or {})
    _check_sharded(result, planner, strict)
    _check_proof(result, strict)
    return result


@contextlib.contextmanager
def _old_objects_apart() -> Iterator[None]:
    """Leaves what exists now out of collections of garbage, which the many new objects start and which would walk
    through all libraries each time: a fifth of a plan."""
    # Of a program that has frozen its own objects, `unfreeze` would free these, too
    if gc.get_freeze_count():
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _planned(
    model: nn.Module,
    example: Any,
    p: int,
    rules: Mapping[str, Rule],
    options: PlanOptions,
    prove: str | bool,
    budget: float,
) -> tuple[Plan, Planner]:
    """Returns the plan of arguments that have been checked, and what has made it."""
    progress.step("tracing the model")
    record = traced(model, example, rules)
    planner, blocks = Planner(model, example, p, record, options), options.invariant_blocks
    if blocks is not None and p != (fewest := min(2, blocks)):
        # What is sharded must not depend on p: what two ranks shard
        of_two = Planner(model, example, fewest, record, options)
        planner.only = _shared(_decided(of_two, prove, rules, budget), p)
    result = _decided(planner, prove, rules, budget)
    if planner.only is not None:
        _check_same(planner.only, result)
    if prove is False:
        result.proofs = []
    return result, planner


def replan_in_blocks(of: Plan, model: nn.Module, blocks: int) -> Plan:
    """Returns the plan of the same model and example with ``invariant_blocks``, for ``apply``: it may shard other dims,
    the same for every number of ranks.

    Raises:
        ValueError: as :func:`plan`, or the plan does not keep its example.
    """
    if not has_example(of):
        raise ValueError("invariant_blocks: must be given to auto.plan, since this plan does not keep its example")
    hints = {name: "whole" for name, reason in of.whole.items() if reason.startswith(WHOLE_BY_HINT)}
    tokens = bool(of.tokens)
    example = example_for(of, model)
    options: dict[str, Any] = {"invariant_blocks": blocks, "shares": of.shares}
    return plan(model, example, of.p, hints=hints, rules=of.rules, sequence_parallel=tokens, **options)


def _decided(planner: Planner, prove: str | bool, rules: Mapping[str, Rule], budget: float) -> Plan:
    """The plan of a planner, proven by values if that is asked for."""
    result = planner.decide() if planner.p > 1 or planner.blocks else alone(planner)
    if prove == "values" and planner.p > 1 and result.shardings:
        with unchanged(planner.model):  # its class may keep things, too
            result = _proven(planner, result, rules, budget)
    return result


def _shared(plan: Plan, p: int) -> dict[str, int]:
    """The parameters that a plan in blocks shards, with the dim.

    Raises:
        ValueError: one of p ranks would have nothing of one of them.
    """
    for name, sharding in plan.shardings.items():
        for part, rank in itertools.product(sharding.parts, range(p)):
            start, stop = part.span(rank, p)
            if start == stop:
                has = f"{name} has {part.size // part.unit} units of {part.unit} in {part.blocks} blocks"
                advice = whole_advice(name)
                raise ValueError(f"invariant_blocks: {has}, and rank {rank} of {p} would have none; {advice}")
    return {name: sharding.dim for name, sharding in plan.shardings.items()}


def _check_same(only: Mapping[str, int], plan: Plan) -> None:
    """Raises ValueError unless a plan in blocks shards what that of two ranks does."""
    for name in only:
        if name not in plan.shardings:
            raise ValueError(
                f"invariant_blocks: {name} is sharded over two ranks and cannot be over {plan.p}: "
                f"{plan.whole[name]}; {whole_advice(name)}"
            )


def _proven(planner: Planner, plan: Plan, rules: Mapping[str, Rule], budget: float) -> Plan:
    """The plan whose values are proven: what differs is left whole, and all is decided again."""
    try:
        prover = prover_of(planner, plan, rules, budget, apply_in_proof)
        while True:
            # The reduced model must shard tokens exactly if the plan does, or another plan would be proven
            planner.proves_tokens = bool(plan.tokens)
            different = prover.differences(plan)
            if not different:
                break
            planner.whole_tokens.update(different.pop(TOKEN_SUMS, {}))
            # By kind: of equal layers only the first two have run
            for name in list(plan.shardings):
                if kind_of(name) in different:
                    planner.why.setdefault(name, different[kind_of(name)])
            plan = planner.decide()
            if not plan.shardings:
                break
        plan.proof = "values"
    except UnprovenError as error:
        # Not an error: the shapes are proven, and the plan says that the values are not
        plan.proof = f"shapes: {error}"
    return plan


def _check_proof(plan: Plan, strict: bool) -> None:
    """Warns that values could not be proven, which ``strict`` refuses."""
    _, _, reason = plan.proof.partition(": ")
    if not reason:
        return
    text = f"the values of the plan are not proven, its shapes alone: {reason}"
    if strict:
        raise ValueError(f'strict: {text}; prove="shapes" asks for no more')
    warnings.warn(f"model: {text}; auto.apply(.., verify=True) compares them in the real group", stacklevel=3)


def _check_sharded(plan: Plan, planner: Planner, strict: bool) -> None:
    total = sum(t.numel() * t.element_size() for _, t in planner.record.parameters.values())
    for name, tensor in planner.record.parameters.values():
        if name in plan.shardings:
            continue
        asked = next((hint for alias in planner.names[name] if (hint := hint_of(planner.hints, alias))), None)
        if plan.p > 1 and (asked == "sharded" or (isinstance(asked, P) and asked.axes)):
            raise ValueError(f"hints: {name} cannot be sharded: {plan.whole[name]}")
        size = tensor.numel() * tensor.element_size()
        if strict and size > LARGE_SHARE * total and plan.p > 1:
            raise ValueError(
                f"strict: {name}, {size / total:.0%} of all parameter bytes, stays whole: {plan.whole[name]}"
            )
