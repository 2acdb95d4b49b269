"""Places of the sums of gradients: a minimum cut between what must be I and what must be R.

A node is a replicated tensor as one of its uses sees it, behind the boundaries of modules that it has crossed on its
way there: the output of the module that made it, and arguments of modules. An operator on whole tensors joins its
nodes: their gradients are all complete (I) or all partial (R). At a boundary an I may become an R, for the bytes of the
all-reduce in backward. The loss, outputs and results of sums are I, operands of sharded work are R, and the cheapest
cut between both is the list of conversions."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from torch import Tensor

from tp_ext.auto.record.dims import Atom
from tp_ext.auto.record.edits import Conversion, LeafPath
from tp_ext.auto.record.operators import row_of
from tp_ext.auto.record.record import ModuleCall, Step, span_start, tensors
from tp_ext.auto.search.cut import END, CutBoundary, TypeGraph
from tp_ext.auto.search.infer import COMPLETED, PARTIAL, SHARDS, InferredTypes, Types
from tp_ext.auto.search.reasons import Problem
from tp_ext.auto.search.tokens import TokenFlow
from tp_ext.conversions import I, P, R

REFUSED = 1 << 96  # the cost of an input without a gradient, above all bytes
SCALE = 1 << 32  # of bytes, so that of equal ones a preference decides: late tensors, and of one tensor
OUTPUT, RETURNED, ARGUMENT, PART = 1, 2, 3, 63  # a module's result, one that it was given, from outermost arguments on
SOURCE = 0  # a node that is I
SUM = "sum"  # the key of a node
JOINED = frozenset({"joined"})  # the type of a gradient that has that of the operator's results
Kind = str | Atom  # of what must be R: always, or while the tokens of an atom are sharded


# [Note: sums of gradients are a minimum cut]
class SumPlacement:
    """The types of gradients and the sums that complete them."""

    def __init__(self, inferred: InferredTypes) -> None:
        self.inferred, self.record, self.tokens = inferred, inferred.record, inferred.tokens
        self.graph = TypeGraph()
        self.nodes: dict[tuple[object, ...], int] = {}  # of a version of a tensor, behind the boundaries that follow
        self.meaning: dict[int, Tensor | Step] = {}
        self.whole: dict[int, Step | None] = {SOURCE: None}  # nodes that are I, with the operators on tokens to blame
        self.sinks: dict[Kind, dict[int, Step]] = {PARTIAL: {}}  # nodes that are R, with the operators that need it
        self.used: list[tuple[Tensor, int, int]] = []  # each use with its node, in the order of backward
        self.boundaries: list[CutBoundary] = []
        self.summed: list[tuple[Step, int]] = []  # operators whose results their call sums, with the node of these
        self.possible: dict[int, list[tuple[tuple[float, float], str, ModuleCall, list[LeafPath]]]] = {}
        self.build()

    # ------------------------------------------------------------ nodes

    def node(self, key: tuple[object, ...], meaning: Tensor | Step) -> int:
        node = self.nodes[key] = self.graph.node()
        self.meaning[node] = meaning
        return node

    def add(self, boundary: CutBoundary) -> None:
        self.graph.add(boundary)
        self.boundaries.append(boundary)

    def is_typed(self, tensor: Tensor) -> bool:
        """True if a tensor has a gradient, which is not that of a shard."""
        id_, inferred = id(tensor), self.inferred
        is_cut = id_ in self.record.parameters and self.record.parameters[id_][0] in inferred.cut
        return id_ in inferred.differentiable and id_ not in inferred.sharded and not is_cut

    def version(self, tensor: Tensor, place: int) -> int:
        """The number of operators that have written into the memory of a tensor before an operator."""
        if not self.record.writes:
            return 0
        return sum(step.place < place for step in self.record.writes.get(id(self.record.root_of(tensor)), ()))

    def made(self, tensor: Tensor, version: int) -> int:
        """The node of a version of a tensor where an operator has made it."""
        key = (id(tensor), version)
        if key in self.nodes:
            return self.nodes[key]
        node, record, inferred = self.node(key, tensor), self.record, self.inferred
        maker = record.maker.get(id(tensor))
        if maker is None or any(tensor is t for t in maker.inputs):
            if version == 0 and id(tensor) in record.parameters:
                self.enter_parameter(tensor, node)
            elif version == 0 and id(tensor) in inferred.inputs:
                self.whole[node] = None
        elif version == self.version(tensor, maker.place):
            layers = inferred.contracts(maker) and inferred.roles.get(maker.module) in ("row", "vocab")
            on_tokens = self.tokens is not None and maker.place in self.tokens.steps
            if maker.place in inferred.by_call:
                self.graph.join(node, self.sum_of_call(maker, tensor))
            # A Function of Python, or a hook, computes with the gradient itself. Sums hand it to the terms of all ranks
            elif layers or on_tokens or id(tensor) in record.functions or id(tensor) in inferred.partial:
                self.whole[node] = maker if on_tokens else None
        return node

    def sum_of_call(self, step: Step, tensor: Tensor) -> int:
        """The node of the results of an operator whose call sums them, over which all ranks compute the same next."""
        if (SUM, step.place) not in self.nodes:
            node = self.node((SUM, step.place), step)
            self.add(CutBoundary(SOURCE, node, self.cost(tensor), tensor, known=None))
        return self.nodes[SUM, step.place]

    def enter_parameter(self, tensor: Tensor, node: int) -> None:
        """A parameter is summed where its module reads it, which is before any of its uses."""
        inferred, (name, _) = self.inferred, self.record.parameters[id(tensor)]
        module, _, attribute = name.rpartition(".")
        is_divided = name in inferred.divided
        if is_divided:
            self.sinks[PARTIAL][node] = self.record.steps[min(inferred.divided[name])]
        if self.users_outside(tensor, module):
            self.whole[node] = None
            return
        known = tuple(call.start for call in self.record.calls_of.get(module, ()))
        edit = Conversion(module, "parameter", (attribute,), I, P if is_divided else R)
        self.add(CutBoundary(SOURCE, node, self.cost(tensor), tensor, edits=(edit,), known=known))

    def users_outside(self, tensor: Tensor, module: str) -> list[str]:
        """The modules that read a parameter past the place where that of its own is summed."""
        users = {self.record.steps[place].module for place in self.record.uses.get(id(tensor), ())}
        return sorted(user for user in users if module and user != module and not user.startswith(f"{module}."))

    def use(self, tensor: Tensor, place: int) -> int:
        """The node of a tensor as an operator sees it."""
        version = self.version(tensor, place)
        key: tuple[object, ...] = (id(tensor), version)
        node = self.made(tensor, version)
        for _, at, call, paths in self.boundaries_of(tensor):
            if not (call.stop <= place if at == "output" else call.start <= place < call.stop):
                continue
            key = (*key, at, call.order)
            if key not in self.nodes:
                self.add(self.boundary(tensor, node, self.node(key, tensor), at, call, paths))
            node = self.nodes[key]
        # An error where it comes with a gradient
        if version == 0 and id(tensor) in self.inferred.inputs and id(tensor) not in self.record.differentiable:
            key = (*key, "refused", place)
            if key not in self.nodes:
                self.add(CutBoundary(node, self.node(key, tensor), REFUSED, tensor))
            node = self.nodes[key]
        return node

    def boundary(
        self, tensor: Tensor, outer: int, inner: int, at: str, call: ModuleCall, paths: list[LeafPath]
    ) -> CutBoundary:
        edits = tuple(Conversion(call.module, at, path, I, R) for path in paths)
        if at == "output":
            preference = RETURNED if any(tensor is t for _, t in call.inputs) else OUTPUT
            return CutBoundary(
                outer,
                inner,
                self.cost(tensor, preference),
                tensor,
                self.first(tensor, call),
                END,
                edits,
                call,
                (call.stop,),
            )
        preference = min(ARGUMENT + len(call.module.split(".")) * (call.module != ""), PART - 1)
        return CutBoundary(
            outer, inner, self.cost(tensor, preference), tensor, call.start, call.stop, edits, call, (call.start,)
        )

    def cost(self, tensor: Tensor, preference: int = OUTPUT) -> int:
        maker = self.record.maker.get(id(tensor))
        before = len(self.record.steps) - (maker.place if maker is not None else 0)
        return tensor.numel() * tensor.element_size() * SCALE + before * (PART + 1) + preference

    def first(self, tensor: Tensor, call: ModuleCall) -> int:
        """The operator from which on a sum at an output counts: 0 if all uses come after it."""
        return (
            call.stop
            if any(self.inferred.last_write(tensor) < use < call.stop for use in self.record.uses.get(id(tensor), ()))
            else 0
        )

    def boundaries_of(self, tensor: Tensor) -> list[tuple[tuple[float, float], str, ModuleCall, list[LeafPath]]]:
        """The boundaries of a tensor in the order in which it crosses them."""
        if id(tensor) not in self.possible:
            self.possible[id(tensor)] = sorted(self.find_boundaries(tensor), key=lambda boundary: boundary[0])
        return self.possible[id(tensor)]

    def find_boundaries(self, tensor: Tensor) -> Iterator[tuple[tuple[float, float], str, ModuleCall, list[LeafPath]]]:
        id_, inferred = id(tensor), self.inferred
        taken, returned = (_by_call(pairs.get(id_, ())) for pairs in (self.record.taken_by, self.record.returned_by))
        written = self.record.writes.get(id(self.record.root_of(tensor)), ())
        for call, paths in returned.items():
            # Uses before a write in place are of other values, whose gradient the sum reaches through the write
            if id_ in self.record.functions or call.stop <= inferred.last_write(tensor):
                continue
            # A module that returns its argument comes last: code around it may use the argument itself
            if call in taken and self.first(tensor, call):
                continue
            summing = inferred.partial.get(id_, call.module)
            if call.module and summing != call.module and not summing.startswith(f"{call.module}."):
                continue
            yield (call.stop, call.end - 0.5), "output", call, paths
        for call, paths in taken.items():
            # What the module returns is then the summed tensor, also for the uses of others and for the caller
            if call not in returned and not any(call.start <= step.place < call.stop for step in written):
                yield (call.start, call.order), "argument", call, paths

    # ------------------------------------------------------------ operators

    def build(self) -> None:
        """Enters all uses that have a gradient: those of a tensor come before the operator that made it."""
        for _, tensor in tensors(self.record.output):
            if self.is_typed(tensor):
                self.whole[self.use(tensor, END)] = None
        for step in reversed(self.record.steps):
            results = self.results(step)
            joined = [
                node for tensor in _unwritten(step) if (node := self.operand(step, tensor, bool(results))) is not None
            ]
            if results and (joined or any(step.outputs[0] is t for t in step.inputs)):
                self.join(step, results, joined)

    def results(self, step: Step) -> list[tuple[Tensor, int]]:
        """The results of an operator that have a gradient, with their nodes; of what it writes in place, all views."""
        results: dict[int, Tensor] = {}
        for tensor in step.outputs:
            results[id(tensor)] = tensor
            if any(tensor is t for t in step.inputs):
                views = self.inferred.views_before(tensor, step.place)
                results.update((id_, self.inferred.by_id[id_]) for id_ in views)
        keys = [(t, (id(t), self.version(t, step.place + 1))) for t in results.values() if self.is_typed(t)]
        return [(t, self.nodes[key]) for t, key in keys if key in self.nodes]

    def operand(self, step: Step, tensor: Tensor, has_gradient: bool) -> int | None:
        """Enters the use of a tensor; returns its node if the gradient has the type of that of the results."""
        inferred = self.inferred
        if not self.is_typed(tensor):
            return None
        types = inferred.given(step, tensor, JOINED if has_gradient else frozenset())
        if not types or inferred.is_partial_in(tensor, step):
            return None
        node = self.use(tensor, step.place)
        self.used.append((tensor, step.place, node))
        if self.tokens is not None and self.is_complete_before(self.tokens, tensor, step):
            self.whole[node] = None
            if types != JOINED or step.place in self.tokens.steps:
                return None
            node = self.node(("gathered", id(tensor), step.place), tensor)
            self.sinks[PARTIAL][node] = step
        if types == JOINED:
            return node
        if PARTIAL in types:
            self.sinks[PARTIAL].setdefault(node, step)
        elif self.tokens is not None and step.place in self.tokens.steps:
            self.sinks.setdefault(self.tokens.steps[step.place], {}).setdefault(node, step)
        else:
            self.whole[node] = None
        return None

    def is_complete_before(self, tokens: TokenFlow, tensor: Tensor, step: Step) -> bool:
        """True if a gradient is complete before the boundary at which a tensor is sharded on its tokens, or gathered:
        that of shards is gathered there, and a partial one of gathered tokens is scattered as a sum."""
        gather = tokens.gather_at(tensor, step.place)
        is_shard = step.place in tokens.steps or gather is None or gather.whole is R
        return is_shard and tokens.range_at(tensor, step.place) is not None

    def join(self, step: Step, results: list[tuple[Tensor, int]], operands: list[int]) -> None:
        node = self.node((step,), step)
        for operand in operands:
            self.graph.join(node, operand)
        for tensor, result in results:
            if any(tensor is t for t in step.inputs) or not any(tensor is t for t in step.outputs):
                self.graph.join(node, self.made(tensor, self.version(tensor, step.place)))
            part = self.part(step, tensor, operands[0], result) if operands else None
            self.add(part) if part is not None else self.graph.join(node, result)

    def part(self, step: Step, tensor: Tensor, outer: int, inner: int) -> CutBoundary | None:
        """The boundary of a result of a split, which is no output of a module: the tensor that is split may be one, and
        its sum covers this part alone."""
        source = step.inputs[0]
        if not row_of(step.name).splits or step.outputs[0] is source or id(tensor) in self.record.functions:
            return None
        outputs = [
            (call, paths)
            for _, at, call, paths in self.boundaries_of(source)
            if at == "output" and call.stop <= step.place
        ]
        if not outputs:
            return None
        call, paths = outputs[-1]
        dim, start = span_start(step, tensor)
        span = (dim - source.dim(), start, start + tensor.shape[dim])
        edits = tuple(Conversion(call.module, "output", path, I, R, span=span) for path in paths)
        return CutBoundary(outer, inner, self.cost(tensor, PART), tensor, 0, END, edits, call, (call.stop,))

    # ------------------------------------------------------------ the cut

    def solve(self) -> Iterator[tuple[CutBoundary, bool]]:
        """Yields the boundaries of the cut, each with whether it is one for sharded tokens; adds the problems, and the
        types of the uses, to the inferred."""
        types: dict[int, Types] = {}
        for kind, sinks in self.sinks.items():
            sources = {**self.whole}
            for other, nodes in self.sinks.items():
                sources |= nodes if other is not kind else {}
            cut, inside = self.cut(kind, sources, sinks)
            types |= dict.fromkeys(inside, frozenset({PARTIAL if kind == PARTIAL else SHARDS}))
            yield from ((boundary, kind != PARTIAL) for boundary in cut)
        for tensor, place, node in self.used:
            self.inferred.used.setdefault(id(tensor), []).append((place, types.get(node, COMPLETED)))
        self.inferred.partial_sums = {place for place in self.inferred.by_call if self.nodes.get((SUM, place)) in types}

    def cut(
        self, kind: Kind, sources: Mapping[int, Step | None], sinks: Mapping[int, Step]
    ) -> tuple[list[CutBoundary], set[int]]:
        banned, favoured = set[Conversion](), set[Conversion]()

        def is_open(boundary: CutBoundary) -> bool:
            if not banned.isdisjoint(boundary.edits):
                return False
            return isinstance(kind, str) or self.is_known(boundary, kind)

        while True:
            whole = self.graph.whole(sources, is_open)
            if refused := [node for node in sinks if node in whole]:
                self.inferred.problems += [self.problem(node, sinks[node], whole, sources) for node in refused]
                return [], set()
            for boundary in self.boundaries:
                boundary.flow = 0
            inside = self.graph.inside(whole, sinks, is_open)
            cut = [b for b in self.boundaries if b.inner in inside and b.outer not in inside]
            unwanted = self.unwanted(cut)
            if not unwanted:
                return cut, inside
            # Its other calls may make the sum for the same bytes
            banned |= unwanted & favoured
            for boundary in self.boundaries:
                if not unwanted.isdisjoint(boundary.edits):
                    boundary.cost -= boundary.cost % SCALE
            favoured |= unwanted

    def is_known(self, boundary: CutBoundary, atom: Atom) -> bool:
        """True if the tokens that are sharded are known where a boundary begins."""
        tokens, known = self.tokens, boundary.known
        return tokens is not None and known is not None and all(tokens.entered_before(place, atom) for place in known)

    def unwanted(self, cut: Iterable[CutBoundary]) -> set[Conversion]:
        """Returns the sums at modules with several calls that some call must not make: its gradient there is complete,
        sharded, or summed elsewhere."""
        orders: dict[Conversion, set[int]] = {}
        for boundary in cut:
            if (call := boundary.call) is not None and len(self.record.calls_of[call.module]) > 1:
                for edit in boundary.edits:
                    orders.setdefault(edit, set()).add(call.order)
        used = {id(tensor) for tensor, _, _ in self.used} | self.inferred.outputs | self.inferred.sharded
        unwanted = set()
        for edit, made in orders.items():
            others = (call for call in self.record.calls_of[edit.module] if call.order not in made)
            leaves = (call.outputs if edit.at == "output" else call.inputs for call in others)
            if any(path == edit.path and id(tensor) in used for pairs in leaves for path, tensor in pairs):
                unwanted.add(edit)
        return unwanted

    # ------------------------------------------------------------ problems

    def problem(self, node: int, user: Step, whole: Mapping[int, int], sources: Mapping[int, Step | None]) -> Problem:
        """The problem of sharded work that a path without a boundary joins with what must be I."""
        need = user
        on_path, tensor, is_mixed = [user], user.inputs[0], False
        while True:
            meaning = self.meaning.get(node)
            if isinstance(meaning, Step):
                on_path.append(meaning)
                # From here on to what the tensor is also used for
                is_mixed = is_mixed or not any(tensor is t for t in meaning.outputs)
                user = user if is_mixed else meaning
            elif meaning is not None and not is_mixed:
                tensor = meaning
            if whole[node] == node:
                break
            node = whole[node]
        on_path += [step for step in [sources[node]] if step is not None]
        places = {step.place for step in on_path} & (self.tokens.steps.keys() if self.tokens is not None else set())
        name, text = self.text(tensor, user, is_mixed)
        return Problem(name, text, tuple(sorted(places)), self.inferred.blamed([need.place]))

    def text(self, tensor: Tensor, user: Step, is_mixed: bool) -> tuple[str, str]:
        record, id_, maker = self.record, id(tensor), self.record.maker.get(id(tensor))
        if id_ in record.parameters:
            name = record.parameters[id_][0]
            module = name.rpartition(".")[0]
            if users := self.users_outside(tensor, module):
                return name, f"{name} is read outside of {module}, by {users}"
            return name, f"{name} is used by sharded and by replicated work"
        if maker is None:
            return user.module, f"the gradient of an input is partial in {user.name} ({user.line})"
        if id_ in record.functions:
            text = f"{record.functions[id_]} ({maker.line}) has a partial gradient: it is used by {user.reason}"
            return maker.module, text
        if not is_mixed and self.tokens is not None and maker.place in self.tokens.steps:
            return maker.module, f"the gradient of gathered tokens of {maker.reason} stays partial in {user.reason}"
        uses = f"is used by sharded ({user.name}, {user.line}) and by replicated work"
        text = f"the result of {maker.name} ({maker.line}) {uses}, and no boundary of a module lies between"
        return maker.module or user.module, text


def _by_call(pairs: Iterable[tuple[ModuleCall, LeafPath]]) -> dict[ModuleCall, list[LeafPath]]:
    paths: dict[ModuleCall, list[LeafPath]] = {}
    for call, path in pairs:
        paths.setdefault(call, []).append(path)
    return paths


def _unwritten(step: Step) -> list[Tensor]:
    """The operands of an operator, each once, but for those that it writes."""
    return list({id(t): t for t in step.inputs if not any(t is x for x in step.outputs)}.values())
