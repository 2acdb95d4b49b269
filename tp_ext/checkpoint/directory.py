"""Checkpoints of model and optimizer, each a directory: saved by p ranks, loaded by any other number, and replaced
atomically, so that a complete one exists at every moment.
"""

import contextlib
import io
import os
import time
from array import array
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import DeviceMesh, ProcessGroup
from torch.optim import Optimizer

from tp_ext._checks import check_bool
from tp_ext._object_collectives import call_and_combine, call_and_gather
from tp_ext.checkpoint.background import begin_save, copy_to_host, group_of_saves, wait_for_last_save, wait_for_save_to
from tp_ext.checkpoint.files.atomic_directory import (
    finish_interrupted_swap,
    remove_directory,
    staging_path,
    start_writing,
    swap_in,
    sync_to_disk,
)
from tp_ext.checkpoint.files.entry_files import EntryWriter
from tp_ext.checkpoint.files.metadata import with_checksum
from tp_ext.checkpoint.files.reader import EXTRA, METADATA, CheckpointReader
from tp_ext.checkpoint.files.write_lock import WriteLock, check_lock_timeout
from tp_ext.checkpoint.optimizer_state import check_optimizer
from tp_ext.checkpoint.plan_exchange import exchange_plans
from tp_ext.checkpoint.save_plan import GlobalPlan, Payload, RankPlan, pairs
from tp_ext.checkpoint.sharded import plan_of_model
from tp_ext.checkpoint.sharded_load import load_from
from tp_ext.group import NOT_GIVEN, Group
from tp_ext.mesh import mesh_axes
from tp_ext.model.census import census
from tp_ext.model.fqn import StateDict
from tp_ext.model.stages import Stages, joined

_WRITE_AHEAD = 8 << 20  # bytes that are left to the disk at a time


# [Note: checkpoints are directories of torch.distributed.checkpoint]
def save_checkpoint(
    path: str | os.PathLike[str],
    module: Stages,
    optimizer: Optimizer | None = None,
    *,
    group: Group = NOT_GIVEN,
    mesh: DeviceMesh | None = None,
    process_group: ProcessGroup | None = None,
    lock_timeout: float = 60.0,
    asynchronous: bool = False,
    **extra: Any,
) -> Future[None] | None:
    """Saves model, optimizer and ``extra`` in a directory, in the format of ``torch.distributed.checkpoint``: each
    element of every tensor once, by a rank that holds it. Every rank of ``process_group`` calls it.

    The checkpoint is written under a temporary name next to ``path`` and moved there when it is complete and on disk.
    A kill at any moment leaves this checkpoint or the last one, and :func:`load_checkpoint` finds it. Saves to one
    path, by the same job or another, run one after the other. All ranks return when the checkpoint is in place.

    With ``asynchronous`` they return as soon as each rank has copied the values that it will write, those at the time
    of the call, to the memory of its host; a thread writes them. One save is in flight at a time: the next one, of
    either kind, waits for it, and so does the end of the program.

    Args:
        path: a directory on a file system that all ranks share: new, empty, or an earlier checkpoint to be replaced.
        module, optimizer, group, mesh: as for :func:`sharded_state_dict`; data axes and pipelines too. With
            ``mesh`` stages that use the same names are refused.
        process_group: all participating ranks; None: all ranks of the job.
        lock_timeout: seconds to wait for another save to the same path. The ranks exchange a message every second
            meanwhile, so the timeout of the group does not matter.
        asynchronous: whether to write in a thread. The first call makes a gloo group over the ranks of
            ``process_group``, which the thread uses; wait for the result before ``destroy_process_group``.
        extra: tensors and plain values, such as a step, losses or generator states; the first rank's are saved.

    Returns:
        With ``asynchronous`` a ``concurrent.futures.Future``, whose ``result()`` waits until the checkpoint is in
        place; else None.

    Communicates: plans and outcomes, no tensors.

    Raises:
        OSError: on every rank, if one could not write; the last checkpoint is untouched. FileExistsError: ``path`` is
            something other than a checkpoint. TimeoutError: another process, which is named, is still saving there. An
            asynchronous save raises these in ``result()``, or else in the next save, which then saves nothing.
        TypeError: ``extra`` holds a value that could not be loaded again; ``optimizer`` or ``asynchronous`` of another
            type. ValueError: lock_timeout; the ranks do not hold the whole model; see :func:`sharded_state_dict`.
    """
    check_lock_timeout(lock_timeout)
    check_bool(asynchronous=asynchronous)
    check_optimizer(optimizer)
    # Through links, now: a relative path or a link may mean another directory when the thread writes
    target = Path(os.path.realpath(path))
    # The exchange of plans, too, so that the thread's collectives follow it in one order on all ranks
    over = group_of_saves(process_group) if asynchronous else process_group
    rank = dist.get_rank(over) if dist.is_initialized() else 0
    first = rank == 0
    payload: Payload = []

    def prepare() -> RankPlan:
        wait_for_last_save()
        axes = mesh_axes(group, mesh)
        plan, contents = plan_of_model(census(module, axes), optimizer, stages_differ=mesh is not None)
        # Now, not in the thread: its values may change afterwards
        extra_bytes = _dump(extra) if first else b""
        payload.extend((*contents, extra_bytes))
        if first:
            # Here its error reaches all ranks before anything is copied or written; checked again under the lock
            _check_replaceable(target)
            target.parent.mkdir(parents=True, exist_ok=True)
        return plan

    assigned, whole = exchange_plans(over, prepare)
    extra_bytes, contents = payload[-1], [payload[index] for index in assigned]
    assert isinstance(extra_bytes, bytes)
    payload.clear()
    failed: list[Exception] = []
    if asynchronous:
        try:
            copy_to_host(contents)
        except Exception as error:  # no memory: all ranks raise it where they meet next
            failed.append(error)

    def save() -> None:
        lock = WriteLock(target) if first else None
        made: list[Path] = []
        try:
            staging = _begin(target, lock, lock_timeout, made, failed, over)
            _write(target, staging, lock, rank, whole, contents, extra_bytes, over)
        # Their messages say what to do; other errors get the path
        except (FileExistsError, TimeoutError):
            raise
        except Exception as error:
            raise OSError(f"path: {os.fspath(path)!r} could not be written: {error}") from error
        finally:
            contents.clear()
            for left in made:  # unless it is in place
                with contextlib.suppress(OSError):
                    remove_directory(left, target)
            if lock is not None:
                lock.release()

    if asynchronous:
        return begin_save(os.fspath(target), save, over)
    save()
    return None


