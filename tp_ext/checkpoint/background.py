"""Saves that go on in a thread while the training continues: one at a time, over a process group of their own.

A collective of the thread must never be on a communicator that the training uses, on which the ranks would run them in
different orders. So there is one more group, of gloo, over the same ranks.
"""

import atexit
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Future

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from tp_ext._object_collectives import is_alive
from tp_ext.checkpoint.save_plan import PLAIN_TENSORS, Payload


class RunningSave(Future[None]):
    """A save in a thread, as a future whose error is raised once: by ``result``, or by the next save."""

    def __init__(self, path: str, act: Callable[[], None], over: ProcessGroup | None) -> None:
        super().__init__()
        self.path, self.reported = path, False
        if over is not None and dist.get_backend(over) == "simulated":
            self._run(act)  # in another thread it would be no rank of the simulation
            return
        # No daemon: the interpreter waits for it at exit
        self._thread = threading.Thread(target=self._run, args=(act,), name="tp_ext.save_checkpoint")
        # Running: a cancelled future would leave the other ranks in their collectives
        self.set_running_or_notify_cancel()
        self._thread.start()

    def _run(self, act: Callable[[], None]) -> None:
        try:
            time.sleep(0)  # else the caller, who waits for the start, gets the interpreter 5 ms later
            act()
        # Anything, or result() would wait for ever
        except BaseException as error:
            self.set_exception(error)
        else:
            self.set_result(None)

    def result(self, timeout: float | None = None) -> None:
        super().exception(timeout)  # waits; after a timeout the error counts as not reported
        self.reported = True
        super().result()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        error = super().exception(timeout)
        self.reported = True
        return error


class _Last:
    save: RunningSave | None = None


# [Note: asynchronous saves are a thread over our own save]
def begin_save(path: str, act: Callable[[], None], over: ProcessGroup | None = None) -> RunningSave:
    """Starts ``act`` in a thread, of a simulated rank at once; the last save must have ended.

    Args:
        over: the group over which ``act`` communicates.
    """
    _Last.save = RunningSave(path, act, over)
    return _Last.save


def wait_for_last_save() -> None:
    """Waits for the last asynchronous save of this process; raises its error, unless it has been raised."""
    if (last := _Last.save) is None:
        return
    super(RunningSave, last).exception()  # interrupted by Ctrl-C, it is still the last one
    _Last.save = None
    # Once is enough: a program that has handled the error of result() may go on saving
    if not last.reported:
        last.result()


def wait_for_save_to(path: str) -> None:
    """Waits for an asynchronous save of this process to ``path``; its error is raised elsewhere."""
    if _Last.save is not None and _Last.save.path == path:
        super(RunningSave, _Last.save).exception()


def _leave_to_parent() -> None:
    """Forgets the running save in a forked child: the thread is the parent's, and the child would never see it end."""
    _Last.save = None


os.register_at_fork(after_in_child=_leave_to_parent)


@atexit.register
def _report() -> None:
    """Writes an error that has not been raised to stderr, at exit, when the thread has ended."""
    if _Last.save is not None and not _Last.save.reported and (error := _Last.save.exception()) is not None:
        lines = traceback.format_exception(error)
        sys.stderr.write(f"tp_ext: the last asynchronous save failed\n{''.join(lines)}")


_groups: dict[str, tuple[ProcessGroup, ProcessGroup]] = {}


def group_of_saves(process_group: ProcessGroup | None) -> ProcessGroup | None:
    """Returns the group of asynchronous saves over the ranks of ``process_group`` (None: of the job), made at the first
    call; None without ``torch.distributed``.

    Communicates: the first call, as ``torch.distributed.new_group``.
    """
    if not dist.is_initialized():
        return None
    over = dist.group.WORLD if process_group is None else process_group
    assert over is not None
    # The name of a destroyed group may come again, for other ranks
    for name in [name for name, (known, _) in _groups.items() if not is_alive(known)]:
        del _groups[name]
    entry = _groups.get(over.group_name)
    if entry is None:
        ranks = dist.get_process_group_ranks(over)
        whole = len(ranks) == dist.get_world_size()
        # gloo, since objects alone are exchanged. Ranks outside of the group make no save, and need not call this
        group = dist.new_group(ranks, backend="gloo", use_local_synchronization=not whole)
        assert isinstance(group, ProcessGroup)
        entry = _groups[over.group_name] = over, group
    return entry[1]


@torch.no_grad()
def copy_to_host(payload: Payload) -> None:
    """Replaces each tensor by a copy in the memory of the host, complete on return."""
    plain: dict[int, Tensor] = {}
    streams = {}
    for index, entry in enumerate(payload):
        if not isinstance(entry, Tensor):
            continue
        if entry.is_cpu and type(entry) in PLAIN_TENSORS:
            plain[index] = entry
            continue
        payload[index] = _copied(entry)
        if entry.is_cuda:
            streams[entry.device] = torch.cuda.current_stream(entry.device)
    # Many small ones in two thirds of the time of a call for each
    for index, copy in zip(plain, _clones([*plain.values()]), strict=True):
        payload[index] = copy
    # One wait for all copies, which were queued without one
    for stream in streams.values():
        stream.synchronize()


def _clones(tensors: list[Tensor]) -> list[Tensor]:
    foreach = getattr(torch, "_foreach_clone", None)  # not in the oldest torch
    clones: list[Tensor] = foreach(tensors) if foreach and tensors else [tensor.clone() for tensor in tensors]
    return clones


def _copied(tensor: Tensor) -> Tensor:
    """Returns a copy on the host: of a GPU's tensor in page-locked memory, which torch keeps for the next save."""
    if not tensor.is_cuda:
        return tensor.to("cpu", copy=True, memory_format=torch.contiguous_format)
    copy = torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=True)  # whatever the default device
    return copy.copy_(tensor, non_blocking=True)
