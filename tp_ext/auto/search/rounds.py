"""The rounds of a plan: each decides what to shard, places the collectives and proves the result on fakes. What fails
is replicated in the next round."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from torch import nn

from tp_ext.auto.record import progress
from tp_ext.auto.record.dims import Atom, Reason, atoms, contains, length
from tp_ext.auto.record.edits import Conversion
from tp_ext.auto.record.forwards import looks_up
from tp_ext.auto.record.multi_head import WEIGHTS, attends
from tp_ext.auto.record.record import Record, tensors
from tp_ext.auto.search.choose import Cut, Decision, carries, choose, decisions, users_of_parameters
from tp_ext.auto.search.collectives import collectives_of, on_the_wire
from tp_ext.auto.search.direct_calls import direct_calls
from tp_ext.auto.search.flow import Flow
from tp_ext.auto.search.hints import PlanOptions, hint_of
from tp_ext.auto.search.in_blocks import plan_in_blocks
from tp_ext.auto.search.infer import InferredTypes
from tp_ext.auto.search.integers import IntegerSearch, Local, agreeing, merged, merged_sizes
from tp_ext.auto.search.localize import LocalEdits, Localized, MismatchError, digest, is_conv1d
from tp_ext.auto.search.picture import outputs_of
from tp_ext.auto.search.planned_draws import draws_of, undrawable
from tp_ext.auto.search.plans import Plan, described
from tp_ext.auto.search.reasons import Problem, kind_of, reason_of
from tp_ext.auto.search.sliced_constants import Constants
from tp_ext.auto.search.summed_calls import find_summed_calls
from tp_ext.auto.search.token_search import find_tokens
from tp_ext.auto.search.tokens import Bans, TokenFlow, ban_mismatch, ban_problems
from tp_ext.mesh_program.partition_spec import P
from tp_ext.sharding import Part, Sharding, split_sizes

MAX_ROUNDS = 40  # each replicates one more parameter and decides again
POSSIBLE = "possible"  # sequence_parallel of parts of a model: sharded tokens where they can be, no error if nowhere
TABLE_ADVICE = "as a head, only an nn.Linear whose weight is this table (head.weight = table.weight) can be sharded"
MAX_GROWTH = 1.05  # bytes of activations on the wire, of those without sequence parallelism, that "auto" accepts


@dataclass
class State:
    """One round: decisions with their communication, and what follows of them."""

    flow: Flow
    heads: list[str]
    local: dict[int, Local] = field(default_factory=dict)  # integers and sizes, by rank
    proofs: list[str] = field(default_factory=list)  # by rank
    whole_tokens: dict[str, str] = field(default_factory=dict)

    @property
    def types(self) -> InferredTypes:
        return self.flow.types


class Planner:
    def __init__(self, model: nn.Module, example: Any, p: int, record: Record, options: PlanOptions) -> None:
        self.only, self.given = options.only, options.local if len(options.local) == p else ()
        self.whole_tokens: dict[str, str] = {}  # kinds of modules whose sums the proof by values leaves whole
        self.together: list[list[str]] = []  # those that the last plan shards by one decision
        self.local: dict[int, Local] = {}  # the code of each rank in the last plan
        self.larger: Planner | None = None  # of a model with more layers, whose code is tried first
        self.model, self.example, self.p, self.record = model, example, p, record
        self.hints, self.budget, self.blocks = options.hints, options.memory_budget, options.invariant_blocks
        self.shares, self.token_sizes = options.shares, functools.partial(split_sizes, p=p, weights=options.shares)
        self.sequence_parallel, self.proves_tokens = options.sequence_parallel, bool(options.sequence_parallel)
        self.why: dict[str, str] = {}  # parameters that a round left whole, with the reason
        self.modules = dict(model.named_modules(remove_duplicate=False))
        names: dict[int, list[str]] = {}
        for name, tensor in model.named_parameters(remove_duplicate=False):
            names.setdefault(id(tensor), []).append(name)
        self.names = {group[0]: group for group in names.values()}  # all names of a parameter, by its first
        self.used_in = users_of_parameters(record)
        self.called_by_name = {call.module for call in record.calls if any(path[0] == 1 for path, _ in call.inputs)}

    def may_shard(self, name: str, dim: int) -> bool:
        """True if hints, and the rounds before, allow a parameter to be sharded on a dim."""
        if name in self.why or (self.only is not None and self.only.get(name) != dim):
            return False
        # A tied parameter is whole if a hint says so of any of its names
        for alias in self.names[name]:
            hint = hint_of(self.hints, alias)
            if hint == "whole" or (isinstance(hint, P) and not (dim < len(hint.dims) and hint.dims[dim])):
                return False
        return True

    # ------------------------------------------------------------ rounds

    def decide(self) -> Plan:
        """Decides until flow and proof accept; each round replicates what they refuse, and notes the reason."""
        for number in itertools.count():
            progress.step(f"round {number + 1} of what is sharded over {self.p} ranks")
            state = self.state()
            try:
                problem = next(iter(state.flow.problems), None)
                if problem is None and state.types.chosen:
                    self.localize(state)
            except MismatchError as mismatch:
                if number >= MAX_ROUNDS or not self.leave_whole(state, mismatch):
                    self.leave_all(state, str(mismatch))
                continue
            if problem is None:
                self.check_constraints(state)
                return self.finished(self.with_tokens(state) if self.sequence_parallel and self.p > 1 else state)
            if number >= MAX_ROUNDS or not self.leave_whole_problems(state):
                self.leave_all(state, problem.text)
        raise AssertionError

    def leave_all(self, state: State, text: str) -> None:
        """Replicates everything: nothing smaller could be blamed, or the search takes too long."""
        for decision in state.types.chosen:
            self.leave(decision, text)

    def check_constraints(self, state: State) -> None:
        sharded = [atom for decision in state.types.chosen for atom in decision.sharded]
        for dim, reason in self.record.constraints if self.p > 1 else ():
            if any(contains(dim, atom) for atom in sharded):
                continue
            pinned = next((atom.pinned for atom in atoms(dim) if atom.pinned), None)
            why = f"it is pinned by {pinned}" if pinned else "no parameter that has it is sharded"
            raise ValueError(f"{reason}: a dim of {length(dim)} cannot be sharded: {why}")

    def state(self) -> State:
        ranks: dict[str, Any] = {"blocks": self.blocks or 0, "shares": self.shares}
        decisions = choose(self.record, self.p, self.may_shard, self.budget, self.only is None, **ranks)
        # A parameter belongs to one decision: no two of those chosen share one
        cut = {name: decision for decision in decisions for name in decision.parameters}
        cuts = {name: cut_ for decision in decisions for name, cut_ in decision.parameters.items()}
        roles = self.roles(cuts)
        outputs = {id(t) for _, t in tensors(self.record.output)}
        out = [t for t in self.record.kept if id(t) in outputs]
        losses = [step for step in self.record.steps if step.is_loss]
        # Logits keep their full shape for the model's code, so only columns that follow each other can be heads; other
        # outputs with a sharded dim are gathered
        reached = {d.atom for d in decisions if any(carries(self.record, t, d.slowest) for t in out)}
        lost = {d.atom for d in decisions if any(d.occurs(step.contracted) for step in losses)}
        heads_found = [
            decision for decision in decisions if decision.atom in reached | lost and self.is_head(decision, roles)
        ]
        heads_atoms = {atom for head in heads_found for atom in head.sharded}
        for decision in decisions:
            for cut_ in decision.parameters.values() if decision.atom in heads_atoms else ():
                cut_.sharding = Sharding(cut_.sharding.dim, [Part(cut_.sharding.size, **ranks)])
        heads = [
            alias.rpartition(".")[0]
            for name, decision in cut.items()
            for alias in self.names[name]
            if decision.atom in heads_atoms
            and roles.get(alias.rpartition(".")[0]) == "column"
            and alias.endswith(".weight")
        ]
        flow = self.flow(decisions, roles, heads_atoms, cut)
        for name, text in self.record.problems:
            if any(not name or n.startswith(f"{name}.") for n in cut):
                flow.problems.append(Problem(name, text))
        for decision in decisions:
            if decision.atom in lost - heads_atoms:
                text = "its classes are features of other layers, too, and cannot be sharded in the loss"
                flow.problems.append(Problem("", text, blame=frozenset(decision.sharded)))
        flow.problems.extend(undrawable(flow, self.p, bool(self.given)))
        return State(flow, heads)

    def is_head(self, decision: Decision, roles: Mapping[str, str]) -> bool:
        """True if a decision shards heads, and embeddings tied to them, and nothing else."""
        owners = [[alias.rpartition(".")[0] for alias in self.names[name]] for name in decision.parameters]
        return all(any(roles.get(owner) in ("column", "vocab") for owner in of_one) for of_one in owners)

    def flow(
        self,
        decisions: list[Decision],
        roles: Mapping[str, str],
        heads: set[Atom],
        cut: Any,
        tokens: TokenFlow | None = None,
    ) -> Flow:
        """Places the collectives of these decisions."""
        flow = Flow(InferredTypes(self.record, decisions, roles, heads, cut, tokens))
        Constants(flow).find()
        flow.place()
        find_summed_calls(flow)
        return flow

    def roles(self, cuts: Mapping[str, Cut]) -> dict[str, str]:
        """Returns the roles of modules that layers replace: linear layers and embeddings that use their own weight."""
        roles: dict[str, str] = {}
        for name, cut in cuts.items():
            for alias in self.names[name]:
                owner, _, attribute = alias.rpartition(".")
                module, dim = self.modules[owner], cut.sharding.dim
                if attribute in WEIGHTS and attends(module):
                    roles[owner] = "attention"
                if attribute != "weight" or owner not in self.used_in.get(cut.id, ()):
                    continue
                weight = module._parameters[attribute]
                if weight is None or not weight.is_floating_point():
                    continue  # sharded in place, as all others: layers multiply and look up no complex numbers
                # Sharded in place: a subclass with its own forward, and one called with `input=`, no name of the layers
                is_plain = type(module).forward is nn.Linear.forward and "bias" in module._parameters  # not computed
                if is_plain and owner not in self.called_by_name:
                    roles[owner] = "column" if dim == 0 else "row"
                elif is_conv1d(module):
                    roles[owner] = "column" if dim == 1 else "row"
                elif dim == 0 and looks_up(module):
                    roles[owner] = "vocab"
        return roles

    def leave_whole_problems(self, state: State) -> bool:
        dropped: dict[str, str] = {}
        # The others may follow from those whose cause is known: they are seen again in the next round
        known = [problem for problem in state.flow.problems if problem.blame]
        for problem in known or state.flow.problems:
            # From the most exact to the least: the decisions to blame, the module's parameters, those around it, all
            names = [n for n, decision in state.types.cut.items() if problem.blame.intersection(decision.sharded)]
            if not names and problem.name:
                names = [n for n in state.types.cut if n == problem.name or n.startswith(problem.name + ".")]
            if not names and "." in problem.name:
                around = problem.name.rpartition(".")[0]
                names = [n for n in state.types.cut if n.startswith(around + ".")]
            for name in names or (list(state.types.cut) if not problem.name else []):
                dropped.setdefault(name, problem.text)
        for name, text in dropped.items():
            self.leave(state.types.cut[name], text)
        return bool(dropped)

    def leave(self, decision: Decision, text: str, advice: Mapping[str, str] | None = None) -> None:
        """Replicates the parameters of a decision, for a reason and with more advice for some of them."""
        pinned = decision.atom.pinned
        if pinned is None:
            for name in decision.parameters:
                self.why.setdefault(name, f"{text}; {advice[name]}" if advice and name in advice else text)
        elif pinned.is_sum:  # other atoms of these parameters may be sharded yet
            decision.atom.pinned = Reason(f"{pinned}, whose sum its call cannot complete: {text}")

    def leave_whole(self, state: State, mismatch: MismatchError) -> bool:
        """Replicates the parameters of the module, or of the nearest around it, and of all modules of its class."""
        blocks = itertools.accumulate(mismatch.module.split("."), "{}.{}".format) if mismatch.module else ()
        calls = self.localized(state).numbered_calls()
        results = calls[mismatch.at][1][2] if mismatch.at < len(calls) else []
        # What the call that differs has a sharded dim of; else what is near to its module, and last the heads
        types = state.types
        hit = [decision for decision in types.chosen if any(carries(self.record, t, decision.sharded) for t in results)]
        if hit:
            return self.give_up(state, hit, mismatch)
        for prefix in [*(f"{block}." for block in reversed(list(blocks))), ""]:
            hit = [
                decision
                for decision in types.chosen
                if decision.atom not in types.whole_heads and any(n.startswith(prefix) for n in decision.parameters)
            ]
            if hit:
                break
        return self.give_up(state, hit or types.chosen, mismatch)

    def give_up(self, state: State, hit: list[Decision], mismatch: MismatchError) -> bool:
        """Replicates the parameters of decisions, and of all modules that have the class of the differing module."""
        left, prefix = list(hit), f"{mismatch.module}."
        inside = {n.removeprefix(prefix) for decision in hit for n in decision.parameters if n.startswith(prefix)}
        if inside and mismatch.module:
            kind = type(self.modules[mismatch.module])
            same = {f"{name}.{n}" for name, module in self.modules.items() if type(module) is kind for n in inside}
            left += [decision for decision in state.types.chosen if same.intersection(decision.parameters)]
        tables = [name for name in state.types.cut if state.types.roles.get(name.rpartition(".")[0]) == "vocab"]
        for decision in left:
            self.leave(decision, str(mismatch), dict.fromkeys(tables, TABLE_ADVICE))
        return True

    def localized(self, state: State) -> Localized:
        edits = LocalEdits(
            p=self.p,
            token_sizes=self.token_sizes,
            roles=state.types.roles,
            heads=state.heads,
            shardings=self.shardings(state),
            buffers=state.flow.buffers,
            conversions=self.conversions(state),
        )
        return Localized(self.model, self.example, edits, state.flow)

    def conversions(self, state: State) -> list[Conversion]:
        flow, tokens = state.flow, state.types.tokens
        edits = [*flow.copies, *flow.sums, *flow.slices, *flow.gathers, *flow.calls]
        return edits + (tokens.edits if tokens else [])

    def shardings(self, state: State) -> dict[str, Sharding]:
        """The shardings of parameters; a tied parameter has the same one under all its names."""
        cuts = (cut for decision in state.types.chosen for cut in decision.parameters.items())
        return {alias: cut.sharding for name, cut in cuts for alias in self.names[name]}

    def localize(self, state: State) -> None:
        """Finds the integers of every rank; ranks with the same local lengths share them."""
        localized, larger = self.localized(state), self.larger or self
        searched, proofs = dict[tuple[int, ...], Local](), dict[tuple[int, ...], str]()
        state.proofs.clear()
        # Where less is sharded than in all layers, integers that change no shape would stay local
        sharded = {name for group in larger.together for name in group if name in self.names}
        is_same = larger is not self and larger.p == self.p and state.types.cut.keys() == sharded
        known = self.given or (larger.local if is_same else ())
        for rank in range(self.p):
            key = tuple(size for decision in state.types.chosen for size in decision.sizes(rank).values())
            if key not in searched:
                before = next(iter(searched.values()), larger.local[0].of(self.modules) if larger.local else None)
                given = agreeing(localized, rank, known[rank]) if known else None
                searched[key], calls = given or IntegerSearch(localized, rank, before).find()
                proofs[key] = digest(calls)
            state.local[rank] = searched[key]
            state.proofs.append(proofs[key])
        kinds = {str({m: sorted(changes) for m, changes in integers.patches.items()}) for integers in searched.values()}
        # `merged` writes one attribute down for all ranks, with the number of each
        if len(kinds) > 1:
            module = next(iter(next(integers.patches for integers in searched.values() if integers.patches)), "")
            raise MismatchError(module, f"ranks differ in the integers that must be local: {sorted(kinds)}")

    # ------------------------------------------------------------ sequence parallelism

    def with_tokens(self, base: State) -> State:
        """Returns the state with activations sharded on their tokens; the given one if ``"auto"`` finds no gain."""
        whole = {name: self.whole_tokens[kind_of(name)] for name in self.modules if kind_of(name) in self.whole_tokens}
        bans = Bans(sources=dict(whole))
        state = self.try_tokens(base, bans, 0)
        if state.types.tokens is None:  # along the dim that operators mix the most; else along another
            other = Bans(sources=dict(whole))
            state = self.try_tokens(base, other, 1)
            bans = bans if state.types.tokens is None else other
        state = replace(state, whole_tokens=dict(bans.sources))
        if state.types.tokens is None:
            module, text = next(iter(bans.sources.items()), ("the model", "no layer sums over the ranks"))
            reason = f"after {module}: {text}"
        else:
            before, after = (on_the_wire(collectives_of(s.flow, self.p, s.heads, True)) for s in (base, state))
            gains = after <= MAX_GROWTH * before and state.types.tokens.saved > 0
            if self.sequence_parallel in (True, POSSIBLE) or gains:
                return state
            reason = f"activations on the wire would grow from {before} to {after} bytes"
        if self.sequence_parallel is True:
            raise ValueError(f"sequence_parallel: True must be possible somewhere, and is not: {reason}")
        return replace(base, whole_tokens=dict(bans.sources) if state.types.tokens is None else {"the model": reason})

    def try_tokens(self, base: State, bans: Bans, alternative: int) -> State:
        """Shards tokens until gradients and proof accept; each attempt bans more, and at the end all stay whole."""
        for _ in range(MAX_ROUNDS):
            tokens = find_tokens(base.flow, self.token_sizes, bans, alternative)
            if not tokens.sources:
                return base
            flow = self.flow(base.types.chosen, base.types.roles, base.types.whole_heads, base.types.cut, tokens)
            if flow.problems:
                ban_problems(flow.problems, tokens, bans)
                continue
            state = replace(base, flow=flow, proofs=[])
            try:
                self.prove(state)
            except MismatchError as mismatch:
                places = [i for i, _ in self.localized(state).numbered_calls()]
                index = places[mismatch.at] if mismatch.at < len(places) else len(self.record.python_calls)
                kinds = {name: type(module).__qualname__ for name, module in self.modules.items()}
                ban_mismatch(self.record, tokens, mismatch.module, index, str(mismatch), kinds, bans)
                continue
            return state
        return base

    def prove(self, state: State) -> None:
        """Proves the shapes of a state whose integers have been found."""
        assert state.types.tokens is not None
        localized, proofs = self.localized(state), dict[tuple[Any, ...], str]()
        lengths = {atom.size for _, atom in state.types.tokens.entries}
        for rank in range(self.p):
            sizes = [size for decision in state.types.chosen for size in decision.sizes(rank).values()]
            key = (*sizes, *(self.token_sizes(n)[rank] for n in sorted(lengths)))
            if key not in proofs:
                local = state.local[rank]
                proofs[key] = digest(localized.checked(rank, local.patches, local.sizes))
            state.proofs.append(proofs[key])

    # ------------------------------------------------------------ the result

    def finished(self, state: State) -> Plan:
        flow = state.flow
        self.together = [list(decision.parameters) for decision in state.types.chosen]
        self.local = dict(state.local)
        candidates = functools.cache(lambda: decisions(self.record, self.p, self.may_shard, shares=self.shares))
        whole = [name for name, _ in self.record.parameters.values() if name not in state.types.cut]
        plan = Plan(
            p=self.p,
            shardings=self.shardings(state),
            tied=[group for name, group in self.names.items() if len(group) > 1 and name in state.types.cut],
            roles=dict(state.types.roles),
            heads=state.heads,
            buffers=flow.buffers,
            conversions=self.conversions(state),
            refused_inputs=flow.refused_inputs,
            draws=draws_of(flow, self.p),
            patches=merged({rank: local.patches for rank, local in state.local.items()}),
            sizes=merged_sizes([state.local[rank].sizes for rank in sorted(state.local)]),
            whole={a: self.reason(n, state, candidates) for n in whole for a in self.names[n]},
            collectives=collectives_of(flow, self.p, state.heads),
            shapes={a: tuple(t.shape) for n, t in self.record.parameters.values() for a in self.names[n]},
            example=described(self.example, self.record.read),
            proofs=state.proofs,
            bytes_of_element={n: t.element_size() for n, t in self.record.parameters.values()},
            outputs=outputs_of(flow, self.modules, state.heads, self.token_sizes),
            whole_tokens=state.whole_tokens,
            direct=self.record.direct,
            shares=self.shares,
        )
        plan.direct_calls = direct_calls(state.flow, plan.edited(), plan.local())
        return plan_in_blocks(plan, state.flow, self.modules, self.blocks) if self.blocks else plan

    def reason(self, name: str, state: State, candidates: Callable[[], list[Decision]]) -> str:
        """Returns why a parameter stays whole."""
        if self.p == 1 and not self.blocks:
            return "p = 1"
        # First: the dims of a parameter that a round has left whole do not show why
        if name in self.why:
            return self.why[name]
        return reason_of(self.record, name, self.p, self.may_shard, candidates, state.types.cut, self.why, self.shares)
