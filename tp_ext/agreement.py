"""Ranks that must all go on or all fail: what one of them found wrong becomes the error of each."""

import contextlib
import pickle
import warnings
from collections.abc import Callable, Iterator
from typing import TypeVar, cast

import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")
_KINDS = (KeyError, TypeError, ValueError, pickle.UnpicklingError)


def gathered(value: T, process_group: ProcessGroup | None) -> list[T]:
    """What every rank has, in the order of the ranks; without ``torch.distributed`` the own value alone."""
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


def together(process_group: ProcessGroup | None, act: Callable[[], T]) -> T:
    """What ``act`` returns here. What it raises on a rank, on the first one of several, every rank raises.

    Communicates: one all-gather of objects.
    """
    result, error = None, None
    try:
        result = act()
    except Exception as raised:
        error = raised
    for found in gathered(None if error is None else portable(error), process_group):
        if found is not None:
            raise found from error
    return cast(T, result)


@contextlib.contextmanager
def plain_failures() -> Iterator[None]:
    """Around a call of ``torch.distributed.checkpoint``: what failed on a rank, on the first one of several, is raised
    on all as that, not as torch's collection of failures."""
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "torch.distributed is disabled")  # which is meant
            yield
    except CheckpointException as error:  # on all ranks
        rank = min(error.failures)
        raise portable(error.failures[rank][0]) from error
