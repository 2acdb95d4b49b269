"""The random calls of a traced model, with the dim along which what they mask is sharded."""

from __future__ import annotations

from dataclasses import replace

from tp_ext.auto.record.dims import Atom, atoms, atoms_in
from tp_ext.auto.record.edits import OTHER, Draw
from tp_ext.auto.record.operators import row_of
from tp_ext.auto.record.record import ModuleCall, RandomCall, Record
from tp_ext.auto.search.choose import constant_atoms, local_length
from tp_ext.auto.search.flow import Flow
from tp_ext.auto.search.reasons import Problem


def draws_of(flow: Flow, p: int) -> list[Draw]:
    """Returns the draws of each module: of its first call if all calls draw alike, else of every call."""
    finder, record = _DrawFinder(flow, p), flow.types.record
    by_module: dict[str, dict[ModuleCall, list[Draw]]] = {}
    for random_call in record.random_calls:
        of_module = by_module.setdefault(random_call.module, {})
        of_module.setdefault(random_call.call, []).append(finder.draw(random_call))
    draws = [Draw(module, OTHER, always=always) for module, always in record.other_draws.items()]
    for calls in by_module.values():
        first, *others = calls.values()
        if all(other == first for other in others):
            draws += first
            continue
        for call, of_call in calls.items():
            caller = call.caller.module if call.caller is not None else None
            number = _number(record, call)
            draws += [replace(draw, caller=caller, number=number) for draw in of_call]
    return draws


def _number(record: Record, call: ModuleCall) -> int:
    """The place of a call among those that its caller's call makes of the module."""
    before = record.calls[: call.order]
    return sum(earlier.module == call.module and earlier.caller is call.caller for earlier in before)


def undrawable(flow: Flow, p: int, carried_out: bool) -> list[Problem]:
    """Returns problems of random calls whose masks cannot be those of the full tensor, at the lengths of each run.

    Args:
        carried_out: the model is sharded, and runs a call that may not draw: where it draws, its hooks refuse it.
    """
    finder, record = _DrawFinder(flow, p), flow.types.record
    return [
        Problem(call.module, f"{call.name} masks a dim that has a sharded factor between lengths of the example")
        for call in record.random_calls
        if (call.draws or not carried_out) and (draw := finder.draw(call)).dim is not None and draw.factor is None
    ]


class _DrawFinder:
    def __init__(self, flow: Flow, p: int) -> None:
        record = self.record = flow.types.record
        # Logits have their full shape for the code, so masks of dropout on them are whole
        decisions = [decision for decision in flow.types.chosen if decision.atom not in flow.types.whole_heads]
        self.decisions, self.p, self.local, self.tokens = decisions, p, flow.local, flow.types.tokens
        self.constant, self.fixed = constant_atoms(record), constant_atoms(record, buffers=False)
        for step in record.steps:
            if (
                row_of(step.name).product and step.inputs[-1].dim() == 2
            ):  # the features of an input, which a weight fixes
                self.fixed |= set(atoms(step.contracted))
        self.sizes: list[dict[Atom, int]] = [{} for _ in range(p)]
        for decision in decisions:
            for rank, sizes in enumerate(self.sizes):
                sizes.update(decision.sizes(rank))

    def draw(self, call: RandomCall) -> Draw:
        dim, factor = None, None
        for i, label in enumerate(self.record.dims_of(call.masked) if id(call.masked) in self.local else ()):
            inside = atoms_in(label)
            for decision in self.decisions:
                if not inside.isdisjoint(decision.sharded):
                    dim, factor = i, decision.factor(label, self.constant)
        tokens = self.tokens.range_of_call(call.masked, call.index) if self.tokens else None
        dim = dim if tokens is None else tokens.dim
        shape = tuple(self.lengths(call, i, tokens is not None and i == dim) for i in range(call.masked.dim()))
        return Draw(call.module, call.name, dim, factor, tokens is not None, shape, call.always)

    def lengths(self, call: RandomCall, i: int, varies: bool) -> tuple[int, ...] | None:
        """The lengths of a dim on the ranks; None if a run may have others."""
        label, is_local = atoms(self.record.dims_of(call.masked)[i]), id(call.masked) in self.local
        is_attention = call.name != "dropout" and i >= call.masked.dim() - 2  # of the weights: lengths of tokens
        if varies or is_attention or not label or any(atom not in self.fixed for atom in label):
            return None
        return tuple(local_length(label, sizes if is_local else {}) for sizes in self.sizes)
