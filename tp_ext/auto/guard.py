"""Guards calls of a sharded model that its plan did not see: proven at their first occurrence, or an error.

A plan knows the code that its example runs. Another argument can lead to other code, which uses a sharded tensor in a
way that nothing has checked. So the kinds of the arguments of each call are compared with those that were proven; for
new ones the unsharded structure is planned and proven again, on fakes and by values, and what it communicates must be
what the model does."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tp_ext.auto.proof.copies import copied_model
from tp_ext.auto.proof.prove_values import Apply, UnprovenError
from tp_ext.auto.proof.proven_plan import BUDGET, prover_of
from tp_ext.auto.record.edits import Slice
from tp_ext.auto.record.forwards import named_arguments
from tp_ext.auto.record.rules import from_notation
from tp_ext.auto.record.trace import Arguments, arguments, trace
from tp_ext.auto.search.hints import PlanOptions
from tp_ext.auto.search.localize import argument_names
from tp_ext.auto.search.plans import Plan, example_for
from tp_ext.auto.search.reasons import traced
from tp_ext.auto.search.rounds import Planner


def structure_of(model: nn.Module) -> nn.Module:
    """A copy of a model without its weights, which are on meta; buffers are shared."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in module._parameters.values():
            if tensor is not None:
                memo[id(tensor)] = nn.Parameter(tensor.detach().to("meta"), requires_grad=tensor.requires_grad)
        memo.update((id(buffer), buffer) for buffer in module._buffers.values() if buffer is not None)
    return copied_model(model, memo)


class _OpaqueError(Exception):
    """An argument whose contents are not known, such as a cache."""


