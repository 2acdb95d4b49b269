"""Sequence parallelism: the tensors between sharded work that are sharded on their tokens, and their boundaries.

The sum of a row-parallel layer becomes a reduce-scatter over a dim of tokens. What follows works on shards as long as
each operator treats the tokens one by one: it neither pins nor contracts their atom, and its result has it. Where an
operator needs all tokens, they are gathered at a boundary of a module; where it combines shards with a replicated
tensor that has the tokens, that is sliced at one. What has no such boundary stays whole: decisions are taken back, one
by one, until all that is left has its boundaries (Korthikanti et al., arXiv:2205.05198, here derived)."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple

from torch import Tensor

from tp_ext.auto.record.dims import Atom
from tp_ext.auto.record.edits import Conversion, LeafPath, Output
from tp_ext.auto.record.record import ModuleCall, Record, tensors
from tp_ext.auto.search.choose import local_length
from tp_ext.auto.search.reasons import Problem
from tp_ext.conversions import I, P, S, Type

END = sys.maxsize

ScatterKey = tuple[str, str, LeafPath]  # module, "output" or "argument", path


class Origin(NamedTuple):
    """The origin of a tensor sharded on its tokens: the sum of a module, a slice at a boundary, or an operator."""

    source: str = ""
    scatter: ScatterKey | None = None
    step: int = -1


@dataclass(eq=False)
class Range:
    """The uses of a tensor, from one operator to another, for which it is sharded on its tokens.

    ``entered``: the call at whose end, or with ``inside`` at whose start, that begins; None: an operator made it.
    """

    tensor: Tensor
    atom: Atom
    dim: int
    origin: Origin
    entered: ModuleCall | None = None
    inside: bool = False

    @property
    def start(self) -> int:
        return 0 if self.entered is None else self.entered.start if self.inside else self.entered.stop

    @property
    def stop(self) -> int:
        return self.entered.stop if self.entered is not None and self.inside else END

    def has_index(self, index: int) -> bool:
        """Returns whether the tensor is sharded for a call from Python, given by its place among these."""
        if self.entered is None:
            return True
        return self.entered.first <= index < self.entered.last if self.inside else index >= self.entered.last

    def has_call(self, call: ModuleCall) -> bool:
        if self.entered is None:
            return True
        return self.entered.around(call) if self.inside else call.order >= self.entered.end


@dataclass(eq=False)
class TokenGather:
    """The place where a tensor is whole again: in ``call``, or with ``after`` from its end on; None: in the caller."""

    range: Range
    whole: Type
    call: ModuleCall | None = None
    after: bool = False

    def has_place(self, place: int) -> bool:
        if self.call is None:
            return False
        return place >= self.call.stop if self.after else self.call.start <= place < self.call.stop

    def has_index(self, index: int) -> bool:
        if self.call is None:
            return False
        return index >= self.call.last if self.after else self.call.first <= index < self.call.last

    def has_call(self, call: ModuleCall) -> bool:
        if self.call is None:
            return False
        return call.order >= self.call.end if self.after else self.call.around(call)


@dataclass
class Bans:
    """The operators, sums and boundaries that must not be sharded on tokens, with reasons; they only grow."""

    steps: dict[int, str] = field(default_factory=dict)
    sources: dict[str, str] = field(default_factory=dict)
    scatters: dict[ScatterKey, str] = field(default_factory=dict)

    def add(self, origin: Origin, reason: str) -> bool:
        """Returns whether it is new."""
        before = len(self.steps) + len(self.sources) + len(self.scatters)
        if origin.scatter is not None:
            self.scatters.setdefault(origin.scatter, reason)
        elif origin.source:
            self.sources.setdefault(origin.source, reason)
        else:
            self.steps.setdefault(origin.step, reason)
        return len(self.steps) + len(self.sources) + len(self.scatters) > before


class TokenFlow:
    """The operators and tensors that are sharded on tokens, and the boundaries between these and whole ones."""

    def __init__(
        self,
        record: Record,
        steps: dict[int, Atom],
        ranges: dict[int, list[Range]],
        gathers: Iterable[TokenGather],
        source_paths: Mapping[str, list[LeafPath]],
    ) -> None:
        self.steps, self.ranges = steps, ranges
        self.gathers: dict[int, list[TokenGather]] = {}
        for gather in gathers:
            self.gathers.setdefault(id(gather.range.tensor), []).append(gather)
        self.entries = entries(ranges)
        # In order, not as a set, of which each rank's process has another order: plans are compared by their digests
        sources = (r.origin.source for ranges in self.ranges.values() for r in ranges if r.origin.source)
        self.sources = dict.fromkeys(sources)
        self.edits: list[Conversion] = []
        self._outputs = list(tensors(record.output))
        self._calls = record.calls_of
        self.saved = sum(
            t.numel() * t.element_size()
            for step in record.steps
            if step.place in self.steps
            for t in step.outputs
            if id(t) in record.differentiable and not any(t is x for x in step.inputs)
        )
        self._make_edits(record, source_paths)

    def range_at(self, tensor: Tensor, place: int) -> Range | None:
        """The range of a use of a tensor, also where it has been gathered."""
        return next((r for r in self.ranges.get(id(tensor), ()) if r.start <= place < r.stop), None)

    def gather_at(self, tensor: Tensor, place: int) -> TokenGather | None:
        return next((g for g in self.gathers.get(id(tensor), ()) if g.has_place(place)), None)

    def range_of_call(self, tensor: Tensor, index: int) -> Range | None:
        """The range of a tensor as the result of a call from Python, by its place among these; None: it is whole."""
        if any(g.has_index(index) for g in self.gathers.get(id(tensor), ())):
            return None
        return next((r for r in self.ranges.get(id(tensor), ()) if r.has_index(index)), None)

    def entered_before(self, place: int, atom: Atom) -> bool:
        """Returns whether the tokens that were sharded last before an operator are these."""
        return latest(self.entries, place) is atom

    def _put(self, module: str, at: str, path: LeafPath, before: Type, after: Type, dim: int) -> None:
        edit = Conversion(module, at, path, before, after, dim, tokens=True)
        if edit not in self.edits:
            self.edits.append(edit)

    def _make_edits(self, record: Record, source_paths: Mapping[str, list[LeafPath]]) -> None:
        for ranges in self.ranges.values():
            for r in ranges:
                # A range that an operator made needs no edit: its inputs are sharded already
                if r.origin.source:
                    assert r.entered is not None
                    for path in source_paths[r.origin.source]:
                        self._put(r.origin.source, "output", path, P, S, r.dim)
                elif r.origin.scatter is not None:
                    module, at, path = r.origin.scatter
                    self._put(module, at, path, I, S, r.dim)
        # A tensor may be in several places of an argument or output: each is gathered
        for gathers in self.gathers.values():
            for gather in gathers:
                r, call = gather.range, gather.call
                at, leaves = "output", list(tensors(record.output))
                if call is not None:
                    at, leaves = ("output", call.outputs) if gather.after else ("argument", call.inputs)
                for path, tensor in leaves:
                    if tensor is r.tensor:
                        name = "" if call is None else call.module
                        self._put(name, at, path, S, gather.whole, r.dim)
        # A recomputation in backward needs the full length of an argument that stays sharded
        kept: dict[tuple[str, LeafPath], list[int | None]] = {}
        for call in record.calls:
            for path, tensor in call.inputs:
                kept.setdefault((call.module, path), []).append(self._dim_in(tensor, call))
        for call in record.calls:
            for path, _ in call.inputs:
                # An argument that is whole in some calls: a recomputation could not say which call it repeats
                dim, *others = set(kept[call.module, path])
                if dim is not None and not others and call.module:
                    self._put(call.module, "argument", path, S, S, dim)

    def _dim_in(self, tensor: Tensor, call: ModuleCall) -> int | None:
        """The dim on which an argument of a call is sharded."""
        if any(g.has_call(call) for g in self.gathers.get(id(tensor), ())):
            return None
        return next((r.dim for r in self.ranges.get(id(tensor), ()) if r.has_call(call)), None)

    def range_in(self, tensor: Tensor, call: ModuleCall) -> Range | None:
        """The range of a result of a call, for its caller; None: it is whole."""
        if any(g.has_call(call) or (g.after and g.call is call) for g in self.gathers.get(id(tensor), ())):
            return None
        ranges = self.ranges.get(id(tensor), ())
        return next((r for r in ranges if r.has_call(call) or (r.entered is call and not r.inside)), None)

    def shown(self, record: Record, output: Output, sizes_of: Callable[[int], list[int]]) -> Output:
        """The result of a module for pictures, which may be sharded on its tokens."""
        call = self._calls[output.module][0]
        token_range = self.range_in(call.outputs[0][1], call)
        if token_range is None or output.module in self.sources:
            return output
        local, label = list(output.local), record.dims_of(token_range.tensor)[token_range.dim]
        local[token_range.dim] = local_length(label, {token_range.atom: sizes_of(token_range.atom.size)[0]})
        return replace(output, local=tuple(local), state="sharded")

    def calls(self) -> Iterator[tuple[Conversion, Tensor]]:
        """The boundaries, once for each call of their modules, with the tensor there."""
        for edit in self.edits:
            if not edit.module:
                yield from ((edit, tensor) for path, tensor in self._outputs if path == edit.path)
                continue
            for call in self._calls[edit.module]:
                at_boundary = call.outputs if edit.at == "output" else call.inputs
                yield from ((edit, tensor) for path, tensor in at_boundary if path == edit.path)

    def seen_in(self, record: Record, call: ModuleCall, index: int) -> Iterator[Range]:
        """Yields the sharded tensors that the code of a module has seen before a call from Python: its arguments, its
        results, and those of the modules that it calls."""
        for path, tensor in call.inputs:
            if self._dim_in(tensor, call) is not None and path:
                yield from (
                    Range(r.tensor, r.atom, r.dim, Origin(step=place))
                    for r in self.ranges[id(tensor)]
                    for place in self.steps
                    if call.start <= place < call.stop and any(tensor is t for t in record.steps[place].inputs)
                )
        # Calls that have returned before
        for inner in record.calls:
            if call.around(inner) and inner.last <= index and inner.module.rpartition(".")[0] == call.module:
                # Code reads a length of what a module that it calls has returned
                yield from (r for _, t in inner.outputs if (r := self.range_in(t, inner)) is not None)
        for place in self.steps:
            step = record.steps[place]
            if step.module == call.module and call.start <= place < call.stop:
                yield from (r for t in step.outputs for r in self.ranges.get(id(t), ()) if r.origin.step == place)


def latest(entries: Iterable[tuple[int, Atom]], place: int) -> Atom | None:
    atoms_before = [atom for at, atom in entries if at <= place]
    return atoms_before[-1] if atoms_before else None


def entries(ranges: Mapping[int, Iterable[Range]]) -> list[tuple[int, Atom]]:
    """(operator, atom) where tokens become sharded, in order."""
    entered = [
        (r.start, r.entered.end, r.atom) for ranges_ in ranges.values() for r in ranges_ if r.entered is not None
    ]
    return [(start, atom) for start, _, atom in sorted(entered, key=lambda entry: entry[:2])]


# ---------------------------------------------------------------- decisions that are taken back


def ban_problems(problems: Sequence[Problem], tokens: TokenFlow, bans: Bans) -> None:
    """Bans the operators that make gradients incomplete where nothing can complete them."""
    banned = False
    for problem in problems:
        for place in problem.steps:
            banned |= bans.add(Origin(step=place), problem.text)
    # No operator is to blame. Without its scattered sums the model has no shards of tokens, and the search ends
    if not banned:
        for module in tokens.sources:
            bans.add(Origin(source=module), problems[0].text)


def ban_mismatch(
    record: Record, tokens: TokenFlow, module: str, index: int, text: str, kinds: Mapping[str, str], bans: Bans
) -> None:
    """Bans the operator that made the wrong result of a call from Python; if there is none, the tensors sharded in its
    module before that call, a length of which its code has read.

    Args:
        index: of the call. text: what is wrong. kinds: class of each module; equal modules are treated alike.
    """
    reason = f"the code needs all tokens: {text}"

    def ban(origin: Origin) -> bool:
        if origin.step < 0:
            return bans.add(origin, reason)
        step = record.steps[origin.step]
        # Layers of one class run the same code. A ban for each alone would need a round for each layer
        alike = [
            place
            for place in tokens.steps
            if record.steps[place].name == step.name
            and record.steps[place].line == step.line
            and kinds[record.steps[place].module] == kinds[step.module]
        ]
        # A list: any() of a generator would stop at the first new ban
        added = [bans.add(Origin(step=place), reason) for place in dict.fromkeys((*alike, origin.step))]
        return any(added)

    # From the nearest cause to the farthest, each only if the ones before banned nothing: the operators that made the
    # call's arguments, the tensors that the module has seen, its operators, and the sources of the shards
    banned = False
    if index < len(record.python_calls):
        for tensor in record.python_calls[index][2]:
            r = tokens.range_of_call(tensor, index)
            if r is not None and r.origin.step >= 0:
                banned |= ban(r.origin)
    if banned:
        return
    call = next((c for c in record.calls if c.module == module and c.first <= index <= c.last), record.calls[0])
    for r in tokens.seen_in(record, call, index):
        banned |= ban(r.origin)
    inside = [place for place in tokens.steps if call.start <= place < call.stop]
    if not banned:
        added = [ban(Origin(step=place)) for place in inside]
        banned = any(added)
    if not banned:
        for source in tokens.sources:
            bans.add(Origin(source=source), reason)
