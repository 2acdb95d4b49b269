"""Phases of a view: all ranks of all members come, do something, and decide together whether all have done it."""

import time

from tp_ext.elastic.board import NO, YES, Board, View
from tp_ext.elastic.pulse import Pulse

LOOK = 0.05  # seconds between two looks at all signs of life


class Pause:
    """Pauses between looks at the store: the longer it takes, the less often."""

    def __init__(self) -> None:
        self._begun = time.monotonic()

    def __call__(self) -> None:
        time.sleep(min(LOOK / 2, max(0.001, (time.monotonic() - self._begun) / 10)))


class GivenUpError(Exception):
    """A phase has failed, as this rank or another one has found."""


class Phases:
    """The phases of the ranks of a view.

    Args:
        size: the number of ranks of each replica.
    """

    def __init__(self, board: Board, pulse: Pulse, size: int) -> None:
        self._board, self._pulse, self._size, self._looked = board, pulse, size, 0.0

    def arrived(self, phase: str, view: View) -> bool:
        """Returns whether all ranks of all members have come; False if one is gone."""
        everyone = len(view.members) * self._size
        came, pause = self._board.count(f"arrived/{phase}", 1), Pause()
        while came < everyone:
            if self.is_given_up(phase, view):
                return False
            pause()
            came = self._board.count(f"arrived/{phase}")
        return True

    def agreed(self, phase: str, view: View, error: Exception | None) -> bool:
        """Returns whether all ranks have done what the phase is for, as all decide together.

        Raises:
            TypeError, ValueError: see :meth:`refuse`.
        """
        key, everyone, pause = f"decided/{phase}", len(view.members) * self._size, Pause()
        if error is not None:
            self._board.first(key, NO)
        # The last one that is done proposes it for all
        elif self._board.count(f"done/{phase}", 1) == everyone:
            self._board.first(key, YES)
        while (word := self._board.read(key)) is None:
            self.is_given_up(phase, view)
            pause()
        if word not in (YES, NO):
            kind, _, text = word.partition(": ")
            raise {"TypeError": TypeError}.get(kind, ValueError)(text)
        return word == YES

    def refuse(self, phase: str, error: Exception) -> None:
        """Has all ranks raise this error."""
        self._board.first(f"decided/{phase}", f"{type(error).__name__}: {error}")

    def is_given_up(self, phase: str, view: View) -> bool:
        """Returns whether the phase has failed; gives it up if a member is gone."""
        if self._board.read(f"decided/{phase}") not in (None, YES):
            return True
        if time.monotonic() - self._looked >= LOOK:
            self._looked = time.monotonic()
            if self._pulse.gone(view.ids):
                return self._board.first(f"decided/{phase}", NO) != YES
        return False
