"""Search for the innermost module whose inputs are right and whose outputs, or gradients, are wrong."""

from collections import defaultdict
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tp_ext.verify.compare import Comparison, PartsOfDim, compare, copies_summed, is_partial
from tp_ext.verify.record import Outcome, RecordedCall


class WrongModule(NamedTuple):
    """A module, and the comparison that shows it to be wrong; None if only what surrounds its parts can be."""

    module: str
    wrong: Comparison | None = None


class Trace:
    """The calls of the modules of one forward: one process's calls matched with the ranks' by name and order.

    Args:
        mode: ``"eval"`` or ``"train"``.
        bound: the error of what is right.
        floors: least magnitudes to which differences of activations and of gradients are relative.
    """

    def __init__(
        self,
        reference: Outcome,
        outcomes: Sequence[Outcome],
        mode: str,
        bound: float,
        tables: Sequence[PartsOfDim],
        floor: float = 0.0,
    ) -> None:
        self._bound, self._tables, self._floor = bound, tables, floor
        numbers: dict[str, int] = defaultdict(int)
        by_name = [_by_name(outcome.calls[mode]) for outcome in outcomes]
        self._calls: list[tuple[RecordedCall, list[RecordedCall]]] = []
        for call in reference.calls[mode]:
            number = numbers[call.name]
            numbers[call.name] += 1
            # The ranks may call other modules, after a branch: calls have the name of a module and its number in common
            peers = [calls.get(call.name, [])[number : number + 1] for calls in by_name]
            if all(peers):
                self._calls.append((call, [some[0] for some in peers]))

    def first_wrong_output(self) -> WrongModule:
        """Returns the first module to end whose inputs are not wrong and whose outputs are, unless a module around it
        is right again, or its outputs are partial and are summed after it; the model itself if there is none."""
        wrong: list[tuple[RecordedCall, Comparison]] = []
        healed: list[RecordedCall] = []
        for call, peers in self._calls:  # in the order of their ends: inner calls before outer ones
            outputs = self._compare(call.outputs, [peer.outputs for peer in peers], partial=call.partial)
            bad = self._first_wrong(outputs)
            if bad is None and any(output.error is not None for output in outputs):
                healed.append(call)
            if bad is None and not _as_many(call, peers):
                bad = Comparison(None, None, [])
            # Wrong outputs of wrong inputs have their cause elsewhere
            if bad is not None and not self._any_wrong(call.inputs, [peer.inputs for peer in peers]):
                wrong.append((call, bad))
        wrong = [(call, bad) for call, bad in wrong if not any(call.within(around) for around in healed)]
        summed = [call for call, bad in wrong if self._summed_after(call, bad)]
        # A module around one whose partial output is summed after it is not to blame for that one
        for call, bad in wrong:
            if not any(part.within(call) for part in summed):
                return WrongModule(call.name, bad)
        return WrongModule(wrong[0][0].name, wrong[0][1]) if wrong else WrongModule("")

    def _summed_after(self, call: RecordedCall, bad: Comparison) -> bool:
        """Returns whether the output is partial and the next module called has right inputs, as after a sum between."""
        following = [(other, peers) for other, peers in self._calls if other.start > call.end]
        if not bad.locals or not is_partial(bad, self._bound) or not following:
            return False
        other, peers = min(following, key=lambda entry: entry[0].start)
        return not self._any_wrong(other.inputs, [peer.inputs for peer in peers])

    def output(self, module: str) -> Comparison | None:
        """Returns the comparison of the first output of the module that is wrong, in any of its calls."""
        for call, peers in self._calls:
            if call.name == module:
                wrong = self._first_wrong(self._compare(call.outputs, [peer.outputs for peer in peers]))
                if wrong is not None:
                    return wrong
        return None

    def first_wrong_gradients(self, wrong: Sequence[str], reference: Outcome) -> list[tuple[str, WrongModule]]:
        """Returns pairs of a wrong parameter and the module at which its gradient becomes wrong, in the order of
        backward.

        A parameter whose module gets right gradients is wrong by that module. Of all others the last one in forward
        is looked at: the module after it that gets right gradients and gives wrong ones, else the one around it.

        Args:
            wrong: parameters and inputs whose gradients are wrong.
        """
        gets = {id(call): self._gradients_of_outputs(call, peers) for call, peers in self._calls}
        placed: list[tuple[int, str, WrongModule]] = []
        passed: list[tuple[int, str]] = []
        for name in wrong:
            owners = [self._last_call(owner) for owner in reference.owners.get(name, [])]
            calls = [call for call in owners if call is not None]
            blamed = [call for call in calls if self._first_wrong(gets[id(call)])]
            # The module gets right gradients of its outputs: it computes the wrong one
            if calls and not blamed:
                placed.append((max(call.end for call in calls), name, WrongModule(calls[0].name)))
            else:
                passed.append((max((call.start for call in blamed), default=-1), name))
        if passed:
            start, name = max(passed, key=lambda entry: entry[0])
            place = self._where_gradient_turns(start, gets)
            # A module that is named already for its own parameter is the cause of both
            if place.module not in {other.module for _, _, other in placed} or not place.module:
                placed.append((start, name, place))
        return [(name, place) for _, name, place in sorted(placed, key=lambda entry: -entry[0])]

    def _where_gradient_turns(self, start: int, gets: dict[int, list[Comparison]]) -> WrongModule:
        turning = []
        for call, peers in self._calls:
            inputs = [call.input_gradients.get(i) for i in range(len(call.inputs))]
            others = [[peer.input_gradients.get(i) for i in range(len(call.inputs))] for peer in peers]
            bad = self._first_wrong(self._compare(inputs, others, partial=call.partial, gradients=True))
            if bad is not None and call.start > start and not self._first_wrong(gets[id(call)]):
                turning.append((call, bad))
        inner = [
            (call, bad)
            for call, bad in turning
            if not any(other is not call and other.within(call) for other, _ in turning)
        ]
        if inner:
            call, bad = min(inner, key=lambda entry: entry[0].start)
            return WrongModule(call.name, bad)
        # Between modules: the innermost call around the parameter's that gets right gradients
        owner = next((call for call, _ in self._calls if call.start == start), None)
        around = owner
        while around is not None and (id(around) not in gets or self._first_wrong(gets[id(around)])):
            around = around.parent
        gradient = None if owner is None else self._first_wrong(gets[id(owner)])
        return WrongModule("" if around is None else around.name, gradient)

    def _gradients_of_outputs(self, call: RecordedCall, peers: Sequence[RecordedCall]) -> list[Comparison]:
        mine = [call.output_gradients.get(i) for i in range(len(call.outputs))]
        others = [[peer.output_gradients.get(i) for i in range(len(mine))] for peer in peers]
        return self._compare(mine, others, gradients=True)

    def _last_call(self, module: str) -> RecordedCall | None:
        """Returns the last call of the module, or of the nearest one around it that is called."""
        while True:
            calls = [call for call, _ in self._calls if call.name == module]
            if calls or not module:
                return calls[-1] if calls else None
            module = module.rpartition(".")[0]

    def _first_wrong(self, some: Sequence[Comparison]) -> Comparison | None:
        return next((comparison for comparison in some if comparison.wrong(self._bound)), None)

    def _any_wrong(self, full: Sequence[Tensor | None], locals_: Sequence[Sequence[Tensor | None]]) -> bool:
        return self._first_wrong(self._compare(full, locals_)) is not None

    def _compare(
        self,
        full: Sequence[Tensor | None],
        locals_: Sequence[Sequence[Tensor | None]],
        partial: bool = False,
        gradients: bool = False,
    ) -> list[Comparison]:
        """Compares tensors with the full ones; partial ones by their sum. Gradients of copies may be partial."""
        compared = []
        for whole, *shards in zip(full, *locals_, strict=False):
            comparison = compare(whole, shards, self._tables, self._floor)
            if partial and whole is not None and all(x is not None and x.shape == whole.shape for x in shards):
                total = torch.stack([x for x in shards if x is not None]).sum(0)
                summed = compare(whole, [total], (), self._floor)
                comparison = min(comparison, summed, key=lambda c: c.known_error)
            compared.append(copies_summed(comparison, self._floor) if gradients else comparison)
        return compared


def _by_name(calls: Sequence[RecordedCall]) -> dict[str, list[RecordedCall]]:
    by_name: dict[str, list[RecordedCall]] = defaultdict(list)
    for call in calls:
        by_name[call.name].append(call)
    return by_name


def _as_many(call: RecordedCall, peers: Sequence[RecordedCall]) -> bool:
    return all(len(peer.outputs) == len(call.outputs) for peer in peers)
