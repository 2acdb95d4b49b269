"""Gloo ranks for tests that compare them: `run(fn, p, ...)` calls fn on p ranks at once, returns what each returned.
A test that runs on every rank itself: `on_ranks.py`.

One pool of p long-lived processes per p, made at first use, each with its own default process
group of size p (file rendezvous). They are forked from a server that has imported torch once and
done nothing else (no thread, no CUDA context): a pool costs tens of milliseconds, a run a few.

`fn` is a function at the top of a module, since it travels by name; arguments and results travel
by plain pickle. Every run starts from the same seed and ends with a sum over the ranks, so that a
collective too many or too few fails its own test, not the next. A failure throws the pool away, and
so do the threads of its process groups once they have cost as much as a new pool (`close_costly`).

TP_EXT_RANKS_BACKEND=cpu:gloo,cuda:nccl: the backends of their groups. TP_EXT_RANKS_SECONDS: no run waits for longer.
"""

import atexit
import contextlib
import faulthandler
import multiprocessing
import os
import pickle
import re
import shutil
import signal
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any
from unittest import mock

from tp_ext import common_generator

_context = multiprocessing.get_context("forkserver")
PRELOADED = ["tests.helpers.preloaded"]
# What a rank would import by itself, in 2 s of processor time: by the server, where pytest has imported it
OF_OTHERS = ["tp_ext.huggingface", "transformers.trainer", "trl.trainer.sft_trainer", "peft", "lightning"]
BACKEND = "TP_EXT_RANKS_BACKEND"
PLANS = "TP_EXT_TESTS_PLANS"  # the folder of those that were made in this run
STRICT = {"MKL_CBWR": "AVX512,STRICT"}  # for tp_invariant: MKL reads it once in a process
_ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
    "TORCHINDUCTOR_COMPILE_THREADS": "1",  # no processes of the ranks' own
}
_GRACE_SECONDS = 1.0  # for the other ranks to tell their own error, once one has failed
# Each group of gloo has a thread that wakes up a hundred times a second: 2 ms of processor time, of some 80 for a fork
_MAX_GROUP_SECONDS = 40
_pools: dict[int, "_Pool"] = {}


class RankError(Exception):
    """`ranks` failed; `rank`, `type_name` and `traceback` are those of the first one."""

    def __init__(self, ranks: list[int], p: int, type_name: str, text: str):
        super().__init__(f"rank {', '.join(map(str, ranks))} of {p}: {type_name}\n{text}")
        self.rank, self.ranks, self.type_name, self.traceback = ranks[0], ranks, type_name, text


def run(fn: Callable, p: int, *args: Any, timeout: float = 180, **kwargs: Any) -> list:
    """The results of fn(group, *args, **kwargs) on ranks 0..p-1, group a gloo ProcessGroup."""
    timeout = min(timeout, float(os.environ.get("TP_EXT_RANKS_SECONDS", timeout)))
    task = pickle.dumps((sys.path, pickle.dumps((fn, args, kwargs))))
    pool = _pools.pop(p, None) or _Pool(p)
    with contextlib.ExitStack() as on_error:
        on_error.callback(pool.close)
        results = pool.run(task, timeout)
        on_error.pop_all()
    _pools[p] = pool
    return results


def start_forkserver() -> None:
    """Starts the server that forks processes, if it does not run, with the environment of ranks: all that are forked
    have that."""
    of_others = [name for name in OF_OTHERS if name in sys.modules and shutil.which("nvidia-smi") is None]
    _context.set_forkserver_preload([*of_others, *PRELOADED])  # which freezes what is there
    with mock.patch.dict(os.environ, _ENVIRONMENT):
        forkserver.ensure_running()


def run_fresh(fn: Callable, *args: Any, timeout: float = 180, **kwargs: Any) -> Any:
    """The result of fn(*args, **kwargs) in a new process that has no process group."""
    return run_apart(fn, 1, *args, timeout=timeout, **kwargs)[0]


def run_apart(fn: Callable, processes: int, *args: Any, timeout: float = 180, **kwargs: Any) -> list:
    """The results of fn(*args, **kwargs) in that many new processes at once, none with a process group."""
    with contextlib.closing(_Pool(0, processes)) as pool:
        return pool.run(pickle.dumps((sys.path, pickle.dumps((fn, args, kwargs)))), timeout)


def run_raises(
    fn: Callable,
    p: int,
    exception: type | tuple[type, ...],
    match: str,
    *args: Any,
    in_turns: bool = True,
    timeout: float = 180,
    **kwargs: Any,
) -> list[str]:
    """Asserts that fn raises the same `exception` (no subclass) with the same message (numbers
    aside) on every rank, that `match` is in it, and that the group works afterwards. Returns them.

    The ranks call fn in turns while the others wait, so an fn that sends anything before it raises
    hangs here. in_turns=False is for errors that only a collective brings to light.
    """
    raised = run(_raised, p, fn, args, kwargs, in_turns, timeout=timeout)
    names = [e.__name__ for e in (exception if isinstance(exception, tuple) else (exception,))]
    for rank, (name, message, text) in enumerate(raised):
        assert name in names, f"rank {rank}: {name}, expected {' or '.join(names)}\n{text}"
        assert re.search(match, message), f"rank {rank}: {match!r} is not in {message!r}"
    same = {(name, re.sub(r"\d+", "#", message)) for name, message, _ in raised}
    assert len(same) == 1, f"the ranks disagree: {same}"
    return [message for _, message, _ in raised]


