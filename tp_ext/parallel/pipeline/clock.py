"""The time of a step and of parts of it, such as those in which a rank of a pipeline computes."""

import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd.profiler import record_function
from torch.distributed.pipelining import PipelineStage, _utils


class Clock:
    """Measures a step and parts of it: on CUDA by events on the device's current stream, elsewhere by the host's
    clock.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._parts: list[tuple[Any, Any]] = []
        self._step: list[tuple[Any, Any]] = []

    @contextmanager
    def step(self) -> Iterator[None]:
        """Measures a step, in place of the one before."""
        self._parts, self._step, begin = [], [], self._now()
        yield
        self._step.append((begin, self._now()))

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Measures a part, which is a range of this name in a profile: see :func:`tp_ext.debug.record_timeline`."""
        begin = self._now()
        with record_function(name):
            yield
        self._parts.append((begin, self._now()))

    def seconds(self) -> tuple[float, float]:
        """Returns the seconds of the parts of the last step, and of the step. On CUDA it waits for its end."""
        return sum(self.parts()), sum(self._each(self._step))

    def parts(self) -> list[float]:
        """Returns the seconds of each part of the last step. On CUDA it waits for its end."""
        return self._each(self._parts)

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return time.perf_counter()
        # The host's clock would measure launches, or the host would have to wait for each pass
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _each(self, intervals: list[tuple[Any, Any]]) -> list[float]:
        if self._device.type != "cuda":
            return [end - begin for begin, end in intervals]
        # All events are on one stream, where the last one is reached last
        for _, end in intervals[-1:]:
            end.synchronize()
        return [begin.elapsed_time(end) / 1000 for begin, end in intervals]


class TimedStage(PipelineStage):
    """torch's stage, whose computation a clock measures."""

    def __init__(self, *args: Any, clock: Clock, **options: Any) -> None:
        super().__init__(*args, **options)
        self._clock = clock
        self._whole: set[int] = set()  # microbatches whose backward was not split
        self._grads: list[tuple[Tensor, Tensor | None]] = []

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **options: Any) -> Any:
        """Runs the forward of a microbatch.

        Raises:
            RuntimeError: its outputs are not those of the call on fake tensors, which the next stage expects.
        """
        with self._clock.part(f"forward {fwd_chunk_id} of stage {self.stage_index}"):
            result = super().forward_one_chunk(fwd_chunk_id, *args, **options)
        # The outputs of the last stage are sent to no other
        if not self.is_last:
            self._check_outputs(result if isinstance(result, tuple) else (result,))
        return result

    def backward_one_chunk(
        self, bwd_chunk_id: int, loss: Any = None, full_backward: bool = True, last_backward: bool = False
    ) -> Any:
        """Runs a backward, or its first half: all of it if no input needs a gradient, since torch finds the gradients
        of the weights behind those of the inputs."""
        state = self._forward_chunk_states.get(bwd_chunk_id)
        if not full_backward and not self.is_first and state is not None:
            inputs = [one for one in state.input_values if isinstance(one, Tensor)]
            if not any(one.requires_grad for one in inputs):
                self._whole.add(bwd_chunk_id)
                full_backward = True
        with self._clock.part(f"backward {bwd_chunk_id} of stage {self.stage_index}"):
            return super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, last_backward: bool = False) -> Any:
        """Runs the second half of a backward."""
        if bwd_chunk_id in self._whole:
            # Its first half was the whole backward
            self._whole.remove(bwd_chunk_id)
            return None
        with self._clock.part(f"weight gradient {bwd_chunk_id} of stage {self.stage_index}"):
            return super().backward_weight_one_chunk(bwd_chunk_id, last_backward)

    def clear_runtime_states(self) -> None:
        """Forgets the last step, also one that an exception ended."""
        super().clear_runtime_states()
        for left in (self.backward_state, self.dw_runner, self.bwd_cache, self._whole):
            left.clear()
        if self.group_size == 1:  # else messages may still be on their way into the buffers, which torch reports
            for infos in (*self.args_recv_info.values(), *self.grad_recv_info.values()):
                for info in infos:
                    info.buffer = None

    def get_local_bwd_output(self, mb_index: int) -> Any:
        """Returns the gradient of the input for the stage before on this rank; none in evaluation."""
        # torch raises without a backward, and its looped schedules call this in evaluation, too
        return super().get_local_bwd_output(mb_index) if self.has_backward else ()

    def set_local_bwd_input(self, next_stage_bwd_outputs: Any, mb_index: int) -> None:
        """Takes the gradient of the output from the stage after on this rank; none in evaluation."""
        if self.has_backward:
            super().set_local_bwd_input(next_stage_bwd_outputs, mb_index)

    def _pre_metadata_inference_backup(self) -> None:
        self._grads = [(param, param.grad) for param in self.submod.parameters()]
        super()._pre_metadata_inference_backup()

    def _post_metadata_inference_cleanup(self) -> None:
        """Keeps the gradients: torch removes those of FSDP2, also where no forward has run to find the shapes."""
        if self._inference_mode == _utils.InferenceMode.DYNAMIC:
            super()._post_metadata_inference_cleanup()
        for param, grad in self._grads:
            param.grad = grad
        self._grads = []

    def _check_outputs(self, results: tuple[Any, ...]) -> None:
        outputs = [one for one in results if isinstance(one, Tensor)]
        own = [(list(output.shape), output.dtype) for output in outputs]
        want = [(list(one.shape), one.dtype) for one in self._stage_meta.outputs or ()]
        static = self._inference_mode == _utils.InferenceMode.STATIC
        # A fake output comes from a cache that the call on fake tensors has filled: it has no data to send
        if any(isinstance(output, FakeTensor) for output in outputs) or (static and own != want):
            raise RuntimeError(
                f"model: the outputs of stage {self.stage_index}, {own}, must be those of the call on fake tensors, "
                f"{want}, and no fake ones; a forward must not depend on anything but its arguments and the module"
            )
