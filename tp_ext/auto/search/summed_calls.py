"""Calls that sum over a sharded dim, such as the mean of an RMS norm over all heads, and complete the sum over the
ranks themselves.

The statistics are small, one number a token, so the call reduces them at once: what follows has the same on all ranks.
Where sharded work uses them, their gradient is partial, and is summed there, too: P to R, else P to I."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from torch import Tensor, nn

from tp_ext.auto.record.dims import Atom, atoms_in
from tp_ext.auto.record.edits import Conversion, Factor
from tp_ext.auto.record.operators import SUMMED_CALLS
from tp_ext.auto.record.record import ModuleCall, Record, Step
from tp_ext.auto.search.choose import Decision, carries
from tp_ext.auto.search.partial_sums import PartialSums
from tp_ext.auto.search.reasons import Problem
from tp_ext.conversions import I, P, R


class FlowWithSums(Protocol):
    """What the flow of a plan collects of such calls."""

    calls: list[Conversion]
    statistics: list[tuple[Conversion, Tensor]]
    problems: list[Problem]


class TypedRecord(Protocol):
    """What finds the communication of a plan."""

    record: Record
    chosen: list[Decision]
    sums: PartialSums
    sharded: set[int]
    whole_heads: set[Atom]
    partial_sums: set[int]
    used: dict[int, Any]
    outputs: set[int]


def find_summed_calls(finder: TypedRecord, flow: FlowWithSums) -> None:
    """Adds to the flow the conversion of each call that sums over a sharded dim, or why there is none."""
    record = finder.record
    of_calls: dict[str, dict[ModuleCall, list[Conversion]]] = {}
    blame: dict[str, set[Atom]] = {}
    for step in (record.steps[place] for place in sorted(finder.sums.by_call)):
        blame.setdefault(step.module, set()).update(finder.sums.atoms & atoms_in(step.contracted))
        call = next((c for c in record.calls if c.module == step.module and c.start <= step.place < c.stop), None)
        factor = _factor(finder, step)
        # Indices alone come of it, as of a codebook, whose code makes other calls in eval mode
        ids = {id(t) for t in step.outputs} & record.differentiable
        if ids and ids.isdisjoint((*finder.used, *finder.outputs, *finder.sharded)):
            text = f"the result of {step.reason} has no gradient"
            flow.problems.append(Problem(step.module, text))
            continue
        if call is None or factor is None:
            text = f"{step.reason} sums over a dim that has a sharded factor inside"
            flow.problems.append(Problem(step.module, text, blame=frozenset(blame[step.module])))
            continue
        conversion = _conversion(finder, step, call, *factor)
        of_calls.setdefault(step.module, {}).setdefault(call, []).append(conversion)
        # The sharded result of a norm is its first; behind it are the mean and the deviation
        results = step.outputs[:1] if id(step.outputs[0]) not in finder.sharded else step.outputs[1:]
        flow.statistics += [(conversion, t) for t in results if t.numel()]
    for module, by_call in of_calls.items():
        first = next(iter(by_call.values()))
        # The same function runs in each call: it knows a call by its number alone
        if any(by_call.get(call) != first for call in record.calls if call.module == module):
            text = f"{module or 'the model'} sums over a sharded dim in some of its calls only"
            flow.problems.append(Problem(module, text, blame=frozenset(blame[module])))
        flow.calls += first


def localize_norms(model: nn.Module, calls: Sequence[Conversion], rank: int, p: int) -> None:
    """Gives the norms of torch among the modules with such calls the size of a rank, which those on fakes compare."""
    for call in calls:
        module = model.get_submodule(call.module)
        if call.factor is not None and isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.normalized_shape = (call.factor.local_size(rank, p),)


def _conversion(finder: TypedRecord, step: Step, call: ModuleCall, dim: int, factor: Factor) -> Conversion:
    name, calls = SUMMED_CALLS[step.function], finder.record.python_calls
    same = [i for i in range(call.first, min(call.last, len(calls))) if calls[i][:2] == (step.module, name)]
    after = R if step.place in finder.partial_sums or id(step.outputs[0]) in finder.sharded else I
    return Conversion(step.module, "call", (name, same.index(step.index), len(same)), P, after, dim, factor)


def _factor(finder: TypedRecord, step: Step) -> tuple[int, Factor] | None:
    """The sharded dim of the tensor that an operator sums, from the end, and its shards; None: it has no such dim, or
    several."""
    x, record = step.inputs[0], finder.record
    chosen = [decision for decision in finder.chosen if carries(record, x, decision.sharded)]
    dims = [i for i, label in enumerate(record.dims_of(x)) if not atoms_in(label).isdisjoint(finder.sums.atoms)]
    # Sharded logits answer such calls themselves
    if len(chosen) != 1 or len(dims) != 1 or chosen[0].atom in finder.whole_heads:
        return None
    parts = chosen[0].parts(record.dims_of(x)[dims[0]])
    return None if parts is None else (dims[0] - x.dim(), Factor(tuple(parts)))
