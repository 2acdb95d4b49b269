"""Guards calls of a sharded model that its plan did not see: proven at their first occurrence, or an error.

A plan knows the code that its example runs. Another argument can lead to other code, which uses a sharded tensor in a
way that nothing has checked. So the kinds of the arguments of each call are compared with those that were proven; for
new ones the unsharded structure is planned and proven again, on fakes and by values, and what it communicates must be
what the model does."""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import TransformType, get_interpreter_stack
from torch._dynamo.eval_frame import skip_code
from torch._functorch.pyfunctorch import temporarily_clear_interpreter_stack

from tp_ext.auto.module_state import (
    HOOKS,
    SHARED,
    Baseline,
    Path,
    StatePlace,
    StateWatch,
    is_hidden,
    sentence,
)
from tp_ext.auto.modules.call_edits import begin_call
from tp_ext.auto.moved import gone_modules, moved, refuse_copies
from tp_ext.auto.plan_again import plan_again
from tp_ext.auto.proof.copies import copied_model
from tp_ext.auto.proof.prove_values import Apply
from tp_ext.auto.record.arguments import autocast, without_modes
from tp_ext.auto.record.edits import CallEdits
from tp_ext.auto.record.flow import CallFlow, flow_of, is_number, on_meta
from tp_ext.auto.record.forwards import argument_names, named_arguments
from tp_ext.auto.record.numbers import ReadNumbers
from tp_ext.auto.record.trace import Arguments, arguments
from tp_ext.auto.search.localize import leaf_at
from tp_ext.auto.search.plans import Plan, example_for, has_example
from tp_ext.auto.signature import numbers_of, signature
from tp_ext.auto.synced import Synced
from tp_ext.auto.traced_calls import look_while_traced
from tp_ext.group import ParallelGroup

FEW_RECORDS = 4  # flows of one kind of call, each for its own lengths and numbers, before symbols stand for these
MAX_SEEN = 10_000
MAX_READ = 64  # calls of one kind whose numbers are compared; for others the flow is recorded again
MAX_PROOFS = 32  # by values, of calls whose code reads numbers from arguments
FEW_NUMBERS = 4  # proven by values with the same functions, before others are by shapes


def structure_of(model: nn.Module) -> nn.Module:
    """A copy of a model without its weights, which are on meta; buffers are shared."""
    memo: dict[int, Any] = {}
    for module in model.modules():
        for tensor in module._parameters.values():
            if tensor is not None:
                memo[id(tensor)] = new = nn.Parameter(tensor.detach().to("meta"), requires_grad=tensor.requires_grad)
                new.__dict__.update(tensor.__dict__)
        memo.update((id(buffer), buffer) for buffer in module._buffers.values() if buffer is not None)
    return copied_model(model, memo)


@dataclass
class ProvenCall:
    """A call that is proven: the kinds and state with the numbers of which its flow was recorded, and what it does
    otherwise than the example at the boundaries of the model."""

    sizes: str
    fixed: Any
    with_gradients: bool
    edits: CallEdits | None = None


