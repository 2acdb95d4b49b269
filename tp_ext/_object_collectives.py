"""Object collectives that succeed on all ranks or raise on all ranks: an error of one rank is raised on every rank."""

import contextlib
import hashlib
import itertools
import pickle
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, TypeVar, cast

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.distributed.checkpoint.api import CheckpointException

T = TypeVar("T")
AxisGroups = Sequence[ProcessGroup]
"""The groups of this rank along each axis of a mesh."""

_BUILTIN = (KeyError, TypeError, ValueError, pickle.UnpicklingError)


class RetryError(OSError):
    """An error after which all ranks can retry. It takes precedence over other errors of other ranks."""


def all_gather_objects(value: T, process_group: ProcessGroup | None) -> list[T]:
    """Returns the values of all ranks, in rank order; without ``torch.distributed`` only this rank's."""
    if _is_single_process(process_group):
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


def attempt(act: Callable[[], T]) -> tuple[Exception | None, tuple[Exception | None, T | None]]:
    """Calls ``act``. Returns its error, or None; and (the error in a form that can be pickled, the result)."""
    try:
        return None, (None, act())
    except Exception as error:
        return error, (as_builtin_error(error), None)


def call_and_gather(process_group: ProcessGroup | None, act: Callable[[], T]) -> list[T]:
    """Calls ``act`` on all ranks and returns all results. If it raises on a rank, every rank raises that error; of
    several errors, the first rank's.

    Communicates: one all-gather of objects.
    """
    failure, outcome = attempt(act)
    outcomes = all_gather_objects(outcome, process_group)
    if errors := [error for error, _ in outcomes if error is not None]:
        raise _error_to_raise(errors) from failure
    return [result for _, result in outcomes]  # type: ignore[misc]


def call_on_all_ranks(process_group: ProcessGroup | None, act: Callable[[], T]) -> T:
    """Calls ``act`` on all ranks and returns this rank's result, which need not be picklable. Raises and communicates
    as :func:`call_and_gather`.
    """
    results: list[T] = []
    call_and_gather(process_group, lambda: results.append(act()))
    return results[0]


def check_same_names(
    argument: str,
    names: Sequence[str],
    groups: Iterable[ProcessGroup],
    problem: Exception | None = None,
    **options: object,
) -> None:
    """Raises on all ranks of the groups if a rank has a ``problem``, if ``argument`` names other layers on it, or if
    one of the other ``options`` is another one.

    Communicates: one all-gather of objects over each group.
    """
    for group in groups:
        if dist.get_backend(group) == "fake":  # a group of one process
            continue
        # Every rank goes through all its groups, by which the error of one reaches all that share a group with it
        try:
            of_ranks = call_and_gather(group, lambda raised=problem: _or_raise((names, options), raised))  # type: ignore[misc]
        except Exception as error:
            problem = error
            continue
        problem = _difference(argument, [listed for listed, _ in of_ranks], [given for _, given in of_ranks])
    if problem is not None:
        raise problem


def _or_raise(value: T, problem: Exception | None) -> T:
    if problem is not None:
        raise problem
    return value


def _difference(
    argument: str, names: Sequence[Sequence[str]], options: Sequence[dict[str, object]]
) -> ValueError | None:
    """Returns an error for the first name, or the first option, in which ranks differ."""
    for name in dict.fromkeys(itertools.chain(*names)):
        ranks = [rank for rank, listed in enumerate(names) if name in listed]
        if len(ranks) < len(names):
            return ValueError(
                f"{argument}: must name the same layers on all ranks, and {name!r} is named on ranks {ranks} alone "
                f"of the {len(names)} ranks of the group"
            )
    for rank, given in enumerate(options):
        for name, value in given.items():
            if value != options[0][name]:
                return ValueError(
                    f"{name}: must be the same on all ranks, and is {options[0][name]!r} on rank 0, {value!r} on rank "
                    f"{rank} of the group"
                )
    return None


def call_and_combine(
    process_group: ProcessGroup | None, act: Callable[[], T], combine: Callable[[list[T]], list[Any]]
) -> Any:
    """Calls ``act`` on all ranks, on the first ``combine`` with all results, and returns on each rank its entry of the
    list that this returns. If one of them raises, every rank raises that error; of several errors, the first rank's.

    Communicates: one gather and one scatter of objects.
    """
    failure, outcome = attempt(act)
    answers: list[tuple[Exception | None, Any]] = []
    outcomes = _gather_objects(outcome, process_group)
    if outcomes is not None:
        try:
            if errors := [error for error, _ in outcomes if error is not None]:
                raise _error_to_raise(errors) from failure
            answers = [(None, answer) for answer in combine([result for _, result in outcomes])]  # type: ignore[misc]
        except Exception as raised_here:
            failure, answers = failure or raised_here, [(as_builtin_error(raised_here), None)] * len(outcomes)
    raised, answer = _scatter_objects(answers, process_group)
    if raised is not None:
        raise raised from failure
    return answer