def signature(model: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> str | None:
    """The kinds of the arguments of a call: dims and kinds of tensors, values of switches; not lengths.

    Returns None if there is an object among them that no run on fakes can be given, such as a cache.
    """
    named = named_arguments(model, args, kwargs)
    named = {"args": args, **kwargs} if named is None else named
    try:
        return repr({key: _kind(value) for key, value in sorted(named.items())})
    except _OpaqueError:
        return None


def _kind(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.dim(), "float" if value.is_floating_point() else "bool" if value.dtype == torch.bool else "int"
    # Code branches on these values
    if value is None or isinstance(value, bool | str | torch.dtype | torch.device):
        return str(value)
    # Without its value: a scale that differs in each call would need a proof in each call
    if isinstance(value, int | float | complex):
        return type(value).__name__
    if isinstance(value, Mapping):
        return {str(key): _kind(inner) for key, inner in value.items()}
    # Exact types: a subclass may be a cache, which holds more than its items
    if type(value) in (list, tuple):
        return [_kind(inner) for inner in value]
    raise _OpaqueError


@dataclass
class Guard:
    """A forward pre-hook of a sharded model.

    Attributes:
        structure: the unsharded model without weights. apply: carries a plan out. proven: signatures of calls that
            have been proven. sizes: those with lengths for which the code is known to be the example's, or proven.
    """

    plan: Plan
    structure: nn.Module
    apply: Apply
    proven: set[str | None] = field(default_factory=set)
    sizes: set[Any] = field(default_factory=set)

    def __post_init__(self) -> None:
        args, kwargs = arguments(example_for(self.plan, self.structure))
        key = signature(self.structure, args, kwargs)
        self.proven |= {None, key}
        self.sizes.add((key, lengths(args, kwargs)))

    def __deepcopy__(self, memo: Any) -> Guard:
        return self  # plain data, the same for all copies of the model

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if self.plan.refused_inputs and torch.is_grad_enabled():
            self.refuse_partial_gradients(args, kwargs)
        # A run on fakes and a proof cannot be parts of a compiled graph
        if torch.compiler.is_compiling():
            return
        kinds = signature(self.structure, args, kwargs)
        key = kinds and f"{kinds} {torch.is_grad_enabled()}"  # sums of gradients do not matter without any
        # The example's kinds are there without the mode: its proof has run with gradients and without
        if key not in self.proven and kinds not in self.proven:
            self.convert_as(module)
            self.prove(args, kwargs)
            self.proven.add(key)
        elif key is not None and (size := (kinds, lengths(args, kwargs))) not in self.sizes:
            self.convert_as(module)
            if self.calls(args, kwargs) != self.calls(*arguments(example_for(self.plan, self.structure))):
                self.prove(args, kwargs)
            self.sizes.add(size)

    def convert_as(self, module: nn.Module) -> None:
        """Gives the structure the types that the parameters and buffers of the sharded model have by now."""
        for of in (nn.Module.named_parameters, nn.Module.named_buffers):
            types = {name: tensor.dtype for name, tensor in of(module)}
            for name, tensor in of(self.structure):
                tensor.data = tensor.data.to(types.get(name, tensor.dtype))  # in place: tied ones stay tied

    def calls(self, args: Any, kwargs: Any) -> list[tuple[str, str]]:
        """The calls that the code of the unsharded model makes, by modules and names; not their shapes."""
        record = trace(self.structure, _example(self.structure, args, kwargs), operators=False)
        return [call[:2] for call in record.python_calls]

    def refuse_partial_gradients(self, args: Any, kwargs: Any) -> None:
        """Raises RuntimeError if an argument wants a gradient that would be this rank's part of it."""
        names, named = argument_names(self.structure), named_arguments(self.structure, args, kwargs)
        if named is None:  # any number by position
            names, named = [], {**dict(zip(map(str, range(len(args))), args, strict=True)), **kwargs}
        for place, key, *rest in self.plan.refused_inputs:
            name = names[int(key)] if place == 0 and int(key) < len(names) else str(key)
            value = named.get(name)
            for inner in rest:
                value = value[inner] if value is not None else None
            if isinstance(value, Tensor) and value.requires_grad:
                raise RuntimeError(
                    f"{name}: has requires_grad=True, and its gradient would be partial; plan with an example whose "
                    f"{name} requires a gradient"
                )

    def prove(self, args: Any, kwargs: Any) -> None:
        """Plans the structure with these arguments, and compares.

        Raises:
            RuntimeError: the call communicates elsewhere, or its values are not those of the unsharded model.
        """
        example = _example(self.structure, args, kwargs)
        shown = sorted(example) if isinstance(example, dict) else "positional ones"
        advice = f"the plan's example shows no call with arguments of these kinds and lengths, {shown}: plan with one"
        try:
            problem = plan_again(self.plan, self.structure, example, self.apply)
        except ValueError as error:
            problem = str(error)
        if problem:
            raise RuntimeError(f"model: {advice}; {problem}")


def _example(structure: nn.Module, args: Any, kwargs: Any) -> Any:
    """The arguments of a call as an example on meta."""
    named = named_arguments(structure, args, kwargs)
    example = named if named is not None else Arguments(args, kwargs) if kwargs else args
    return tree_map(lambda x: _on_meta(x) if isinstance(x, Tensor) else x, example)


def _on_meta(x: Tensor) -> Tensor:
    return x.detach().to("meta").requires_grad_(x.requires_grad)


def lengths(args: Any, kwargs: Mapping[str, Any]) -> tuple[tuple[int, ...], ...]:
    """The orders of magnitude of the lengths of a call's tensors: code may take another path for one token, or many."""
    return tuple(
        tuple(n if n < 2 else n.bit_length() for n in leaf.shape)
        for leaf in tree_leaves((args, kwargs))
        if isinstance(leaf, Tensor)
    )


def _by_name(structure: nn.Module, edit: Any) -> Any:
    """An edit of an argument of the model by its name: this call's example has names where the plan's may have none."""
    of_argument = isinstance(edit, Slice) or "argument" in (getattr(edit, "kind", ""), getattr(edit, "at", ""))
    if edit.module or not of_argument or edit.path[0]:
        return edit
    names = argument_names(structure)
    number = edit.path[1]
    return dataclasses.replace(edit, path=(1, names[number], *edit.path[2:])) if number < len(names) else edit


def plan_again(plan: Plan, structure: nn.Module, example: Any, apply: Apply) -> str:
    """Plans an unsharded model again, with another example; returns how that differs from a plan, or ""."""
    rules = {name: from_notation(line) for name, line in plan.rules.items()}
    record = traced(structure, example, rules)
    # The shards exist: what the new plan may decide is only whether the same shards serve this call, too
    only = {name: sharding.dim for name, sharding in plan.shardings.items()}
    options = PlanOptions(sequence_parallel=bool(plan.tokens), invariant_blocks=plan.invariant_blocks, only=only)
    planner = Planner(structure, example, plan.p, record, options)
    again = planner.decide()
    called = {call.module for call in record.calls}
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
            return f"{name} cannot be sharded then: {again.whole.get(name, 'it is sharded in another way')}"
        whole_heads = True
    gradients = ("copies",) if torch.is_grad_enabled() else ()
    # Of modules that this call runs: what it does not run cannot be wrong in it. A head that stays sharded may have
    # sums more than the new plan has, none less
    for kind in (*gradients, "sums", "slices", "tokens"):
        edits, edits_now = ({_by_name(structure, edit) for edit in getattr(of, kind)} for of in (plan, again))
        changed = {edit for edit in (edits_now - edits if whole_heads else edits ^ edits_now) if edit.module in called}
        if changed:
            return f"it communicates elsewhere then, in {next(iter(changed)).module or 'the model'}"
    # The integers of a rank are set in the modules, for all calls of them
    for module in called:
        if again.patches.get(module) != plan.patches.get(module) or again.sizes.get(module) != plan.sizes.get(module):
            return f"{module or 'the model'} reads other integers then"
    # Hooks of the model gather its results in every call
    if again.gathers != plan.gathers or not {*again.heads} <= {*plan.heads}:
        return "it has other results with a sharded dim then"
    try:
        prover = prover_of(planner, again, rules, BUDGET, apply) if plan.proof == "values" and plan.p > 1 else None
        differences = prover.differences(again) if prover is not None else {}
    except UnprovenError:
        # The shapes of this call are proven. Its values cannot be on this machine, which is no fault of the call
        return ""
    return next(iter(differences.values()), "")
