"""Types of a record's tensors on the ranks, by one pass over its operators.

A tensor is sharded (it has a sharded atom), partial (its sum over the ranks is the tensor), or replicated. A
contraction of a sharded atom makes its result partial. An operator keeps its result partial if it is linear in its
partial arguments and nothing is added to them that every rank would add, until an output of the module, where it is
summed. Which arguments these are depends on the operator: a padding of zeros is linear and one of ones is not,
``index_add`` is linear in its base and its source together. Names alone do not decide."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from tp_ext.auto.record.dims import Atom, atoms_in
from tp_ext.auto.record.edits import LeafPath
from tp_ext.auto.record.operators import SUMMED_CALLS, row_of
from tp_ext.auto.record.record import Record, Step, tensors
from tp_ext.auto.search.choose import Decision, carries
from tp_ext.auto.search.reasons import Problem
from tp_ext.auto.search.tokens import TokenFlow

COMPLETE, PARTIAL = "complete", "partial"  # types of gradients
SHARDS = "of shards"  # partial while tokens are sharded, else complete
Types = frozenset[str]
COMPLETED: Types = frozenset({COMPLETE})


class InferredTypes:
    """The types of tensors for the decisions of a round.

    Attributes:
        sharded: ids of the tensors that have a sharded dim, or only seem to, until :meth:`narrow`.
        partial: id -> module in which the tensor became partial; outside of it the tensor has been summed.
        divided: names of parameters that every rank adds to partial sums: used as 1/p of themselves.
        by_call: the operators whose sum their call completes. working: for each operator, whether it works on shards.
        used: id -> the types of a tensor's gradient by the operators that use it; partial_sums: the operators of
            ``by_call`` whose result has a partial gradient. Both are found by the placement of sums.
        problems: why some sharding must be given up.

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
        self.atoms = frozenset(atom for decision in chosen for atom in decision.sharded)
        self.in_blocks = any(decision.blocks for decision in chosen)
        self.by_id = {id(t): t for t in record.kept}
        self.sharded = {i for i, t in self.by_id.items() if carries(record, t, self.atoms)}
        self.outputs = {id(t) for _, t in tensors(record.output)}
        self.inputs = {id(t): path for path, t in record.inputs if t.is_floating_point() or t.is_complex()}
        # Those of inputs, too: a model may be a part of a larger one
        self.differentiable = record.differentiable | record.from_inputs
        self.partial: dict[int, str] = {}
        self.blame: dict[int, frozenset[Atom]] = {}  # the contracted atoms by which a tensor is partial
        self.divided: dict[str, set[int]] = {}  # with the operators that add it
        self.by_call: set[int] = set()
        self.stop: dict[int, int] = {}  # id -> the end of the call in which the tensor is partial
        self.used: dict[int, list[tuple[int, Types]]] = {}
        self.partial_sums: set[int] = set()
        self.working: list[bool] = []
        self.problems: list[Problem] = []
        for step in record.steps:
            if step.is_loss:
                self.of_loss(step)
            elif self.contracts(step):
                # torch's attention averages its weights itself
                by_call = row_of(step.name).is_sum and step.function in SUMMED_CALLS
                self.summed_by_call(step) if by_call else self.contracted(step)
            elif any(id(t) in self.partial for t in step.inputs):
                self.of_partial(step)
        self.check_divided()
        self.check_outputs()

    def contracts(self, step: Step) -> bool:
        return not atoms_in(step.contracted).isdisjoint(self.atoms)

    def problem(self, name: str, text: str, tensors: Iterable[Tensor] = ()) -> None:
        blame = frozenset[Atom]().union(*(self.blame.get(id(t), frozenset()) for t in tensors))
        self.problems.append(Problem(name, text, blame=blame))

    def is_partial_in(self, tensor: Tensor, step: Step) -> bool:
        """True if a tensor is partial for an operator; outside of the module that made it so it has been summed."""
        return id(tensor) in self.partial and step.place < self.stop[id(tensor)]

    def mark(self, ids: Iterable[int], module: str, place: int, blame: frozenset[Atom]) -> None:
        """Makes tensors partial up to the end of the call of the module that runs at ``place``."""
        # At the end of this call the output is summed: code after it sees no partial tensor
        stop = next((c.stop for c in self.record.calls_of.get(module, ()) if c.start <= place < c.stop), sys.maxsize)
        for id_ in ids:
            self.partial[id_], self.blame[id_], self.stop[id_] = module, blame, stop

    def of_loss(self, step: Step) -> None:
        for tensor in step.inputs:
            if self.is_partial_in(tensor, step):
                self.problem(self.partial[id(tensor)], f"partial sums enter {step.reason}", [tensor])

    def summed_by_call(self, step: Step) -> None:
        """An operator that sums over a sharded atom, in a call that completes the sum."""
        self.by_call.add(step.place)
        self.blame.update((id(t), self.atoms & atoms_in(step.contracted)) for t in step.outputs)
        if inside := [t for t in step.inputs if self.is_partial_in(t, step)]:
            self.problem(step.module, f"partial sums meet a sharded dim in {step.reason}", [*step.outputs, *inside])

    def contracted(self, step: Step) -> None:
        """An operator that sums over a sharded atom: its result is partial, unless its layer sums it."""
        if self.roles.get(step.module) in ("row", "vocab"):
            return
        atoms_ = self.atoms & atoms_in(step.contracted)
        # Before the problems below, which take the atoms to blame from here
        self.blame.update((id(t), atoms_) for t in step.outputs)
        if row_of(step.name).looks_up:  # ids of other ranks' rows
            where = step.module or "the model"
            text = f"rows are looked up in {where} ({step.line}), by no forward of nn.Embedding"
            self.problem(step.module, text, step.outputs)
        self.mark(map(id, step.outputs), step.module, step.place, atoms_)
        added = step.inputs[:1] if row_of(step.name).linear == "added" else []
        added = step.inputs[2:] if step.name == "convolution" else added
        if added and not self.add_once(step, added):
            text = f"{step.name} in {step.module or 'the model'} adds a replicated tensor to partial sums"
            self.problem(step.module, text, step.outputs)
        factors = [t for t in step.inputs if self.is_partial_in(t, step) and not any(t is a for a in added)]
        if factors or any(id(t) in self.sharded for t in step.outputs):
            # The ranks' terms would be products of sums, or belong to slices of their own
            self.problem(step.module, f"{step.reason} sums over two sharded factors", [*step.outputs, *factors])

    def of_partial(self, step: Step) -> None:
        """An operator with partial arguments."""
        inside = [t for t in step.inputs if self.is_partial_in(t, step)]
        if not inside:
            return  # summed at the module's output
        module = self.partial[id(inside[0])]
        blame = frozenset[Atom]().union(*(self.blame[id(t)] for t in inside))
        if not self.stays_partial(step, inside):
            where = module or "the model"
            self.problem(module, f"partial sums of {where} enter {step.name} ({step.line}) before it ends", inside)
        elif any(id(t) in self.sharded for t in step.outputs):
            self.problem(module, f"partial sums meet a sharded dim in {step.reason}", inside)
        else:
            written = [t for t in step.outputs if any(t is x for x in step.inputs)]
            ids = {id(t) for t in step.outputs}.union(*map(self.record.memory_of, written))  # of all views of it
            self.mark(ids, module, step.place, blame)

    def add_once(self, step: Step, added: list[Tensor]) -> bool:
        """Marks parameters that every rank adds to partial sums: divided by p. False if one is no parameter."""
        names = [added_parameter(self.record, tensor) for tensor in added]
        for name in names:
            if name is not None:
                self.divided.setdefault(name, set()).add(step.place)
        return None not in names

    def check_divided(self) -> None:
        """A parameter is divided for all of its module's code, so that no other operator may use it."""
        for name, places in self.divided.items():
            for step in uses_of(self.record, name):
                if step.place not in places:
                    blame = frozenset[Atom]().union(
                        *(
                            self.blame.get(id(t), frozenset())
                            for place in places
                            for t in self.record.steps[place].outputs
                        )
                    )
                    text = f"{name} is added to partial sums, and used by {step.reason} too"
                    self.problems.append(Problem(name.rpartition(".")[0], text, blame=blame))

    def check_outputs(self) -> None:
        """Partial sums leave their module by its outputs, in every call of it, and by no attribute."""
        # What an attribute keeps is reported here, and not again as what never leaves
        left = {self.partial[id_] for id_ in self.partial if id_ in self.record.stored}
        for id_, module in self.partial.items():
            if id_ in self.record.stored:
                tensors_ = [t for t in self.record.kept if id(t) == id_][:1]
                where = self.record.stored[id_] or "the model"
                self.problem(module, f"an attribute of {where} keeps partial sums of {module or 'the model'}", tensors_)
        # A module sums an output in all of its calls or in none
        calls: dict[tuple[str, LeafPath], list[bool]] = {}
        for call in self.record.calls:
            for path, tensor in call.outputs:
                calls.setdefault((call.module, path), []).append(self.partial.get(id(tensor)) == call.module)
        sums = {key for key, partial in calls.items() if any(partial)}
        for (module, _), partial in calls.items():
            if any(partial) and not all(partial):
                blame = [t for c in self.record.calls_of[module] for _, t in c.outputs]
                self.problem(module, f"an output of {module or 'the model'} is partial in some calls only", blame)
        # A partial tensor that is no output is never summed: what uses it computes with this rank's terms
        for module in sorted(set(self.partial.values()) - {module for module, _ in sums} - left):
            tensors_ = [t for t in self.record.kept if self.partial.get(id(t)) == module]
            self.problem(module, f"partial sums inside {module or 'the model'} never leave it as an output", tensors_)

    def stays_partial(self, step: Step, inside: list[Tensor]) -> bool:
        """True if an operator's result is a partial sum: linear in the partial tensors ``inside``, which it has as
        arguments, and nothing added to them that is on every rank."""
        row, partial = row_of(base_name(step)), self.partial
        if not all(t.is_floating_point() or t.is_complex() for t in step.outputs):
            return False  # a conversion to integers rounds
        # From here on by operator: linear in what is partial, with nothing added that is on every rank
        if row.linear == "source" and step.kwargs.get("reduce") is None and len(step.args) <= row.most_arguments:
            return self.write_stays_partial(step, row.source)
        # An index that is a partial sum itself has no value yet, and in a divisor nothing is linear. Rounding after a
        # division of terms is not that of the division of their sum
        if row.linear in ("first", "dividend"):
            return id(step.inputs[0]) in partial and len(inside) == 1 and step.kwargs.get("rounding_mode") is None
        # A product of two partial sums is not the sum of the products
        if row.linear == "factors":
            return len(inside) == 1
        # Zeros are the sum of zeros; any other number would be added by every rank
        if row.linear == "filled":
            filled = _argument(step, 2, "value", 0)
            return len(inside) == 1 and not isinstance(filled, Tensor) and filled == 0
        # A replicated part of the result would be summed with the others, p times
        if row.linear == "joined":
            return len(inside) == len(step.inputs)
        if row.linear == "terms":
            numbers = [a for a in step.args[:2] if not isinstance(a, Tensor) and a != 0]
            others = [t for t in step.inputs if id(t) not in partial]
            # What p ranks add is added p times; a parameter can be divided by p first, a number of the code cannot
            return not numbers and self.add_once(step, others)
        return False

    def write_stays_partial(self, step: Step, source: int) -> bool:
        """True if an operator writes partial sums into partial sums, or into zeros, which are the sum of zeros."""
        target, value = (step.args[i] if len(step.args) > i else None for i in (0, source))
        if not isinstance(target, Tensor) or not isinstance(value, Tensor) or id(value) not in self.partial:
            return False
        # copy_ into a view leaves the rest of its base as it was, and the base must be partial as a whole
        covers = base_name(step) == "copy" and not is_view(self.record, target)
        return covers or id(target) in self.partial or is_zero(self.record, target, step.place)

    def works_sharded(self, step: Step) -> bool:
        if any(id(tensor) in self.sharded or self.is_partial_in(tensor, step) for tensor in step.outputs):
            return True
        # A row layer and a look-up sum their own result, which is replicated then
        return not step.is_loss and self.contracts(step) and self.roles.get(step.module) not in ("row", "vocab")

    def narrow(self, local: set[int]) -> None:
        """Leaves whole the tensors that no shard reaches, of which modules take slices: their gradients are partial.
        Finds the operators that work on shards."""
        self.sharded &= local | self.record.parameters.keys()
        self.working = [self.works_sharded(step) for step in self.record.steps]

    # ------------------------------------------------------------ gradients

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
        places = {id_: record.maker[id_].place if id_ in record.maker else -1 for id_ in views if id_ != id(tensor)}
        return [id_ for id_, made_at in places.items() if made_at < place and id_ not in self.sharded]

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
                blamed.update(*(self.atoms & atoms_in(dim) for dim in (step.contracted, *dims)))
                blamed.update(a for t in operands for a in self.blame.get(id(t), ()))
            else:
                left += [use for t in step.outputs for use, types in self.used.get(id(t), ()) if PARTIAL in types]
        return frozenset(blamed)


