"""``auto.apply``: a plan carried out on a model."""

from __future__ import annotations

import warnings
from typing import Any

from torch import nn

from tp_ext.auto.argument_checks import check_blocks_of, problem_of_context
from tp_ext.auto.check_applied import whole_matrices
from tp_ext.auto.execute import apply_quietly
from tp_ext.auto.planner import replan_in_blocks
from tp_ext.auto.search.plans import Plan
from tp_ext.group import Group, parallel_group


def apply(
    plan: Plan,
    model: nn.Module,
    group: Group,
    *,
    verify: bool = False,
    example: Any = None,
    invariant_blocks: int | None = None,
) -> nn.Module:
    """Shards a model by a plan, in place: forward code, names and state-dict keys stay.

    Linear layers become :class:`~tp_ext.ColumnParallelLinear` and :class:`~tp_ext.RowParallelLinear`; other sharded
    parameters stay in their modules, which have :class:`~tp_ext.Layout` declared. Gradients are complete after
    ``backward()``. Dropout draws the masks of one process. Logits sharded over the vocabulary have their full shape for
    the model's own code, whose cross entropy and arg-max do not gather them.

    Args:
        plan: of this model, for as many ranks as the group has.
        model: with the same full weights on all ranks, or on meta: then its shards are on meta, too.
        group: the ranks: a process group, 1-D mesh or group name.
        verify: compare the loss, or else all outputs, every gradient and buffers with a copy of the unsharded
            model.
        example: the arguments for ``verify``: a dict of keyword arguments or a tuple.
        invariant_blocks: the plan's, by default: the training has the same bits for every number of ranks, as with
            layers built in :func:`tp_ext.tp_invariant`. A plan without is made again with it.

    Returns:
        The model; ``model.tp_ext_plan`` is the plan. Rank 0 warns if more than 10 % of the bytes of matrices stay whole
        and no hint asks for that.

    Communicates: one all-gather of fingerprints, before anything is changed; with ``verify`` a forward and a backward.

    Raises:
        ValueError: on all ranks, before anything is changed: the plan is for another number of ranks or another model;
            ranks have different plans or models; the model is sharded by a plan; ``verify`` without ``example``; other
            ``invariant_blocks`` than the plan's; in :func:`tp_ext.shares`, other shares than the plan's. After it:
            ``verify`` finds a difference. RuntimeError: with blocks, products are not reproducible in this process.
            TypeError: an argument of another type.
    """
    if invariant_blocks is not None and isinstance(plan, Plan) and plan.invariant_blocks is None:
        plan = replan_in_blocks(plan, model, invariant_blocks)
    check_blocks_of(plan, invariant_blocks)
    problem = problem_of_context(plan) if isinstance(plan, Plan) else ""
    applied = apply_quietly(plan, model, group, verify=verify, example=example, problem=problem)
    if parallel_group(group).rank == 0 and (text := whole_matrices(plan)):
        warnings.warn(text, stacklevel=2)
    return applied
