"""From a model and an example to a plan: trace, decide, prove by shapes and by values."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tp_ext.auto.argument_checks import check_example, check_model, check_options
from tp_ext.auto.hints import check_hints, hint_of
from tp_ext.auto.one_rank import for_one_rank
from tp_ext.auto.plans import Plan
from tp_ext.auto.proven_plan import TOKENS, Prover, UnprovenError, kind_of
from tp_ext.auto.reasons import traced
from tp_ext.auto.rounds import POSSIBLE, Planner
from tp_ext.auto.rules import Rule, from_notation
from tp_ext.auto.unchanged import unchanged
from tp_ext.mesh_program.partition_spec import P

BUDGET = 2**30
LARGE = 0.01  # of all parameter bytes: what strict=True does not leave whole


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
) -> Plan:
    """Derives how a model is sharded over p ranks, from one run of its forward on fake tensors.

    Every dim is a product of atoms; every operator unifies, divides or pins atoms; those that nothing pins may be
    sharded, and of these the set is chosen that leaves the fewest bytes on a rank. Integers that the code reads, such
    as ``num_heads``, are found, and the shapes of all calls on a rank proven, before the plan is returned
    (docs/guide/auto.md).

    Args:
        model: any module, also on meta; it is not changed. Its forward must not branch on the values of tensors.
        example: arguments of forward: a dict of keyword arguments, or a tuple. With ``labels=`` or the like the loss is
            part of the plan, and logits stay sharded up to it.
        p: number of ranks.
        hints: pattern of names of modules or parameters -> ``"whole"``, ``"sharded"``, or the :class:`~tp_ext.P` of a
            parameter, such as ``P("tp", None)``. Of several patterns that fit, the longest counts.
        rules: ``"ns::op"`` -> a line of notation (:mod:`tp_ext.auto.rules`), for operators of your own.
        memory_budget: bytes of parameters that a rank may hold.
        sequence_parallel: whether activations between the sharded blocks are sharded on their tokens, where every
            operator there treats these one by one: True: wherever that is possible, and an error if it is nowhere;
            ``"auto"``: if it also makes activations smaller, and communicates at most 5 % more bytes of activations
            than without. The example must have at least p tokens.
        strict: a weight above 1 % of all parameter bytes that stays whole is an error.
        prove: ``"values"``: the model, of equal layers the first two, is run with random weights on p ranks, all in
            this process, and on one; weights by which outputs, gradients or buffers differ stay whole, with the reason.
            ``"shapes"``: only the shapes of all calls on a rank are compared, as they are in any case; this cannot see
            a number that is wrong. False: as ``"shapes"``, and ranks do not repeat it in :func:`apply`.
        budget: bytes of parameters that the proof by values may run; a larger model has its first layer run, or is
            proven by shapes alone, which its table says.

    Returns:
        The :class:`Plan`, the same on every rank of every process.

    Communicates nothing; needs no process group.

    Raises:
        ValueError: a rule that is no notation, or for no operator; a hint that fits nothing, or that cannot hold; a
            budget that cannot; a forward that branches on data, or that fails with the example; with ``strict``,
            weights that stay whole; with ``sequence_parallel=True``, a model in which no activation can be sharded on
            its tokens. TypeError: an argument of another type.
    """
    check_model(model)
    check_example(example)
    check_options(p, hints, rules, memory_budget, sequence_parallel, strict, prove, budget)
    own = {name: from_notation(line) for name, line in (rules or {}).items()}
    hints = dict(hints or {})
    check_hints(model, hints)
    planner = Planner(model, example, p, traced(model, example, own), hints, memory_budget, sequence_parallel)
    found = planner.decide() if p > 1 else _alone(planner)
    if prove == "values" and p > 1 and found.shardings:
        with unchanged(model):  # its class may keep things, too
            found = _proven(planner, found, own, budget)
    elif prove is False:
        found.proofs = []
    found.rules = dict(rules or {})
    _check_sharded(found, planner, hints, strict)
    return found


def _proven(planner: Planner, found: Plan, rules: Mapping[str, Rule], budget: float) -> Plan:
    """The plan whose values are proven: what differs is left whole, and all is decided again."""
    try:
        prover = _prover(planner, rules, budget)
        while True:
            planner.proves_tokens = bool(found.tokens)
            different = prover.differences(found)
            if not different:
                break
            planner.whole_tokens.update(different.pop(TOKENS, {}))
            for name in list(found.shardings):
                if kind_of(name) in different:
                    planner.why.setdefault(name, different[kind_of(name)])
            found = planner.decide()
            if not found.shardings:
                break
        found.proof = "values"
    except UnprovenError as error:
        found.proof = f"shapes: {error}"
    return found


def _prover(planner: Planner, rules: Mapping[str, Rule], budget: float) -> Prover:
    def planned(
        model: nn.Module, example: Any, p: int, only: Mapping[str, int], whole_tokens: Mapping[str, str] | None = None
    ) -> tuple[Plan, list[list[str]]]:
        record = traced(model, example, rules)
        tokens = POSSIBLE if planner.proves_tokens and p > 1 else False
        part = Planner(model, example, p, record, {}, None, tokens, only)
        part.whole_tokens = {**planner.whole_tokens, **(whole_tokens or {})}
        return part.decide() if p > 1 else _alone(part), part.together

    return Prover(planner.model, planner.example, planner.p, planned, budget)


def plan_again(plan: Plan, structure: nn.Module, example: Any) -> str:
    """Plans an unsharded model again, with another example; returns how that differs from a plan, or ""."""
    rules = {name: from_notation(line) for name, line in plan.rules.items()}
    record = traced(structure, example, rules)
    only = {name: sharding.dim for name, sharding in plan.shardings.items()}
    planner = Planner(structure, example, plan.p, record, {}, None, bool(plan.tokens), only)
    found = planner.decide()
    called = {call.module for call in record.calls}
    used = {id(t) for step in record.steps for t in step.inputs}
    # Logits have their full shape for any code, and are gathered where it needs that: a head that this code would
    # leave whole may stay sharded, with the sums of its input's gradient
    heads = {f"{head}.{own}" for head in plan.heads for own in ("weight", "bias")}
    heads |= {name for names in plan.tied if heads.intersection(names) for name in names}
    whole_heads = False
    for id_, (name, _) in record.parameters.items():
        if id_ not in used or found.shardings.get(name) == plan.shardings.get(name):
            continue
        if name not in heads or name in found.shardings:
            return f"{name} cannot be sharded then: {found.whole.get(name, 'it is sharded in another way')}"
        whole_heads = True
    gradients = ("copies",) if torch.is_grad_enabled() else ()
    for kind in (*gradients, "sums", "slices", "tokens"):
        own, wanted = set(getattr(plan, kind)), set(getattr(found, kind))
        changed = {edit for edit in (wanted - own if whole_heads else own ^ wanted) if edit.module in called}
        if changed:
            return f"it communicates elsewhere then, in {next(iter(changed)).module or 'the model'}"
    for module in called:
        if found.patches.get(module) != plan.patches.get(module) or found.sizes.get(module) != plan.sizes.get(module):
            return f"{module or 'the model'} reads other integers then"
    if found.gathers != plan.gathers or not {*found.heads} <= {*plan.heads}:
        return "it has other results with a sharded dim then"
    try:
        differences = _prover(planner, rules, BUDGET).differences(found) if plan.proof == "values" else {}
    except UnprovenError:
        return ""
    return next(iter(differences.values()), "")


def _alone(planner: Planner) -> Plan:
    """The plan of one rank: that of two without its shards, if there is one."""
    try:
        two = Planner(
            planner.model, planner.example, 2, planner.record, planner.hints, None, False, planner.only
        ).decide()
    except ValueError:
        two = planner.decide()
    return for_one_rank(two, planner.modules)


def _check_sharded(found: Plan, planner: Planner, hints: Mapping[str, str | P], strict: bool) -> None:
    total = sum(t.numel() * t.element_size() for _, t in planner.record.parameters.values())
    for name, tensor in planner.record.parameters.values():
        if name in found.shardings:
            continue
        asked = next((hint for alias in planner.names[name] if (hint := hint_of(hints, alias))), None)
        if found.p > 1 and (asked == "sharded" or (isinstance(asked, P) and asked.axes)):
            raise ValueError(f"hints: {name} cannot be sharded: {found.whole[name]}")
        size = tensor.numel() * tensor.element_size()
        if strict and size > LARGE * total and found.p > 1:
            raise ValueError(
                f"strict: {name}, {size / total:.0%} of all parameter bytes, stays whole: {found.whole[name]}"
            )
