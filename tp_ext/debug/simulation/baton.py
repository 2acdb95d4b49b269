"""Threads of which one runs at a time, as ranks of a group: a rank that must wait for others hands over to the next."""

import contextvars
import os
import queue
import sys
import threading
from collections.abc import Callable
from typing import Any

import torch

from tp_ext.debug.simulation.rank_state import RankState, ThreadModes

_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(file)) + os.sep for file in (torch.__file__, sys.modules["tp_ext"].__file__)
)
_POLL = 1.0  # seconds until a wake-up that an interrupt lost is noticed


def user_line(frame: Any) -> str:
    """Returns ``file:line`` of the innermost frame outside of torch and tp_ext, or of the innermost of all."""
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    frame = innermost if frame is None or frame.f_code.co_filename == threading.__file__ else frame
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _line_of(error: BaseException) -> str:
    lines = []
    trace = error.__traceback__
    while trace is not None:
        lines.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    of_user = [line for line in lines if not line[0].startswith(_LIBRARIES)]
    file, number = (of_user or lines)[-1]
    return f"{file}:{number}"


class Waiting:
    """A condition that a rank waits for: an issued call, which others complete."""

    done = False

    def describe(self) -> str:
        """Returns the call, as errors name it, with its ``file:line``."""
        raise NotImplementedError


class _Rank:
    def __init__(self, number: int, state: RankState) -> None:
        self.number, self.state = number, state
        self.turn: queue.SimpleQueue[None] = queue.SimpleQueue()
        self.thread: threading.Thread | None = None
        self.waiting: Waiting | None = None
        self.ended = False
        self.result: Any = None


class Baton:
    """The ranks of one simulation.

    Attributes:
        failure: the sentence for the first error, or None; every wait raises it.
        cause: the exception of the rank that failed, if any.
    """

    def __init__(self, p: int, seed: int) -> None:
        self._caller = RankState.current()
        torch.manual_seed(seed)
        start = RankState.current()
        self._caller.restore()
        self._ranks = [_Rank(number, start) for number in range(p)]
        self._modes = ThreadModes()
        self._current: _Rank | None = None
        self._all_ended = threading.Event()
        self.failure: str | None = None
        self.cause: BaseException | None = None

    def run(self, body: Callable[[int], Any]) -> list[Any]:
        """Runs ``body(rank)`` on every rank, and returns the results.

        Raises:
            RuntimeError: a rank failed.
        """
        for rank in self._ranks:
            context = contextvars.copy_context()
            rank.thread = threading.Thread(
                target=context.run, args=(self._run_rank, rank, body), name=f"rank {rank.number}", daemon=True
            )
        try:
            self._hand_to(self._ranks[0])
            self._all_ended.wait()
        except BaseException as interrupt:
            self._interrupt(interrupt)
            raise
        finally:
            for rank in self._ranks:
                if rank.thread is not None and rank.thread.ident is not None:
                    rank.thread.join()
            self._caller.restore()
        if self.failure is not None:
            raise RuntimeError(self.failure) from self.cause
        return [rank.result for rank in self._ranks]

    def wait(self, number: int, waiting: Waiting) -> None:
        """Runs other ranks until ``waiting`` is done.

        Raises:
            RuntimeError: a rank failed, or none can go on.
        """
        rank = self._ranks[number]
        rank.waiting = waiting
        try:
            while not waiting.done:
                self.check()
                self._hand_over(rank)
        finally:
            rank.waiting = None

    def check(self) -> None:
        """Raises RuntimeError: a rank failed."""
        if self.failure is not None:
            raise RuntimeError(self.failure)

    def fail(self, sentence: str, cause: BaseException | None = None) -> None:
        """Makes the simulation fail, if it has not yet."""
        if self.failure is None:
            self.failure, self.cause = sentence, cause

    def _run_rank(self, rank: _Rank, body: Callable[[int], Any]) -> None:
        try:
            with self._modes:
                rank.result = body(rank.number)
        except BaseException as error:
            sentence = f"simulate: rank {rank.number} raised {type(error).__name__}: {error} ({_line_of(error)})"
            if self.failure is None:
                self.fail(sentence, error)
            elif self.cause is None:
                self.cause = error
        finally:
            rank.ended = True
            self._hand_over(rank)

    def _hand_over(self, rank: _Rank) -> None:
        """Runs the next rank that can go on; returns when it is the turn of ``rank`` again, or at once if it ended."""
        if self._current is not rank:  # unwinds after an interrupt
            return
        order = self._ranks[rank.number + 1 :] + self._ranks[: rank.number + 1]
        able = [r for r in order if self._can_run(r)]
        if not able and not all(r.ended for r in order):
            self._fail_stuck()
            able = [r for r in order if self._can_run(r)]
        if not able:
            self._current = None
            self._all_ended.set()
            return
        if able[0] is rank:
            return
        if not rank.ended:
            rank.state = RankState.current()
        self._hand_to(able[0])
        while not rank.ended and self._current is not rank:
            try:
                rank.turn.get(timeout=_POLL)
            except queue.Empty:
                pass

    def _can_run(self, rank: _Rank) -> bool:
        if rank.ended:
            return False
        if self.failure is not None:
            return rank.thread is not None and (rank.thread.ident is not None)
        return rank.waiting is None or rank.waiting.done

    def _hand_to(self, rank: _Rank) -> None:
        rank.state.restore()
        self._current = rank
        assert rank.thread is not None
        if rank.thread.ident is None:
            rank.thread.start()
        else:
            rank.turn.put(None)

    def _fail_stuck(self) -> None:
        waits = [f"rank {r.number} waits in {r.waiting.describe()}" for r in self._ranks if r.waiting is not None]
        returned = [f"rank {r.number}" for r in self._ranks if r.ended]
        if returned:
            self.fail(f"simulate: {', '.join(returned)} returned while {'; '.join(waits)}")
        else:
            self.fail(f"simulate: no rank can go on: {'; '.join(waits)}")

    def _interrupt(self, error: BaseException) -> None:
        self.fail(f"simulate: interrupted by {type(error).__name__}", error)
        rank = self._current
        if rank is not None and rank.thread is not None and rank.thread.ident is not None:
            import ctypes

            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(rank.thread.ident), ctypes.py_object(KeyboardInterrupt)
            )
