"""Ranks that must all go on or all fail: an error of one of them becomes the error of each."""

import contextlib
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")
_KINDS = (KeyError, TypeError, ValueError, pickle.UnpicklingError)


class RetryError(OSError):
    """An error after which all ranks can try once more. It goes before other errors of other ranks."""


def gathered(value: T, process_group: ProcessGroup | None) -> list[T]:
    """The values of all ranks, in their order; without ``torch.distributed`` this rank's alone."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size(process_group)
    dist.all_gather_object(values, value, group=process_group)
    return values


def portable(error: BaseException) -> Exception:
    """The error as it can be sent to other ranks: of a built-in kind, with its message."""
    if isinstance(error, OSError):
        return type(error)(str(error))
    for kind in _KINDS:
        if isinstance(error, kind):
            return kind(error.args[0] if len(error.args) == 1 else str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


def outcomes(process_group: ProcessGroup | None, act: Callable[[], T]) -> list[T]:
    """The results of ``act`` on all ranks. If it raises on a rank, every rank raises that error, the first rank's of
    several.

    Communicates: one all-gather of objects.
    """
    failure: Exception | None = None
    outcome: tuple[Exception | None, T | None] = None, None
    try:
        outcome = None, act()
    except Exception as error:
        failure, outcome = error, (portable(error), None)
    found = gathered(outcome, process_group)
    if errors := [error for error, _ in found if error is not None]:
        raise _first(errors) from failure
    return [result for _, result in found]  # type: ignore[misc]


def together(process_group: ProcessGroup | None, act: Callable[[], T]) -> T:
    """The result of ``act`` on this rank, which need not be one that can be sent. Raises and communicates as
    :func:`outcomes`.
    """
    results: list[T] = []
    outcomes(process_group, lambda: results.append(act()))
    return results[0]


def _first(errors: Iterable[Exception]) -> Exception:
    return min(errors, key=lambda error: not isinstance(error, RetryError))  # the first of those that are minimal


@contextlib.contextmanager
def plain_failures() -> Iterator[None]:
    """Around a call of ``torch.distributed.checkpoint``: raises the error of a rank, the first one of several, on all
    ranks as it is, not as torch's collection of failures."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
            yield
    except CheckpointException as error:  # on all ranks
        failures = [portable(error.failures[rank][0]) for rank in sorted(error.failures)]
        raise _first(failures) from error
