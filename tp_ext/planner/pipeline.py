"""The simulation of one step of a pipeline: when each rank runs which action."""

import os
from collections.abc import Sequence
from typing import Any, NamedTuple

from tp_ext._build import load
from tp_ext._checks import check_int, check_number, check_path
from tp_ext.debug.timeline import Span
from tp_ext.debug.timeline import Timeline as Picture
from tp_ext.planner.actions import KINDS, library_schedule

PHASES = {"F": "forward", "B": "backward", "I": "backward", "W": "weight gradient"}
"""The phase of a measured timeline of each kind of action."""


class Row(NamedTuple):
    """An action of a rank.

    Attributes:
        action: ``"2F0"``: stage 2, forward, microbatch 0. B is a full backward, I its input gradient, W its weight
            gradient, as torch writes them.
        start, end: in seconds since the begin of the step.
    """

    action: str
    start: float
    end: float


class Timeline(NamedTuple):
    """One step of a pipeline.

    Attributes:
        time: from the first begin to the last end of any rank, in seconds.
        bubble: the idle share of ``time``, mean over ranks.
        in_flight: of each rank the most microbatches of its stages whose activations it holds: from the begin of F to
            the end of B, or of W if the backward is split.
        rows: of each rank its actions in order.
    """

    time: float
    bubble: float
    in_flight: tuple[int, ...]
    rows: tuple[tuple[Row, ...], ...]

    def draw(self, path: str | os.PathLike[str], title: str = "") -> None:
        """Draws a row for each rank, as :meth:`tp_ext.debug.Timeline.save` does for a measured step.

        Raises:
            TypeError: ``path`` is no path. ImportError: no matplotlib.
        """
        check_path(path=path)
        picture = Picture()
        for row in self.rows:
            picture.ranks.append([_span(*row) for row in row])
        picture.save(path, title)


def _span(action: str, start: float, end: float) -> Span:
    kind = next(letter for letter in action if letter in KINDS)
    stage, _, microbatch = action.partition(kind)
    return Span(PHASES[kind], f"{PHASES[kind]} {microbatch} of stage {stage}", start, end)


def simulate_pipeline(
    schedule: str,
    pp: int,
    microbatches: int,
    *,
    virtual: int = 1,
    forward: float | Sequence[float],
    input_grad: float | Sequence[float],
    weight_grad: float | Sequence[float],
    send: float = 0.0,
) -> Timeline:
    """Simulates one step of a schedule of ``torch.distributed.pipelining``, whose lists of actions it reads.

    An action begins when its rank is free and its input has arrived: a forward's from the stage before, a backward's
    from the stage after it. A full backward takes ``input_grad + weight_grad``, and its gradient is sent
    at its end. Messages take ``send`` and overlap with computation; between stages of one rank they take nothing.

    For stages of equal cost the bubble of 1F1B, GPipe and Interleaved1F1B is
    ``(pp - 1) / (microbatches virtual + pp - 1)`` (Narayanan et al., arXiv:2104.04473, section 2.2).

    Args:
        schedule: a name of :func:`tp_ext.parallel.pipeline_stages`. 1F1B with ``virtual`` > 1 is Interleaved1F1B.
        pp: number of ranks. microbatches: of the step. virtual: number of stages of each rank.
        forward, input_grad, weight_grad: seconds of one microbatch in one stage: a number, or one for each stage of
            the whole pipeline.
        send: seconds of a message between ranks.

    Communicates nothing.

    Raises:
        TypeError, ValueError: a number out of its range, a list of another length, what the schedule cannot run.
    """
    check_int(least=1, pp=pp, microbatches=microbatches, virtual=virtual)
    check_number(least=0, send=send)
    name = "Interleaved1F1B" if schedule == "1F1B" and virtual > 1 else schedule
    schedule_of_ranks = library_schedule(name, pp, virtual, microbatches)
    times = [
        _of_stages(name, value, pp * virtual)
        for name, value in (("forward", forward), ("input_grad", input_grad), ("weight_grad", weight_grad))
    ]
    time, busy, events = load().planner.simulate(schedule_of_ranks, list(zip(*times, strict=True)), send)
    letters = list(KINDS)
    rows = tuple(tuple(Row(f"{s}{letters[kind]}{i}", b, e) for kind, s, i, b, e in of_rank) for of_rank in events)
    bubble = 1 - sum(busy) / (pp * time) if time else 0.0
    return Timeline(time, bubble, tuple(sum(of_rank) for of_rank in schedule_of_ranks.in_flight), rows)


def _of_stages(name: str, value: float | Sequence[float], stages: int) -> list[float]:
    if isinstance(value, Sequence) and not isinstance(value, str):
        if len(value) != stages:
            raise ValueError(f"{name}: {len(value)} numbers must be one for each of the {stages} stages")
        values = list(value)
    else:
        values = [value] * stages
    for seconds in values:
        named: dict[str, Any] = {name: seconds}
        check_number(least=0, **named)
    return [float(seconds) for seconds in values]
