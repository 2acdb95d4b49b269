"""Which plans have the same bits for every number of ranks: what is computed on shards must not depend on their cut.

With ``invariant_blocks`` the sharded dims are cut into the blocks of :func:`tp_ext.tp_invariant`. Linear layers and the
cross entropy over a vocabulary sum by one tree over the blocks. What else works on shards is allowed if it moves
elements, or computes each of them by itself with the same bits wherever it lies; some functions of torch are replaced
by others for that. Anything else is refused by name, by the plan and so on every rank alike, before any collective."""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

from torch import Tensor, nn

from tp_ext.auto.record.dims import Atom
from tp_ext.auto.record.edits import DirectCall
from tp_ext.auto.record.operators import OPERATORS, functions, row_of
from tp_ext.auto.record.record import Step
from tp_ext.auto.search.choose import carries
from tp_ext.auto.search.flow import Flow
from tp_ext.auto.search.infer import PARTIAL
from tp_ext.auto.search.localize import is_conv1d
from tp_ext.conversions import I, S

if TYPE_CHECKING:
    from tp_ext.auto.search.plans import Plan

POWERS = (2, 3)
REPLACED = {name: functions(row.replaced) for name, row in OPERATORS.items() if row.replaced}
"""Operators whose result depends on the shard or the number of threads -> the functions that are replaced in calls of
the model (:mod:`tp_ext.auto.modules.block_functions`)."""


def plan_in_blocks(plan: Plan, flow: Flow, modules: Mapping[str, nn.Module], blocks: int) -> Plan:
    """Returns the plan with its blocks and the modules in which functions are replaced.

    Raises:
        ValueError: it computes something whose bits depend on the number of ranks; with the module and the operator.
    """
    check = _Check(flow)
    check.layers(plan.roles, modules)
    check.sums()
    for step in check.steps_on_shards(plan.roles):
        if text := _dependence(step) or check.broadcast(step):
            check.refuse(step.module, text, (*step.inputs, *step.outputs))
    functions = {step.module for step in check.record.steps if _base(step) in REPLACED}
    functions |= {draw.module for draw in plan.masks} | {draw.caller for draw in plan.masks if draw.caller is not None}
    return replace(
        plan,
        invariant_blocks=blocks,
        functions=sorted(functions),
        direct_calls=list(map(_without_sums, plan.direct_calls)),
    )


def whole_advice(name: str) -> str:
    """Returns the advice to leave a parameter whole in all layers."""
    pattern = re.sub(r"(?<=\.)\d+(?=\.)", "*", name)
    return f"hints={{{pattern!r}: 'whole'}} leaves it whole for every number of ranks"