@dataclass
class Guard:
    """A forward pre-hook of a sharded model.

    Attributes:
        structure: the unsharded model without weights. apply: carries a plan out. base: the state of the sharded
            model as the plan was applied. seen: calls that are proven, with what they do otherwise than the example at
            the boundaries of the model. read: those whose code reads numbers from arguments, with these, the last ones
            of each kind. number_proofs: how many of them were proven. flows: what they call, by digests. regions: tests
            of other lengths and numbers with which the calls of a kind have the same flow. records: how many flows of a
            kind have been recorded. modes: those of the modules in which the example's is known. dtype: torch's default
            when the plan was applied. ignored: attributes
            that forward itself sets before it reads them; None: not looked for yet. watches: of each copy of the model.
    """

    plan: Plan
    structure: nn.Module
    apply: Apply
    group: ParallelGroup
    base: Baseline
    seen: dict[Any, CallEdits | None] = field(default_factory=dict)
    read: dict[Any, collections.deque[tuple[ReadNumbers, CallEdits | None]]] = field(default_factory=dict)
    number_proofs: int = 0
    flows: dict[Any, list[ProvenCall]] = field(default_factory=dict)
    regions: dict[Any, list[tuple[Callable[[Sequence[Any]], bool], CallEdits | None]]] = field(default_factory=dict)
    records: collections.Counter[Any] = field(default_factory=collections.Counter)
    modes: set[tuple[bool, ...]] = field(default_factory=set)
    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    ignored: set[Path] | None = None
    watches: weakref.WeakKeyDictionary[nn.Module, tuple[StateWatch, dict[Path, str]]] = field(
        default_factory=weakref.WeakKeyDictionary
    )

    def __deepcopy__(self, memo: Any) -> Guard:
        return self  # what it has of a model is by its names, the same for all copies

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "regions": {}, "read": {}, "watches": None}  # these hold functions and models

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update({**state, "watches": weakref.WeakKeyDictionary()})

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> Any:
        if torch.compiler.is_compiling():
            look_while_traced(self, module, args, kwargs)
            return None
        stack = get_interpreter_stack()
        if not stack:
            edits = self.look(module, args, kwargs)
        elif any(interpreter.key() == TransformType.Grad for interpreter in stack):
            raise RuntimeError(
                "model: is sharded by tp_ext.auto, and torch.func's grad, vjp, jacrev and hessian cannot go through "
                "it: take torch.autograd.grad or torch.autograd.functional; vmap, jvp and jacfwd can"
            )
        else:  # a proof would be a part of the transform
            with temporarily_clear_interpreter_stack():
                edits = self.look(module, args, kwargs)
        return begin_call(module, edits, args, kwargs, self.group)

    def look_at_trace(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        """Looks at a call that a compiler traces.

        Raises:
            RuntimeError: as :meth:`look`; or it does otherwise than the example at the boundaries of the model.
        """
        if self.look(module, args, kwargs) is not None:
            raise RuntimeError(
                "model: the results of this call have other sharded dims than those of the plan's example, for which a "
                "compiled model has no hooks: plan with such a call, or compile the blocks alone"
            )

    @torch.compiler.disable  # where the hooks of a compiled model are no part of its graph
    def look(self, module: nn.Module, args: Any, kwargs: Any) -> CallEdits | None:
        """Looks whether a call is proven; if not, proves it. Returns what it does otherwise than the example.

        Raises:
            RuntimeError: its numbers could be wrong.
        """
        if self.plan.refused_inputs and torch.is_grad_enabled():
            self.refuse_partial_gradients(args, kwargs)
        named = named_arguments(self.structure, args, kwargs)
        given = {"args": args, **kwargs} if named is None else named
        kinds, values, opaque = signature(given)
        changes = self.changes(module)
        modes = autocast(), torch.get_default_dtype(), torch.is_inference_mode_enabled()
        mode = torch.is_grad_enabled(), *modes, self.watches[module][0].dtype()
        call = kinds, values, mode, tuple(changes.items())
        if call in self.seen:
            return self.seen[call]
        # What cannot be left out of a run on fakes has no run of its own
        known = {name: value for name, value in given.items() if not opaque.get(name)}
        is_example = has_example(self.plan) or not any(opaque.values())
        example = known if named is not None else Arguments(args, kwargs) if kwargs else args
        for numbers, edits in self.read.get(call, ()):
            if numbers.hold(arguments(example)):
                return edits
        edits, read = None, None
        # In inference mode operators are others, which have no rules
        gradients = torch.is_grad_enabled()
        with torch.inference_mode(False), torch.set_grad_enabled(gradients):
            # Without its cache a call of a decoding has other tokens, of which the plan's own are sharded
            if not opaque or (named is not None and is_example and (changes or not self.plan.tokens)):
                edits, read = self.look_at(module, call, changes, example, bool(opaque))
        if read is not None:
            self.read.setdefault(call, collections.deque(maxlen=MAX_READ)).appendleft((read, edits))
            return edits
        if len(self.seen) >= MAX_SEEN:
            self.seen.clear()
        self.seen[call] = edits
        return edits

    def changes(self, module: nn.Module) -> dict[Path, str]:
        """The changes of a model's state since its plan was applied."""
        watch, changes = self.watches.get(module, (None, {}))
        if watch is not None and watch.is_unchanged():
            return changes
        watch = StateWatch(module, self.ignored or ())
        refuse_copies(watch)
        changes = self.base.changes(watch, by_values=self.plan.proof == "values")
        if changes and self.ignored is None:
            self.ignored = self.set_by_forward()
            return self.changes(module)
        self.watches[module] = watch, changes
        return changes

    def set_by_forward(self) -> set[Path]:
        """The attributes that forward sets: all, if it reads none of them before, else those that are no numbers, such
        as caches, with which the proof by values has run."""
        example, before, found = (
            example_for(self.plan, self.structure),
            StateWatch(self.structure),
            dict[Path, StatePlace](),
        )

        def compare(*_: Any) -> None:
            now = StateWatch(self.structure)
            for path, place in now.places.items():
                if path[1] not in (*HOOKS, "_modules", "forward") and path[0] != SHARED:
                    old = before.places.get(path)
                    if old is None or old.text != place.text:
                        found[path] = StatePlace(place.text, old and old.holder, is_number(place.holder.get(place.key)))

        handle = self.structure.register_forward_hook(compare, always_call=True)
        try:
            flow = flow_of(self.structure, example)
        except Exception:  # of any type: of the model's code
            return set()
        finally:
            handle.remove()
        kept = [
            (place.holder, place.key, place.holder.pop(place.key))
            for path in found
            if (place := before.places.get(path))
        ]
        try:
            is_unread = flow_of(self.structure, example) == flow
        except Exception:  # of any type: it misses what it reads
            is_unread = False
        finally:
            for holder, key, value in kept:
                holder[key] = value
        return {path for path, place in found.items() if is_unread or not place.key}

    def look_at(
        self, module: nn.Module, call: Any, changes: dict[Path, str], example: Any, in_part: bool
    ) -> tuple[CallEdits | None, ReadNumbers | None]:
        """Records the flow of a call that is new, and proves it unless it is that of a proven one; returns what it does
        otherwise than the example, and the numbers that its code reads from arguments.

        Raises:
            RuntimeError: the call communicates elsewhere, or its values are not those of the unsharded model.
        """
        kinds, values, mode, state = call
        group = kinds, mode, state
        for holds, edits in self.regions.get(group, ()):
            if holds(values):
                return edits, None
        watch = self.watches[module][0]
        self.convert_as(watch)
        # What a flow does not show: gradients, and which module stands where, with the hooks that it has
        hidden = tuple((path, text) for path, text in changes.items() if is_hidden(path) or path[1] == "_modules")
        if not any(path[-1] == "training" for path in changes):
            with Synced(self.structure, watch, {}, self.base):
                self.know_example(tuple(watch.modes.values()))
        with Synced(self.structure, watch, changes, self.base):
            try:
                flow = flow_of(self.structure, on_meta(example, is_recorded=False))
            except Exception:  # of any type: of the model's code, on which the proof has a sentence
                if in_part:
                    return None, None
                return self.prove(on_meta(example, is_recorded=False), changes, None, hidden)[0], None
            if mode[3]:
                self.compare_in_inference_mode(example, flow)
            fixed = kinds, numbers_of(example), state, flow.numbers
            example = on_meta(example, flow.read)
            known = self.known(flow, hidden, fixed)
            proven = (known.edits, True) if known is not None else self.prove(example, changes, flow, hidden)
            edits, is_general = proven
            if not is_general:
                return edits, flow.read
            if known is None or flow.read is None:
                proven_call = ProvenCall(flow.sizes, fixed, torch.is_grad_enabled(), edits)
                self.flows.setdefault((flow.calls, hidden), []).append(proven_call)
            self.records[group] += 1
            if self.records[group] > FEW_RECORDS and not in_part and flow.read is None:
                regions = [(holds, edits) for holds in region_of(self.structure, example, flow)]
                self.regions.setdefault(group, []).extend(regions)
            return edits, flow.read

    def compare_in_inference_mode(self, example: Any, flow: CallFlow) -> None:
        """Raises RuntimeError if a call does otherwise in inference mode than in its flow: there no proof runs."""
        with torch.inference_mode():
            if flow_of(self.structure, on_meta(example, is_recorded=False)).calls != flow.calls:
                raise RuntimeError(
                    "model: forward calls other functions in torch.inference_mode(), where nothing can be proven: call "
                    "it under torch.no_grad()"
                )

    def count_proof(self, read: ReadNumbers) -> None:
        """Counts the proofs for numbers that code reads.

        Raises:
            RuntimeError: there have been ``MAX_PROOFS``.
        """
        if self.number_proofs >= MAX_PROOFS:
            raise RuntimeError(
                f"{read.names()}: forward reads numbers from these arguments, at {', '.join(read.lines)}, and those of "
                f"{MAX_PROOFS} calls that led to other code have been proven in this process: pass fewer different ones"
            )
        self.number_proofs += 1

    def know_example(self, modes: tuple[bool, ...]) -> None:
        """Records the flow of the plan's example, once for each mode."""
        if modes in self.modes or not has_example(self.plan) or torch.get_default_dtype() != self.dtype:
            return
        self.modes.add(modes)
        example = example_for(self.plan, self.structure)
        args, kwargs = arguments(example)
        named = named_arguments(self.structure, args, kwargs)
        kinds, _, _ = signature({"args": args, **kwargs} if named is None else named)
        try:
            with without_modes():
                example = example if named is None else named
                flow = flow_of(self.structure, example)
                # A plan without proofs may have been made in the other mode
                if not self.plan.proofs and flow.calls != self.flow_in_other_mode(example).calls:
                    return
        except Exception:  # of any type: each call is proven then
            return
        fixed = kinds, numbers_of(example), (), flow.numbers
        self.flows.setdefault((flow.calls, ()), []).append(ProvenCall(flow.sizes, fixed, with_gradients=True))

    def flow_in_other_mode(self, example: Any) -> CallFlow:
        """The flow of the plan's example with every module in the mode in which it is not."""
        modules = [*self.structure.modules()]
        try:
            for module in modules:
                module.training ^= True
            return flow_of(self.structure, example)
        finally:
            for module in modules:
                module.training ^= True

    def known(self, flow: CallFlow, hidden: Any, fixed: Any) -> ProvenCall | None:
        """Returns the proven call whose flow is this: with the same integers, or with others since only lengths
        differ."""
        with_gradients = torch.is_grad_enabled()
        for known in self.flows.get((flow.calls, hidden), ()):
            if (known.sizes == flow.sizes or known.fixed == fixed) and (known.with_gradients or not with_gradients):
                return known
        return None

    def convert_as(self, watch: StateWatch) -> None:
        """Gives the structure the types that the parameters and buffers of the sharded model have by now."""
        for name, module in self.structure.named_modules():
            for table in ("_parameters", "_buffers") if name in watch.modules else ():
                held = vars(watch.modules[name])[table]
                for key, tensor in vars(module)[table].items():
                    if tensor is not None and held.get(key) is not None:
                        tensor.data = tensor.data.to(held[key].dtype)  # in place: tied ones stay tied

    def refuse_partial_gradients(self, args: Any, kwargs: Any) -> None:
        """Raises RuntimeError if an argument wants a gradient that would be this rank's part of it."""
        names, named = argument_names(self.structure), named_arguments(self.structure, args, kwargs)
        if named is None:  # any number by position
            names, named = [], {**dict(zip(map(str, range(len(args))), args, strict=True)), **kwargs}
        for place, key, *rest in self.plan.refused_inputs:
            name = names[int(key)] if place == 0 and int(key) < len(names) else str(key)
            value = leaf_at(named.get(name), rest)
            if isinstance(value, Tensor) and value.requires_grad:
                raise RuntimeError(
                    f"{name}: has requires_grad=True, and its gradient would be partial; plan with an example whose "
                    f"{name} requires a gradient"
                )

    def prove(
        self, example: Any, changes: dict[Path, str], flow: CallFlow | None, hidden: Any
    ) -> tuple[CallEdits | None, bool]:
        """Plans the structure with these arguments, and compares, as :func:`plan_again`.

        By shapes alone where the same functions were proven by values with several other numbers.

        Raises:
            RuntimeError: the call communicates elsewhere, or its values are not those of the unsharded model.
        """
        shown = sorted(example) if isinstance(example, dict) else "positional ones"
        advice = f"the plan's example shows no call with arguments of these kinds and lengths, {shown}: plan with one"
        by_values = True
        if flow is not None and flow.read is not None:
            advice = f"the plan's example shows no call with these numbers of {flow.read.names()}: plan with one"
            gradients = torch.is_grad_enabled()
            same = [known.with_gradients >= gradients for known in self.flows.get((flow.calls, hidden), ())]
            if by_values := sum(same) < FEW_NUMBERS:
                self.count_proof(flow.read)
        if changes:
            advice = f"{sentence(changes)}: plan it so"
        if gone := min(gone_modules(self.plan, self.structure), default=""):
            advice = f"{gone} has been replaced or removed, which the plan has changed: plan the model anew"
        try:
            return plan_again(moved(self.plan, self.structure), self.structure, example, self.apply, by_values)
        except ValueError as error:
            raise RuntimeError(f"model: {advice}; {error}") from error


# A compiler that traces the model traces its guard with it. One that begins with the guard would not look again where
# the state of modules changes, which the guard's own code does not read
skip_code(Guard.__call__.__code__)


def region_of(structure: nn.Module, example: Any, flow: CallFlow) -> list[Callable[[Sequence[Any]], bool]]:
    """A test of lengths and numbers with which a flow is the same, if there is one."""
    try:
        symbolic = flow_of(structure, example, symbolic=True)
    except Exception:  # of any type: code that symbols do not run in is recorded for each length
        return []
    same = (symbolic.calls, symbolic.sizes) == (flow.calls, flow.sizes)
    return [symbolic.holds] if same and symbolic.holds is not None else []