def load_checkpoint(
    path: str | os.PathLike[str],
    module: Stages,
    optimizer: Optimizer | None = None,
    *,
    group: Group = NOT_GIVEN,
    mesh: DeviceMesh | None = None,
    process_group: ProcessGroup | None = None,
) -> StateDict:
    """Loads a checkpoint of :func:`save_checkpoint`, or of ``torch.distributed.checkpoint`` and a
    :func:`sharded_state_dict`, at any number of ranks and any data axes; returns its ``extra``. Every rank of
    ``process_group`` calls it.

    All values, on all ranks, come from one checkpoint, even if another replaces it meanwhile. The directory need not
    be trusted: nothing in it is executed. An asynchronous save of this process to ``path`` is waited for.

    Args, Communicates, Raises: as :func:`load_sharded_state_dict`; FileNotFoundError: there is no checkpoint.
    """
    module, axes = joined(module), mesh_axes(group, mesh)
    wait_for_save_to(os.path.realpath(path))
    with contextlib.closing(CheckpointReader(path)) as reader:
        return load_from(reader, module, optimizer, axes, process_group, reader.read_extra)


def _begin(
    target: Path,
    lock: WriteLock | None,
    timeout: float,
    made: list[Path],
    failed: list[Exception],
    process_group: ProcessGroup | None,
) -> Path:
    """Waits until the first rank holds the lock and has made the staging directory; returns it. All ranks communicate
    after each turn, lest a collective time out."""
    begin = time.monotonic()

    def take_turn() -> str:
        if failed:
            # On all ranks: call_and_gather passes it on
            raise failed[0]
        if lock is None or not lock.take_turn(begin, timeout):
            return ""
        _check_replaceable(target)
        # Under the lock alone is it certain that the writers of leftovers have ended
        finish_interrupted_swap(target)
        made.append(staging_path(target))
        made[0].mkdir()
        return made[0].name

    while not (name := max(call_and_gather(process_group, take_turn))):
        pass
    return target.with_name(name)


