"""The way of a replica to its first view."""

import time
from collections.abc import Sequence

from tp_ext.elastic.board import Board, Replica, View
from tp_ext.elastic.fit import Fit, difference
from tp_ext.elastic.phases import LOOK
from tp_ext.elastic.proposals import Proposals


class Joining:
    """The way of this rank's replica to a view.

    Args:
        id, name, size: of the replica.
        silence: seconds after which a rank that shows no life is gone.
    """

    def __init__(
        self, board: Board, proposals: Proposals, fit: Fit, id: str, name: str, size: int, silence: float
    ) -> None:
        self._board, self._proposals, self._fit = board, proposals, fit
        self._id, self._name, self._size, self._silence = id, name, size, silence
        self._speaks: bool | None = None
        self._replica: Replica | None = None

    def view(self, step: int, least: int, deadline: float) -> View:
        """Waits for a view with this replica as a member.

        Args:
            step: of the weights of this replica.
            least: the number of replicas of a first view.

        Raises:
            ValueError: it does not fit the replicas that run or wait. TimeoutError: there is no view in time.
        """
        if self._speaks is None:
            self._fit.publish()
            # The last rank speaks for the replica: all have described themselves
            self._speaks = self._board.count(f"described/{self._id}", 1) == self._size
        last, begun = None, time.monotonic()
        while True:
            last = self._board.last_view(0 if last is None else last.number) or last
            if last is not None and self._id in last.ids:
                return last
            self.check()
            running = self._proposals.running(last)
            joiners = self._proposals.joiners(last, None if running is None else running.family)
            if self._speaks:
                # Those that run answer when they begin a step. In a long one it is known at last that they live
                self._ask(step, running, joiners, time.monotonic() - begun > 1.5 * self._silence)
            ready = len(joiners) >= least and any(joiner.id == self._id for joiner in joiners)
            # If no member of the last view is alive, the waiting replicas start again from the weights of one of them
            if ready and running is None:
                self._board.propose(self._proposals.first(last, joiners))
            elif time.monotonic() > deadline:
                raise TimeoutError(f"begin: {len(joiners)} replicas wait, and {least} or a running one must be there")
            else:
                time.sleep(LOOK)

    def check(self) -> None:
        """Raises ValueError if it was found that this replica does not fit the others."""
        if (text := self._board.read(f"unfit/{self._id}")) is not None:
            raise ValueError(f"replica: {self._name!r} does not fit the others, which go on without it: {text}")

    def _ask(self, step: int, running: Replica | None, joiners: Sequence[Replica], sure: bool) -> None:
        """Asks for this replica to take part; notes that it does not fit the one that runs or the first one that
        waits."""
        if self._replica is None:
            replica = Replica(self._id, self._name, step, self._size, self._fit.family(self._size))
            if running is not None and not difference(self._board, replica, running):
                # Whatever those that run were when they joined
                replica = replica._replace(family=running.family)
            self._replica = replica
            self._board.join(replica)
        reference = running or next(iter(joiners), None)
        if sure and reference is not None:
            self._proposals.refuse([self._replica], reference)
