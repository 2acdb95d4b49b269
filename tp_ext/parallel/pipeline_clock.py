"""The time in which a rank of a pipeline computes, and so the share of a step in which it is idle."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch.distributed.pipelining import PipelineStage


class Clock:
    """Measures a step and the computation in it: on CUDA by events on the current stream, elsewhere by the host's
    clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._cuda = device.type == "cuda"
        self._busy: list[tuple[Any, Any]] = []
        self._step: list[tuple[Any, Any]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measures a step, in place of the one before."""
        self._busy, self._step, begin = [], [], self._now()
        yield
        self._step.append((begin, self._now()))

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Measures some computation."""
        begin = self._now()
        yield
        self._busy.append((begin, self._now()))

    def seconds(self) -> tuple[float, float]:
        """Returns the seconds of computation in the last step, and those of the step. On CUDA it waits for its end."""
        return self._sum(self._busy), self._sum(self._step)

    def _now(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _sum(self, intervals: list[tuple[Any, Any]]) -> float:
        if not self._cuda:
            return sum(end - begin for begin, end in intervals)
        for _, end in intervals[-1:]:
            end.synchronize()
        return sum(begin.elapsed_time(end) for begin, end in intervals) / 1000


class TimedStage(PipelineStage):
    """torch's stage, whose computation a clock measures."""

    clock: Clock

    def forward_one_chunk(self, *args: Any, **options: Any) -> Any:
        with self.clock.busy():
            return super().forward_one_chunk(*args, **options)

    def backward_one_chunk(self, *args: Any, **options: Any) -> Any:
        with self.clock.busy():
            return super().backward_one_chunk(*args, **options)

    def backward_weight_one_chunk(self, *args: Any, **options: Any) -> Any:
        with self.clock.busy():
            return super().backward_weight_one_chunk(*args, **options)

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Returns the gradient of the input for the stage before on this rank; none in evaluation."""
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Takes the gradient of the output from the stage after on this rank; none in evaluation."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)
