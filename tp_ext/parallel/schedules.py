"""The schedules of torch.distributed.pipelining: which stages each rank has, and what cannot be combined with them."""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed._composable.contract import _get_registry
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointWrapper
from torch.distributed.fsdp import FSDPModule
from torch.distributed.pipelining import schedules

from tp_ext._checks import check_choice, check_int
from tp_ext.model.census import Census

OLDEST_TORCH = (2, 15)


class Schedule(NamedTuple):
    """A schedule of torch.

    Attributes:
        name: its name for :func:`tp_ext.parallel.pipeline_stages`; that of torch's class without "Schedule".
        looped: whether a rank may have several stages.
        v: whether a rank has one stage of the first half and its mirror image, in a V; always two.
        splits: whether it computes the gradients of weights apart from those of activations.
        rounds: whether the microbatches must be a multiple of the number of rounds.
        at_least_stages: whether it needs at least one microbatch per stage.
    """

    name: str
    looped: bool = False
    v: bool = False
    splits: bool = False
    rounds: bool = False
    at_least_stages: bool = False

    @property
    def torch_class(self) -> type[Any]:
        schedule: type[Any] = getattr(schedules, f"Schedule{self.name}")
        return schedule

    def bubble(self, ranks: int, microbatches: int, per_rank: int) -> float | None:
        """Returns the idle share for stages of equal cost, (p - 1) / (m v + p - 1); None if the gradients of weights
        fill idle time, for which there is no such formula."""
        return None if self.splits else (ranks - 1) / (microbatches * per_rank + ranks - 1)

    def stages_of(self, rank: int, ranks: int, per_rank: int) -> list[int]:
        """Returns the stages of a rank."""
        if self.v:
            return [rank, 2 * ranks - 1 - rank]
        return list(range(rank, ranks * per_rank, ranks))


SCHEDULES = {
    one.name: one
    for one in (
        Schedule("GPipe"),
        Schedule("1F1B", at_least_stages=True),
        Schedule("LoopedBFS", looped=True),
        Schedule("Interleaved1F1B", looped=True, rounds=True),
        Schedule("InterleavedZeroBubble", looped=True, rounds=True, splits=True),
        Schedule("ZBVZeroBubble", v=True, splits=True),
        Schedule("DualPipeV", v=True, splits=True, at_least_stages=True),
    )
}


def check_schedule(name: object) -> None:
    """Raises TypeError if ``name`` is no string, ValueError if no schedule has it."""
    if not isinstance(name, str):
        raise TypeError(f"schedule: {name!r} must be a name, one of {', '.join(SCHEDULES)}")
    check_choice(SCHEDULES, schedule=name)


def known_schedule(name: str) -> Schedule:
    """Returns the schedule of a name.

    Raises:
        TypeError, ValueError: see :func:`check_schedule`. RuntimeError: a torch that lacks what the stages need.
    """
    check_schedule(name)
    # Not the whole version, which may end in "+cu128" or begin a third part with letters
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    if release < OLDEST_TORCH:
        raise RuntimeError(
            f"torch: {torch.__version__} must be at least 2.15 for pipeline_stages; older ones have no forward context "
            "of a stage, and their backward in halves computes shared nodes twice"
        )
    return SCHEDULES[name]


def number_of_stages_per_rank(schedule: Schedule, given: int | None) -> int:
    """Returns the number of stages of each rank.

    Raises:
        ValueError: not the number that the schedule has.
    """
    fixed = 2 if schedule.v else None if schedule.looped else 1
    if given is None:
        return fixed or 2
    if not isinstance(given, int) or isinstance(given, bool) or given < 1 or (fixed is not None and given != fixed):
        rule = f"{fixed} with {schedule.name}" if fixed else "an integer of at least 1"
        raise ValueError(f"stages_per_rank: {given!r} must be {rule}")
    return given


def check_microbatches(schedule: Schedule, microbatches: int, ranks: int, stages: int) -> None:
    """Raises ValueError if the schedule cannot run this number of microbatches."""
    check_int(least=1, microbatches=microbatches)
    if schedule.at_least_stages and microbatches < stages:
        raise ValueError(
            f"microbatches: {microbatches} must be at least the number of stages, {stages}, with {schedule.name}"
        )
    # The rule of torch's constructor, which would raise after the model has been changed
    if schedule.rounds and microbatches % max(1, microbatches // ranks):
        raise ValueError(
            f"microbatches: {microbatches} must be a multiple of {microbatches // ranks}, the number of rounds of "
            f"{schedule.name} over {ranks} ranks; multiples of {ranks} are"
        )


def check_pipeline_model(schedule: Schedule, model: Census, parts: Sequence[nn.Module]) -> None:
    """Raises ValueError if parts of the model cannot be in a stage, or not under a schedule that splits the
    backward.
    """
    if any(isinstance(module, FSDPModule) for _, module in model.modules):
        raise ValueError(
            "model: must not be sharded by fully_shard yet; pass fsdp=, which keeps the parameters after forward, "
            "since resharding them loses gradients under schedules that split the backward"
        )
    if not schedule.splits:
        return
    refuse = functools.partial(_refuse, schedule)
    for part in parts:
        for name, module in part.named_modules():
            where = name or type(module).__name__
            # By torch.compile, or in place
            if isinstance(module, torch._dynamo.OptimizedModule) or vars(module).get("_compiled_call_impl"):
                refuse(f"{where!r} is compiled", "compiled code cannot run its backward in halves")
            # By a wrapper, or by torch.distributed._composable.checkpoint
            if isinstance(module, CheckpointWrapper) or "checkpoint" in (_get_registry(module) or {}):
                refuse_recomputation(schedule, where)
    check_hooks(schedule, parts)


def check_hooks(schedule: Schedule, parts: Sequence[nn.Module]) -> None:
    """Raises ValueError if a parameter has a hook that a schedule that splits the backward would not call."""
    if not schedule.splits:
        return
    for part in parts:
        for name, param in part.named_parameters():
            if getattr(param, "_post_accumulate_grad_hooks", None):
                _refuse(
                    schedule,
                    f"the parameter {name!r} has a post-accumulate-grad hook (as for main_grad, or an optimizer in "
                    "backward)",
                    "the gradients of weights are not accumulated by autograd there, so it would not be called; layers "
                    "with grad_accumulation_fusion need no hook",
                )


def refuse_recomputation(schedule: Schedule, where: str) -> None:
    """Raises the error of recomputation under a schedule that splits the backward."""
    _refuse(
        schedule,
        f"{where!r} recomputes its activations (torch.utils.checkpoint)",
        "each half of a backward would recompute them, the second once for each group of weights",
    )


def _refuse(schedule: Schedule, what: str, why: str) -> None:
    raise ValueError(f"model: {what}, and must not with {schedule.name}, which splits the backward: {why}")
