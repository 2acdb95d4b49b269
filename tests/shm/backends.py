"""What the tests of `tp_shm` share: both backends, groups over them, values that every rank can tell, fresh ranks.

Every test runs over gloo too, some only with ``--exhaustive``: gloo is the oracle, and a test that gloo does not pass
asks too much.
"""

import functools
import os
import pickle
import shutil
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

import tp_ext  # noqa: F401, registers tp_shm
from tests.helpers import ranks

both_backends = pytest.mark.parametrize("backend", ["gloo", "tp_shm"])
# Where a run over gloo proves only that the test asks no more than gloo gives
tp_shm_and_gloo = pytest.mark.parametrize("backend", [pytest.param("gloo", marks=pytest.mark.exhaustive), "tp_shm"])
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
INTEGERS = (torch.int8, torch.uint8, torch.int32, torch.int64)
COMPLEX = (torch.complex64, torch.complex128)
DTYPES = (*FLOATS, *INTEGERS, torch.bool, *COMPLEX)


@functools.cache
def group_of(backend: str, members: tuple[int, ...] | None = None, name: str = "") -> Any:
    """A group over `members`, all by default: one for each `name`, in a rank of the pool. All ranks call it."""
    return dist.new_group(members, timeout=timedelta(seconds=60), backend=backend)


def values(rank: int, shape: Any, dtype: torch.dtype, salt: int = 0) -> torch.Tensor:
    """Integers from -2 to 2, other ones on each rank: sums and products of a few are exact in every dtype."""
    shape = (shape,) if isinstance(shape, int) else tuple(shape)
    numbers = (torch.arange(torch.Size(shape).numel()) * 7 + rank * 3 + salt) % 5 - 2
    if dtype == torch.bool:
        return (numbers > 0).view(shape)
    if dtype == torch.uint8:
        numbers = numbers.abs()
    if dtype.is_complex:
        return torch.complex(numbers.double(), numbers.roll(1).double()).to(dtype).view(shape)
    return numbers.to(dtype).view(shape)


def of_all(p: int, shape: Any, dtype: torch.dtype, salt: int = 0) -> list[torch.Tensor]:
    return [values(rank, shape, dtype, salt) for rank in range(p)]


def same(x: torch.Tensor, y: torch.Tensor) -> None:
    """Equal in shape, dtype and every value; a bool is what it says, whatever its byte."""
    assert x.shape == y.shape and x.dtype == y.dtype
    if x.dtype == torch.bool:
        x, y = x.contiguous().view(torch.uint8) != 0, y.contiguous().view(torch.uint8) != 0
    assert torch.equal(x, y), f"{x.flatten()[:8]} should be {y.flatten()[:8]}"


def timed_error(call: Callable) -> tuple[float, str]:
    """Seconds until a call raises a RuntimeError, and its message; -1 and the result if it raises none."""
    begin = time.monotonic()
    try:
        return -1.0, f"no error, but {call()}"
    except RuntimeError as e:
        return time.monotonic() - begin, str(e)


def collective(name: str, group: Any, p: int, one: int) -> Callable:
    """A collective that cannot do without rank `one`."""
    x, whole = torch.ones(1000), torch.ones(p * 1000)
    return {
        "all_reduce": lambda: dist.all_reduce(x, group=group),
        "large all_reduce": lambda: dist.all_reduce(torch.ones(3_000_000), group=group),
        "all_gather": lambda: dist.all_gather_into_tensor(whole, x, group=group),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(x, whole, group=group),
        "broadcast": lambda: dist.broadcast(x, one, group=group),
        "all_to_all": lambda: dist.all_to_all_single(torch.ones(p * 1000), whole, group=group),
        "recv": lambda: dist.recv(x, one, group=group),
        "recv from any": lambda: dist.recv(x, group=group),
        "barrier": lambda: dist.barrier(group=group),
        "async": lambda: dist.all_reduce(x, group=group, async_op=True).wait(),
    }[name]


# Ranks of their own, for what a pool of gloo ranks cannot show


@dataclass
class Outcome:
    """The end of a rank: the result of fn, or the type name and message of its exception, or the way it died."""

    value: Any = None
    error: str | None = None
    message: str = ""
    traceback: str = ""
    seconds: float = 0.0
    exitcode: int | None = None
    pid: int = 0


def launch(fn: Callable, p: int, *args: Any, timeout: float = 60, environment: Any = None) -> list[Outcome]:
    """fn(rank, p, folder, *args) in p new processes that share a folder; all are gone when it returns."""
    folder = Path(tempfile.mkdtemp(prefix="launch_"))
    task = pickle.dumps((fn, args, dict(environment or {})))
    pipes, workers = {}, []
    try:
        for rank in range(p):
            here, there = ranks._context.Pipe()
            workers.append(ranks._context.Process(target=_rank, args=(rank, p, folder, task, there)))
            workers[-1].start()
            there.close()
            pipes[here] = rank
        outcomes = [Outcome(error="TimeoutError", message=f"no answer within {timeout:g} s") for _ in range(p)]
        deadline = time.monotonic() + timeout
        while pipes and (ready := connection.wait(list(pipes), max(0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = pipes.pop(pipe)
                try:
                    outcomes[rank] = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):
                    workers[rank].join(5)
                    outcomes[rank] = Outcome(error="Died", exitcode=workers[rank].exitcode)
        for worker, outcome in zip(workers, outcomes, strict=True):
            worker.join(10 if outcome.error != "TimeoutError" else 0)  # the end of the process is part of the test
            outcome.exitcode, outcome.pid = worker.exitcode, worker.pid
        return outcomes
    finally:
        for worker in workers:
            worker.kill()
            worker.join()
        shutil.rmtree(folder, ignore_errors=True)


def results(outcomes: list[Outcome]) -> list:
    """The results of the ranks; the first rank that failed, or did not end well, is an error."""
    for rank, outcome in enumerate(outcomes):
        assert outcome.error is None, f"rank {rank}: {outcome.error} {outcome.message}\n{outcome.traceback}"
        assert outcome.exitcode == 0, f"rank {rank} ended with {outcome.exitcode}"
    return [outcome.value for outcome in outcomes]


def segments(pids: Iterable[int]) -> set[str]:
    """Names in /dev/shm of the segments that these processes made; other jobs of this machine may have their own."""
    pids = set(map(str, pids))
    return {name for name in os.listdir("/dev/shm") if name.startswith("tp_shm.") and name.split(".")[2] in pids}


def start(rank: int, p: int, folder: Path, backend: str, seconds: float = 60, name: str = "store") -> Any:
    """The default group of a rank that `launch` started."""
    store = dist.FileStore(str(folder / name), p)
    dist.init_process_group(backend, store=store, rank=rank, world_size=p, timeout=timedelta(seconds=seconds))
    return dist.group.WORLD


def _rank(rank: int, p: int, folder: Path, task: bytes, pipe: connection.Connection) -> None:
    fn, args, environment = pickle.loads(task)
    threading.Thread(target=ranks._end_with_parent, daemon=True).start()
    os.environ.update({"GLOO_SOCKET_IFNAME": "lo", **environment})
    dist.set_debug_level_from_env()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    begin = time.monotonic()
    try:
        outcome = Outcome(value=fn(rank, p, folder, *args))
    except BaseException as e:
        outcome = Outcome(error=type(e).__name__, message=str(e), traceback=traceback.format_exc())
    outcome.seconds = time.monotonic() - begin
    pipe.send_bytes(pickle.dumps(outcome))
    pipe.close()
    if dist.is_initialized():
        dist.destroy_process_group()
