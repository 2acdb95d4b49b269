"""`@on_ranks(2)` on a test runs it on every rank: the test is the function on the rank."""

import copy
import functools
import importlib
import inspect
from collections.abc import Callable
from typing import Any

import pytest
from torch import distributed as dist

from tests.helpers.ranks import run
from tests.helpers.simulated import as_processes, plans_made_once
from tp_ext.debug import simulate


def on_ranks(*p: int, backend: str = "simulated", timeout: float = 180) -> Callable[[Callable], Callable]:
    """Makes a test of ``fn(group, ..)``, which runs on every rank with the test's arguments.

    Simulated ranks are threads of this process, of which one runs at a time: nothing is pickled, and a debugger stops
    at the line of the rank that failed. They share the process. A test that patches it, or whose subject is processes,
    signals or a backend, has ranks in processes, to which arguments and fixtures travel by pickle.

    Args:
        p: numbers of ranks; several are a parameter ``p`` of the test, and without any the test has one of its own.
            ``fn`` may take it.
        backend: of ``group``: ``"simulated"``, or in processes ``"gloo"`` (of the pool: what TP_EXT_RANKS_BACKEND says)
            or ``"tp_shm"``.
        timeout: seconds, for processes; simulated ranks that wait for each other are found at once.
    """

    def decorate(fn: Callable) -> Callable:
        _, *parameters = inspect.signature(fn).parameters.values()
        takes_p = any(parameter.name == "p" for parameter in parameters)

        @functools.wraps(fn)
        def test(**arguments: Any) -> None:
            size = p[0] if len(p) == 1 else arguments.pop("p")
            if takes_p:
                arguments["p"] = size
            if backend == "simulated":
                _simulate(fn, size, arguments)
            else:
                run(_call, size, fn.__module__, fn.__name__, backend, arguments, timeout=timeout)

        if len(p) == 1:
            parameters = [parameter for parameter in parameters if parameter.name != "p"]
        elif not takes_p:
            parameters.insert(0, inspect.Parameter("p", inspect.Parameter.POSITIONAL_OR_KEYWORD))
        test.__signature__ = inspect.Signature(parameters)  # pytest reads the arguments from it
        if len(p) > 1:
            test = pytest.mark.parametrize("p", p)(test)
        return pytest.mark.simulated(test) if backend == "simulated" else test

    return decorate


def _simulate(fn: Callable, p: int, arguments: dict[str, Any]) -> None:
    def on_rank(rank: int, group: Any) -> None:
        try:
            fn(group, **copy.deepcopy(arguments))  # a rank may change what it gets
        except BaseException as error:
            if not isinstance(error, pytest.skip.Exception):
                error.add_note(f"on rank {rank} of {p}")
            raise

    try:
        with as_processes(), plans_made_once():
            simulate(on_rank, p)
    except RuntimeError as error:
        raise error.__cause__ or error from None


def _call(group: Any, module: str, name: str, backend: str, arguments: dict[str, Any]) -> None:
    own = dist.new_group(backend=backend) if backend != "gloo" else None
    # The test travels by its name: pickle finds the decorated function there, and not the one for the rank
    getattr(importlib.import_module(module), name).__wrapped__(own or group, **arguments)
    if own is not None:
        dist.destroy_process_group(own)