class _Check:
    """Refuses what a plan computes with other bits for other numbers of ranks."""

    def __init__(self, flow: Flow) -> None:
        self.flow, self.types, self.record = flow, flow.types, flow.types.record

    def refuse(self, module: str, text: str, operands: Iterable[Tensor] = (), atoms: Collection[Atom] = ()) -> None:
        """Raises ValueError, with a parameter to leave whole: one that the operands or the atoms shard."""
        operands = list(operands)
        for decision in self.types.chosen:
            if set(decision.sharded) & set(atoms) or any(carries(self.record, t, decision.sharded) for t in operands):
                advice = whole_advice(next(iter(decision.parameters)))
                break
        else:
            advice = "hints must leave what it reads whole"
        raise ValueError(
            f"invariant_blocks: {module or 'the model'} {text}: its bits would depend on the ranks; {advice}"
        )

    def layers(self, roles: Mapping[str, str], modules: Mapping[str, nn.Module]) -> None:
        for name, role in roles.items():
            module = modules[name]
            if role == "attention" or not (isinstance(module, nn.Linear | nn.Embedding) or is_conv1d(module)):
                own = [t for n, t in self.record.parameters.values() if n.startswith(f"{name}.")]
                self.refuse(name, f"is a sharded {type(module).__name__}, which has no form in blocks", own)

    def sums(self) -> None:
        """Refuses sums of one term of each rank, which layers in blocks do not make."""
        types, record = self.types, self.record
        for partial in self.flow.sums:
            ids = [id_ for id_, module in types.partial.items() if module == partial.module]
            atoms = frozenset[Atom]().union(*(types.blame.get(id_, frozenset()) for id_ in ids))
            self.refuse(partial.module, "returns a sum of one term of each rank", atoms=atoms)
        names = {id_: name for id_, (name, _) in record.parameters.items()}
        for copy, tensor in zip(self.flow.copies, self.flow.copied, strict=True):
            if id(tensor) in record.differentiable:
                uses = [place for place, of_use in types.used.get(id(tensor), ()) if PARTIAL in of_use]
                used = f" in {record.steps[uses[0]].reason}" if uses else ""
                text = f"has a gradient that is a sum of one term of each rank{used}"
                self.refuse(names.get(id(tensor), copy.module), text, atoms=types.blamed(uses))

    def broadcast(self, step: Step) -> str:
        """Returns a text if an operator sums the gradient of a tensor that it broadcasts, else ""."""
        if row_of(_base(step)).exact not in ("pointwise", "scaled"):
            return ""
        size = max(tensor.numel() for tensor in step.outputs)
        is_summed = any(id(t) in self.record.differentiable and t.numel() < size for t in step.inputs)
        return f"broadcasts a tensor in {step.reason} on shards, and sums its gradient" if is_summed else ""

    def steps_on_shards(self, roles: Mapping[str, str]) -> Iterator[Step]:
        """The operators on shards outside of layers. Logits keep their full shape for the model's code, which gathers
        them for other functions than those of tp_ext."""
        inside = [atom for atom in self.types.atoms if atom not in self.types.whole_heads]
        for step in self.record.steps:
            if step.module in roles or step.is_loss:
                continue
            if any(carries(self.record, tensor, inside) for tensor in (*step.inputs, *step.outputs)):
                yield step


def _base(step: Step) -> str:
    return step.name if step.name in REPLACED else step.name.removesuffix("_")


def _dependence(step: Step) -> str:
    """Returns a text if the result of an operator on shards would depend on their sizes, else ""."""
    name, last, scaled = _base(step), step.inputs[0].dim() - 1, step.kwargs.get("alpha", 1) != 1
    if name in REPLACED:
        # What takes its place is for [batch, heads, tokens, head_dim] alone
        if name == "scaled_dot_product_attention":
            return "" if last == 3 else f"computes {step.reason} on shards that are not 4-D"
        # An operator inside of another function, such as einsum, is not replaced
        is_view = name == "expand" and step.outputs[0].numel() == step.inputs[0].numel()
        # matmul expands the batch dims of its factors itself, and is replaced as a whole
        if not is_view and step.function not in REPLACED[name] | (REPLACED["bmm"] if name == "expand" else set()):
            called = getattr(step.function, "__name__", "code without a function of torch")
            return f"computes {step.reason} on shards by {called}"
        # What takes its place computes along the last dim alone
        is_last = name != "_softmax" or step.args[1] in (-1, last)
        return "" if is_last else f"computes {step.reason} on shards over another dim than the last"
    # Squares and cubes are products. Other powers, and quotients that are rounded, are not known to have the same bits
    # at every place
    exponent = step.args[1] if len(step.args) > 1 else None
    odd_power = name == "pow" and (isinstance(exponent, Tensor) or exponent not in POWERS)
    rounded = name == "div" and step.kwargs.get("rounding_mode") is not None
    exact = row_of(name).exact
    if exact and not (odd_power or rounded or (scaled and exact == "scaled")):
        return ""
    return f"computes {step.reason} on shards{' with alpha' if scaled else ''}"


def _without_sums(direct: DirectCall) -> DirectCall:
    """A direct call, refused if it would add terms of the ranks, or slices of them."""
    if all(edit.types == (S, I) for edit in (*direct.values, *direct.gradients)):
        return direct
    text = "it would add one term of each rank, with invariant_blocks"
    return direct.without(text)
