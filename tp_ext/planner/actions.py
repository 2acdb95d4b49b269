"""The lists of actions of the schedules of ``torch.distributed.pipelining``, as its ranks execute them."""

import functools
from typing import Any

from torch.distributed.pipelining import schedules

from tp_ext._build import load
from tp_ext.parallel.schedules import SCHEDULES, check_microbatches, check_schedule, number_of_stages_per_rank

KINDS = {"F": 0, "B": 1, "I": 2, "W": 3}
"""The numbers of the kinds in csrc/planner/pipeline.h."""
Action = tuple[str, int, int]
"""A kind of :data:`KINDS`, a stage of the whole pipeline, a microbatch."""


@functools.lru_cache(maxsize=1024)
def pipeline_actions(schedule: str, pp: int, virtual: int, microbatches: int) -> tuple[tuple[Action, ...], ...]:
    """Returns the actions of each rank, in the order in which it executes them.

    They are those that torch's classes compute. 1F1B has none that are right in torch 2.15: its ``pipeline_order``
    gives the microbatches of the last rank numbers from 1, so the order of its ``_step_microbatches`` is taken.

    Raises:
        TypeError, ValueError: no schedule, or what it cannot run.
    """
    check_schedule(schedule)
    known = SCHEDULES[schedule]
    try:
        number_of_stages_per_rank(known, virtual)
    except ValueError as error:  # which names the argument of pipeline_stages
        raise ValueError(str(error).replace("stages_per_rank", "virtual", 1)) from None
    check_microbatches(known, microbatches, pp, pp * virtual)
    if schedule == "1F1B":
        return tuple(_one_forward_one_backward(rank, pp, microbatches) for rank in range(pp))
    if schedule == "GPipe":
        return tuple(tuple((kind, rank, i) for kind in ("F", "B") for i in range(microbatches)) for rank in range(pp))
    rounds = max(1, microbatches // pp)
    # Without its constructor, which needs the modules of stages
    instance: Any = object.__new__(known.torch_class)
    instance.pp_group_size, instance._num_stages, instance.num_stages = pp, pp * virtual, pp * virtual
    instance._stages, instance.n_local_stages, instance._n_microbatches = [None] * virtual, virtual, microbatches
    instance.number_of_rounds, instance.microbatches_per_round = rounds, microbatches // rounds
    return tuple(_plain(instance._calculate_single_rank_operations(rank)) for rank in range(pp))


def _plain(actions: list[schedules._Action | None]) -> tuple[Action, ...]:
    """Returns the computations of a list, with those that torch overlaps one after the other."""
    plain: list[Action] = []
    for action in actions:
        for part in (action.sub_actions or (action,)) if action is not None else ():
            if part.computation_type.value in KINDS and part.microbatch_index is not None:
                plain.append((part.computation_type.value, part.stage_index, part.microbatch_index))
    return tuple(plain)


def _one_forward_one_backward(rank: int, pp: int, microbatches: int) -> tuple[Action, ...]:
    warmup = min(microbatches, pp - rank)
    actions = [("F", rank, i) for i in range(warmup)]
    for i in range(microbatches):
        actions.append(("B", rank, i))
        if warmup + i < microbatches:
            actions.append(("F", rank, warmup + i))
    return tuple(actions)


@functools.lru_cache(maxsize=4096)
def library_schedule(schedule: str, pp: int, virtual: int, microbatches: int) -> Any:
    """Returns the lists of :func:`pipeline_actions` as an object of the library."""
    lists = pipeline_actions(schedule, pp, virtual, microbatches)
    flat = [[(KINDS[kind], stage, i) for kind, stage, i in actions] for actions in lists]
    return load().planner.Schedule(flat, microbatches)
