"""Searches for the tensors that may be sharded on their tokens. Each attempt bans what had no boundary at which to
slice or to gather, and the next one does without."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from torch import Tensor

from tp_ext.auto.record.dims import Atom, atoms, contains
from tp_ext.auto.record.edits import LeafPath
from tp_ext.auto.record.operators import row_of
from tp_ext.auto.record.record import ModuleCall, RandomCall, Step
from tp_ext.auto.search.flow import Flow
from tp_ext.auto.search.infer import PARTIAL
from tp_ext.auto.search.tokens import END, Bans, Origin, Range, ScatterKey, TokenFlow, TokenGather, entries, latest
from tp_ext.conversions import I, R, Type

ATTENTION = "scaled_dot_product_attention"
USED_WHOLE = "it is used whole at once"
TokenSizes = Callable[[int], list[int]]  # number of tokens -> those of each rank
NO_GATHER = ", and no boundary at which to gather them lies before it"


def find_tokens(flow: Flow, sizes_of: TokenSizes, bans: Bans, alternative: int = 0) -> TokenFlow:
    """Finds the tensors that may be sharded on their tokens; the others are added to ``bans``, with the reason.

    Args:
        flow: the communication without.
        alternative: index into the candidate token dims, ordered by how many operators mix them.
    """
    search = _TokenSearch(flow, sizes_of, bans, alternative)
    search.run()
    return TokenFlow(flow.types.record, search.steps, search.ranges, search.gathers, search.source_paths)


class _TokenSearch:
    def __init__(self, flow: Flow, sizes_of: TokenSizes, bans: Bans, alternative: int) -> None:
        self.flow, self.types, self.sizes_of, self.bans = flow, flow.types, sizes_of, bans
        self.record, self.roles = flow.types.record, flow.types.roles
        self.alternative, self.p = alternative, len(sizes_of(0))
        self.ranges: dict[int, list[Range]] = {}
        self.steps: dict[int, Atom] = {}  # place -> the atom of the tokens
        self.gathers: list[TokenGather] = []
        self.scatters: dict[ScatterKey, Range] = {}
        self.source_paths: dict[str, list[LeafPath]] = {}
        self.why: dict[int, str] = {}  # why an operator needs all tokens, by place
        self.mixed: dict[Atom, int] = {}  # the number of operators that need the atom whole
        for step in self.record.steps:
            for atom in dict.fromkeys(atoms([*step.reason.pinned, *step.contracted])):
                self.mixed[atom] = self.mixed.get(atom, 0) + 1
        self.fixed: set[Atom] = set(self.types.atoms)
        for _, tensor in self.record.parameters.values():
            for label in self.record.dims_of(tensor):
                self.fixed |= set(atoms(label))
        self.sources = self.find_sources()

    def run(self) -> None:
        # Each of them adds a ban or a slice where it returns False, and both are limited in number: the loop ends
        while not (self.attempt() and self.has_sources_everywhere() and self.draws_alike()):
            pass

    def draws_alike(self) -> bool:
        """Returns whether all calls of a module mask shards, or none does; else bans the shards."""
        ranges_of: dict[str, list[Range | None]] = {}
        for call in self.record.random_calls:
            whole = any(g.has_index(call.index) for g in self.gathers if g.range.tensor is call.masked)
            ranges = [] if whole else self.ranges.get(id(call.masked), [])
            ranges_of.setdefault(call.module, []).append(next((r for r in ranges if r.has_index(call.index)), None))
        mixed = [(m, r) for m, ranges in ranges_of.items() if None in ranges for r in ranges if r is not None]
        several = [(m, r) for m, r in mixed if len(self.record.calls_of[m]) > 1]
        for module, r in several:
            self.ban(r, f"dropout in {module} draws for several calls")
        return not several

    # ------------------------------------------------------------ sums that may be scattered

    def find_sources(self) -> list[Range]:
        wanted: set[tuple[str, LeafPath]] = {
            (name, ()) for name, role in self.roles.items() if role in ("row", "vocab")
        }
        wanted |= {(partial.module, partial.path) for partial in self.flow.sums}
        results_of: dict[str, list[tuple[ModuleCall, LeafPath, Tensor]]] = {}
        for call in self.record.calls:
            for path, tensor in call.outputs:
                if (call.module, path) in wanted:
                    results_of.setdefault(call.module, []).append((call, path, tensor))
        ranges = []
        for module, results in results_of.items():
            ranges_of_module, dims = [], set()
            for call, _, tensor in results:
                choice = self.choice(tensor)
                if choice is not None:
                    ranges_of_module.append(Range(tensor, choice[1], choice[0], Origin(source=module), call))
                    dims.add(choice[0])
            # A layer scatters all of its results along one dim, in all of its calls
            if len(ranges_of_module) < len(results) or len(dims) > 1:
                text = f"its result of shape {tuple(results[0][2].shape)} has no dim of {self.p} or more tokens"
                self.bans.sources.setdefault(module, text)
                continue
            ranges += ranges_of_module
            self.source_paths[module] = list(dict.fromkeys(path for _, path, _ in results))
        return ranges

    def choice(self, tensor: Tensor) -> tuple[int, Atom] | None:
        """Returns the dim of the tokens and its atom: of several candidates, the one that most operators mix."""
        candidates = [
            (dim, label[0])
            for dim, label in enumerate(map(atoms, self.record.dims_of(tensor)))
            if len(label) == 1 and all(self.sizes_of(label[0].size)) and not self.is_fixed(label[0])
        ]
        # Attention mixes the tokens, and few operators the batch. At a tie the later dim: the batch usually comes first
        candidates.sort(key=lambda candidate: (-self.mixed.get(candidate[1], 0), -candidate[0]))
        return candidates[min(self.alternative, len(candidates) - 1)] if candidates else None

    def is_fixed(self, atom: Atom) -> bool:
        """Returns whether an atom is of a dim of parameters."""
        return atom in self.fixed or any(self.is_fixed(inner) for part in atom.parts or () for inner in atoms(part))

    # ------------------------------------------------------------ one attempt

    def attempt(self) -> bool:
        """Propagates the sharded tokens. Returns True if every range has its boundaries; bans the others."""
        # From the start: shards that a ban takes away were the reason of other shards
        self.ranges, self.steps, self.why, self.gathers = {}, {}, {}, []
        for r in [*self.sources, *self.scatters.values()]:
            if r.origin.source not in self.bans.sources:
                self.ranges.setdefault(id(r.tensor), []).append(r)
        needs: list[tuple[Tensor, int, Step]] = []
        for step in self.record.steps:
            near = [self.range_at(t, step.place) for t in step.inputs]
            shards = {id(r.tensor): r for r in near if r is not None}
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
                    result_range = Range(tensor, atom, dim, Origin(step=step.place))
                    self.ranges.setdefault(id(tensor), []).append(result_range)
        # A new slice makes further operators work on shards: all is propagated again
        if needs:
            for tensor, dim, step in needs:
                self.scatter(tensor, dim, step)
            return False
        self.events = entries(self.ranges)
        gathered = [self.gather(r) for ranges in self.ranges.values() for r in ranges]  # each may add a ban
        return all(gathered)

    def range_at(self, tensor: Tensor, place: int) -> Range | None:
        return next((r for r in self.ranges.get(id(tensor), ()) if r.start <= place < r.stop), None)

    def dim_of(self, tensor: Tensor, atom: Atom) -> int | None:
        dims = [i for i, label in enumerate(self.record.dims_of(tensor)) if atom in atoms(label)]
        return dims[0] if len(dims) == 1 else None

    def needs_all(self, step: Step, shards: Mapping[int, Range]) -> tuple[str, list[tuple[Tensor, int]]]:
        """Returns why an operator cannot work on shards of tokens; or "", and the tensors to be sliced for it, with
        their dims."""
        # Two atoms are the tokens of two inputs of the model, whose lengths need not agree
        atom, *others = {r.atom for r in shards.values()}
        where, types = str(step.reason), self.types
        if step.place in self.bans.steps:
            return self.bans.steps[step.place], []
        # Sharded work needs all tokens: each rank has other features of every token
        if types.working[step.place] or step.module in self.roles or step.is_loss:
            return f"{where} is sharded work", []
        if any(types.is_partial_in(t, step) for t in [*step.inputs, *step.outputs]):
            return f"{where} works on partial sums", []
        if others or step.name == ATTENTION or atom in atoms([*step.reason.pinned, *step.contracted]):
            return f"{where} needs all tokens", []
        # Each rank would draw the same numbers for other tokens
        if row_of(step.name).draws:
            return f"{where} draws random numbers", []
        # What is whole must be sliced on its way in, and every result must have the tokens as one dim
        wanted = []
        for tensor in [*step.inputs, *step.outputs]:
            dims = self.record.dims_of(tensor)
            token_dims = [i for i, label in enumerate(dims) if contains(label, atom)]
            is_output = any(tensor is t for t in step.outputs)
            # The code around has the tensor whole, before and after the write
            if is_output and id(tensor) not in shards and any(tensor is t for t in step.inputs):
                return f"{where} writes shards into a whole tensor", []
            if (
                len(token_dims) > 1
                or (token_dims and atom not in atoms(dims[token_dims[0]]))
                or (is_output and not token_dims)
            ):
                return f"{where} has a result without the dim of tokens, or with several", []
            if token_dims and not is_output and id(tensor) not in shards and self.range_at(tensor, step.place) is None:
                # A slice of a dim batch x tokens has whole rows of the batch, not a part of the tokens of each
                if len(atoms(dims[token_dims[0]])) > 1:
                    return f"{where} uses a whole tensor with tokens inside of a dim", []
                wanted.append((tensor, token_dims[0]))
        return "", wanted

    # ------------------------------------------------------------ boundaries

    def scatter(self, tensor: Tensor, dim: int, step: Step) -> None:
        """Slices a whole tensor at a boundary before an operator that uses shards with it, or bans the operator."""
        if self.range_at(tensor, step.place) is not None:
            return  # by an earlier operator's boundary
        place, atom = step.place, self.steps[step.place]
        # A module that is called several times has one plan for all calls, which would slice at each of them
        once = self.record.calls_of
        boundaries: list[tuple[ScatterKey, ModuleCall, bool]] = []
        # At an argument of the module in which the operator runs, unless the module returns it: its caller would get
        # the slice
        for call, path in self.record.taken_by.get(id(tensor), ()):
            kept = not any(t is tensor for _, t in call.outputs)
            if call.module and len(once[call.module]) == 1 and call.start <= place < call.stop and kept:
                boundaries.append(((call.module, "argument", path), call, True))
        # Or at the output by which the tensor came; first of all if every later use works on shards, so that it is
        # sliced once
        for call, path in reversed(self.record.returned_by.get(id(tensor), ())):
            is_sum = self.roles.get(call.module) in ("row", "vocab")
            if call.module and len(once[call.module]) == 1 and call.stop <= place and not is_sum:
                here = ((call.module, "output", path), call, False)
                local = all(use in self.steps for use in self.record.uses[id(tensor)] if use >= call.stop)
                boundaries.insert(0, here) if local else boundaries.append(here)
                break
        for key, call, inside in boundaries:
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

    def gradients(self, r: Range, places: Iterable[int], complete: bool = False) -> set[str]:
        wanted = set(places)
        gradient_types = {t for place, types in self.types.used.get(id(r.tensor), ()) if place in wanted for t in types}
        return gradient_types | ({"complete"} if complete else set())

    def gather(self, r: Range) -> bool:
        """Finds the boundaries at which a tensor becomes whole for the operators that need it; False: bans its origin,
        for want of one."""
        id_ = id(r.tensor)
        # Uses before the range see the tensor whole: it is not yet sliced or scattered there
        places = [place for place in self.record.uses.get(id_, ()) if r.start <= place < r.stop]
        whole = [place for place in places if place not in self.steps]
        is_output = id_ in self.types.outputs and r.stop == END
        draws = [call for call in self.record.random_calls if id(call.masked) == id_ and r.has_index(call.index)]
        draws = [draw for draw in draws if not self.may_draw(draw, r)]
        # Nothing needs all tokens: done, unless a boundary slices a tensor that nothing uses
        if not whole and not is_output and not draws:
            return bool(places) or r.origin.step >= 0 or self.ban(r, "its tokens are not used")
        why = self.why.get(whole[0], "") if whole else "the model returns it"
        if draws:
            why = f"{draws[0].name} in {draws[0].module} draws for several calls"
        # No use is on shards. Slicing was of no use; a result is gathered once, where its module returns it
        if len(whole) == len(places):
            if r.origin.step < 0:
                return self.ban(r, why if USED_WHOLE in why else f"{USED_WHOLE}: {why}")
            call = self.returned_whole(r, whole, is_output)
            if call is not None and all(draw.index >= call.last for draw in draws):
                self.gathers.append(TokenGather(r, _whole(self.gradients(r, whole, is_output)), call, True))
                return True
        # A gather makes a copy: what is written to one does not reach the others
        if draws or any(any(t is r.tensor for t in self.record.steps[place].outputs) for place in whole):
            return self.ban(r, why if draws else f"{why}, and it is written in place")
        gathers = []
        # Else a module gathers its argument, in one collective for all uses inside of the module
        while whole:
            call = next(
                (c for c, _ in self.record.taken_by.get(id_, ()) if self.may_gather(r, c, whole[0], whole)), None
            )
            if call is None:
                why = self.why.get(whole[0], "")
                return self.ban(r, why if NO_GATHER in why else why + NO_GATHER)
            inside = [place for place in places if call.start <= place < call.stop]
            gathers.append(TokenGather(r, _whole(self.gradients(r, inside)), call))
            whole = [place for place in whole if place not in inside]
        if is_output:
            if not self.entered(r, END):
                return self.ban(r, "the model returns it after other tokens have been sharded")
            gathers.append(TokenGather(r, I))
        self.gathers += gathers
        return True

    def may_draw(self, draw: RandomCall, r: Range) -> bool:
        """Returns whether the mask that a call draws can be that of shards: a module has one plan for all its calls."""
        same = all(
            any(other.dim == r.dim and other.has_index(call.index) for other in self.ranges.get(id(call.masked), ()))
            for call in self.record.random_calls
            if call.module == draw.module and len(self.record.calls_of[draw.module]) > 1
        )
        return same and latest(self.events, draw.place) is r.atom

    def returned_whole(self, r: Range, whole: list[int], is_output: bool) -> ModuleCall | None:
        """Returns the call that made a tensor, if all uses come after it and none is on shards."""
        returned = (
            c
            for c, _ in reversed(self.record.returned_by.get(id(r.tensor), ()))
            if not any(t is r.tensor for _, t in c.inputs)
        )
        call = next(returned, None)
        if call is None or not call.module or any(place < call.stop for place in whole):
            return None
        return call if len(self.record.calls_of[call.module]) == 1 and self.entered(r, call.stop) else None

    def may_gather(self, r: Range, call: ModuleCall, at: int, whole: list[int]) -> bool:
        # A hook of a module acts in all of its calls, of which others may have whole arguments
        if not call.module or not call.start <= at < call.stop or len(self.record.calls_of[call.module]) > 1:
            return False
        # A module that returns its argument would hand the gathered tensor to code that expects shards
        if r.entered is call or not r.has_call(call) or any(t is r.tensor for _, t in call.outputs):
            return False
        inside = [place for place in self.record.uses[id(r.tensor)] if call.start <= place < call.stop]
        return set(inside) <= set(whole) and len(self.gradients(r, inside)) <= 1 and self.entered(r, call.start)

    def entered(self, r: Range, place: int) -> bool:
        """Returns whether the tokens sharded last before a boundary are the tensor's, so that their length is known."""
        return latest(self.events, place) is r.atom

    def has_sources_everywhere(self) -> bool:
        """Returns whether every connected set of shards has a sum that is scattered; else bans the slices there, which
        would only communicate."""
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


def _whole(types: set[str]) -> Type:
    # A partial gradient is summed and sliced in one collective. A complete gradient is only sliced: each rank has it
    return R if types == {PARTIAL} else I
