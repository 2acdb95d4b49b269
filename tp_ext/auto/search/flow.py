"""Communication of a plan: types of tensors and of their gradients, and the boundaries at which both are completed.

A tensor is sharded (it has a sharded atom), partial (its sum over the ranks is the tensor), or replicated. A
contraction of a sharded atom makes its result partial; linear operators keep it so until an output of the module,
where it is summed. The gradient of a replicated tensor is partial where sharded work uses it. It is summed where the
whole gradient is partial and forward code need not change: at a parameter, at an output of a module, or at an
argument of a module all of whose uses of it are sharded. Elsewhere partial gradients flow on to what the tensor was
made of. The sums are the f and g of Megatron-LM (arXiv:1909.08053, section 3), here derived."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from torch import Tensor

from tp_ext.auto.record.dims import Atom, atoms_in
from tp_ext.auto.record.edits import Conversion, LeafPath, gathered_output
from tp_ext.auto.record.record import ModuleCall, Record, Step, tensors
from tp_ext.auto.search.choose import Decision, carries
from tp_ext.auto.search.partial_sums import PartialSums
from tp_ext.auto.search.place import COMPLETED, PARTIAL, REFUSED, SHARDS, SumPlacement, Types
from tp_ext.auto.search.reasons import Problem
from tp_ext.auto.search.sliced_constants import Constants
from tp_ext.auto.search.summed_calls import find_summed_calls
from tp_ext.auto.search.tokens import TokenFlow
from tp_ext.conversions import I, P
from tp_ext.sharding import Sharding


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
        self.problems = self.flow.problems
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
        self.partial_sums: set[int] = set()  # operators whose sum over the ranks, by their call, has a partial gradient
        # Sums by tensor and by the first and last operator of the uses
        self.summed: dict[int, dict[tuple[int, int], list[Conversion]]] = {}

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
        self.place_sums()
        find_summed_calls(self, self.flow)
        Constants(self).find()
        for id_, sums in self.summed.items():
            new = [copy for copies in sums.values() for copy in copies if copy not in self.flow.copies]
            self.flow.copies += new
            self.flow.copied += [self.by_id[id_]] * len(new)
        return self.flow

    def problem(self, name: str, text: str) -> None:
        self.flow.problems.append(Problem(name, text))

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

    def place_sums(self) -> None:
        """Places the sums of gradients at boundaries of modules."""
        number, placement = len(self.flow.problems), SumPlacement(self)
        placement.build()
        for boundary, tokens in placement.solve():
            id_, key = id(boundary.tensor), (boundary.start, boundary.stop)
            if boundary.cost == REFUSED and self.inputs[id_] not in self.flow.refused_inputs:
                self.flow.refused_inputs.append(self.inputs[id_])
            if boundary.edits:
                edits = [replace(edit, tokens=tokens) for edit in boundary.edits]
                self.summed.setdefault(id_, {}).setdefault(key, []).extend(edits)
        if len(self.flow.problems) == number:
            self.find_unsharded()

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
        return frozenset() if self.is_partial_in(tensor, step) else frozenset({PARTIAL})

    def views_before(self, tensor: Tensor, place: int) -> list[int]:
        """The other replicated tensors, by id, that share the memory of one when an operator writes into it."""
        record = self.record
        views = record.memory_of(tensor) if record.writes else []
        made = {id_: record.maker[id_].place if id_ in record.maker else -1 for id_ in views if id_ != id(tensor)}
        return [id_ for id_, at in made.items() if at < place and id_ not in self.sharded]

    def last_write(self, tensor: Tensor) -> int:
        """The place of the last operator that writes into the memory of a tensor; -1: none does."""
        return max((step.place for step in self.record.writes.get(id(self.record.root_of(tensor)), ())), default=-1)

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

    def find_unsharded(self) -> None:
        """Adds a problem for each parameter that has a sharded dim and is whole, such as by a hint."""
        for id_, (name, tensor) in self.record.parameters.items():
            if name not in self.cut and id_ in self.sharded:
                text = f"{name} has a sharded dim and is not sharded"
                carried = (decision for decision in self.chosen if carries(self.record, tensor, decision.sharded))
                self.problems += [Problem(next(iter(decision.parameters)), text) for decision in carried]