def _gather_objects(value: T, process_group: ProcessGroup | None) -> list[T] | None:
    """Returns the values of all ranks, in rank order, on the first rank; None on the others."""
    if _is_single_process(process_group):
        return [value]
    values: list[Any] | None = [None] * dist.get_world_size(process_group) if _is_first(process_group) else None
    dist.gather_object(value, values, group=process_group, group_dst=0)
    return values


def _scatter_objects(values: list[T], process_group: ProcessGroup | None) -> T:
    """Returns on each rank its entry of the first rank's list."""
    if _is_single_process(process_group):
        return values[0]
    received: list[Any] = [None]
    dist.scatter_object_list(received, values if _is_first(process_group) else None, group=process_group, group_src=0)
    return cast(T, received[0])


def _is_single_process(process_group: ProcessGroup | None) -> bool:
    """Returns whether there are no other ranks, without ``torch.distributed``. RuntimeError: there were when a save in
    the background began, which must not go on as if it were the only rank."""
    if dist.is_initialized():
        return False
    if process_group is not None:
        raise RuntimeError("process_group: was destroyed before the save was done; wait for its result()")
    return True


def is_alive(process_group: ProcessGroup | None) -> bool:
    """Returns False for a group that was destroyed. None stands for the group of a process without
    ``torch.distributed``."""
    alone = not dist.is_initialized()
    if process_group is None or alone:
        return process_group is None and alone
    try:
        return bool(dist.get_process_group_ranks(process_group))
    except (KeyError, ValueError):
        return False


def _is_first(process_group: ProcessGroup | None) -> bool:
    return dist.get_rank(process_group) == 0


def broadcast_from_first(make: Callable[[], T], axes: AxisGroups) -> T:
    """Calls ``make`` on the rank that is the first of all axes and returns its result, or raises its error, on all
    ranks.

    Communicates: one broadcast of an object along every axis.
    """
    result: list[Any] = [None, None]  # value, error
    if all(axis.rank() == 0 for axis in axes):
        try:
            result[0] = make()
        except Exception as error:  # of any kind: the other ranks wait for an answer
            result[1] = error
    for axis in broadcast_axes(axes):
        dist.broadcast_object_list(result, group=axis, group_src=0)
    if result[1] is not None:
        raise result[1]
    return cast(T, result[0])


def broadcast_axes(axes: AxisGroups) -> Iterator[ProcessGroup]:
    """Yields the axes along which this rank takes part when something goes from the rank that is the first of all axes
    to all ranks, along one axis after the other: it takes part along an axis if it is the first of all later ones."""
    for i, axis in enumerate(axes):
        if all(later.rank() == 0 for later in axes[i + 1 :]):
            yield axis


def true_on_any_rank(flag: bool, axes: AxisGroups, device: torch.device) -> bool:
    """Returns whether the flag is set on any rank, so that all know of one's failure.

    Communicates: one all-reduce of one number along every axis.
    """
    number = torch.tensor([float(flag)], device=device)
    for axis in axes:
        dist.all_reduce(number, dist.ReduceOp.MAX, group=axis)
    return bool(number)


def differs_between_ranks(value: object, axes: AxisGroups, device: torch.device) -> bool:
    """Returns whether two ranks have different values, by a hash of ``repr(value)``.

    Communicates: one all-reduce of two numbers along every axis.
    """
    # Not hash(), whose values are no contract between processes. 56 bits: the negative fits an int64, too
    number = int.from_bytes(hashlib.sha256(repr(value).encode()).digest()[:7], "big")
    # MAX of the negative is the least: one all-reduce for both
    extremes = torch.tensor([number, -number], device=device)
    for axis in axes:
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group=axis)
    return bool(extremes.sum())


def all_gather_along(values: list[T], axes: AxisGroups) -> list[T]:
    """Returns the values of all ranks of a mesh, gathered along one axis after another."""
    for axis in axes:
        values = [value for of_rank in all_gather_objects(values, axis) for value in of_rank]
    return values


def raise_first(failure: Exception | None, axes: AxisGroups) -> None:
    """Raises on all ranks of a mesh the failure of the first rank that has one, if any has.

    Communicates: one exchange of objects along every axis.
    """
    failures = all_gather_along([None if failure is None else as_builtin_error(failure)], axes)
    if raised := [error for error in failures if error is not None]:
        raise _error_to_raise(raised) from failure


def raise_on_all_ranks(failure: Exception | None, axes: AxisGroups, device: torch.device) -> None:
    """Raises on all ranks of a mesh if a rank has a failure; see :func:`raise_first`.

    Communicates: one all-reduce of one number along every axis; before an error, one exchange of objects.
    """
    if true_on_any_rank(failure is not None, axes, device):
        raise_first(failure, axes)


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
