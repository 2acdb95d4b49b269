"""Checks of the arguments of ``plan`` and ``apply``: before anything runs, with the same words on all ranks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from tp_ext._checks import check_bool, check_int
from tp_ext.auto.search.hints import PlanOptions
from tp_ext.auto.search.plans import Plan
from tp_ext.invariance import check_ranks, check_reproducible, refuse_call
from tp_ext.mesh_program.partition_spec import P
from tp_ext.nn.float8 import Float8Linear
from tp_ext.nn.low_bits import QuantizedLinear
from tp_ext.share_sizes import Weights, checked_weights, current_shares, ratios


def check_planned_model(model: Any) -> None:
    """Raises TypeError unless it is a module, ValueError if it has linears in few bits, which no rule shards."""
    if not isinstance(model, nn.Module):
        kind = f"the class {model.__name__}" if isinstance(model, type) else type(model).__name__
        raise TypeError(f"model: {kind} must be an nn.Module" + (", an object" if isinstance(model, type) else ""))
    for name, module in model.named_modules():
        if isinstance(module, Float8Linear | QuantizedLinear):
            raise ValueError(
                f"model: {name!r} was converted to float8 or quantised and must not be sharded then: shard first"
            )


def shares_of_plan(shares: Any, p: int, options: PlanOptions) -> Weights | None:
    """Returns the shares of p ranks, those of the context :func:`tp_ext.shares` unless they are given; None: equal.

    Raises:
        TypeError: they are no numbers. ValueError: they are no weights of p ranks, others than those of the context, or
            with an option that has no such form.
    """
    check_int(least=1, p=p)
    context = current_shares() if p > 1 else None
    if shares is None and context is None:
        return None
    weights = checked_weights(shares) if shares is not None else context.weights  # type: ignore[union-attr]
    if context is not None and ratios(weights) != ratios(context.weights):
        raise ValueError(f"shares: {list(weights)} must be those of tp_ext.shares, {list(context.weights)}")
    if len(weights) != p:
        raise ValueError(f"shares: {list(weights)} are {len(weights)} weights, and must be one for each rank, p = {p}")
    if p == 1:
        return None
    if not all(weights):
        raise ValueError(
            f"shares: {list(weights)} must be above 0: the code of a model of tp_ext.auto computes with a rank's "
            "shard; a model of layers of tp_ext may have a rank without any"
        )
    for weight in weights:
        if not isinstance(weight, int | float):
            raise TypeError(f"shares: {weight!r} must be an integer or a float, which the file of a plan holds")
    if options.invariant_blocks is not None:
        raise ValueError(f"shares: {list(weights)} must not be given with invariant_blocks, which cut dims by blocks")
    if context is not None and not context.tokens and options.sequence_parallel is not False:
        raise ValueError(
            f"shares: tokens=False must not be combined with sequence_parallel={options.sequence_parallel!r}: tokens "
            "of models of tp_ext.auto follow the shares"
        )
    # 2.0 is 2: files and ranks must have one text for it
    return tuple(int(weight) if weight == int(weight) else weight for weight in weights)


def problem_of_context(plan: Plan) -> str:
    """Returns why a plan must not be applied in the context :func:`tp_ext.shares`, or ""."""
    context = current_shares()
    if context is None or plan.p == 1:
        return ""
    if plan.shares is None or ratios(plan.shares) != ratios(context.weights):
        of_plan = None if plan.shares is None else list(plan.shares)
        return f"shares: those of the plan, {of_plan}, must be those of tp_ext.shares, {list(context.weights)}"
    return "shares: tokens=False must not be combined with a plan that shards tokens" * bool(
        plan.tokens and not context.tokens
    )


def check_is_no_layer(model: nn.Module) -> None:
    """Raises ValueError if the model is itself a layer that ``apply`` would have to replace."""
    if isinstance(model, nn.Linear | nn.MultiheadAttention):
        raise ValueError(
            f"model: a {type(model).__name__} must be inside of a module, such as nn.Sequential(model): another layer "
            "takes its place"
        )


def check_example(example: Any) -> None:
    """Raises TypeError unless an example is a dict of keyword arguments or a tuple."""
    if not isinstance(example, Mapping | tuple):
        raise TypeError(
            f"example: {type(example).__name__} must be a dict of keyword arguments or a tuple of arguments"
        )
    if isinstance(example, Mapping) and (wrong := [key for key in example if not isinstance(key, str)]):
        raise TypeError(f"example: the key {wrong[0]!r} must be the name of an argument of forward")


def check_plan_options(p: Any, options: PlanOptions, rules: Any, strict: Any, prove: Any, budget: Any) -> None:
    """Raises TypeError or ValueError unless ``plan`` takes these options."""
    check_int(least=1, p=p)
    check_bool(strict=strict)
    blocks, sequence_parallel = options.invariant_blocks, options.sequence_parallel
    if blocks is not None:
        check_int(least=1, invariant_blocks=blocks)
        check_ranks(blocks, p)
    if not isinstance(sequence_parallel, bool) and sequence_parallel != "auto":
        raise ValueError(f"sequence_parallel: {sequence_parallel!r} must be False, True or 'auto'")
    if blocks is not None and sequence_parallel:
        raise ValueError(f"sequence_parallel: {sequence_parallel!r} must be False with invariant_blocks = {blocks}")
    # Types first: the rules below iterate over patterns and lines
    for name, value in (("hints", options.hints), ("rules", rules)):
        if value is not None and not isinstance(value, Mapping):
            raise TypeError(f"{name}: {type(value).__name__} must be a dict")
        for key in value or ():
            if not isinstance(key, str):
                raise TypeError(f"{name}: the key {key!r} must be text")
    for pattern, value in options.hints.items():
        if not isinstance(value, P) and value not in ("whole", "sharded"):
            raise ValueError(f"hints: {pattern!r} is {value!r} and must be 'whole', 'sharded' or a P")
    # A misspelled operator would leave its rule unused, silently
    for operator, line in (rules or {}).items():
        if not isinstance(line, str):
            raise TypeError(f"rules: {operator!r} is {line!r} and must be a line of notation, such as 'b h, h -> b h'")
        if not re.fullmatch(r"\w+::\w+", operator) or not _is_known(operator):
            raise ValueError(f"rules: {operator!r} must be an operator, 'namespace::name', that torch knows by now")
    if prove is not False and prove not in ("values", "shapes"):
        raise ValueError(f"prove: {prove!r} must be 'values', 'shapes' or False")
    for name, value in (("memory_budget", options.memory_budget), ("budget", budget)):
        # True is an int in Python
        number = isinstance(value, int | float) and not isinstance(value, bool) and value > 0
        if not number and not (name == "memory_budget" and value is None):
            raise ValueError(f"{name}: {value!r} must be a positive number of bytes")


def _is_known(operator: str) -> bool:
    return any(name.partition(".")[0] == operator for name in torch._C._dispatch_get_all_op_names())


def check_blocks_of(plan: Any, blocks: Any) -> None:
    """Raises ValueError unless a plan has the blocks that ``apply`` is given, if any, or in ``tp_invariant`` some, and
    RuntimeError if it has and products are not reproducible."""
    of_plan = getattr(plan, "invariant_blocks", None)
    if blocks is not None and blocks != of_plan:
        raise ValueError(
            f"invariant_blocks: {blocks!r} must be that of the plan, {of_plan}: auto.plan(.., invariant_blocks=..)"
        )
    if of_plan is None:
        refuse_call("auto.apply", "make the plan with invariant_blocks=, or build the model of layers of tp_ext")
    else:
        check_reproducible()


def check_apply(plan: Any, model: Any, verify: Any, example: Any) -> None:
    """Raises TypeError or ValueError unless ``apply`` takes these arguments."""
    if not isinstance(plan, Plan):
        raise TypeError(f"plan: {type(plan).__name__} must be a Plan, of tp_ext.auto.plan or Plan.load")
    check_planned_model(model)
    check_bool(verify=verify)
    if verify and example is None:
        raise ValueError("example: None must be the arguments of forward, for verify=True")
    if example is not None:
        check_example(example)
    if getattr(model, "tp_ext_plan", None) is not None:
        raise ValueError(f"model: {type(model).__name__} is sharded by a plan and must not be sharded again")
