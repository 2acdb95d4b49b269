"""Sequence parallelism: which tensors between sharded work are sharded on their tokens, and where that begins and ends.

The sum of a row-parallel layer becomes a reduce-scatter over a dim of tokens. What follows works on shards as long as
each operator treats the tokens one by one: it neither pins nor contracts their atom, and its result has it. Where an
operator needs all tokens, they are gathered at a boundary of a module; where it combines shards with a replicated
tensor that has the tokens, that is sliced at one. What has no such boundary stays whole: decisions are taken back, one
by one, until all that is left has its boundaries (Korthikanti et al., arXiv:2205.05198, here derived)."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from torch import Tensor

from tp_ext.auto.dims import Atom, atoms, contains
from tp_ext.auto.edits import Path, Tokens
from tp_ext.auto.flow import PARTIAL, Finder, Problem
from tp_ext.auto.trace import Call, RandomCall, Record, Step, tensors

RANDOM = {
    "bernoulli", "bernoulli_", "rand_like", "randn_like", "randint_like", "normal", "normal_", "uniform_", "random_",
    "exponential_", "geometric_", "log_normal_", "cauchy_", "native_dropout", "multinomial", "rrelu_with_noise",
}  # fmt: skip
ATTENTION = "scaled_dot_product_attention"
END = sys.maxsize
WHOLE = "it is used whole at once"
NO_GATHER = ", and no boundary at which to gather them lies before it"

ScatterKey = tuple[str, str, Path]  # module, "output" or "argument", path


class Origin(NamedTuple):
    """What makes a tensor sharded on its tokens: the sum of a module, a slice at a boundary, or an operator."""

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
    entered: Call | None = None
    inside: bool = False

    @property
    def start(self) -> int:
        return 0 if self.entered is None else self.entered.start if self.inside else self.entered.stop

    @property
    def stop(self) -> int:
        return self.entered.stop if self.entered is not None and self.inside else END

    def has_index(self, index: int) -> bool:
        """Whether a call from Python, by its place among these, is one for which the tensor is sharded."""
        if self.entered is None:
            return True
        return self.entered.first <= index < self.entered.last if self.inside else index >= self.entered.last

    def has_call(self, call: Call) -> bool:
        if self.entered is None:
            return True
        return self.entered.around(call) if self.inside else call.order >= self.entered.end


@dataclass(eq=False)
class Gather:
    """Where a tensor is whole again: inside of ``call``, or with ``after`` from its end on; no call: for the caller."""

    range: Range
    kind: str
    call: Call | None = None
    after: bool = False

    def has_place(self, place: int) -> bool:
        if self.call is None:
            return False
        return place >= self.call.stop if self.after else self.call.start <= place < self.call.stop

    def has_index(self, index: int) -> bool:
        if self.call is None:
            return False
        return index >= self.call.last if self.after else self.call.first <= index < self.call.last

    def has_call(self, call: Call) -> bool:
        if self.call is None:
            return False
        return call.order >= self.call.end if self.after else self.call.around(call)


@dataclass
class Bans:
    """What must not be sharded on its tokens, with the reason; it only grows."""

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
    """What is sharded on its tokens: operators, tensors, and the boundaries between these and whole ones."""

    def __init__(self, search: _Search) -> None:
        self.steps, self.ranges = search.steps, search.ranges
        self.gathers: dict[int, list[Gather]] = {}
        for gather in search.gathers:
            self.gathers.setdefault(id(gather.range.tensor), []).append(gather)
        self.entries = search.entries()
        self.sources = {r.origin.source for ranges in self.ranges.values() for r in ranges if r.origin.source}
        self.edits: list[Tokens] = []
        self._outputs = list(tensors(search.record.output))
        self._calls: dict[str, list[Call]] = {}
        for call in search.record.calls:
            self._calls.setdefault(call.module, []).append(call)
        self.saved = sum(
            t.numel() * t.element_size()
            for step in search.record.steps
            if step.place in self.steps
            for t in step.outputs
            if id(t) in search.record.differentiable and not any(t is x for x in step.inputs)
        )
        self._make_edits(search)

    def range_at(self, tensor: Tensor, place: int) -> Range | None:
        """The range of a use of a tensor, also where it has been gathered."""
        return next((r for r in self.ranges.get(id(tensor), ()) if r.start <= place < r.stop), None)

    def gather_at(self, tensor: Tensor, place: int) -> Gather | None:
        return next((g for g in self.gathers.get(id(tensor), ()) if g.has_place(place)), None)

    def range_of_call(self, tensor: Tensor, index: int) -> Range | None:
        """The range of a tensor as the result of a call from Python, by its place among these; None: it is whole."""
        if any(g.has_index(index) for g in self.gathers.get(id(tensor), ())):
            return None
        return next((r for r in self.ranges.get(id(tensor), ()) if r.has_index(index)), None)

    def entered_before(self, place: int, atom: Atom) -> bool:
        """Whether the tokens that were sharded last before an operator are these."""
        return _latest(self.entries, place) is atom

    def _put(self, tokens: Tokens) -> None:
        if tokens not in self.edits:
            self.edits.append(tokens)

    def _make_edits(self, search: _Search) -> None:
        record = search.record
        for ranges in self.ranges.values():
            for r in ranges:
                if r.origin.source:
                    assert r.entered is not None
                    for path in search.source_paths[r.origin.source]:
                        self._put(Tokens("reduce_scatter", r.origin.source, "output", path, r.dim))
                elif r.origin.scatter is not None:
                    module, at, path = r.origin.scatter
                    self._put(Tokens("scatter", module, at, path, r.dim))
        for gathers in self.gathers.values():
            for gather in gathers:
                r, call = gather.range, gather.call
                at, found = "output", list(tensors(record.output))
                if call is not None:
                    at, found = ("output", call.outputs) if gather.after else ("argument", call.inputs)
                for path, tensor in found:
                    if tensor is r.tensor:
                        name = "" if call is None else call.module
                        self._put(Tokens(gather.kind, name, at, path, r.dim))
        kept: dict[tuple[str, Path], list[int | None]] = {}
        for call in record.calls:
            for path, tensor in call.inputs:
                kept.setdefault((call.module, path), []).append(self._dim_in(tensor, call))
        for call in record.calls:
            for path, tensor in call.inputs:
                dim, *others = set(kept[call.module, path])
                if dim is not None and not others and call.module:
                    self._put(Tokens("keep", call.module, "argument", path, dim))

    def _dim_in(self, tensor: Tensor, call: Call) -> int | None:
        """The dim on which an argument of a call is sharded."""
        if any(g.has_call(call) for g in self.gathers.get(id(tensor), ())):
            return None
        return next((r.dim for r in self.ranges.get(id(tensor), ()) if r.has_call(call)), None)

    def range_in(self, tensor: Tensor, call: Call) -> Range | None:
        """The range of a result of a call, for its caller; None: it is whole."""
        if any(g.has_call(call) or (g.after and g.call is call) for g in self.gathers.get(id(tensor), ())):
            return None
        found = self.ranges.get(id(tensor), ())
        return next((r for r in found if r.has_call(call) or (r.entered is call and not r.inside)), None)

    def calls(self) -> Iterator[tuple[Tokens, Tensor]]:
        """The boundaries, once for each call of their modules, with the tensor there."""
        for one in self.edits:
            if not one.module:
                yield from ((one, tensor) for path, tensor in self._outputs if path == one.path)
                continue
            for call in self._calls[one.module]:
                found = call.outputs if one.at == "output" else call.inputs
                yield from ((one, tensor) for path, tensor in found if path == one.path)

    def seen_in(self, record: Record, call: Call, index: int) -> Iterator[Range]:
        """What the code of a module has seen sharded before a call from Python: its arguments, what it computed, and
        what the modules that it calls returned."""
        for path, tensor in call.inputs:
            if self._dim_in(tensor, call) is not None and path:
                yield from (
                    Range(r.tensor, r.atom, r.dim, Origin(step=place))
                    for r in self.ranges[id(tensor)]
                    for place in self.steps
                    if call.start <= place < call.stop and any(tensor is t for t in record.steps[place].inputs)
                )
        for inner in record.calls:
            if call.around(inner) and inner.last <= index and inner.module.rpartition(".")[0] == call.module:
                yield from (r for _, t in inner.outputs if (r := self.range_in(t, inner)) is not None)
        for place in self.steps:
            step = record.steps[place]
            if step.module == call.module and call.start <= place < call.stop:
                yield from (r for t in step.outputs for r in self.ranges.get(id(t), ()) if r.origin.step == place)


def _latest(entries: Iterable[tuple[int, Atom]], place: int) -> Atom | None:
    found = [atom for at, atom in entries if at <= place]
    return found[-1] if found else None


def find_tokens(
    record: Record, finder: Finder, roles: Mapping[str, str], p: int, bans: Bans, alternative: int = 0
) -> TokenFlow:
    """Finds what may be sharded on its tokens; what may not is added to ``bans``, with the reason.

    Args:
        finder: the communication without, which has been found.
        alternative: of the dims that may be the tokens' the how many-th, those first that operators mix the most.
    """
    search = _Search(record, finder, roles, p, bans, alternative)
    search.run()
    return TokenFlow(search)


class _Search:
    def __init__(
        self, record: Record, finder: Finder, roles: Mapping[str, str], p: int, bans: Bans, alternative: int
    ) -> None:
        self.record, self.finder, self.roles, self.p, self.bans = record, finder, roles, p, bans
        self.alternative = alternative
        self.ranges: dict[int, list[Range]] = {}
        self.steps: dict[int, Atom] = {}  # place -> the atom of the tokens
        self.gathers: list[Gather] = []
        self.scatters: dict[ScatterKey, Range] = {}
        self.source_paths: dict[str, list[Path]] = {}
        self.why: dict[int, str] = {}  # why an operator needs all tokens, by place
        self.uses: dict[int, list[int]] = {}
        self.mixed: dict[Atom, int] = {}  # the number of operators that need the atom whole
        for step in record.steps:
            for id_ in {id(t) for t in step.inputs}:
                self.uses.setdefault(id_, []).append(step.place)
            for atom in set(atoms([*step.reason.pinned, *step.contracted])):
                self.mixed[atom] = self.mixed.get(atom, 0) + 1
        self.fixed: set[Atom] = set(finder.atoms)
        for _, tensor in record.parameters.values():
            for label in record.dims_of(tensor):
                self.fixed |= set(atoms(label))
        self.sources = self.find_sources()

    def run(self) -> None:
        while not (self.attempt() and self.has_sources_everywhere() and self.draws_alike()):
            pass

    def draws_alike(self) -> bool:
        """Whether all calls of a module mask shards, or none does; else bans the shards."""
        found: dict[str, list[Range | None]] = {}
        for one in self.record.random_calls:
            whole = any(g.has_index(one.index) for g in self.gathers if g.range.tensor is one.masked)
            ranges = [] if whole else self.ranges.get(id(one.masked), [])
            found.setdefault(one.module, []).append(next((r for r in ranges if r.has_index(one.index)), None))
        mixed = [(m, r) for m, every in found.items() if None in every for r in every if r is not None]
        several = [(m, r) for m, r in mixed if self.finder.number_of_calls[m] > 1]
        return all([self.ban(r, f"dropout in {module} draws for several calls") for module, r in several])

    def entries(self) -> list[tuple[int, Atom]]:
        """(operator, atom) where tokens become sharded, in order."""
        found = [
            (r.start, r.entered.end, r.atom) for ranges in self.ranges.values() for r in ranges if r.entered is not None
        ]
        return [(start, atom) for start, _, atom in sorted(found, key=lambda one: one[:2])]

    # ------------------------------------------------------------ sums that may be scattered

    def find_sources(self) -> list[Range]:
        wanted = {(name, ()) for name, role in self.roles.items() if role in ("row", "vocab")}
        wanted |= {(one.module, one.path) for one in self.finder.flow.sums}
        found: dict[str, list[tuple[Call, Path, Tensor]]] = {}
        for call in self.record.calls:
            for path, tensor in call.outputs:
                if (call.module, path) in wanted:
                    found.setdefault(call.module, []).append((call, path, tensor))
        ranges = []
        for module, results in found.items():
            own, dims = [], set()
            for call, path, tensor in results:
                choice = self.choice(tensor)
                if choice is not None:
                    own.append(Range(tensor, choice[1], choice[0], Origin(source=module), call))
                    dims.add(choice[0])
            if len(own) < len(results) or len(dims) > 1:
                text = f"its result of shape {tuple(results[0][2].shape)} has no dim of {self.p} or more tokens"
                self.bans.sources.setdefault(module, text)
                continue
            ranges += own
            self.source_paths[module] = list(dict.fromkeys(path for _, path, _ in results))
        return ranges

    def choice(self, tensor: Tensor) -> tuple[int, Atom] | None:
        """The dim of the tokens, and its atom: of several that which the most operators mix."""
        found = [
            (dim, label[0])
            for dim, label in enumerate(map(atoms, self.record.dims_of(tensor)))
            if len(label) == 1 and label[0].size >= self.p and not self.is_fixed(label[0])
        ]
        found.sort(key=lambda one: (-self.mixed.get(one[1], 0), -one[0]))
        return found[min(self.alternative, len(found) - 1)] if found else None

    def is_fixed(self, atom: Atom) -> bool:
        """Whether it is of a dim of parameters."""
        return atom in self.fixed or any(self.is_fixed(one) for part in atom.parts or () for one in atoms(part))

    # ------------------------------------------------------------ one attempt

    def attempt(self) -> bool:
        """Follows the tokens from where they are sharded; returns whether all has its boundaries, else bans what has
        not."""
        self.ranges, self.steps, self.why, self.gathers = {}, {}, {}, []
        for r in [*self.sources, *self.scatters.values()]:
            if r.origin.source not in self.bans.sources:
                self.ranges.setdefault(id(r.tensor), []).append(r)
        needs: list[tuple[Tensor, int, Step]] = []
        for step in self.record.steps:
            shards = {id(t): r for t in step.inputs if (r := self.range_at(t, step.place)) is not None}
            if not shards:
                continue
            reason, wanted = self.needs_all(step, shards)
            if reason:
                self.why[step.place] = reason
                continue
            atom = next(iter(shards.values())).atom
            self.steps[step.place] = atom
            needs += [(tensor, dim, step) for tensor, dim in wanted]
            for tensor in step.outputs:
                if not any(tensor is t for t in step.inputs):
                    dim = self.dim_of(tensor, atom)
                    assert dim is not None
                    made = Range(tensor, atom, dim, Origin(step=step.place))
                    self.ranges.setdefault(id(tensor), []).append(made)
        if needs:
            for tensor, dim, step in needs:
                self.scatter(tensor, dim, step)
            return False
        self.events = self.entries()
        return all([self.gather(r) for ranges in self.ranges.values() for r in ranges])  # each bans what it finds

    def range_at(self, tensor: Tensor, place: int) -> Range | None:
        return next((r for r in self.ranges.get(id(tensor), ()) if r.start <= place < r.stop), None)

    def dim_of(self, tensor: Tensor, atom: Atom) -> int | None:
        found = [i for i, label in enumerate(self.record.dims_of(tensor)) if atom in atoms(label)]
        return found[0] if len(found) == 1 else None

    def needs_all(self, step: Step, shards: Mapping[int, Range]) -> tuple[str, list[tuple[Tensor, int]]]:
        """Why an operator cannot work on shards of tokens; or "", and the tensors that must be sliced for it, with the
        dims."""
        atom, *others = {r.atom for r in shards.values()}
        where, finder = str(step.reason), self.finder
        if step.place in self.bans.steps:
            return self.bans.steps[step.place], []
        if finder.working[step.place] or step.module in self.roles or step.is_loss:
            return f"{where} is sharded work", []
        if any(finder.is_partial_in(t, step) for t in [*step.inputs, *step.outputs]):
            return f"{where} works on partial sums", []
        if others or step.name == ATTENTION or atom in atoms([*step.reason.pinned, *step.contracted]):
            return f"{where} needs all tokens", []
        if step.name in RANDOM:
            return f"{where} draws random numbers", []
        wanted = []
        for tensor in [*step.inputs, *step.outputs]:
            dims = self.record.dims_of(tensor)
            own = [i for i, label in enumerate(dims) if contains(label, atom)]
            is_output = any(tensor is t for t in step.outputs)
            if is_output and id(tensor) not in shards and any(tensor is t for t in step.inputs):
                return f"{where} writes shards into a whole tensor", []
            if len(own) > 1 or (own and atom not in atoms(dims[own[0]])) or (is_output and not own):
                return f"{where} has a result without the dim of tokens, or with several", []
            if own and not is_output and id(tensor) not in shards and self.range_at(tensor, step.place) is None:
                if len(atoms(dims[own[0]])) > 1:
                    return f"{where} uses a whole tensor with tokens inside of a dim", []
                wanted.append((tensor, own[0]))
        return "", wanted

    # ------------------------------------------------------------ boundaries

    def scatter(self, tensor: Tensor, dim: int, step: Step) -> None:
        """Slices a whole tensor at a boundary before an operator that uses shards with it, or bans the operator."""
        if self.range_at(tensor, step.place) is not None:
            return  # by an earlier operator's boundary
        finder, place, atom = self.finder, step.place, self.steps[step.place]
        once = finder.number_of_calls
        found: list[tuple[ScatterKey, Call, bool]] = []
        for call, path in finder.calls_with.get(id(tensor), ()):
            kept = not any(t is tensor for _, t in call.outputs)
            if call.module and once[call.module] == 1 and call.start <= place < call.stop and kept:
                found.append(((call.module, "argument", path), call, True))
        for call, path in reversed(finder.returned_by.get(id(tensor), ())):
            is_sum = self.roles.get(call.module) in ("row", "vocab")
            if call.module and once[call.module] == 1 and call.stop <= place and not is_sum:
                here = ((call.module, "output", path), call, False)
                local = all(use in self.steps for use in self.uses[id(tensor)] if use >= call.stop)
                found.insert(0, here) if local else found.append(here)
                break
        for key, call, inside in found:
            if key not in self.bans.scatters:
                r = Range(tensor, atom, dim, Origin(scatter=key), call, inside)
                self.scatters[key] = r
                self.ranges.setdefault(id(tensor), []).append(r)
                return
        maker = self.record.maker.get(id(tensor))
        what = "a parameter or input" if maker is None else f"the result of {maker.reason}"
        self.bans.steps[place] = (
            f"{step.reason} uses shards of tokens with {what}, and no boundary at which to slice that lies between"
        )

    def ban(self, r: Range, reason: str) -> bool:
        self.bans.add(r.origin, reason)
        if r.origin.scatter is not None:
            self.scatters.pop(r.origin.scatter, None)
        return False

    def types(self, r: Range, places: Iterable[int], complete: bool = False) -> set[str]:
        wanted = set(places)
        found = {t for place, types in self.finder.used.get(id(r.tensor), ()) if place in wanted for t in types}
        return found | ({"complete"} if complete else set())

    def gather(self, r: Range) -> bool:
        """Finds the boundaries at which a tensor becomes whole for the operators that need it; False: bans its origin,
        for want of one."""
        finder, id_ = self.finder, id(r.tensor)
        places = [place for place in self.uses.get(id_, ()) if r.start <= place < r.stop]
        whole = [place for place in places if place not in self.steps]
        is_output = id_ in finder.outputs and r.stop == END
        draws = [one for one in self.record.random_calls if id(one.masked) == id_ and r.has_index(one.index)]
        draws = [one for one in draws if not self.may_draw(one, r)]
        if not whole and not is_output and not draws:
            return bool(places) or r.origin.step >= 0 or self.ban(r, "its tokens are not used")
        why = self.why.get(whole[0], "") if whole else "the model returns it"
        if draws:
            why = f"{draws[0].name} in {draws[0].module} draws for several calls"
        if len(whole) == len(places):
            if r.origin.step < 0:
                return self.ban(r, why if WHOLE in why else f"{WHOLE}: {why}")
            call = self.returned_whole(r, whole, is_output)
            if call is not None and all(one.index >= call.last for one in draws):
                self.gathers.append(Gather(r, _kind(self.types(r, whole, is_output)), call, True))
                return True
        if draws or any(any(t is r.tensor for t in self.record.steps[place].outputs) for place in whole):
            return self.ban(r, why if draws else f"{why}, and it is written in place")
        found = []
        while whole:
            call = next((c for c, _ in finder.calls_with.get(id_, ()) if self.may_gather(r, c, whole[0], whole)), None)
            if call is None:
                why = self.why.get(whole[0], "")
                return self.ban(r, why if NO_GATHER in why else why + NO_GATHER)
            inside = [place for place in places if call.start <= place < call.stop]
            found.append(Gather(r, _kind(self.types(r, inside)), call))
            whole = [place for place in whole if place not in inside]
        if is_output:
            if not self.entered(r, END):
                return self.ban(r, "the model returns it after other tokens have been sharded")
            found.append(Gather(r, "gather"))
        self.gathers += found
        return True

    def may_draw(self, one: RandomCall, r: Range) -> bool:
        """Whether the mask that a call draws can be that of shards: a module has one plan for all its calls."""
        same = all(
            any(other.dim == r.dim and other.has_index(call.index) for other in self.ranges.get(id(call.masked), ()))
            for call in self.record.random_calls
            if call.module == one.module and self.finder.number_of_calls[one.module] > 1
        )
        return same and _latest(self.events, one.place) is r.atom

    def returned_whole(self, r: Range, whole: list[int], is_output: bool) -> Call | None:
        """The call that made a tensor all of whose uses are whole ones after it."""
        found = (
            c
            for c, _ in reversed(self.finder.returned_by.get(id(r.tensor), ()))
            if not any(t is r.tensor for _, t in c.inputs)
        )
        call = next(found, None)
        if call is None or not call.module or any(place < call.stop for place in whole):
            return None
        return call if self.finder.number_of_calls[call.module] == 1 and self.entered(r, call.stop) else None

    def may_gather(self, r: Range, call: Call, at: int, whole: list[int]) -> bool:
        if not call.module or not call.start <= at < call.stop or self.finder.number_of_calls[call.module] > 1:
            return False
        if r.entered is call or not r.has_call(call) or any(t is r.tensor for _, t in call.outputs):
            return False
        inside = [place for place in self.uses[id(r.tensor)] if call.start <= place < call.stop]
        return set(inside) <= set(whole) and len(self.types(r, inside)) <= 1 and self.entered(r, call.start)

    def entered(self, r: Range, place: int) -> bool:
        """Whether the tokens sharded last before a boundary are those of the tensor, so that their length is known."""
        return _latest(self.events, place) is r.atom

    def has_sources_everywhere(self) -> bool:
        """Whether all that hangs together has a sum that is scattered; else bans the slices there, which would only
        communicate."""
        groups: dict[Range, Range] = {}

        def root(r: Range) -> Range:
            while groups.setdefault(r, r) is not r:
                r = groups[r]
            return r

        for place in self.steps:
            step = self.record.steps[place]
            near = [self.range_at(t, place) for t in step.inputs]
            near += [self.ranges[id(t)][-1] for t in step.outputs if id(t) in self.ranges]
            first, *others = [r for r in near if r is not None]
            for other in others:
                groups[root(other)] = root(first)
        fed = {root(r) for ranges in self.ranges.values() for r in ranges if r.origin.source}
        alone = [r for r in self.scatters.values() if root(r) not in fed]
        for r in alone:
            self.ban(r, "no sum over ranks is scattered next to it")
        return not alone


def _kind(types: set[str]) -> str:
    return "all_gather" if types == {PARTIAL} else "gather"


# ---------------------------------------------------------------- decisions that are taken back


def ban_problems(problems: Sequence[Problem], tokens: TokenFlow, bans: Bans) -> None:
    """Bans the operators that make gradients incomplete where nothing can complete them."""
    found = False
    for problem in problems:
        for place in problem.steps:
            found |= bans.add(Origin(step=place), problem.text)
    if not found:
        for module in tokens.sources:
            bans.add(Origin(source=module), problems[0].text)


def ban_mismatch(
    record: Record, tokens: TokenFlow, module: str, index: int, text: str, kinds: Mapping[str, str], bans: Bans
) -> None:
    """Bans what a call from Python shows to be wrong: the operator that made its result, with a length of its own; else
    what is sharded in the module before that call, since its code has read a length of it.

    Args:
        index: of the call. text: what is wrong. kinds: class of each module; equal modules are treated alike.
    """
    reason = f"the code needs all tokens: {text}"

    def ban(origin: Origin) -> bool:
        if origin.step < 0:
            return bans.add(origin, reason)
        step = record.steps[origin.step]
        alike = [
            place
            for place in tokens.steps
            if record.steps[place].name == step.name
            and record.steps[place].line == step.line
            and kinds[record.steps[place].module] == kinds[step.module]
        ]
        return any([bans.add(Origin(step=place), reason) for place in {*alike, origin.step}])

    found = False
    if index < len(record.python_calls):
        for tensor in record.python_calls[index][2]:
            r = tokens.range_of_call(tensor, index)
            if r is not None and r.origin.step >= 0:
                found |= ban(r.origin)
    if found:
        return
    call = next((c for c in record.calls if c.module == module and c.first <= index <= c.last), record.calls[0])
    for r in tokens.seen_in(record, call, index):
        found |= ban(r.origin)
    inside = [place for place in tokens.steps if call.start <= place < call.stop]
    if not found:
        found = any([ban(Origin(step=place)) for place in inside])
    if not found:
        for source in tokens.sources:
            bans.add(Origin(source=source), reason)