def base_name(step: Step) -> str:
    """The operator's name without the underscore of its in-place form."""
    return step.name.removesuffix("_")


def is_view(record: Record, tensor: Tensor) -> bool:
    """True if an operator that only moves elements made a tensor."""
    maker = record.maker.get(id(tensor))
    return maker is not None and row_of(maker.name).view


def is_zero(record: Record, tensor: Tensor, place: int) -> bool:
    """True if a tensor was made of zeros and nothing has written into it before an operator."""
    root = record.root_of(tensor)
    name = record.factories.get(id(root)) or (record.maker[id(root)].name if id(root) in record.maker else "")
    if not row_of(name.removesuffix("_")).zeros:
        return False
    return not any(written.place < place for written in record.writes.get(id(root), ()))


def _argument(step: Step, place: int, name: str, default: Any) -> Any:
    return step.args[place] if len(step.args) > place else step.kwargs.get(name, default)


def added_parameter(record: Record, tensor: Tensor) -> str | None:
    """Returns the name of the parameter that a tensor is linear in, such as the experts' biases of each token, or a
    product with numbers; None if there is none."""
    while id(tensor) not in record.parameters:
        maker = record.maker.get(id(tensor))
        if maker is None or not is_linear_of_first(maker):
            return None
        tensor = maker.inputs[0]
    return record.parameters[id(tensor)][0]


def is_linear_of_first(step: Step) -> bool:
    """True if an operator is linear in its first tensor whatever its other arguments are."""
    return row_of(step.name).linear == "first" or (step.name == "mul" and len(step.inputs) == 1)


def uses_of(record: Record, name: str) -> list[Step]:
    """The operators that use a parameter, or what is linear of it."""
    ids = {id_ for id_, (parameter, _) in record.parameters.items() if parameter == name}
    uses = []
    for step in record.steps:
        if any(id(t) in ids for t in step.inputs):
            if is_linear_of_first(step) and id(step.inputs[0]) in ids:
                ids |= {id(t) for t in step.outputs}
            else:
                uses.append(step)
    return uses
