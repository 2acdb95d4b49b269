"""Ranks in this process for tests: `run(fn, p, ...)` as that of `ranks`, by ``debug.simulate``.

For tests whose subject is what ranks compute, not the processes or a backend. Ranks take turns, and a plan of
``auto.plan`` is made by the first of them alone: it is the same on all, which tests on processes show.
"""

import pickle
import threading
from collections.abc import Callable
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tp_ext import auto
from tp_ext.debug import simulate


def run(fn: Callable, p: int, *args: Any, **kwargs: Any) -> list:
    """The results of fn(group, *args, **kwargs) on ranks 0..p-1, each with arguments and a thread of its own."""
    task, threads, plan = pickle.dumps((args, kwargs)), torch.get_num_threads(), auto.plan
    plans: list[Any] = []
    calls = threading.local()

    def on_rank(rank: int, group: Any) -> Any:
        own_args, own_kwargs = pickle.loads(task)
        return tree_map_only(Tensor, lambda t: t.detach().clone(), fn(group, *own_args, **own_kwargs))

    def planned(*args: Any, **kwargs: Any) -> auto.Plan:
        calls.number = number = getattr(calls, "number", -1) + 1
        if number == len(plans):
            plans.append(plan(*args, **kwargs))
        return plans[number]

    torch.set_num_threads(1)  # as the processes: a product's sums depend on them
    try:
        with mock.patch.object(auto, "plan", planned):
            return simulate(on_rank, p)
    finally:
        torch.set_num_threads(threads)
