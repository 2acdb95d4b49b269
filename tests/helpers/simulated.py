"""Ranks in this process for tests: `run(fn, p, ...)` as that of `ranks`, by ``debug.simulate``.

For tests whose subject is what ranks compute, not the processes or a backend. Ranks take turns, and a plan of
``auto.plan``, or the proof of a call that its example does not show, is made by the first of them alone: it is the same
on all, which tests on processes show.
"""

import contextlib
import pickle
import threading
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from torch import Tensor
from torch.utils._pytree import tree_map_only

from tp_ext import auto
from tp_ext.auto import guard
from tp_ext.debug import simulate


def run(fn: Callable, p: int, *args: Any, **kwargs: Any) -> list:
    """The results of fn(group, *args, **kwargs) on ranks 0..p-1, each with arguments and a thread of its own."""
    task = pickle.dumps((args, kwargs))

    def on_rank(rank: int, group: Any) -> Any:
        own_args, own_kwargs = pickle.loads(task)
        return tree_map_only(Tensor, lambda t: t.detach().clone(), fn(group, *own_args, **own_kwargs))

    with as_processes(), plans_made_once():
        return simulate(on_rank, p)


@contextlib.contextmanager
def as_processes() -> Iterator[None]:
    """One thread for a product, as in a process of the pool: its sums depend on the number."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


@contextlib.contextmanager
def plans_made_once() -> Iterator[None]:
    """The first of the simulated ranks to plan a model, or to prove a call, does it for all."""
    plans = _once(auto.plan, lambda *args, **options: repr(options))
    proofs = _once(guard.plan_again, _call)
    with mock.patch.object(auto, "plan", plans), mock.patch.object(guard, "plan_again", proofs):
        yield


def _call(plan: auto.Plan, structure: torch.nn.Module, example: Any, apply: Any, *by_values: bool) -> str:
    modes = [module.training for module in structure.modules()]
    return repr((plan.fingerprint, example, modes, torch.is_grad_enabled(), by_values))


def _once(function: Callable, key: Callable) -> Callable:
    """A function whose n-th call on a rank has the result of the n-th call on the first one, if it is the same call."""
    results: dict[tuple[int, str], Any] = {}
    calls = threading.local()

    def first(*args: Any, **kwargs: Any) -> Any:
        calls.number = getattr(calls, "number", -1) + 1
        name = calls.number, key(*args, **kwargs)
        if name not in results:
            results[name] = function(*args, **kwargs)
        return results[name]

    return first
