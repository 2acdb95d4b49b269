"""Modules of a sharded model that have been moved, wrapped or removed: a plan by the names that they have by now."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

from torch import nn

from tp_ext.auto.module_state import NEW, StateWatch
from tp_ext.auto.modules.boundary_edits import EnteredParameters
from tp_ext.auto.record.boundary import edits_at
from tp_ext.auto.record.edits import NAME
from tp_ext.auto.search.plans import Plan


def keep_names(model: nn.Module) -> None:
    """Writes the name of each module of a model into it: what a plan does there moves with the module."""
    for name, module in model.named_modules():
        vars(module)[NAME] = name


def edited_modules(plan: Plan) -> set[str]:
    """The modules that have shards, hooks or integers of a plan."""
    edits: list[Any] = [*plan.conversions, *plan.draws]
    owners = [name.rpartition(".")[0] for name in (*plan.shardings, *plan.buffers)]
    return {*owners, *plan.roles, *plan.patches, *plan.sizes, *(edit.module for edit in edits)}


def _names_now(model: nn.Module) -> dict[str, str]:
    """The name of a module when the plan was applied -> its name by now."""
    names: dict[str, str] = {}
    others: list[str] = []
    seen: set[int] = set()
    for name, module in model.named_modules(remove_duplicate=False):
        if NAME in vars(module):
            names.setdefault(vars(module)[NAME], name)
            others += [name] if id(module) in seen else []
        seen.add(id(module))
    return {**{name: name for name in others}, **names}  # of a module with several


def gone_modules(plan: Plan, model: nn.Module) -> set[str]:
    """The modules that a plan has changed and a model has no more."""
    return edited_modules(plan) - {*_names_now(model)}


def moved(plan: Plan, model: nn.Module) -> Plan:
    """A plan by the names that the modules of a model have by now, without what it does in those that are gone."""
    names = _names_now(model)
    if all(name == old for old, name in names.items()) and not gone_modules(plan, model):
        return plan

    def of_parameter(name: str) -> str | None:
        owner, _, attribute = name.rpartition(".")
        return f"{names[owner]}.{attribute}".lstrip(".") if owner in names else None

    def keyed(values: dict[str, Any]) -> dict[str, Any]:
        return {names[name]: value for name, value in values.items() if name in names}

    def edits(values: Iterable[Any]) -> list[Any]:
        return [dataclasses.replace(edit, module=names[edit.module]) for edit in values if edit.module in names]

    draws = [dataclasses.replace(d, caller=None if d.caller is None else names.get(d.caller)) for d in plan.draws]
    return dataclasses.replace(
        plan,
        shardings={new: s for name, s in plan.shardings.items() if (new := of_parameter(name)) is not None},
        tied=[[new for name in tied if (new := of_parameter(name)) is not None] for tied in plan.tied],
        roles=keyed(plan.roles),
        heads=[names[name] for name in plan.heads if name in names],
        conversions=edits(plan.conversions),
        draws=edits(draws),
        patches=keyed(plan.patches),
        sizes=keyed(plan.sizes),
    )


def refuse_copies(watch: StateWatch) -> None:
    """Raises RuntimeError if a model has got a copy of a module that is sharded, or of a parameter a computed one that
    takes its place where the gradient of the parameter is summed."""
    for name, module in watch.modules.items():
        if name.endswith(NEW) and NAME in vars(module):
            raise RuntimeError(
                f"model: {name.removesuffix(NEW)} is a copy of {vars(module)[NAME]}, which is sharded: add it to the "
                "unsharded model, and plan and apply after that"
            )
        for attribute in (n for e in edits_at(module, EnteredParameters) for n in (*e.divided, *e.copied)):
            if attribute not in module._parameters:
                raise RuntimeError(
                    f"model: {name}.{attribute} is computed from other parameters since the plan was applied, by "
                    "which its gradient is summed: register what computes it, and plan and apply after that"
                )
