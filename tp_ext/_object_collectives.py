"""Object collectives by which all ranks go on or all fail: an error of one rank is raised on every rank."""

import contextlib
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")
_BUILTIN = (KeyError, TypeError, ValueError, pickle.UnpicklingError)


class RetryError(OSError):
    """An error after which all ranks can retry. It takes precedence over other errors of other ranks."""


def all_gather_objects(value: T, process_group: ProcessGroup | None) -> list[T]:
    """Returns the values of all ranks, in rank order; without ``torch.distributed`` only this rank's."""
    if not dist.is_initialized():
        return [value]
    values: list[T] = [value] * dist.get_world_size(process_group)
    dist.all_gather_object(values, value, group=process_group)
    return values


def as_builtin_error(error: BaseException) -> Exception:
    """Returns the error in a form that can be sent to other ranks: of a built-in class, with the same message."""
    if isinstance(error, OSError):
        return type(error)(str(error))
    for kind in _BUILTIN:
        if isinstance(error, kind):
            return kind(error.args[0] if len(error.args) == 1 else str(error))
    return RuntimeError(f"{type(error).__name__}: {error}")


def call_and_gather(process_group: ProcessGroup | None, act: Callable[[], T]) -> list[T]:
    """Calls ``act`` on all ranks and returns all results. If it raises on a rank, every rank raises that error; of
    several errors, the first rank's.

    Communicates: one all-gather of objects.
    """
    failure: Exception | None = None
    outcome: tuple[Exception | None, T | None] = None, None
    try:
        outcome = None, act()
    except Exception as error:
        failure, outcome = error, (as_builtin_error(error), None)
    found = all_gather_objects(outcome, process_group)
    if errors := [error for error, _ in found if error is not None]:
        raise _error_to_raise(errors) from failure
    return [result for _, result in found]  # type: ignore[misc]


def call_on_all_ranks(process_group: ProcessGroup | None, act: Callable[[], T]) -> T:
    """Calls ``act`` on all ranks and returns this rank's result, which need not be picklable. Raises and communicates
    as :func:`call_and_gather`.
    """
    results: list[T] = []
    call_and_gather(process_group, lambda: results.append(act()))
    return results[0]


def _error_to_raise(errors: Iterable[Exception]) -> Exception:
    return min(errors, key=lambda error: not isinstance(error, RetryError))  # the first of the minimal ones


@contextlib.contextmanager
def unwrap_checkpoint_errors() -> Iterator[None]:
    """Raises the error of a rank, the first of several, on all ranks as it is, instead of torch's collection of
    failures. For calls of ``torch.distributed.checkpoint``."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # as intended
            yield
    except CheckpointException as error:  # on all ranks
        failures = [as_builtin_error(error.failures[rank][0]) for rank in sorted(error.failures)]
        raise _error_to_raise(failures) from error
