"""The proof by values: a model with its repeated layers taken once is sharded and run, all ranks in this process, and
compared with the unsharded one.

The proof of shapes (:mod:`tp_ext.auto.search.localize`) cannot see a number that is wrong with every shape right: a
mean over a local length, a constant added by every rank. Here outputs, the gradients of inputs and of every parameter,
and buffers are compared, in train and eval mode, with gradients on and off, at two sizes of batch, and the reason of
what differs is a kind of weights that stays whole."""

from __future__ import annotations

import contextlib
import dataclasses
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from tp_ext.auto.modules.logits import ShardedLogits
from tp_ext.auto.proof.copies import copied_model
from tp_ext.auto.proof.watched_hooks import watched_hooks
from tp_ext.auto.record.arguments import with_strides_of, with_tensors
from tp_ext.auto.record.reachable import Notes
from tp_ext.auto.record.record import tensors
from tp_ext.auto.record.unchanged import places_of
from tp_ext.auto.search.localize import replaced
from tp_ext.auto.search.plans import Plan
from tp_ext.simulation import simulate
from tp_ext.simulation.comparison import RunResults, bound_of, differences, layouts_by_name, results_of
from tp_ext.simulation.rank_state import owned_by_ranks

MAX_PROVEN_RANKS = 8  # that run; more ranks have smaller shards of the same kinds

Apply = Callable[[Plan, nn.Module, Any], Any]


class DifferentValuesError(Exception):
    """A tensor of the sharded model that is not that of the unsharded one, with the run that showed it, if both ran."""

    def __init__(self, text: str, run: Run | None = None) -> None:
        super().__init__(text)
        self.run = run


class UnprovenError(Exception):
    """A model cannot be run, for the reason given."""


def run_model(model: nn.Module, call: Any, backward: bool, input_gradients: bool = True) -> RunResults:
    """Runs a model once. What hooks of a user keep is an output."""

    def fresh(x: Tensor) -> Tensor:
        # Copies: a model may write to its inputs, and both runs must get the same
        is_differentiable = backward and input_gradients and x.is_floating_point()
        return with_strides_of(x, x.detach().clone()).requires_grad_(is_differentiable)

    with watched_hooks(model) as hooks:
        results = results_of(model, *with_tensors(call, fresh), backward=backward, gather=full_logits)
    results.outputs |= hooks.kept()
    return results


def full_logits(result: Any) -> Any:
    """Outputs with logits of all columns, for a comparison."""
    for path, tensor in list(tensors(result)):
        if isinstance(tensor, ShardedLogits):
            result = replaced(result, path, ShardedLogits.full)  # type: ignore[arg-type]
    return result


@dataclass(frozen=True)
class Run:
    """One run of the proof: a call of the model, in a mode.

    Attributes:
        input_gradients: whether the floating-point arguments require gradients.
        spare: the call in place of one that the model does not accept in this mode, if that proves anything new.
    """

    call: Any
    training: bool
    backward: bool
    input_gradients: bool = True
    spare: Any = None

    def __call__(self, model: nn.Module) -> RunResults:
        return run_model(model.train(self.training), self.call, self.backward, self.input_gradients)


def prove(
    reduced: nn.Module,
    plan: Plan,
    whole: Plan,
    runs: list[Run],
    dtype: torch.dtype | None,
    apply: Apply,
) -> list[DifferentValuesError]:
    """Runs a model with weights on all ranks of a plan, in this process, next to the same model on one rank.

    Args:
        whole: the plan of one rank, whose draws are those of every number of ranks. runs: :func:`runs_of`.

    Returns:
        For each run in which a tensor differs one that does.

    Raises:
        DifferentValuesError: the sharded model does not run. UnprovenError: the unsharded model does not.
    """
    # Its shapes have been proven, in the types that the model has; calls that the example lacks are the user's
    plan = dataclasses.replace(plan, proofs=[], example=None)
    bound = bound_of(dtype or torch.float32, "random")

    def run_all(rank: int, group: Any, plan: Plan) -> tuple[list[RunResults], dict[str, Any]]:
        model = copied_model(reduced)
        apply(plan, model, group)
        return [run(model) for run in accepted], layouts_by_name(model)

    with torch.random.fork_rng(devices=[]), no_garbage():
        notes = Notes(places_of(reduced))
        notes.empty_caches()
        accepted, wanted = _reference(reduced, whole, runs, apply)
        # Ranks are processes: what the code keeps outside of the model is not what another rank has computed
        shared = notes.changed()
        notes.put_back()
        try:
            with owned_by_ranks(lambda: Notes(shared).put_back) if shared else contextlib.nullcontext():
                ranks = simulate(run_all, plan.p, plan)
        except RuntimeError as error:
            raise DifferentValuesError(str(error)) from error
    errors: dict[int, DifferentValuesError] = {}
    for rank, (results, of_rank) in enumerate(ranks):
        for i, (run, expected, got) in enumerate(zip(accepted, wanted, results, strict=True)):
            size, name = max(differences(expected, got, of_rank), default=(0.0, ""))
            if size > bound:
                errors.setdefault(i, DifferentValuesError(f"{name} differs by {size:.0e} on rank {rank}", run))
    return list(errors.values())


