"""Communication of a plan: types of tensors and of their gradients, and the boundaries at which both are completed.

A tensor is sharded (it has a sharded atom), partial (its sum over the ranks is the tensor), or replicated. A
contraction of a sharded atom makes its result partial; linear operators keep it so until an output of the module,
where it is summed. The gradient of a replicated tensor is partial where sharded work uses it. It is summed where the
whole gradient is partial and forward code need not change: at a parameter, at an output of a module, or at an
argument of a module all of whose uses of it are sharded. Elsewhere partial gradients flow on to what the tensor was
made of. The sums are the f and g of Megatron-LM (arXiv:1909.08053, section 3), here derived."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from tp_ext.auto.record.dims import Atom, atoms_in
from tp_ext.auto.record.edits import Conversion, LeafPath, gathered_output
from tp_ext.auto.record.operators import row_of
from tp_ext.auto.record.record import ModuleCall, Record, Step, span_start, tensors
from tp_ext.auto.search.choose import Decision, carries
from tp_ext.auto.search.partial_sums import PartialSums
from tp_ext.auto.search.reasons import Problem
from tp_ext.auto.search.sliced_constants import Constants
from tp_ext.auto.search.summed_calls import find_summed_calls
from tp_ext.auto.search.tokens import TokenFlow
from tp_ext.conversions import I, P, R
from tp_ext.sharding import Sharding

COMPLETE, PARTIAL = "complete", "partial"  # types of gradients
SHARDS = "of shards"  # partial while tokens are sharded, else complete
Types = frozenset[str]
NOTHING: Types = frozenset()
COMPLETED: Types = frozenset({COMPLETE})
SUMMED = (frozenset({PARTIAL}), frozenset({SHARDS}))  # one of these may be summed: all of it, or none


@dataclass
class Flow:
    """Communication of a plan, with the problems that forbid it."""

    copies: list[Conversion] = field(default_factory=list)
    sums: list[Conversion] = field(default_factory=list)
    slices: list[Conversion] = field(default_factory=list)
    gathers: list[Conversion] = field(default_factory=list)
    calls: list[Conversion] = field(default_factory=list)
    statistics: list[tuple[Conversion, Tensor]] = field(default_factory=list)  # the sums of ``calls``
    refused_inputs: list[LeafPath] = field(default_factory=list)  # those whose gradient would stay partial
    buffers: dict[str, list[Sharding]] = field(default_factory=dict)
    local: set[int] = field(default_factory=set)  # ids of tensors whose sharded dims have local lengths
    copied: list[Tensor] = field(default_factory=list)  # the tensors of ``copies``
    problems: list[Problem] = field(default_factory=list)


class Finder:
    """Finds where gradients and partial results are summed, and which constants are sliced.

    Args:
        roles: ``"column"``, ``"row"`` or ``"vocab"`` of modules that are replaced.
        whole_heads: atoms that reach the loss or an output, where tensors have their full shape for the model's code.
        cut: the decision of each sharded parameter.
        tokens: what is sharded on its tokens.
    """

    def __init__(
        self,
        record: Record,
        chosen: list[Decision],
        roles: Mapping[str, str],
        whole_heads: set[Atom],
        cut: Mapping[str, Decision],
        tokens: TokenFlow | None = None,
        banned: frozenset[Conversion] = frozenset(),
    ) -> None:
        self.tokens = tokens
        self.record, self.chosen, self.roles, self.whole_heads, self.cut = record, chosen, roles, whole_heads, cut
        self.atoms = [atom for decision in chosen for atom in decision.sharded]
        self.in_blocks = any(decision.blocks for decision in chosen)
        self.by_id = {id(t): t for t in record.kept}
        sharded = frozenset(self.atoms)
        self.sharded = {i for i, t in self.by_id.items() if carries(record, t, sharded)}
        self.sums = PartialSums(record, self.atoms, roles, self.sharded)
        self.partial = self.sums.partial
        self.outputs = {id(t) for _, t in tensors(record.output)}
        self.inputs = {id(t): path for path, t in record.inputs if t.is_floating_point() or t.is_complex()}
        # Those of inputs, too: a model may be a part of a larger one
        self.differentiable = record.differentiable | record.from_inputs
        self.flow = Flow()
        self.calls_with: dict[int, list[tuple[ModuleCall, LeafPath]]] = {}
        self.returned_by: dict[int, list[tuple[ModuleCall, LeafPath]]] = {}
        self.number_of_calls: dict[str, int] = {}
        for call in record.calls:
            self.number_of_calls[call.module] = self.number_of_calls.get(call.module, 0) + 1
            for path, tensor in call.inputs:
                self.calls_with.setdefault(id(tensor), []).append((call, path))
            for path, tensor in call.outputs:
                self.returned_by.setdefault(id(tensor), []).append((call, path))
        self.used: dict[int, list[tuple[int, Types]]] = {}  # types of a tensor's gradient by the operators that use it
        self.settled: dict[int, set[int]] = {}  # those of these operators whose gradient a sum after a write completes
        self.shard_steps: dict[int, set[int]] = {}  # operators on shards that make a tensor's gradient one of shards
        self.summed: dict[tuple[int, int, int], list[Conversion]] = {}  # by (id, first and last operator) of the uses
        self.placed: dict[Conversion, set[int]] = {}  # the calls, by their order, at which a sum was placed
        self.banned = banned  # sums that not every call of their module wants, or that are needed further up
        self.moved: set[Conversion] = set()  # sums at outputs that keep another one from completing a gradient

    def find(self) -> Flow:
        self.sums.find()
        self.flow.problems += self.sums.problems
        for call in self.record.calls:
            for path, tensor in call.outputs:
                output = Conversion(call.module, "output", path, P, I)
                if self.partial.get(id(tensor)) == call.module and output not in self.flow.sums:
                    self.flow.sums.append(output)
        self.gathers_of_outputs()
        self.working = [self.works_sharded(step) for step in self.record.steps]
        self.backward_types()
        self.check()
        find_summed_calls(self, self.flow)
        Constants(self).find()
        for (id_, _, _), copies in self.summed.items():
            new = [copy for copy in copies if copy not in self.flow.copies]
            self.flow.copies += new
            self.flow.copied += [self.by_id[id_]] * len(new)
        return self.flow

    def problem(self, name: str, text: str, tensor: Tensor | None = None, uses: Iterable[int] | None = None) -> None:
        """Adds a problem, of some uses of a tensor, by default of all whose gradients are partial."""
        places = self.shard_steps.get(id(tensor), set()) if tensor is not None else set()
        if uses is None:
            uses = [place for place, types in self.used.get(id(tensor), ()) if PARTIAL in types]
        self.flow.problems.append(Problem(name, text, tuple(sorted(places)), self.blamed(uses)))

    def gathers_of_outputs(self) -> None:
        """The outputs of the model that have a sharded dim, but for logits, which keep their full shape."""
        for path, tensor in tensors(self.record.output):
            for dim, label in enumerate(self.record.dims_of(tensor) if id(tensor) in self.sharded else ()):
                for decision in self.chosen:
                    if decision.atom in self.whole_heads or not decision.occurs(label):
                        continue
                    parts = decision.parts(label)
                    if parts is None:
                        text = f"dim {dim} of the output {'.'.join(map(str, path))} has a sharded factor inside"
                        blame = frozenset(decision.sharded)
                        self.flow.problems.append(Problem("", text, blame=blame))
                    else:
                        self.flow.gathers.append(gathered_output("", path, Sharding(dim, parts)))

    def is_partial_in(self, tensor: Tensor, step: Step) -> bool:
        """True if a tensor is partial for an operator; outside of the module that made it so it has been summed."""
        return self.sums.is_inside(step, tensor)

    def works_sharded(self, step: Step) -> bool:
        if any(id(tensor) in self.sharded or self.is_partial_in(tensor, step) for tensor in step.outputs):
            return True
        # A row layer and a look-up sum their own result, which is replicated then
        return not step.is_loss and self.sums.contracts(step) and self.roles.get(step.module) not in ("row", "vocab")

    # ------------------------------------------------------------ backward

    def type_now(self, tensor: Tensor) -> Types:
        at_outputs = COMPLETED if id(tensor) in self.outputs else NOTHING
        return at_outputs.union(*(types for _, types in self.uses_now(id(tensor))))

    def uses_now(self, id_: int) -> list[tuple[int, Types]]:
        """The uses of a tensor with the types of its gradients, after the sums that stand behind a write."""
        settled = self.settled.get(id_, ())
        return [(place, COMPLETED if place in settled else types) for place, types in self.used.get(id_, ())]

    def backward_types(self) -> None:
        """Derives the types of gradients in one backward pass, in which all uses of a tensor come before the operator
        that made it."""
        record = self.record
        for step in reversed(record.steps):
            types: Types = NOTHING
            for tensor in step.outputs:
                if id(tensor) in self.differentiable:
                    # What is written in place has uses before and after the write: only those after it see this step's
                    # gradient
                    in_place = any(tensor is t for t in step.inputs)
                    types |= self.settle_written(tensor, step.place) if in_place else self.settle(tensor)
            for tensor in step.inputs:
                if any(tensor is t for t in step.outputs):
                    continue
                gradient = self.converted(step, tensor, self.given(step, tensor, types))
                if gradient and id(tensor) in self.differentiable and id(tensor) not in self.sharded:
                    self.used.setdefault(id(tensor), []).append((step.place, gradient))
                    if SHARDS in gradient:
                        # Remembers which operators on shards of tokens a gradient passed: if it cannot be summed,
                        # these are taken back
                        on_shards = self.tokens is not None and step.place in self.tokens.steps
                        shard_steps = {step.place} if on_shards else set[int]().union(*self.shards_after(step))
                        self.shard_steps.setdefault(id(tensor), set()).update(shard_steps)
        # No operator made these: they are settled after all of their uses
        leaves = [*record.parameters, *(id(t) for _, t in record.inputs)]
        for id_ in leaves:
            sharded = id_ in record.parameters and record.parameters[id_][0] in self.cut
            if id_ in self.used and not sharded:
                self.settle(self.by_id[id_])

    def shards_after(self, step: Step) -> list[set[int]]:
        return [self.shard_steps.get(id(tensor), set()) for tensor in step.outputs]

    def given(self, step: Step, tensor: Tensor, types: Types) -> Types:
        """The type of the gradient that an operator gives one of its inputs."""
        # Each rank gets the complete gradient of its columns; a column layer in blocks sums that of its input itself
        if step.is_loss or (self.in_blocks and self.roles.get(step.module) == "column"):
            return COMPLETED
        if self.tokens is not None and step.place in self.tokens.steps:
            return frozenset({SHARDS})
        if step.name.startswith("addmm") and self.roles.get(step.module) == "row" and tensor is step.inputs[0]:
            return types  # the bias, added once
        if not self.working[step.place]:
            return types
        # Backward of a sum over the ranks hands its complete gradient to the term of each rank
        return NOTHING if self.is_partial_in(tensor, step) else frozenset({PARTIAL})

    def converted(self, step: Step, tensor: Tensor, gradient: Types) -> Types:
        """The type of a gradient before the boundary at which a tensor is sharded on its tokens, or gathered.

        That of shards is complete: slices of the whole one, which a slice at a boundary gathers.
        """
        if self.tokens is None or not gradient or self.tokens.range_at(tensor, step.place) is None:
            return gradient
        gather = self.tokens.gather_at(tensor, step.place)
        if step.place not in self.tokens.steps:
            if gather is not None and gather.whole is I:
                return gradient  # as of a replicated tensor
            if gather is None or gradient != {PARTIAL}:
                text = f"tokens are gathered for {sorted(gradient)} gradients in {step.reason}"
                self.flow.problems.append(Problem(step.module, text, tuple(self.tokens.steps)))
        return COMPLETED

    def settle_written(self, tensor: Tensor, place: int) -> Types:
        """Returns the gradient type of a value written in place: the union over the uses that follow the write.

        Their sums must stand after the operator, for it hands the gradient on to its other inputs: at the output of a
        module that returns the tensor; where only some uses are sharded, at arguments: ``y += x`` with ``y`` used by a
        sharded and by a replicated layer. Uses of other views of the memory are uses of the value, too.
        """
        memory = [id(tensor), *self.views_before(tensor, place)]
        for id_ in memory:
            types = self.type_now(self.by_id[id_])
            if not types & {PARTIAL, SHARDS}:
                continue
            is_last = types in SUMMED and place == self.last_write(tensor)
            at_output = is_last and self.place_at_output(id_, self.by_id[id_], None)
            rest: set[int] = set() if at_output else {use for use, _ in self.place_at_arguments(id_, place)}
            self.settled.setdefault(id_, set()).update(use for use, _ in self.used[id_] if use not in rest)
        return NOTHING.union(*(self.type_now(self.by_id[id_]) for id_ in memory))

    def views_before(self, tensor: Tensor, place: int) -> list[int]:
        """The other replicated tensors, by id, that share the memory of one when an operator writes into it."""
        record = self.record
        views = record.memory_of(tensor) if record.writes else []
        made = {id_: record.maker[id_].place if id_ in record.maker else -1 for id_ in views if id_ != id(tensor)}
        return [id_ for id_, at in made.items() if at < place and id_ not in self.sharded]

    def last_write(self, tensor: Tensor) -> int:
        """The place of the last operator that writes into the memory of a tensor; -1: none does."""
        return max((step.place for step in self.record.writes.get(id(self.record.root_of(tensor)), ())), default=-1)

    def settle(self, tensor: Tensor) -> Types:
        """Returns the type of the gradient that flows on to what made the tensor, after sums placed here."""
        types, id_ = self.type_now(tensor), id(tensor)
        if not types & {PARTIAL, SHARDS} or id_ in self.sharded:
            return types
        # A sum must complete all uses at once or none: a complete gradient that is summed again is p times too large
        only_partial, tokens = types in SUMMED, SHARDS in types
        # A parameter is summed where its module reads it, which is before any of its uses; code outside of the module
        # would read it past that place
        if id_ in self.record.parameters:
            name = self.record.parameters[id_][0]
            module, _, attribute = name.rpartition(".")
            users = {self.record.steps[place].module for place, _ in self.used[id_]}
            if any(user != module and not user.startswith(module + ".") for user in users if module):
                self.problem(name, f"{name} is read outside of {module}, by {sorted(users)}", tensor)
            elif tokens and not self.are_known(tensor, [c.start for c in self.record.calls if c.module == module]):
                self.problem(name, f"{name} is read by {module}, which begins before tokens are sharded", tensor)
            elif only_partial:
                after = P if name in self.sums.divided else R
                self.place(id_, Conversion(module, "parameter", (attribute,), I, after, tokens=tokens))
            else:
                self.problem(name, f"{name} is used by sharded and by replicated work", tensor)
            return COMPLETED
        # The sum of a call, over which all ranks compute the same next
        if only_partial and not tokens and self.is_summed(self.record.maker.get(id_)):
            return COMPLETED
        # One sum where the tensor leaves its module serves all uses; else one at each argument by which modules that
        # work sharded take it
        if only_partial and self.place_at_output(id_, tensor, None):
            return COMPLETED
        rest = self.place_at_arguments(id_)
        if not rest:
            return COMPLETED
        maker = self.record.maker.get(id_)
        user, places = self.record.steps[rest[0][0]], [place for place, _ in rest]
        if maker is None:
            text = f"the gradient of an input is partial in {user.name} ({user.line})"
            if id_ in self.inputs and id_ not in self.record.differentiable:
                self.flow.refused_inputs.append(self.inputs[id_])  # an error where it comes with a gradient
            else:
                self.problem(user.module, text, tensor, places)
            return COMPLETED
        # A Function of Python, or a hook, computes with the gradient itself, and so needs the complete one
        if id_ in self.record.functions:
            text = f"{self.record.functions[id_]} ({maker.line}) has a partial gradient: it is used by {user.reason}"
            self.problem(maker.module, text, tensor, places)
            return COMPLETED
        if not only_partial:
            self.moved |= self.movable_sums(id_, rest[0][0])
            uses = f"is used by sharded ({user.name}, {user.line}) and by replicated work"
            text = f"the result of {maker.name} ({maker.line}) {uses}, and no boundary of a module lies between"
            self.problem(maker.module or user.module, text, tensor, places)
            return COMPLETED
        if row_of(maker.name).view and id(maker.inputs[0]) in self.sharded:
            return types  # a part of a sharded dim that all ranks hold: its weight's gradient is summed
        # The result of a split is no output of a module, but the tensor that is split may be one: the sum then covers
        # this part of it alone
        if row_of(maker.name).splits:
            source = maker.inputs[0]
            dim, start = span_start(maker, tensor)
            if self.place_at_output(id_, source, (dim - source.dim(), start, start + tensor.shape[dim])):
                return COMPLETED
        if self.tokens is not None and maker.place in self.tokens.steps:
            text = f"the gradient of gathered tokens of {maker.reason} stays partial in {user.reason}"
            self.flow.problems.append(Problem(maker.module, text, (maker.place,)))
        return types

    def is_summed(self, step: Step | None) -> bool:
        """True if a call sums the result of an operator over the ranks, and its gradient."""
        return step is not None and step.place in self.sums.by_call

    def movable_sums(self, id_: int, at: int) -> set[Conversion]:
        """Returns the sums without which all uses of a tensor, or all in a module that takes it as an argument, have
        partial gradients, as the use ``at`` has: one sum serves them all."""
        # An adapter of low rank uses x and its dropout. A sum at the dropout's output would complete some uses alone
        calls = [call for call, _ in self.calls_with.get(id_, ()) if call.start <= at < call.stop]
        # All uses first: one sum communicates less than a sum in each module that takes the tensor
        for start, stop in [(0, sys.maxsize), *((call.start, call.stop) for call in calls)]:
            complete = [place for place, types in self.used[id_] if COMPLETE in types and start <= place < stop]
            if copies := self.completing(complete):
                return copies
        return set()

    def completing(self, places: list[int]) -> set[Conversion]:
        """Returns the sums at outputs of modules that complete the gradients of the operators' inputs; none if one of
        these is complete without a sum."""
        copies: set[Conversion] = set()
        seen: set[int] = set()
        while places:
            step = self.record.steps[places.pop()]
            results = {id(tensor) for tensor in step.outputs}
            # Its gradient is complete without any sum, so that a ban of sums would not make it partial
            if step.is_loss or results & self.outputs:
                return set()
            for id_ in (results & self.used.keys()) - seen:
                seen.add(id_)
                summed = [copy for copy in self.summed.get((id_, 0, sys.maxsize), ()) if copy.at == "output"]
                # No sum at an output has given this gradient its type, so that a ban of sums would not change it
                if not summed and self.type_now(self.by_id[id_]) != COMPLETED:
                    return set()
                copies.update(summed)
                places += [] if summed else [place for place, _ in self.used[id_]]
        return copies

    def are_known(self, tensor: Tensor, places: list[int]) -> bool:
        """True if the tokens that the uses of a tensor have sharded are known where a boundary begins."""
        tokens = self.tokens
        if tokens is None:
            return False
        shards = {tokens.steps[place] for place in self.shard_steps.get(id(tensor), ())}
        return all(tokens.entered_before(place, atom) for place in places for atom in shards)

    def unwanted(self) -> set[Conversion]:
        """Returns the sums that stand in the way of others, and those at modules with several calls that some call must
        not make: its gradient there is complete, sharded, or summed elsewhere."""
        unwanted = self.moved - self.banned
        for copy, orders in self.placed.items():
            for call in self.record.calls if self.number_of_calls[copy.module] > 1 else ():
                if call.module != copy.module or call.order in orders:
                    continue
                at = dict(call.outputs if copy.at == "output" else call.inputs).get(copy.path)
                if at is not None and (self.used.get(id(at)) or id(at) in self.outputs or id(at) in self.sharded):
                    unwanted.add(copy)
        return unwanted

    def blamed(self, places: Iterable[int]) -> frozenset[Atom]:
        """Returns the sharded atoms that make the gradients of these operators' inputs partial."""
        blamed: set[Atom] = set()
        seen: set[int] = set()
        left = list(places)
        while left:
            place = left.pop()
            if place in seen:
                continue
            seen.add(place)
            step = self.record.steps[place]
            if self.working[place]:
                operands = [*step.inputs, *step.outputs]
                dims = [dim for t in operands if id(t) in self.sharded for dim in self.record.dims_of(t)]
                blamed.update(*(self.sums.atoms & atoms_in(dim) for dim in (step.contracted, *dims)))
                blamed.update(a for t in operands for a in self.sums.blame.get(id(t), ()))
            else:
                left += [use for t in step.outputs for use, types in self.used.get(id(t), ()) if PARTIAL in types]
        return frozenset(blamed)

    def place(self, id_: int, copy: Conversion, start: int = 0, stop: int = sys.maxsize) -> None:
        self.summed.setdefault((id_, start, stop), []).append(copy)

    def place_at_output(self, id_: int, source: Tensor, span: tuple[int, int, int] | None) -> bool:
        if id_ in self.record.functions:  # a hook or Function comes before the output: it sees the sum
            return False
        written = self.last_write(source)
        # Uses before a write in place are of other values, whose gradient the sum reaches through the write
        first = min((place for place, _ in self.used[id_] if place > written), default=sys.maxsize)
        tokens = SHARDS in self.type_now(self.by_id[id_])

        def is_argument(returned: tuple[ModuleCall, LeafPath]) -> bool:
            return any(source is tensor for _, tensor in returned[0].inputs)

        # A module that returns its argument comes last: code around it may use the argument itself
        last_first = self.returned_by.get(id(source), [])[::-1]
        for call, path in sorted(last_first, key=is_argument):
            copy = Conversion(call.module, "output", path, I, R, span=span, tokens=tokens)
            known = not tokens or self.are_known(self.by_id[id_], [call.stop])
            if written < call.stop <= first and copy not in self.banned and known:
                self.placed.setdefault(copy, set()).add(call.order)
                self.place(id_, copy)
                return True
        return False

    def place_at_arguments(self, id_: int, after: int = -1) -> list[tuple[int, Types]]:
        """Sums gradients at arguments of modules that use the tensor in sharded work only, and begin after an operator;
        returns the other uses."""
        left = [use for use in self.uses_now(id_) if use[1] & {PARTIAL, SHARDS}]
        rest: list[tuple[int, Types]] = []
        while left:
            at = left[0][0]
            call = next((c for c, _ in self.calls_with.get(id_, ()) if self.may_sum_argument(id_, c, at, after)), None)
            if call is None:
                rest.append(left.pop(0))
                continue
            tokens = SHARDS in left[0][1]
            for path in (path for other, path in self.calls_with[id_] if other is call):
                copy = Conversion(call.module, "argument", path, I, R, tokens=tokens)
                self.placed.setdefault(copy, set()).add(call.order)
                self.place(id_, copy, call.start, call.stop)
            left = [use for use in left if not call.start <= use[0] < call.stop]
        return rest

    def may_sum_argument(self, id_: int, call: ModuleCall, at: int, after: int) -> bool:
        # What the module returns is then the summed tensor, also for the uses of others and for the caller
        if any(other is call for other, _ in self.returned_by.get(id_, ())):
            return False
        if not after < call.start <= at < call.stop or any(
            Conversion(call.module, "argument", path, I, R, tokens=tokens) in self.banned
            for other, path in self.calls_with[id_]
            for tokens in (False, True)
            if other is call
        ):
            return False
        # One type for all uses in the module: a complete gradient that is summed again is p times too large
        inside = {types for place, types in self.uses_now(id_) if call.start <= place < call.stop}
        known = not any(SHARDS in types for types in inside) or self.are_known(self.by_id[id_], [call.start])
        return len(inside) == 1 and inside <= set(SUMMED) and known

    # ------------------------------------------------------------ a second computation, as a check

    def check(self) -> None:
        """Recomputes the types of gradients with the sums in place. Every sum must stand where the whole gradient is
        partial, and no gradient may remain partial."""
        record, gradients = self.record, dict.fromkeys(self.outputs, COMPLETED)
        spans: dict[int, list[tuple[int, int]]] = {}
        for id_, start, stop in self.summed:
            spans.setdefault(id_, []).append((start, stop))
        under: dict[tuple[int, int, int], Types] = dict.fromkeys(self.summed, NOTHING)
        # For tensors written in place, the types with the place from which on they are summed: at an argument of a
        # module that begins after the operator that writes, or at the output of one that ends after it
        written: dict[int, list[tuple[Types, int]]] = {id_: [(types, sys.maxsize)] for id_, types in gradients.items()}
        for step in reversed(record.steps):
            types = NOTHING
            for tensor in step.outputs:
                if any(tensor is t for t in step.inputs):
                    memory = [id(tensor), *self.views_before(tensor, step.place)]
                    uses = [use for id_ in memory for use in written.get(id_, ())]
                    types = types.union(*(COMPLETED if summed > step.place else gradient for gradient, summed in uses))
                else:
                    types |= gradients.get(id(tensor), NOTHING)
            if self.is_summed(step) and types and types != NOTHING.union(*map(self.type_now, step.outputs)):
                self.problem(step.module, f"the gradient of {step.reason} is {sorted(types)}")
            # Whatever comes in, an operator on shards gives each rank the terms of its shard
            if self.working[step.place]:
                types = frozenset({PARTIAL})
            for tensor in step.inputs:
                id_ = id(tensor)
                # Gradients of sharded tensors are shards, those of tensors written here were handled above as outputs
                if id_ not in self.differentiable or id_ in self.sharded or any(tensor is t for t in step.outputs):
                    continue
                if self.is_partial_in(tensor, step):
                    continue
                gradient = self.converted(step, tensor, self.given(step, tensor, types))
                unsummed, summed = gradient, -1
                for start, stop in spans.get(id_, ()):
                    after = start if stop < sys.maxsize else self.last_write(tensor) + 1
                    if after <= step.place < stop:
                        under[id_, start, stop] |= gradient
                        gradient, summed = (COMPLETED, max(summed, after)) if gradient else (gradient, summed)
                written.setdefault(id_, []).append((unsummed, summed))
                gradients[id_] = gradients.get(id_, NOTHING) | gradient
        # A sum of what is complete would be p times too large; a sum of nothing, of a use that the flow expected and
        # that is not there, would be a collective for nothing
        for key, types in under.items():
            copy = self.summed[key][0]
            is_returned = key[0] in self.outputs and key[1:] == (0, sys.maxsize)
            if types != {SHARDS if copy.tokens else PARTIAL} or is_returned:
                self.problem(
                    copy.module, f"the gradient of an {copy.at} of {copy.module or 'the model'} is {sorted(types)}"
                )
        for id_, (name, tensor) in record.parameters.items():
            if name in self.cut:
                continue
            if gradients.get(id_, NOTHING) & {PARTIAL, SHARDS}:
                self.problem(name, f"the gradient of {name} stays partial")
            if id_ in self.sharded:
                text = f"{name} has a sharded dim and is not sharded"
                carried = (decision for decision in self.chosen if carries(record, tensor, decision.sharded))
                self.flow.problems += [Problem(next(iter(decision.parameters)), text) for decision in carried]
