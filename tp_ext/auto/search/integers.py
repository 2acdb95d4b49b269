"""The search for integers that modules hold and that must be local, and for calls whose sizes must be changed instead.

A run of the local model in which all sizes are made right says how many of the code's own were wrong, over the whole
forward. Integers are tried one after the other, depth first: one that leaves fewer wrong sizes is kept and others are
tried with it; a set that leads nowhere is left for the next best. Classes of modules for which no set makes all sizes
right have their sizes changed call by call (:mod:`tp_ext.auto.search.sizes`)."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from tp_ext.auto.record.edits import SizeCall
from tp_ext.auto.record.reachable import reads_by_name
from tp_ext.auto.record.unchanged import names_read
from tp_ext.auto.search.choose import local_length
from tp_ext.auto.search.localize import Localized, MismatchError, Patches, PythonCall, compare_calls

MAX_TOGETHER = 6  # integers of one set, each in all modules of a class
MAX_RUNS = 150
MAX_RUNS_FOR_SIZES = 50  # where sizes can be changed instead

SizesByModule = dict[str, list[SizeCall]]
PatchesKey = frozenset[tuple[str, str, int]]


@dataclass
class Local:
    """The code of a rank: integers, and sizes of calls."""

    patches: Patches = field(default_factory=dict)
    sizes: SizesByModule = field(default_factory=dict)

    def of(self, modules: Container[str]) -> Local:
        """Returns the integers of some modules."""
        patches = {name: changes for name, changes in self.patches.items() if name in modules}
        return Local(patches, {name: calls for name, calls in self.sizes.items() if name in modules})


@dataclass
class _Seen:
    """A run of the local model with some integers, all sizes made right."""

    patches: Patches
    left: int  # calls that were not reached
    mismatch: MismatchError | None
    wrong: dict[str, int]  # module -> sizes that its code gives wrong
    sizes: SizesByModule
    calls: list[PythonCall]

    def effect(self) -> tuple[Any, ...]:
        """Returns what integers change: the calls that are reached, and the sizes of the code."""
        return self.left, self.wrong, self.sizes

    def score(self, changed: set[str]) -> tuple[int, int]:
        """Calls that were not reached, and sizes that are wrong in modules whose sizes are not changed."""
        return self.left, sum(number for name, number in self.wrong.items() if name not in changed)


class IntegerSearch:
    """Searches for one rank.

    Args:
        before: what another rank has; its modules and integers are tried first, so that ranks have the same.
    """

    def __init__(self, localized: Localized, rank: int, before: Local | None = None, max_runs: int = MAX_RUNS) -> None:
        self.localized, self.rank, self.before, self.max_runs = localized, rank, before, max_runs
        self.lines = localized.lines()
        self.wanted, self.known = localized.expected(rank), known_integers(localized, rank)
        self.values_of_decisions: dict[tuple[int, ...], dict[int, list[int]]] = {}
        self.seen: dict[PatchesKey, _Seen] = {}
        self.changed = set(before.sizes) if before is not None else set()
        self.idle: set[str] = set()  # integers that changed nothing
        self.names = names_read(localized.model)
        self.first = localized.runs

    def find(self) -> tuple[Local, list[PythonCall]]:
        """Returns what must be local, and the calls that the local model makes with it.

        Raises:
            MismatchError: there is nothing with which all calls agree.
        """
        start = self.observed(self.known)
        for patches in self.as_before():
            start = min(start, self.observed(patches), key=lambda run: run.score(self.changed))
        while True:
            best = self.best_from(start)
            if best.score(self.changed) == (0, 0):
                break
            if best.mismatch is not None:
                raise best.mismatch
            kinds = {type(self.localized.model.get_submodule(n)) for n in best.wrong if n not in self.changed}
            # By name: a set of classes has another order in each process, and the plan must be the same in all
            kind = next(iter(sorted(kinds, key=lambda candidate: candidate.__qualname__)))
            wrong = [n for n in best.wrong if type(self.localized.model.get_submodule(n)) is kind]
            if missing := [n for n in wrong if n not in best.sizes]:
                raise MismatchError(missing[0], "its calls have other sizes each time that it is called")
            self.changed.update(wrong)
        best = self.without_needless(best)
        local = Local(best.patches, {name: best.sizes[name] for name in sorted(self.changed & set(best.sizes))})
        # An observer that has changed no size has seen the calls that the model makes without it
        if not best.wrong:
            return local, best.calls
        # Again without the observer, which has made all sizes right itself
        return local, self.localized.checked(self.rank, local.patches, local.sizes)

    def best_from(self, start: _Seen) -> _Seen:
        """The first set with nothing wrong; else the best that was seen."""
        # Breaks ties in the heap, whose sets cannot be compared
        order = itertools.count()
        heap: list[tuple[tuple[int, int], int, int, _Seen, Iterator[tuple[str, Patches]]]] = []

        def push(state: _Seen) -> None:
            number = sum(map(len, _attributes(state.patches).values()))
            if number < MAX_TOGETHER:
                entry = (state.score(self.changed), number, next(order), state, self.trials(state))
                heapq.heappush(heap, entry)

        push(start)
        best, tried = start, {_key(start.patches)}
        while heap and best.score(self.changed) != (0, 0) and not self.is_over(best):
            # The best set stays in the heap: its other trials wait while a child of it is better
            trials = heap[0][-1]
            integer, patches = next((trial for trial in trials if _key(trial[1]) not in tried), ("", None))
            if patches is None:
                heapq.heappop(heap)
                continue
            tried.add(_key(patches))
            child = self.observed(patches)
            # An integer that changes nothing in a whole forward is not read there: with others it would be tried in
            # every combination. Where calls differ in more than sizes, what it changes may come after them
            if child.mismatch is not None or child.effect() != heap[0][3].effect():
                push(child)
            else:
                self.idle.add(integer)
            best = min(best, child, key=lambda run: run.score(self.changed))
        if best.mismatch is not None and self.is_over(best):
            text = f"{best.mismatch.text}; no integers found in {self.max_runs} runs"
            best.mismatch = MismatchError(best.mismatch.module, text, best.mismatch.at)
        return best

    def is_over(self, best: _Seen) -> bool:
        most = MAX_RUNS_FOR_SIZES if best.mismatch is None else MAX_RUNS
        return self.localized.runs - self.first > min(most, self.max_runs)

    def observed(self, patches: Patches) -> _Seen:
        key = _key(patches)
        if key not in self.seen:
            observer = self.localized.observer(self.rank)
            calls, raised = self.localized.run(self.rank, patches, observer=observer)
            reached, mismatch = compare_calls(self.wanted, calls, raised, self.lines)
            # At least 1, since calls in addition differ after all wanted calls were reached
            left = 0 if mismatch is None else max(1, len(self.wanted) - reached)
            self.seen[key] = _Seen(patches, left, mismatch, observer.wrong(), observer.planned(), calls)
        return self.seen[key]

    def without_needless(self, best: _Seen) -> _Seen:
        """Removes integers that are not needed: nothing shows that their numbers are right, and another call may read
        them."""
        given = self.before.patches if self.before is not None else self.known
        for name, attribute in sorted((n, a) for n in best.patches for a in best.patches[n]):
            # Those of another rank are needed there, and ranks must have the same
            is_given = attribute in given.get(name, {}) and name not in self.changed
            if is_given or attribute in self.known.get(name, {}) or attribute not in best.patches.get(name, {}):
                continue
            kind = type(self.localized.model.get_submodule(name))
            less = {
                n: {a: v for a, v in changes.items() if a != attribute or not isinstance(self.module(n), kind)}
                for n, changes in best.patches.items()
            }
            other = self.observed({n: changes for n, changes in less.items() if changes})
            if other.score(self.changed) == (0, 0) and all(name in other.sizes for name in other.wrong):
                best = other
        return best

    def module(self, name: str) -> nn.Module:
        return self.localized.model.get_submodule(name)

    def values(self, name: str, of_its_own: bool = False) -> dict[int, list[int]]:
        """Returns the local lengths of each length, from the sharded parameters of a module; if it has none, unless
        ``of_its_own``, of the nearest module around it.

        Another module's 6 may become 3 where this one's becomes 4."""
        decisions = self.localized.flow.types.chosen
        inside = [
            decision for decision in decisions if any(not name or n.startswith(f"{name}.") for n in decision.parameters)
        ]
        if not inside:
            return {} if of_its_own or not name else self.values(name.rpartition(".")[0])
        key = tuple(map(id, inside))
        if key not in self.values_of_decisions:
            self.values_of_decisions[key] = self.localized.local_values(self.rank, inside)
        return self.values_of_decisions[key]

    # ------------------------------------------------------------ candidates

    def as_before(self) -> Iterator[Patches]:
        """The integers of another rank, with each of the values that they may have on this one."""
        before = self.before.patches if self.before is not None else {}
        pairs = [(n, a, old) for n, changes in before.items() for a, (old, _) in changes.items()]
        triples = [(n, a, old) for n, a, old in pairs if a not in self.known.get(n, {})]
        kinds = sorted({(a, old, tuple(self.values(n).get(old, [old]))) for n, a, old in triples})
        for new in itertools.islice(itertools.product(*(options for _, _, options in kinds)), 8) if kinds else ():
            value = dict(zip(kinds, new, strict=True))
            patches: Patches = {n: dict(changes) for n, changes in self.known.items()}
            for n, a, old in triples:
                patches.setdefault(n, {})[a] = old, value[a, old, tuple(self.values(n).get(old, [old]))]
            yield patches

    def trials(self, state: _Seen) -> Iterator[tuple[str, Patches]]:
        """Sets with one integer more, each with the class and name of that: of the first module that has something
        wrong, or of the modules around it, and of all of their class."""
        wrong = [n for n in state.wrong if n not in self.changed]
        name = state.mismatch.module if state.mismatch is not None else wrong[0] if wrong else None
        if name is None:
            return
        around = [name, *(name.rsplit(".", k)[0] for k in (1, 2) if name.count(".") >= k), *([""] if name else [])]
        for holder in around:
            done = state.patches.get(holder, {})
            for attribute, value in integers(self.module(holder)):
                integer = f"{type(self.module(holder)).__qualname__}.{attribute}"
                for new in self.values(holder).get(value, ()) if attribute not in done else ():
                    if integer not in self.idle and self.may_read(holder, attribute):
                        yield integer, self.with_integer(state.patches, holder, attribute, value, new)

    def may_read(self, holder: str, attribute: str) -> bool:
        """False where no code reads an attribute: a trial costs a run. A config may have other names for it."""
        by_name = "." not in attribute and reads_by_name(type(self.module(holder)))
        return self.names is None or attribute in self.names or not by_name

    def with_integer(self, patches: Patches, holder: str, attribute: str, value: int, new: int) -> Patches:
        """Patches with an integer more. Modules of the same class have other widths: each has its own number there, and
        those that are whole keep it."""
        kind = type(self.module(holder))
        changed = {name: dict(changes) for name, changes in patches.items()}
        for name, module in self.localized.model.named_modules():
            if type(module) is not kind:
                continue
            number = dict(integers(module)).get(attribute)
            options = self.values(name, of_its_own=True).get(number, []) if number is not None else []
            if number is not None and (options or name == holder):
                # The share of the holder: 12 -> 6 there makes 24 -> 12 here, where 24 may have other local lengths, too
                same = [option for option in options if option * value == new * number]
                local = new if name == holder else (same or options)[0]
                changed.setdefault(name, {}).setdefault(attribute, (number, local))
        return changed


def agreeing(localized: Localized, rank: int, given: Local) -> tuple[Local, list[PythonCall]] | None:
    """The code of a rank that is carried out, with the calls that it makes, if all agree with it: a search might end at
    another."""
    local = given.of(dict(localized.model.named_modules(remove_duplicate=False)))  # a part has some of them
    try:
        return local, localized.checked(rank, local.patches, local.sizes)
    except MismatchError:
        return None


def known_integers(localized: Localized, rank: int) -> dict[str, dict[str, tuple[int, int]]]:
    """Returns the integers of torch's own modules, which need no search: the numbers of groups of sharded group norms
    and convolutions, module -> {name: (full, local)}.

    A group norm over the wrong number of groups has results of the right shape; and of modules of one class with the
    same number some are sharded and others are not.
    """
    integers: dict[str, dict[str, tuple[int, int]]] = {}
    sizes = localized.sizes(rank)
    modules = dict(localized.model.named_modules(remove_duplicate=False))
    for name, function, tensors in localized.flow.types.record.python_calls:
        module = modules[name]
        # A forward of the user's may take the number of groups from elsewhere than from num_groups
        if function != "group_norm" or type(module).forward is not nn.GroupNorm.forward:
            continue
        statistics = tensors[-1]
        if id(statistics) in localized.flow.local:
            local = local_length(localized.flow.types.record.dims_of(statistics)[1], sizes)
            integers[name] = {"num_groups": (module.num_groups, local)}
    for name, module in modules.items():
        sharding = localized.edits.shardings.get(f"{name}.weight")
        if isinstance(module, nn.modules.conv._ConvNd) and module.groups > 1 and sharding is not None:
            local = module.groups * sharding.local_size(rank, localized.p) // sharding.size
            integers[name] = {"groups": (module.groups, local)}
    return integers


def integers(module: nn.Module) -> list[tuple[str, int]]:
    """Returns the integers that a module holds, directly or in its config or another plain object."""
    attributes = [(name, value) for name, value in vars(module).items() if type(value) is int]
    holders = [(name, value) for name, value in vars(module).items() if _is_config(value)]
    return attributes + [
        (f"{c}.{name}", v) for c, config in holders for name, v in vars(config).items() if type(v) is int
    ]


def _is_config(value: Any) -> bool:
    kind = type(value)
    if isinstance(value, nn.Module | type) or not isinstance(getattr(value, "__dict__", None), dict):
        return False
    # Integers of functions, groups of ranks and objects of torch are no sizes of the model
    return kind.__name__.endswith("Config") or not (callable(value) or kind.__module__.startswith(("torch", "tp_ext")))


def _attributes(patches: Patches) -> dict[str, list[str]]:
    """The attributes set, by the first module that has each."""
    by_module: dict[str, list[str]] = {}
    seen: set[str] = set()
    for name, changes in patches.items():
        by_module[name] = [attribute for attribute in changes if attribute not in seen]
        seen.update(changes)
    return by_module


def _key(patches: Mapping[str, Mapping[str, tuple[int, int]]]) -> PatchesKey:
    return frozenset((n, a, new) for n, changes in patches.items() for a, (_, new) in changes.items())


def merged(by_rank: Mapping[int, Patches]) -> dict[str, dict[str, tuple[int, int | tuple[int, ...]]]]:
    """Patches of all ranks: one number where it is the same on all, else one for each rank."""
    merged: dict[str, dict[str, tuple[int, int | tuple[int, ...]]]] = {}
    for module, changes in by_rank.get(0, {}).items():
        for attribute, (old, _) in changes.items():
            new = tuple(by_rank[rank][module][attribute][1] for rank in sorted(by_rank))
            merged.setdefault(module, {})[attribute] = old, new[0] if len(set(new)) == 1 else new
    return merged


def local_of(
    patches: Mapping[str, Mapping[str, tuple[int, int | tuple[int, ...]]]],
    sizes: Mapping[str, Sequence[Sequence[SizeCall]]],
    rank: int,
) -> Local:
    """The code of a rank, of the patches and sizes of all."""
    of_rank = {module: calls[rank] if len(calls) > 1 else calls[0] for module, calls in sizes.items()}
    return Local(
        {
            module: {a: (old, new[rank] if isinstance(new, tuple) else new) for a, (old, new) in changes.items()}
            for module, changes in patches.items()
        },
        {module: list(calls) for module, calls in of_rank.items() if calls},
    )


def merged_sizes(by_rank: Sequence[SizesByModule]) -> dict[str, list[list[SizeCall]]]:
    """Sizes of all ranks: one list where it is the same on all, else one for each rank."""
    by_module: dict[str, list[list[SizeCall]]] = {}
    for module in dict.fromkeys(name for sizes in by_rank for name in sizes):
        lists = [sizes.get(module, []) for sizes in by_rank]
        by_module[module] = lists[:1] if all(calls == lists[0] for calls in lists) else lists
    return by_module
