"""The calls of a simulated group: the n-th collective of a rank is one with the n-th of every other."""

import sys
from typing import Any

from tp_ext._build import load
from tp_ext.simulation.baton import Baton, user_line

CollectiveCall = Any
"""A ``_C.SimulatedCall``, with ``rank`` (of the simulation), ``line`` and ``group`` added."""

_FRUITLESS_POLLS = 10_000


class SimulatedGroup:
    """The open calls of all ranks of a group.

    Attributes:
        ranks: its ranks, as numbers of the simulation.
    """

    def __init__(self, baton: Baton, ranks: list[int]) -> None:
        self.baton, self.ranks = baton, ranks
        self._issued = [0] * len(ranks)  # collectives of each rank
        self._open: dict[int, dict[int, CollectiveCall]] = {}  # number -> place in the group -> call
        self._sent: list[list[tuple[int, CollectiveCall]]] = [[] for _ in ranks]  # by receiver: sender, message
        self._wanted: list[list[CollectiveCall]] = [[] for _ in ranks]  # by receiver

    def issue(self, place: int, call: CollectiveCall) -> None:
        """Adds a call of the rank at ``place``; executes it, if the others of all ranks are there.

        Raises:
            RuntimeError: it does not fit a call of another rank, or a rank failed before.
        """
        self.baton.check()
        call.rank, call.group, call.line = self.ranks[place], self, user_line(sys._getframe())
        if call.kind == "send":
            self._send(place, call)
        elif call.kind == "recv":
            self._receive(place, call)
        else:
            self._join(place, call)

    def missing(self, call: CollectiveCall) -> list[int]:
        """Returns the ranks that have not issued their part of an open call."""
        if call.kind == "recv":
            others = self.ranks if call.root < 0 else [self.ranks[call.root]]
            return [rank for rank in others if rank != call.rank]
        present = next((calls for calls in self._open.values() if call in calls.values()), {})
        return [rank for place, rank in enumerate(self.ranks) if place not in present]

    def _join(self, place: int, call: CollectiveCall) -> None:
        number = self._issued[place]
        self._issued[place] += 1
        calls = self._open.setdefault(number, {})
        for other in calls.values():
            if not call.fits(other):
                self._refuse(call, other)
        calls[place] = call
        if len(calls) == len(self.ranks):
            del self._open[number]
            try:
                misfit = load().execute_simulated([calls[place] for place in range(len(self.ranks))])
            except Exception as error:  # as for lack of memory; the others would wait for ever
                self.baton.fail(f"{type(error).__name__}: {error} in {describe(call)} of rank {call.rank}", error)
                raise
            if misfit is not None:
                self._refuse(calls[misfit[0]], calls[misfit[1]])

    def _send(self, place: int, call: CollectiveCall) -> None:
        call.done = True
        wanted = self._wanted[call.root]
        for message in wanted:
            if message.root in (-1, place) and message.tag == call.tag:
                wanted.remove(message)
                self._deliver(place, call, message)
                return
        self._sent[call.root].append((place, call))

    def _receive(self, place: int, call: CollectiveCall) -> None:
        sent = self._sent[place]
        for entry in sent:
            if call.root in (-1, entry[0]) and entry[1].tag == call.tag:
                sent.remove(entry)
                self._deliver(*entry, call)
                return
        self._wanted[place].append(call)

    def _deliver(self, sender: int, message: CollectiveCall, call: CollectiveCall) -> None:
        if not message.deliver(call):
            self._refuse(message, call)
        call.root, call.done = sender, True

    def _refuse(self, call: CollectiveCall, other: CollectiveCall) -> None:
        self.baton.fail(
            f"rank {call.rank} calls {describe(call)}, which does not fit {describe(other)} of rank {other.rank}"
        )
        self.baton.check()


class Member:
    """One rank of a group, as the backend in C++ calls it."""

    def __init__(self, group: SimulatedGroup, place: int) -> None:
        self._group, self._place, self._rank = group, place, group.ranks[place]
        self._polls = 0

    def issue(self, call: CollectiveCall) -> None:
        """Issues a call."""
        self._polls = 0
        self._group.issue(self._place, call)

    def wait(self, call: CollectiveCall) -> None:
        """Runs other ranks until the call is done."""
        self._group.baton.wait(self._rank, call)

    def poll(self) -> None:
        """Runs other ranks once. Raises RuntimeError: none can run, time and again."""
        baton = self._group.baton
        baton.check()
        self._polls = 0 if baton.hand_over(self._rank) else self._polls + 1
        if self._polls > _FRUITLESS_POLLS:
            baton.fail(f"rank {self._rank} polls for a call that no other rank can complete")
            baton.check()


def describe(call: CollectiveCall) -> str:
    """Returns the call, as errors name it."""
    return f"{call.text()} at {call.line}"


def describe_stuck(waiting: dict[int, CollectiveCall], returned: set[int]) -> str:
    """Returns the sentence for ranks that wait for each other, or for ranks that returned."""
    early: set[int] = set()
    sentences = []
    for rank, call in waiting.items():
        missing = call.group.missing(call)
        early |= returned.intersection(missing)
        sentences.append(f"rank {rank} waits for {_ranks(missing)} in {describe(call)}")
    if early:
        return f"{_ranks(sorted(early))} returned while {', '.join(sentences)}"
    return f"no rank can go on: {', '.join(sentences)}"


def _ranks(numbers: list[int]) -> str:
    return " and ".join(f"rank {number}" for number in numbers)
