"""The inputs of a step in microbatches, and the place of each microbatch in the global batch."""

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.pipelining.microbatch import split_args_kwargs_into_chunks

from tp_ext._object_collectives import all_gather_along, as_builtin_error, true_on_any_rank
from tp_ext.context_layout import ContextLayout
from tp_ext.group import process_group
from tp_ext.mesh import DataAxes
from tp_ext.random_scope import at

T = TypeVar("T")


def on_all_data_ranks(act: Callable[[], T], data: DataAxes, device: torch.device) -> T:
    """Returns ``act()``. If it raises on a data rank, all data ranks raise that error, of several the first one's.

    Communicates: over each data axis one number, for which the host waits, on a stream of its own lest it wait for the
    work that is queued; and, if it raises, one exchange of objects.
    """
    axes = [process_group(axis.name) for axis in data.axes]
    result: list[T] = []
    failure: Exception | None = None
    try:
        result.append(act())
    except Exception as error:  # of any kind, as of a user's object: the other ranks must not wait for this one
        failure = error
    if axes:
        with torch.cuda.stream(_agreements(device)) if device.type == "cuda" else nullcontext():
            failed = true_on_any_rank(failure is not None, axes, device)
        if failed:
            # Only built-in classes can be read on every rank
            errors = all_gather_along([None if failure is None else as_builtin_error(failure)], axes)
            rank, first = next((rank, one) for rank, one in enumerate(errors) if one is not None)
            raise type(first)(f"{first}, on data rank {rank}") from failure
    elif failure is not None:
        raise failure
    return result[0]


@functools.cache
def _agreements(device: torch.device) -> torch.cuda.Stream:
    return torch.cuda.Stream(device)


class StepInputs:
    """The arguments of a step of :class:`tp_ext.parallel.ParallelRun` on a data-parallel rank.

    Args:
        inputs: a tensor, or a tuple of tensors, whose dim 0 is divided by the number of microbatches; it may be 0.
        target: likewise.
        keywords: of the model; ``layout`` may be a list with one of each microbatch.
        microbatches: their number.
        data_rank: the index of this rank along the data axis.

    Raises:
        TypeError: an input or a layout of another type. ValueError: a length that is no multiple of ``microbatches``;
            layouts of other numbers of tokens.
    """

    def __init__(
        self, inputs: Any, target: Tensor, keywords: dict[str, Any], microbatches: int, data_rank: int
    ) -> None:
        given = inputs if isinstance(inputs, tuple) else (inputs,)
        for name, tensor in (*((f"inputs[{i}]", one) for i, one in enumerate(given)), ("target", target)):
            if not isinstance(tensor, Tensor):
                raise TypeError(f"{name}: {type(tensor).__name__} must be a tensor")
            if tensor.dim() == 0 or len(tensor) % microbatches:
                raise ValueError(
                    f"{name}: shape {tuple(tensor.shape)} must be a multiple of {microbatches} microbatches in dim 0"
                )
        self._given, self._target, self._keywords = given, target, keywords
        self._microbatches, self._data_rank = microbatches, data_rank
        self._layouts = _layouts(keywords.get("layout"), microbatches)
        # Dim 0 of an input of several dims counts sequences
        first: Tensor = given[0]
        self._sequences = len(first) // microbatches if first.dim() > 1 else None
        self._seq = first.shape[1] if first.dim() > 1 else None

    def microbatches(self) -> tuple[list[Any], list[dict[str, Any]], list[Tensor]]:
        """Returns the arguments, the keyword arguments and the target of each microbatch."""
        if len(self._target) == 0:  # torch cannot split what is empty
            return (
                [self._given] * self._microbatches,
                [self._keywords] * self._microbatches,
                [self._target] * self._microbatches,
            )
        arguments, options = split_args_kwargs_into_chunks(self._given, self._keywords, self._microbatches)
        if isinstance(self._keywords.get("layout"), list | tuple):
            options = [one | {"layout": layout} for one, layout in zip(options, self._layouts, strict=True)]
        return arguments, options, list(self._target.chunk(self._microbatches))

    def of_schedule(self) -> tuple[tuple[Tensor, ...], dict[str, Any]]:
        """Returns the arguments of a schedule's ``step``: the batch or, with a list of layouts, each microbatch."""
        # torch's step passes what is no tensor to every microbatch as it is, a list of layouts whole
        if not isinstance(self._keywords.get("layout"), list | tuple):
            return self._given, {"target": self._target, **self._keywords}
        arguments, options, targets = self.microbatches()
        return (), {"arg_mbs": arguments, "kwarg_mbs": options, "target_mbs": targets}

    def random_numbers(self, step: int, microbatch: int) -> AbstractContextManager[Any]:
        """Returns :func:`tp_ext.random.at` with the place of the microbatch in the global batch."""
        # The global batch in the order [data rank, microbatch, row], whose masks one process draws
        row, layout = self._data_rank * self._microbatches + microbatch, self._layouts[microbatch]
        # Packed: how many sequences other ranks have is unknown, so masks count tokens
        if layout is not None and layout.batch is None:
            return at(step, microbatch, batch_offset=row, token_offset=row * layout.tokens, layout=layout)
        if layout is not None:
            return at(step, microbatch, batch_offset=row * (layout.batch or 0), layout=layout)
        # Of an input with one dim it is unknown which elements are a sequence
        if self._sequences is None:
            return at(step, microbatch)
        return at(step, microbatch, batch_offset=row * self._sequences, seq=self._seq)


def _layouts(layout: Any, microbatches: int) -> list[ContextLayout | None]:
    """Returns the layout of each microbatch; None if there is none, or the keyword is the model's own.

    Raises:
        TypeError: a list of something else. ValueError: not one for each microbatch, of equally many tokens.
    """
    if not isinstance(layout, list | tuple):
        return [layout if isinstance(layout, ContextLayout) else None] * microbatches
    for item in layout:
        if not isinstance(item, ContextLayout):
            raise TypeError(f"layout: {item!r} in the list must be a ContextLayout")
    if len(layout) != microbatches:
        raise ValueError(f"layout: {len(layout)} layouts must be {microbatches}, one for each microbatch")
    # The place of a microbatch is computed as a multiple of the length of this rank's
    if len({(item.tokens, item.batch) for item in layout}) > 1:
        raise ValueError(
            f"layout: microbatches of {[item.tokens for item in layout]} tokens in {[item.batch for item in layout]} "
            "sequences (None: packed) must be of equally many"
        )
    return list(layout)