def _write(
    target: Path,
    staging: Path,
    lock: WriteLock | None,
    rank: int,
    plan: GlobalPlan | None,
    contents: Payload,
    extra: bytes,
    process_group: ProcessGroup | None,
) -> None:
    """Writes the checkpoint and moves it to ``target``, for which the first rank holds the lock and has the plan."""

    def write() -> "array[int]":
        # A rank without entries makes no file, and _check_complete expects none
        # The first rank's file is synced below, together with the others that it writes
        return _write_entries(staging / _data_file(rank), contents, rank != 0) if contents else array("q")

    def finish(written: list["array[int]"]) -> list[None]:
        assert lock is not None and plan is not None
        files = [_data_file(of) for of in range(len(written))]
        ends = {name: max(map(sum, pairs(places))) for name, places in zip(files, written, strict=True) if places}
        with open(staging / METADATA, "xb") as file:
            file.write(with_checksum(plan.metadata(written, files)))
        (staging / EXTRA).write_bytes(extra)
        # Before the directory is moved: one whose files or names are lost must not be in place
        sync_to_disk(
            *(staging / name for name in files[:1] if name in ends), staging / METADATA, staging / EXTRA, staging
        )
        # Those of other hosts, too: nothing that is not whole is put in place
        _check_complete(staging, ends)
        # Last: a rival may have taken over the lock of an owner that was silent for too long
        lock.check_held()
        swap_in(staging, target)
        return [None] * len(written)

    call_and_combine(process_group, write, finish)


def _data_file(rank: int) -> str:
    return f"__{rank}_0.distcp"


def _write_entries(path: Path, contents: Payload, sync: bool) -> "array[int]":
    """Writes the entries of this rank to a new file, with ``sync`` to the disk, and forgets each; returns the offset
    and the length of one after the other, which are sent, and compared, as one object."""
    written = array("q")
    with open(path, "xb", buffering=1 << 20) as file:
        writer, started = EntryWriter(file), 0
        for index, entry in enumerate(contents):
            written.extend(writer.write_values(entry) if isinstance(entry, tuple) else writer.write(entry))
            # The copies of an asynchronous save need not all stay in memory until the end
            contents[index] = b""
            # The disk writes while the next entries are copied, and has less to do when the fsync comes
            if writer.end - started >= _WRITE_AHEAD:
                start_writing(file.fileno(), started, writer.end - started)
                started = writer.end
        del entry
        file.flush()
        # On disk before the directory is moved into place: after a power failure it must not hold empty files
        if sync:
            os.fsync(file.fileno())
        else:
            start_writing(file.fileno(), started, writer.end - started)
    return written


def _check_complete(directory: Path, ends: dict[str, int]) -> None:
    """Raises OSError unless all files of a checkpoint are there and complete."""
    for name, end in {**ends, METADATA: 1, EXTRA: 1}.items():
        if (size := (directory / name).stat().st_size) < end:
            raise OSError(f"{name} has {size} bytes and must have {end}")


def _dump(extra: StateDict) -> bytes:
    """Returns the bytes of the file of ``extra``, after a check that they can be loaded."""
    if refused := [key for key, value in extra.items() if not _is_plain(value)]:
        raise TypeError(f"extra: {refused} must be tensors and plain values, which can be loaded with weights_only")
    file = io.BytesIO()
    torch.save(extra, file)
    return file.getvalue()


def _is_plain(value: Any) -> bool:
    if type(value) in (bool, int, float, str):
        return True
    file = io.BytesIO()
    try:
        torch.save(value, file)
        file.seek(0)
        torch.load(file, map_location="cpu", weights_only=True)
    except Exception:  # pickling calls methods of the value
        return False
    return True


def _check_replaceable(target: Path) -> None:
    """Raises FileExistsError if the target is something other than a checkpoint, which a save must not replace."""
    if not target.exists():
        return
    if not target.is_dir():
        raise FileExistsError(f"path: {os.fspath(target)!r} is a file and must be a directory of a checkpoint, or new")
    for file in sorted(target.iterdir()):
        # A .tmp is what torch's writer leaves if it is killed
        ours = file.name in (METADATA, f"{METADATA}.tmp", EXTRA) or file.suffix == ".distcp"
        if not ours or (file.is_dir() and not file.is_symlink()):
            raise FileExistsError(
                f"path: {os.fspath(target)!r} holds {file.name!r}, which no checkpoint does; it must be new, empty, or "
                "an earlier checkpoint"
            )
