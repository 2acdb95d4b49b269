"""Ranks on processes for tests of sharded models: `run` and `run_raises` as those of `ranks`, where rank 0 alone makes
a plan of ``auto.plan`` and sends it: it is the same on all ranks, and costs seconds on each.
"""

from collections.abc import Callable
from typing import Any
from unittest import mock

import torch.distributed as dist

from tests.helpers import ranks
from tp_ext import auto


def run(fn: Callable, p: int, *args: Any, timeout: float = 60, **kwargs: Any) -> list:
    """The results of fn(group, *args, **kwargs) on ranks 0..p-1; each plan is made once."""
    return ranks.run(_with_plans_of_rank_0, p, fn, args, kwargs, timeout=timeout)


def run_raises(fn: Callable, p: int, exception: Any, match: str, *args: Any, **kwargs: Any) -> None:
    """Asserts as ``ranks.run_raises``, all ranks at once, that fn raises the same on every rank."""
    ranks.run_raises(_with_plans_of_rank_0, p, exception, match, fn, args, kwargs, in_turns=False)


def _with_plans_of_rank_0(group: Any, fn: Callable, args: tuple, kwargs: dict) -> Any:
    plan = auto.plan

    def planned(*args: Any, **kwargs: Any) -> auto.Plan:
        made = [plan(*args, **kwargs) if dist.get_rank(group) == 0 else None]
        dist.broadcast_object_list(made, src=0, group=group)
        return made[0]

    with mock.patch.object(auto, "plan", planned):
        return fn(group, *args, **kwargs)