def close_costly() -> None:
    """Ends the pools whose idle threads have cost more than new processes would. For the time between two tests: what
    a test keeps in its workers stays there."""
    for pool in list(_pools.values()):
        if pool.idle_group_seconds() > _MAX_GROUP_SECONDS:
            _pools.pop(pool.p).close()


def close() -> None:
    """Ends all workers."""
    while _pools:
        _pools.popitem()[1].close()


atexit.register(close)


class _Pool:
    def __init__(self, p: int, processes: int = 1):
        self.p, self.pipes, self.processes, self.groups = p, [], [], 0
        self.group_seconds, self.counted, self.used = 0.0, time.monotonic(), False
        self.folder = Path(tempfile.mkdtemp(prefix="ranks_"))
        start_forkserver()
        for rank in range(p or processes):
            here, there = _context.Pipe()
            process = _context.Process(target=_work, args=(rank, p, self.folder, there), daemon=True)
            process.start()
            there.close()  # from now on the worker's death is the end of the pipe
            self.pipes.append(here)
            self.processes.append(process)

    def run(self, task: bytes, timeout: float) -> list:
        self.used = True
        waiting = {pipe: rank for rank, pipe in enumerate(self.pipes)}
        results, failures = {}, []  # of (when, rank, type name, traceback)
        deadline = time.monotonic() + timeout
        for pipe in self.pipes:
            with contextlib.suppress(OSError):  # a dead worker, found below
                pipe.send_bytes(task)
        while waiting and (ready := connection.wait(list(waiting), max(0, deadline - time.monotonic()))):
            for pipe in ready:
                rank = waiting.pop(pipe)
                try:
                    results[rank], failure, self.groups = pickle.loads(pipe.recv_bytes())
                except (EOFError, OSError):  # time 0: a death comes before the errors it causes
                    self.processes[rank].join(1)
                    code = self.processes[rank].exitcode
                    failure = (0.0, rank, "WorkerDied", f"the worker ended with exit code {code}")
                if failure:
                    failures.append(failure)
                    deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
        hanging = list(waiting.values())
        if failures:
            _, rank, name, text = min(failures)
            others = sorted({f[1] for f in failures} - {rank})
            text += f"\nstill running: {hanging}" if hanging else ""
            raise RankError([rank, *others], self.p, name, text)
        if hanging:
            text = f"no answer within {timeout:g} s\n{self._stacks(hanging)}"
            raise RankError(hanging, self.p, "TimeoutError", text)
        return [results[rank] for rank in sorted(results)]

    def idle_group_seconds(self) -> float:
        """The time for which this pool has had groups without use for them: all of them, or all but the default one
        while runs went on; a sum over the groups."""
        now = time.monotonic()
        self.group_seconds += (self.groups - self.used) * (now - self.counted)
        self.counted, self.used = now, False
        return self.group_seconds

    def _stacks(self, hanging: list[int]) -> str:
        for rank in hanging:
            os.kill(self.processes[rank].pid, signal.SIGUSR1)
        time.sleep(0.2)
        return "\n".join(f"rank {r}:\n{(self.folder / str(r)).read_text()}" for r in hanging)

    def close(self) -> None:
        for pipe, process in zip(self.pipes, self.processes, strict=True):
            process.kill()
            process.join()
            pipe.close()
        shutil.rmtree(self.folder, ignore_errors=True)


def _work(rank: int, p: int, folder: Path, pipe: connection.Connection) -> None:
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the parent, who then ends us
    faulthandler.register(signal.SIGUSR1, open(folder / str(rank), "w"))  # noqa: SIM115
    import torch
    from torch import distributed as dist

    torch.set_num_threads(1)
    if p:
        store = dist.FileStore(str(folder / "store"), p)
        dist.init_process_group(os.environ.get(BACKEND, "gloo"), store=store, rank=rank, world_size=p)
    while True:
        sys.path[:], task = pickle.loads(pipe.recv_bytes())
        try:
            fn, args, kwargs = pickle.loads(task)
            torch.manual_seed(0)
            group = [dist.group.WORLD] if p else []
            result = torch.utils._pytree.tree_map_only(  # clone: the values, not all of a storage
                torch.Tensor, lambda t: t.detach().cpu().clone(), fn(*group, *args, **kwargs)
            )
            answer = pickle.dumps((result, None, _groups()))
            for g in group:
                _check(g)
        except BaseException as e:
            text = traceback.format_exc()
            answer = pickle.dumps((None, (time.monotonic(), rank, type(e).__name__, text), 0))
        pipe.send_bytes(answer)


def _end_with_parent() -> None:
    connection.wait([multiprocessing.parent_process().sentinel])
    os._exit(1)


def _groups() -> int:
    """The number of process groups in this worker."""
    from torch import distributed as dist

    return len(dist.distributed_c10d._world.pg_map)


def _check(group: Any) -> None:
    import torch

    total = torch.tensor([group.rank() + 1.0])
    torch.distributed.all_reduce(total, group=group)
    p = group.size()
    assert total.item() == p * (p + 1) / 2, "the ranks' collectives do not match"


def _raised(group: Any, fn: Callable, args: tuple, kwargs: dict, in_turns: bool) -> tuple:
    raised = ("nothing", "", "")
    for turn in range(group.size() if in_turns else 1):
        if turn == group.rank() or not in_turns:
            # A layer that fn makes before its subject would wait for the generator of rank 0
            alone = mock.patch.object(common_generator, "can_meet", lambda device: False)
            try:
                with alone if in_turns else contextlib.nullcontext():
                    fn(group, *args, **kwargs)
            except Exception as e:
                raised = (type(e).__name__, str(e), traceback.format_exc())
        _check(group)
    return raised