@contextlib.contextmanager
def no_garbage() -> Iterator[None]:
    """Fills memory that an operator leaves uninitialised alike in all runs, such as rows after the last group of a
    grouped product."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.use_deterministic_algorithms(True, warn_only=True)
        try:
            yield
        finally:
            torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _reference(reduced: nn.Module, whole: Plan, runs: list[Run], apply: Apply) -> tuple[list[Run], list[RunResults]]:
    """Makes the runs of the unsharded model; returns those that it accepts, and their results.

    Raises:
        UnprovenError: it accepts no run of training. DifferentValuesError: it does without the
            layers and masks of ``whole``.
    """
    try:
        return _accepted(reduced, runs, lambda model, group: apply(whole, model, group))
    except UnprovenError as error:
        try:
            _accepted(reduced, runs, lambda model, group: model)
        except UnprovenError:
            raise error from None
        # The model runs, but not with layers of this package
        raise DifferentValuesError(str(error)) from error


def runs_of(calls: list[Any], gradients: bool) -> list[Run]:
    """Returns the runs of a proof, of which each costs as much as the model.

    Any two of (batch, train or eval, gradients or none) occur together in each way, which shows what depends on two of
    them. The three runs left out would show what depends on all three alone: the code of eval mode without gradients
    at the smaller batch alone, and at the larger batch alone training without gradients, and gradients in eval mode."""
    if not gradients:
        return [Run(call, training, False) for training in (True, False) for call in calls]
    large, small = sorted((calls[0], calls[-1]), key=_elements, reverse=True)
    if len(calls) == 1:
        return [Run(large, training, backward) for training in (True, False) for backward in (True, False)]
    # Training with gradients twice: code may take another path at its second step
    return [
        Run(large, training=True, backward=True),
        Run(large, training=False, backward=False, spare=small),
        Run(small, training=True, backward=True),
        Run(small, training=True, backward=False, spare=large),
        Run(small, training=False, backward=True, spare=large),
    ]


def step_of(runs: list[Run]) -> Run:
    """Returns the cheapest run of training, with gradients if one has them."""
    steps = [run for run in runs if run.training and run.backward >= any(run.backward for run in runs)]
    step = min(steps, key=lambda run: _elements(run.call))
    return dataclasses.replace(step, spare=max((run.call for run in steps), key=_elements))


def _elements(call: Any) -> int:
    return sum(tensor.numel() for _, tensor in tensors(call))


def _accepted(
    reduced: nn.Module, runs: list[Run], prepare: Callable[[nn.Module, Any], object]
) -> tuple[list[Run], list[RunResults]]:
    """Runs a model on one rank, without the runs that it does not accept; returns the others and their results.

    Some models reject one sequence in training, a row more, or an argument that requires a gradient."""
    # Text: an exception has the frames of the run that has failed, and all activations in them
    first_error = ""

    def run_all(rank: int, group: Any) -> tuple[list[RunResults], str]:
        model = copied_model(reduced)
        prepare(model, group)
        results: list[RunResults] = []
        for run in runs:
            try:
                results.append(run(model))
            except Exception as error:
                return results, f"{type(error).__name__}: {str(error)[:200]}"
        return results, ""

    with_gradients = any(run.backward for run in runs)
    while any(run.training and run.backward == with_gradients for run in runs):
        try:
            results, error = simulate(run_all, 1)[0]
        except RuntimeError as refused:  # by `prepare`
            raise UnprovenError(f"{type(refused).__name__}: {str(refused)[:200]}") from refused
        if not error:
            return runs, results
        first_error = first_error or error
        failed = runs[len(results)]
        # All runs again, in a new copy: one that fails half-way leaves other buffers
        if failed.backward and failed.input_gradients:
            runs = [dataclasses.replace(run, input_gradients=False) for run in runs]
        else:
            at = len(results)
            spares = [dataclasses.replace(failed, call=failed.spare, spare=None)] if failed.spare is not None else []
            runs = [*runs[:at], *spares, *runs[at + 1 :]]
    raise UnprovenError(first_error)
