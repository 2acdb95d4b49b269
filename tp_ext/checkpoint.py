"""Checkpoints of model and optimizer, a directory each: what p ranks saved any other number loads, and at every moment
a whole one is there.
"""

import contextlib
import io
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import ProcessGroup
from torch.optim import Optimizer

from tp_ext.agreement import plain_failures, together
from tp_ext.checkpoint_reader import CheckpointReader
from tp_ext.group import Group
from tp_ext.replace import aside, recover, replace, saving, sync
from tp_ext.sharded_load import load_sharded_state_dict
from tp_ext.sharded_state_dict import StateDict, sharded_state_dict

_METADATA, _EXTRA = ".metadata", "extra.pt"


def save_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    group: Group = None,
    process_group: ProcessGroup | None = None,
    **extra: Any,
) -> None:
    """Saves model, optimizer and ``extra`` in a directory, in the format of ``torch.distributed.checkpoint``: of every
    tensor each element once, by a rank that holds it. Every rank of ``process_group`` calls it.

    It is written beside ``path`` and put there when it is whole and on disk. A process killed at any moment leaves this
    checkpoint or the last one, and :func:`load_checkpoint` finds it. All ranks return when it is there.

    Args:
        path: a directory on a file system that all ranks share: new, empty, or an earlier checkpoint, to be replaced.
        module, optimizer, group: as for :func:`sharded_state_dict`; data axes and pipelines too.
        process_group: all ranks that take part; None: all there are.
        extra: tensors and plain values, those of the first rank; a step, say, losses, generator states.

    Communicates: plans and outcomes, no tensors.

    Raises:
        OSError: on every rank, if one could not write; the last checkpoint is untouched. FileExistsError: at ``path``
            is something else than a checkpoint. TypeError: ``extra`` holds what could not be loaded again.
            ValueError: see :func:`sharded_state_dict`.
    """
    target = Path(os.path.realpath(path))
    rank = dist.get_rank(process_group) if dist.is_initialized() else 0

    def prepare() -> tuple[StateDict, bytes]:
        content = _dump(extra), sharded_state_dict(module, optimizer, group=group)
        if rank == 0:
            _check_place(target)
            target.parent.mkdir(parents=True, exist_ok=True)
            recover(target)
            saving(target).mkdir()
        return content[1], content[0]

    state, extra_bytes = together(process_group, prepare)
    try:
        with plain_failures():
            dcp.save(state, storage_writer=dcp.FileSystemWriter(saving(target)), process_group=process_group)

        def finish() -> None:
            if rank == 0:
                (saving(target) / _EXTRA).write_bytes(extra_bytes)
            for file in saving(target).iterdir():  # torch 2.11 syncs a file before all of it is written
                if rank == 0 or file.name.startswith(f"__{rank}_"):
                    sync(file)

        together(process_group, finish)
        together(process_group, lambda: replace(target) if rank == 0 else None)
    except Exception as error:
        if rank == 0:
            with contextlib.suppress(OSError):
                recover(target)
        raise OSError(f"path: {os.fspath(path)!r} could not be written: {error}") from error


def load_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: Optimizer | None = None,
    *,
    group: Group = None,
    process_group: ProcessGroup | None = None,
) -> StateDict:
    """Loads what :func:`save_checkpoint` wrote, or ``torch.distributed.checkpoint`` of a :func:`sharded_state_dict`, at
    any number of ranks and any data axes; returns its ``extra``. Every rank of ``process_group`` calls it.

    The directory need not be trusted: nothing in it is executed.

    Args, Communicates, Raises: as :func:`load_sharded_state_dict`; FileNotFoundError: no checkpoint is there.
    """
    target = Path(os.path.realpath(path))

    def find() -> tuple[Path, StateDict]:
        for place in (target, aside(target)):
            if (place / _METADATA).exists():
                file = place / _EXTRA
                return place, torch.load(file, map_location="cpu", weights_only=True) if file.exists() else {}
        raise FileNotFoundError(f"path: {os.fspath(path)!r} must be a checkpoint, a directory with {_METADATA}")

    place, extra = together(process_group, find)
    reader = CheckpointReader(place)
    load_sharded_state_dict(module, optimizer, storage_reader=reader, group=group, process_group=process_group)
    return extra


def _dump(extra: StateDict) -> bytes:
    """The bytes of the file, of which is known that they can be loaded."""
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
    except Exception:  # whatever it says of itself when it is pickled
        return False
    return True


def _check_place(target: Path) -> None:
    """A directory of someone's own must not be replaced."""
    if not target.exists():
        return
    if not target.is_dir():
        raise FileExistsError(f"path: {os.fspath(target)!r} is a file and must be a directory of a checkpoint, or new")
    for file in sorted(target.iterdir()):
        if not (file.name in (_METADATA, _EXTRA) or file.suffix == ".distcp"):
            raise FileExistsError(
                f"path: {os.fspath(target)!r} holds {file.name!r}, which no checkpoint does; it must be new, empty, or "
                "an earlier checkpoint"
            )
