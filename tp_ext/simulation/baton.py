"""Threads of which one runs at a time: a rank that must wait for others hands over to the next one that can run."""

import contextvars
import ctypes
import os
import sys
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any

import torch
from torch.autograd import forward_ad

from tp_ext._build import load
from tp_ext.simulation.rank_state import RankState, ThreadModes

_LIBRARIES = tuple(
    os.path.dirname(os.path.abspath(str(sys.modules[name].__file__))) + os.sep for name in ("torch", "tp_ext")
)
_POLL = 0.5  # seconds after which a lost wake-up, or an interrupt, is noticed


def user_line(frame: FrameType | None) -> str:
    """Returns ``file:line`` of the innermost frame outside of torch and tp_ext, or of the innermost of all."""
    innermost = frame
    while frame is not None and frame.f_code.co_filename.startswith(_LIBRARIES):
        frame = frame.f_back
    if frame is None or frame.f_code.co_filename == threading.__file__:  # fn is of a library
        frame = innermost
    assert frame is not None
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def _line_of(error: BaseException) -> str:
    lines: list[tuple[str, int]] = []
    trace = error.__traceback__
    while trace is not None:
        lines.append((trace.tb_frame.f_code.co_filename, trace.tb_lineno))
        trace = trace.tb_next
    of_user = [line for line in lines if not line[0].startswith(_LIBRARIES)]
    file, number = (of_user or lines)[-1]
    return f"{file}:{number}"


class _Rank:
    def __init__(self, number: int, state: RankState, thread: threading.Thread) -> None:
        self.number, self.state, self.thread = number, state, thread
        self.turn = load().Turn()
        self.waiting: Any = None  # a call, done or not
        self.ended = False
        self.result: Any = None


