"""Checkpoints of model and optimizer, each a directory: saved by p ranks, loaded by any other number, and replaced
atomically, so that a complete one exists at every moment.
"""

import contextlib
import io
import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed import DeviceMesh, ProcessGroup
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult
from torch.optim import Optimizer

from tp_ext._object_collectives import call_and_gather, call_on_all_ranks, unwrap_checkpoint_errors
from tp_ext.checkpoint.atomic_directory import (
    finish_interrupted_swap,
    remove_directory,
    staging_path,
    swap_in,
    sync_to_disk,
)
from tp_ext.checkpoint.entries import StateDict, state_entries
from tp_ext.checkpoint.gather import ranks_of
from tp_ext.checkpoint.metadata import file_ends
from tp_ext.checkpoint.pipeline import check_names_of_stages
from tp_ext.checkpoint.reader import EXTRA, METADATA, CheckpointReader
from tp_ext.checkpoint.sharded import sharded_state_dict
from tp_ext.checkpoint.sharded_load import load_from
from tp_ext.checkpoint.write_lock import WriteLock, check_lock_timeout
from tp_ext.group import NOT_GIVEN, Group
from tp_ext.mesh import mesh_axes
from tp_ext.nn.stages import Stages, joined


def save_checkpoint(
    path: str | os.PathLike[str],
    module: Stages,
    optimizer: Optimizer | None = None,
    *,
    group: Group = NOT_GIVEN,
    mesh: DeviceMesh | None = None,
    process_group: ProcessGroup | None = None,
    lock_timeout: float = 60.0,
    **extra: Any,
) -> None:
    """Saves model, optimizer and ``extra`` in a directory, in the format of ``torch.distributed.checkpoint``: each
    element of every tensor once, by a rank that holds it. Every rank of ``process_group`` calls it.

    The checkpoint is written under a temporary name next to ``path`` and moved there when it is complete and on disk.
    A kill at any moment leaves this checkpoint or the last one, and :func:`load_checkpoint` finds it. Saves to one
    path, by the same job or another, run one after the other. All ranks return when the checkpoint is in place.

    Args:
        path: a directory on a file system that all ranks share: new, empty, or an earlier checkpoint to be replaced.
        module, optimizer, group, mesh: as for :func:`sharded_state_dict`; data axes and pipelines too. With
            ``mesh`` stages that use the same names are refused.
        process_group: all participating ranks; None: all ranks of the job.
        lock_timeout: seconds to wait for another save to the same path. The ranks exchange a message every second
            meanwhile, so the timeout of the group does not matter.
        extra: tensors and plain values, such as a step, losses or generator states; the first rank's are saved.

    Communicates: plans and outcomes, no tensors.

    Raises:
        OSError: on every rank, if one could not write; the last checkpoint is untouched. FileExistsError: ``path`` is
            something other than a checkpoint. TimeoutError: another process, which is named, is still saving there.
            TypeError: ``extra`` holds a value that could not be loaded again. ValueError: lock_timeout; see
            :func:`sharded_state_dict`.
    """
    check_lock_timeout(lock_timeout)
    target = Path(os.path.realpath(path))
    first = not dist.is_initialized() or dist.get_rank(process_group) == 0

    def prepare() -> tuple[StateDict, bytes]:
        extra_bytes, state = _dump(extra), sharded_state_dict(module, optimizer, group=group, mesh=mesh)
        if first:
            _check_replaceable(target)
            target.parent.mkdir(parents=True, exist_ok=True)
        return state, extra_bytes

    state, extra_bytes = call_on_all_ranks(process_group, prepare)
    if mesh is not None:
        ranks = ranks_of(joined(module), group, mesh)
        entries = state_entries(joined(module), ranks.groups.default)
        check_names_of_stages([name for name, entry in entries.items() if entry.copy_of != name], ranks)
    lock = WriteLock(target) if first else None
    try:
        _wait_for(lock, lock_timeout, process_group)
        _write(target, state, extra_bytes, lock, process_group)
    except (FileExistsError, TimeoutError):
        raise
    except Exception as error:
        raise OSError(f"path: {os.fspath(path)!r} could not be written: {error}") from error
    finally:
        if lock is not None:
            lock.release()


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
    be trusted: nothing in it is executed.

    Args, Communicates, Raises: as :func:`load_sharded_state_dict`; FileNotFoundError: there is no checkpoint.
    """
    module, over = joined(module), mesh_axes(group, mesh)
    with contextlib.closing(CheckpointReader(path)) as reader:
        return load_from(reader, module, optimizer, over, process_group, reader.read_extra)


class _Writer(dcp.FileSystemWriter):
    """A writer into an existing directory: one that was removed after the first rank's death is not created again."""

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        super().finish(metadata, results)
        self.ends = file_ends(one.storage_data for of_rank in results for one in of_rank)  # on the first rank


def _wait_for(lock: WriteLock | None, timeout: float, process_group: ProcessGroup | None) -> None:
    """Waits until the first rank holds the lock. All ranks communicate after each turn, lest a collective time out."""
    begin = time.monotonic()
    while not any(call_and_gather(process_group, lambda: lock is not None and lock.take_turn(begin, timeout))):
        pass


def _write(
    target: Path, state: StateDict, extra: bytes, lock: WriteLock | None, process_group: ProcessGroup | None
) -> None:
    """Writes the checkpoint and moves it to ``target``, for which the first rank holds the lock."""
    rank = dist.get_rank(process_group) if dist.is_initialized() else 0
    made: list[Path] = []

    def begin() -> str:
        if rank:
            return ""
        _check_replaceable(target)
        finish_interrupted_swap(target)
        made.append(staging_path(target))
        made[0].mkdir()
        return made[0].name

    def finish() -> None:
        if rank == 0:
            (staging / EXTRA).write_bytes(extra)
        for file in staging.iterdir():  # torch 2.11 syncs a file before it is completely written
            if rank == 0 or file.name.startswith(f"__{rank}_"):
                sync_to_disk(file)

    def move() -> None:
        if lock is not None:
            _check_complete(staging, writer.ends)
            lock.check_held()
            swap_in(staging, target)

    try:
        staging = target.with_name(call_and_gather(process_group, begin)[0])
        writer = _Writer(staging)
        with unwrap_checkpoint_errors():
            dcp.save(state, storage_writer=writer, process_group=process_group)
        call_on_all_ranks(process_group, finish)
        call_on_all_ranks(process_group, move)
    except BaseException:
        for left in made:
            with contextlib.suppress(OSError):
                remove_directory(left, target)
        raise


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
        ours = file.name in (METADATA, f"{METADATA}.tmp", EXTRA) or file.suffix == ".distcp"
        if not ours or (file.is_dir() and not file.is_symlink()):
            raise FileExistsError(
                f"path: {os.fspath(target)!r} holds {file.name!r}, which no checkpoint does; it must be new, empty, or "
                "an earlier checkpoint"
            )
