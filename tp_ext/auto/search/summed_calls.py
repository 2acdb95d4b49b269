"""Calls that sum over a sharded dim, such as the mean of an RMS norm over all heads, and complete the sum over the
ranks themselves.

The statistics are small, one number a token, so the call reduces them at once: what follows has the same on all ranks.
Where sharded work uses them, their gradient is partial, and is summed there, too: P to R, else P to I."""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from tp_ext.auto.record.dims import Atom, atoms_in
from tp_ext.auto.record.edits import Conversion, Factor
from tp_ext.auto.record.operators import SUMMED_CALLS
from tp_ext.auto.record.record import ModuleCall, Step
from tp_ext.auto.search.choose import carries
from tp_ext.auto.search.flow import Flow
from tp_ext.auto.search.infer import InferredTypes
from tp_ext.auto.search.reasons import Problem
from tp_ext.conversions import I, P, R


def find_summed_calls(flow: Flow) -> None:
    """Adds to the flow the conversion of each call that sums over a sharded dim, or why there is none."""
    types, record = flow.types, flow.types.record
    of_calls: dict[str, dict[ModuleCall, list[Conversion]]] = {}
    blame: dict[str, set[Atom]] = {}
    for step in (record.steps[place] for place in sorted(types.by_call)):
        blame.setdefault(step.module, set()).update(types.atoms & atoms_in(step.contracted))
        call = next((c for c in record.calls_of.get(step.module, ()) if c.start <= step.place < c.stop), None)
        factor = _factor(types, step)
        # Indices alone come of it, as of a codebook, whose code makes other calls in eval mode
        ids = {id(t) for t in step.outputs} & record.differentiable
        users = [record.steps[place] for id_ in ids for place in record.uses.get(id_, ())]
        has_gradient = any(id_ in types.used or id_ in types.outputs or id_ in types.sharded for id_ in ids)
        if not has_gradient and any(not t.is_floating_point() for user in users for t in user.outputs):
            text = f"the result of {step.reason} has no gradient"
            flow.problems.append(Problem(step.module, text))
            continue
        if call is None or factor is None:
            text = f"{step.reason} sums over a dim that has a sharded factor inside"
            flow.problems.append(Problem(step.module, text, blame=frozenset(blame[step.module])))
            continue
        conversion = _conversion(types, step, call, *factor)
        of_calls.setdefault(step.module, {}).setdefault(call, []).append(conversion)
        # The sharded result of a norm is its first; behind it are the mean and the deviation
        results = step.outputs[:1] if id(step.outputs[0]) not in types.sharded else step.outputs[1:]
        flow.statistics += [(conversion, t) for t in results if t.numel()]
    for module, by_call in of_calls.items():
        first = next(iter(by_call.values()))
        # The same function runs in each call: it knows a call by its number alone
        if any(by_call.get(call) != first for call in record.calls_of[module]):
            text = f"{module or 'the model'} sums over a sharded dim in some of its calls only"
            flow.problems.append(Problem(module, text, blame=frozenset(blame[module])))
        flow.calls += first


def localize_norms(model: nn.Module, calls: Sequence[Conversion], rank: int, p: int) -> None:
    """Gives the norms of torch among the modules with such calls the size of a rank, which those on fakes compare."""
    for call in calls:
        module = model.get_submodule(call.module)
        if call.factor is not None and isinstance(module, nn.LayerNorm | nn.RMSNorm):
            module.normalized_shape = (call.factor.local_size(rank, p),)


def _conversion(types: InferredTypes, step: Step, call: ModuleCall, dim: int, factor: Factor) -> Conversion:
    name, calls = SUMMED_CALLS[step.function], types.record.python_calls
    same = [i for i in range(call.first, min(call.last, len(calls))) if calls[i][:2] == (step.module, name)]
    after = R if step.place in types.partial_sums or id(step.outputs[0]) in types.sharded else I
    return Conversion(step.module, "call", (name, same.index(step.index), len(same)), P, after, dim, factor)


def _factor(types: InferredTypes, step: Step) -> tuple[int, Factor] | None:
    """The sharded dim of the tensor that an operator sums, from the end, and its shards; None: it has no such dim, or
    several."""
    x, record = step.inputs[0], types.record
    chosen = [decision for decision in types.chosen if carries(record, x, decision.sharded)]
    dims = [i for i, label in enumerate(record.dims_of(x)) if not atoms_in(label).isdisjoint(types.atoms)]
    # Sharded logits answer such calls themselves
    if len(chosen) != 1 or len(dims) != 1 or chosen[0].atom in types.whole_heads:
        return None
    parts = chosen[0].parts(record.dims_of(x)[dims[0]])
    return None if parts is None else (dims[0] - x.dim(), Factor(tuple(parts)))
