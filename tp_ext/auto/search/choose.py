"""Exact choice of the sharded atoms among those that nothing pins.

A candidate is an atom that is the slowest of a dim of a parameter, or of most parts of one: the dim can be sharded
by it. One candidate shards many parameters: all those in which its atom occurs. No parameter is sharded twice, so
that candidates that share one exclude each other; of every set of such candidates those are chosen that leave the
fewest bytes on a rank."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from torch import Tensor

from tp_ext.auto.record.dims import Atom, Dim, Major, atoms, atoms_in, majors
from tp_ext.auto.record.edits import Factor
from tp_ext.auto.record.operators import row_of
from tp_ext.auto.record.record import Record
from tp_ext.invariance import units_of_rank
from tp_ext.sharding import Part, Sharding
from tp_ext.share_sizes import Weights, split_sizes

SMALL_TABLE = 0.01  # of all parameters: an embedding below costs more in its all-reduce than its bytes are worth
MAX_BRANCHES = 1000  # of the search among candidates that exclude each other


@dataclass
class Cut:
    """A parameter as one decision shards it."""

    id: int
    tensor: Tensor
    sharding: Sharding


@dataclass(eq=False)
class Decision:
    """An atom to be sharded over p ranks, and the parameters that it shards, by name.

    ``group``: the atom sharded further where ``atom`` has fewer elements than ranks: the query heads of each KV head.
    ``blocks``: those of ``tp_invariant`` that the atom is cut into; 0: it is not cut so. ``shares``: of the ranks.
    ``joint``: atoms that are sharded with it, since an operator sums over all of them: features side by side.
    """

    atom: Atom
    p: int
    group: Atom | None = None
    blocks: int = 0
    shares: Weights | None = None
    joint: tuple[Atom, ...] = ()
    parameters: dict[str, Cut] = field(default_factory=dict)

    @property
    def slowest(self) -> list[Atom]:
        """The sharded atoms that are the slowest of dims."""
        return [self.atom, *self.joint]

    @property
    def sharded(self) -> list[Atom]:
        return self.slowest if self.group is None else [self.atom, self.group]

    def sizes(self, rank: int) -> dict[Atom, int]:
        """Lengths of the sharded atoms on a rank."""
        if self.blocks:
            spans = {atom: units_of_rank(atom.size, self.blocks, rank, self.p) for atom in self.slowest}
            return {atom: stop - start for atom, (start, stop) in spans.items()}
        if self.group is None:
            return {atom: split_sizes(atom.size, self.p, self.shares)[rank] for atom in self.slowest}
        holders = self.p // self.atom.size
        return {self.atom: 1, self.group: split_sizes(self.group.size, holders)[rank % holders]}

    def occurs(self, dim: Dim) -> bool:
        """True if a dim, or a part of it, has an atom that this decision shards over all ranks."""
        return not atoms_in(dim).isdisjoint(self.slowest)

    def parts(self, dim: Dim) -> list[Part] | None:
        """The parts of a dim, sharded by this atom; None if it does not occur as the slowest of any."""
        slowest = list(majors(dim, sums=self.atom.pinned is not None))
        is_sharded = [major.atom in self.slowest for major in slowest]
        # Ranks of shares hold no part that all ranks have
        if not any(is_sharded) or (self.shares is not None and not all(is_sharded)):
            return None
        return [self._part(major) for major in slowest]

    def _part(self, major: Major) -> Part:
        size = major.atom.size * major.unit
        if major.atom not in self.slowest:  # a part that all ranks hold: k and v of multi-query attention
            return Part(size, unit=size, copies=self.p)
        if self.group is None:
            return Part(size, unit=major.unit, blocks=self.blocks, shares=self.shares)
        # Query heads are divided among the holders of their KV head, which all hold its k and v
        if major.inner and major.inner[0] is self.group:
            return Part(size, unit=major.unit // self.group.size, groups=self.atom.size)
        return Part(size, unit=major.unit, copies=self.p // self.atom.size)

    def factor(self, dim: Dim, constant: set[Atom]) -> Factor | None:
        """The factor of an activation's dim that has the sharded atom, which the model determines; the others are
        lengths of the run. None if these lie on both sides of it, or the atom is not the slowest of the factor.

        Args:
            constant: atoms whose lengths are the model's.
        """
        factors = atoms(dim)
        first = next((i for i, factor in enumerate(factors) if self.occurs([factor])), len(factors))
        last = next((i for i in range(len(factors), first, -1) if i - 1 == first or factors[i - 1] in constant), first)
        parts = self.parts(factors[first:last])
        varies = any(atom not in constant for atom in factors[first + 1 : last])
        if parts is None or varies or (first > 0 and last < len(factors)):
            return None
        return Factor(tuple(parts), is_minor=last == len(factors))

    def saved(self) -> float:
        """Elements that a rank does not hold."""
        # With blocks one rank, too, makes the decisions of several
        return sum(cut.tensor.numel() for cut in self.parameters.values()) * (1 - 1 / max(self.p, 2))


def decisions(
    record: Record, p: int, may_shard: Callable[[str, int], bool], blocks: int = 0, shares: Weights | None = None
) -> list[Decision]:
    """All candidates, with the parameters that each would shard; ``may_shard(name, dim)``: whether hints allow it."""
    by_atom, contracted = _majors_by_atom(record), _contracted_by_atom(record)
    by_sharded_atom = _side_by_side(contracted, by_atom, p, blocks, shares)
    for id_, (name, tensor) in record.parameters.items():
        for dim, label in enumerate(record.dims_of(tensor)):
            for major in all_majors(label) if may_shard(name, dim) else ():
                decision = by_sharded_atom.get(major.atom) or _decision(major.atom, p, by_atom, blocks, shares)
                if decision is None:
                    continue
                by_sharded_atom[major.atom] = decision
                parts = decision.parts(label)
                # A square weight may have the atom in both dims. `_is_consistent` then refuses the decision
                if parts and name not in decision.parameters:
                    decision.parameters[name] = Cut(id_, tensor, Sharding(dim, parts))
    # Sharding pays for a parameter only if at least half of it is sharded, and a decision that leaves a parameter out
    # must not have its atoms there
    candidates = list(dict.fromkeys(by_sharded_atom.values()))
    for decision in candidates:
        for name, cut in list(decision.parameters.items()):
            held_once = (part.size for part in cut.sharding.parts if part.copies < max(p, 2))
            if 2 * sum(held_once) < cut.sharding.size:
                del decision.parameters[name]  # most of it would be on every rank
    where = _occurrences(record)
    return [
        decision
        for decision in candidates
        if decision.parameters
        and _is_consistent(decision, where)
        and not (blocks and any(part.blocks == 0 for c in decision.parameters.values() for part in c.sharding.parts))
        and not any(
            part.copies > 1
            for atom in decision.slowest
            for dim in contracted.get(atom, ())
            for part in decision.parts(dim) or ()
        )
    ]


def _side_by_side(
    contracted: Mapping[Atom, list[Dim]],
    by_atom: Mapping[Atom, list[Major]],
    p: int,
    blocks: int,
    shares: Weights | None,
) -> dict[Atom, Decision]:
    """The decisions of several atoms, by each of them: those of features side by side, over which an operator sums.

    Sharding one of them alone would leave the rest of such a dim on every rank, whose terms the sum would have p times.
    """
    joined: dict[Atom, dict[Atom, None]] = {}
    for dim in (dim for dims in contracted.values() for dim in dims):
        group = dict.fromkeys(major.atom for major in all_majors(dim))
        for other in [joined[atom] for atom in group if atom in joined]:
            group |= other
        joined.update(dict.fromkeys(group, group))
    decided: dict[Atom, Decision] = {}
    for group in {id(group): group for group in joined.values() if len(group) > 1}.values():
        atom, *joint = group
        alone = [_decision(member, p, by_atom, blocks, shares) for member in group]
        if all(decision is not None and decision.group is None and not decision.atom.pinned for decision in alone):
            decision = Decision(atom, p, blocks=blocks, shares=shares, joint=tuple(joint))
            decided.update(dict.fromkeys(group, decision))
    return decided


def all_majors(dim: Dim) -> Iterator[Major]:
    """The slowest atoms of a dim, and those over which calls sum."""
    yield from majors(dim)
    yield from (major for major in majors(dim, sums=True) if major.atom.pinned)


def _contracted_by_atom(record: Record) -> dict[Atom, list[Dim]]:
    """The dims that operators sum over, by the atoms that can be sharded in them.

    A decision that shards a part of such a dim and leaves the rest on every rank, as after ``cat`` of a sharded and a
    replicated tensor, cannot be: the sum over the ranks would have the terms of the rest p times.
    """
    dims: dict[Atom, list[Dim]] = {}
    for step in record.steps:
        for major in all_majors(step.contracted):
            dims.setdefault(major.atom, []).append(step.contracted)
    return dims


def _is_consistent(decision: Decision, where: Mapping[Atom, set[tuple[int, int]]]) -> bool:
    """True if the decision shards every parameter that has its atoms, each on the one dim that has them."""
    sharded = {(cut.id, cut.sharding.dim) for cut in decision.parameters.values()}
    return all(where[atom] <= sharded for atom in decision.sharded if atom in where)


def _occurrences(record: Record) -> dict[Atom, set[tuple[int, int]]]:
    """The (id, dim) of parameters that have each atom, in any place."""
    places: dict[Atom, set[tuple[int, int]]] = {}
    for id_, (_, tensor) in record.parameters.items():
        for dim, label in enumerate(record.dims_of(tensor)):
            for atom in atoms_in(label):
                places.setdefault(atom, set()).add((id_, dim))
    return places


def constant_atoms(record: Record, buffers: bool = True) -> set[Atom]:
    """Returns the atoms whose lengths the model determines: those of parameters and buffers that no input has."""
    of_model = [*record.parameters.values(), *(record.buffers.values() if buffers else ())]
    constant = {atom for _, t in of_model for label in record.dims_of(t) for atom in atoms_in(label)}
    inputs = {atom for _, t in record.inputs for label in record.dims_of(t) for atom in atoms_in(label)}
    # An atom that an input has, too, is a length of the run, as that of positions that are added to the tokens
    return constant - inputs


def _majors_by_atom(record: Record) -> dict[Atom, list[Major]]:
    by_atom: dict[Atom, list[Major]] = {}
    for _, tensor in record.parameters.values():
        for label in record.dims_of(tensor):
            for major in majors(label):
                by_atom.setdefault(major.atom, []).append(major)
    return by_atom


def _decision(
    atom: Atom, p: int, by_atom: Mapping[Atom, list[Major]], blocks: int, shares: Weights | None
) -> Decision | None:
    """The decision to shard an atom; None if it is pinned, or has fewer elements than ranks and no group to shard."""
    if atom.pinned and (blocks or not atom.pinned.is_sum):
        return None
    if blocks:  # a rank without any unit has no local forward
        decision = Decision(atom, p, blocks=blocks)
        is_held = atom.size > 1 and all(decision.sizes(rank)[atom] for rank in range(p))
        return decision if is_held else None
    if shares is not None:
        return Decision(atom, p, shares=shares) if all(split_sizes(atom.size, p, shares)) else None
    if atom.size >= p:
        return Decision(atom, p)
    # Each KV head needs the same number of holders, and a sum over the ranks would count it once for each
    if atom.size == 1 or p % atom.size or atom.pinned:
        return None
    # k and v do not have the group: some other parameter must say how many query heads a KV head has
    for major in by_atom[atom]:
        if major.inner and not major.inner[0].pinned and major.inner[0].size * atom.size >= p:
            return Decision(atom, p, major.inner[0])
    return None


def choose(
    record: Record,
    p: int,
    may_shard: Callable[[str, int], bool],
    memory_budget: float | None = None,
    small_tables_whole: bool = True,
    blocks: int = 0,
    shares: Weights | None = None,
) -> list[Decision]:
    """Chooses the decisions that leave the fewest bytes on a rank, no parameter sharded twice.

    Tables of embeddings below 1 % of all parameters stay whole, unless the memory budget needs them, or on request.

    Raises:
        ValueError: more bytes of parameters than ``memory_budget`` stay on a rank.
    """
    if p == 1 and not blocks:
        return []
    possible = decisions(record, p, may_shard, blocks, shares)
    candidates = [candidate for candidate in possible if not candidate.atom.pinned]
    total = sum(tensor.numel() for _, tensor in record.parameters.values())
    tables = {id(step.inputs[0]) for step in record.steps if row_of(step.name).looks_up}

    def is_small_table(decision: Decision) -> bool:
        only = all(cut.id in tables and cut.sharding.dim == 0 for cut in decision.parameters.values())
        return small_tables_whole and only and decision.saved() < SMALL_TABLE * total

    chosen = list(_independent([candidate for candidate in candidates if not is_small_table(candidate)]))
    if memory_budget is not None and _bytes_left(record, chosen) > memory_budget:
        chosen = list(_independent(candidates))
        left = _bytes_left(record, chosen)
        if left > memory_budget:
            raise ValueError(
                f"memory_budget: {memory_budget:.0f} bytes must be at least {left:.0f}, the parameters of a rank at "
                f"p = {p} with everything sharded that can be"
            )
    return _with_sums(possible, chosen)


def _with_sums(possible: list[Decision], chosen: list[Decision]) -> list[Decision]:
    """The decisions with those of atoms over which calls sum, such as heads below a norm over all of them.

    These shard weights that no other decision does, or that another one shards on the same dim, such as by the features
    of heads, or one alone that saves far less. A residual stream, over which norms sum, too, is in the weights of many.
    """
    summed = [d for d in possible if d.atom.pinned and any(cut.tensor.dim() > 1 for cut in d.parameters.values())]
    for decision in sorted(summed, key=lambda candidate: -candidate.saved()):
        cuts = decision.parameters
        others = [other for other in chosen if not cuts.keys().isdisjoint(other.parameters)]
        shared = [(cuts[n], other.parameters[n]) for other in others for n in cuts.keys() & other.parameters.keys()]
        same_dims = all(cut.sharding.dim == other_cut.sharding.dim for cut, other_cut in shared)
        factor = 1.0 if same_dims else 1.5 if len(others) == 1 else math.inf
        if decision.saved() > factor * sum(other.saved() for other in others):
            chosen = [*(other for other in chosen if other not in others), decision]
    return chosen


def _bytes_left(record: Record, chosen: Iterable[Decision]) -> float:
    total = sum(tensor.numel() * tensor.element_size() for _, tensor in record.parameters.values())
    for decision in chosen:
        for cut in decision.parameters.values():
            # By shares any rank may have the most; what is saved there is less for all parameters alike
            fullest = 0 if decision.shares is None else decision.shares.index(max(decision.shares))
            local = math.prod(cut.sharding.local_shape(cut.tensor.shape, fullest, decision.p))
            total -= (cut.tensor.numel() - local) * cut.tensor.element_size()
    return total


def _independent(candidates: list[Decision]) -> Iterable[Decision]:
    """The set of greatest weight in which no two candidates share a parameter, component by component."""
    # Stable: the order of the parameters decides ties
    candidates = sorted(candidates, key=lambda candidate: -candidate.saved())
    uses: dict[int, list[int]] = {}
    for i, decision in enumerate(candidates):
        for cut in decision.parameters.values():
            uses.setdefault(cut.id, []).append(i)
    joined = list(range(len(candidates)))

    def root(i: int) -> int:
        while joined[i] != i:
            joined[i] = joined[joined[i]]
            i = joined[i]
        return i

    excluded: dict[int, set[int]] = {i: set() for i in range(len(candidates))}
    for sharing in uses.values():
        for a, b in itertools.combinations(sharing, 2):
            joined[max(root(a), root(b))] = min(root(a), root(b))
            excluded[a].add(b)
            excluded[b].add(a)
    components: dict[int, list[int]] = {}
    for i in range(len(candidates)):
        components.setdefault(root(i), []).append(i)
    weights = [candidate.saved() for candidate in candidates]
    for members in components.values():
        yield from (candidates[i] for i in heaviest(members, excluded, weights))


def heaviest(members: list[int], excluded: Mapping[int, set[int]], weight: list[float]) -> list[int]:
    """The independent set of greatest weight in a component; the greedy one where it is as good, or the search ends."""
    greedy: list[int] = []
    for i in members:
        if not excluded[i].intersection(greedy):
            greedy.append(i)
    # Greedy alone takes the heavy centre of a star, whose light leaves outweigh it together
    left = MAX_BRANCHES

    def total(chosen: Iterable[int]) -> float:
        return sum(weight[i] for i in chosen)

    def best(allowed: frozenset[int]) -> list[int]:
        """Branches on the candidate that excludes most others. What remains decomposes, so this is fast for chains and
        for stars, such as the channels of a residual stream."""
        nonlocal left
        degree = {i: len(excluded[i] & allowed) for i in sorted(allowed)}
        free = [i for i, others in degree.items() if not others]
        # At the end of the search what excludes nothing is still a valid set, and the greedy set may replace it
        if len(free) == len(degree) or left <= 0:
            return free
        left -= 1
        hub = max(degree, key=lambda i: degree[i])
        rest = allowed.difference(free, [hub])
        return free + max(best(rest), [hub, *best(rest - excluded[hub])], key=total)

    chosen = best(frozenset(members))
    return sorted(chosen) if total(chosen) > total(greedy) else greedy


def users_of_parameters(record: Record) -> dict[int, set[str]]:
    """Returns the modules that multiply or look up each parameter, by id."""
    modules_of = dict[int, set[str]]()
    for step in record.steps:
        if not row_of(step.name).product and not row_of(step.name).looks_up:
            continue
        for tensor in step.inputs:
            while id(tensor) in record.maker and row_of(record.maker[id(tensor)].name).view:
                tensor = record.maker[id(tensor)].inputs[0]
            if id(tensor) in record.parameters:
                modules_of.setdefault(id(tensor), set()).add(step.module)
    return modules_of


def carries(record: Record, tensor: Tensor, sharded: Iterable[Atom]) -> bool:
    """True if a tensor has one of these atoms in a dim."""
    return not all(atoms_in(label).isdisjoint(sharded) for label in record.dims.get(id(tensor), ()))


def sharded_dims(record: Record, tensor: Tensor, chosen: Iterable[Decision]) -> Iterator[tuple[int, Dim, Decision]]:
    """Yields the dims of a tensor, and of each the decisions that shard it."""
    for dim, label in enumerate(record.dims_of(tensor)):
        yield from ((dim, label, decision) for decision in chosen if decision.occurs(label))


def local_length(dim: Dim, sizes: Mapping[Atom, int]) -> int:
    """Returns the length of a dim on a rank, where its sharded atoms have these sizes."""
    length = 1
    for atom in atoms(dim):
        if atom in sizes:
            length *= sizes[atom]
        elif atom.parts is not None:
            length *= sum(local_length(part, sizes) for part in atom.parts)
        else:
            length *= atom.size
    return length