class Baton:
    """The ranks of a simulation. Whichever is current runs, all others sleep.

    Args:
        p: number of ranks.
        seed: of torch's generators, on every rank.
        body: what rank r runs, ``body(r)``.
        describe_stuck: returns the sentence of the error if no rank can run, of the call that each of some ranks waits
            for, and of the ranks that returned.
    """

    def __init__(
        self,
        p: int,
        seed: int,
        body: Callable[[int], Any],
        describe_stuck: Callable[[dict[int, Any], set[int]], str],
    ) -> None:
        self._body, self._describe_stuck = body, describe_stuck
        self._modes, self._level = ThreadModes(), forward_ad._current_level  # a proof may run within a jvp
        self._outside = RankState()
        torch.manual_seed(seed)
        start = RankState()
        self._outside.restore()
        self._ranks = []
        for number in range(p):
            target, context = self._run_rank, contextvars.copy_context()
            thread = threading.Thread(target=context.run, args=(target, number), name=f"rank {number}", daemon=True)
            self._ranks.append(_Rank(number, start, thread))
        self._current: _Rank | None = None
        self._all_ended = threading.Event()
        self._failure: str | None = None
        self._cause: BaseException | None = None

    def run(self) -> list[Any]:
        """Runs all ranks to their ends, and returns their results.

        Raises:
            RuntimeError: a rank failed.
        """
        try:
            return self._run_all()
        finally:
            self._forget()

    def _run_all(self) -> list[Any]:
        try:
            for rank in self._ranks:
                rank.thread.start()
            self._give_to(self._ranks[0])
            while not self._all_ended.wait(_POLL):
                pass
        except BaseException as interrupt:
            self._interrupt(interrupt)
            raise
        finally:
            for rank in self._ranks:
                if rank.thread.ident is not None:
                    rank.thread.join()
            self._outside.restore()
        if self._failure is not None:
            raise RuntimeError(f"simulate: {self._failure}") from self._cause
        return [rank.result for rank in self._ranks]

    def _forget(self) -> None:
        """Drops what the ranks ran and made. A group is an object of C++ that refers to this one: if this one led back
        to a group, as its function does, the garbage collector would not see the cycle, and all would stay alive."""
        del self._body, self._outside
        self._cause = None
        for rank in self._ranks:
            del rank.state, rank.result

    def check(self) -> None:
        """Raises RuntimeError: a rank failed."""
        if self._failure is not None:
            raise RuntimeError(f"simulate: {self._failure}")

    def fail(self, sentence: str, cause: BaseException | None = None) -> None:
        """Makes all ranks fail at their next calls, and where they wait. Only the first failure counts."""
        if self._failure is None:
            self._failure, self._cause = sentence, cause

    def wait(self, number: int, call: Any) -> None:
        """Runs other ranks until the call is done.

        Raises:
            RuntimeError: a rank failed, no rank can run, or this one is in forward mode.
        """
        rank = self._ranks[number]
        if forward_ad._current_level > self._level:  # of the process: the next rank would be in it, too
            raise RuntimeError(
                "ranks cannot take turns in forward mode (torch.func.jvp, jacfwd, dual_level), which belongs to their "
                "process: run it under torchrun"
            )
        rank.waiting = call
        try:
            while not call.done:
                self.check()
                if not self.hand_over(number) and not call.done and self._failure is None:
                    self._fail_stuck()
        finally:
            rank.waiting = None

    def poll(self, number: int) -> bool:
        """Runs other ranks once, and returns whether there was one that could run.

        Raises:
            RuntimeError: a rank failed.
        """
        self.check()
        return self.hand_over(number)

    def hand_over(self, number: int) -> bool:
        """Runs the next rank that can run until it is the turn of rank ``number`` again, which need not be able to run
        if no other can. Returns whether there was such a rank."""
        rank = self._ranks[number]
        if self._current is not rank:  # it unwinds after an interrupt
            return False
        for other in self._ranks[number + 1 :] + self._ranks[:number]:
            if not self._can_run(other):
                continue
            if not rank.ended:
                rank.state = RankState()
            self._give_to(other, rank)
            if not rank.ended:
                self._sleep(rank)
            return True
        return False

    def _can_run(self, rank: _Rank) -> bool:
        if rank.ended or rank.thread.ident is None:
            return False
        return self._failure is not None or rank.waiting is None or rank.waiting.done

    def _sleep(self, rank: _Rank) -> None:
        while self._current is not rank:
            rank.turn.take(_POLL)

    def _give_to(self, rank: _Rank, giver: _Rank | None = None) -> None:
        """Makes a rank current, and may return when the giver is."""
        try:
            rank.state.restore()
        except Exception as error:  # fails as the rank would: if it never ran, all would wait for ever
            self.fail(f"rank {rank.number} cannot go on: {type(error).__name__}: {error}", error)
        self._current = rank
        if giver is None or giver.ended:
            rank.turn.give()
        else:
            giver.turn.give_and_take(rank.turn, _POLL)

    def _run_rank(self, number: int) -> None:
        rank = self._ranks[number]
        self._sleep(rank)
        try:
            self.check()
            with self._modes.apply():
                rank.result = self._body(number)
        except BaseException as error:
            self.fail(f"rank {number} raised {type(error).__name__}: {error} ({_line_of(error)})", error)
            self._cause = self._cause or error
        finally:
            rank.ended = True
            if self._current is rank and not self.hand_over(number):
                if not all(other.ended for other in self._ranks):
                    self._fail_stuck()
                    self.hand_over(number)
                else:
                    self._all_ended.set()

    def _fail_stuck(self) -> None:
        waiting = {rank.number: rank.waiting for rank in self._ranks if rank.waiting is not None}
        returned = {rank.number for rank in self._ranks if rank.ended}
        self.fail(self._describe_stuck(waiting, returned))

    def _interrupt(self, error: BaseException) -> None:
        """Makes the rank that runs raise KeyboardInterrupt at its next line of Python, and all others where they
        wait."""
        self.fail(f"interrupted by {type(error).__name__}", error)
        rank = self._current
        if rank is None:  # a thread could not be started
            self._give_to(self._ranks[0])
        elif not rank.ended and rank.thread.ident is not None:
            ctypes.pythonapi.PyThreadState_SetAsyncExc(
                ctypes.c_ulong(rank.thread.ident), ctypes.py_object(KeyboardInterrupt)
            )
