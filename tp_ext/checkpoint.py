"""Checkpoints of model and optimizer: what p ranks saved any other number loads."""

import os
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tp_ext import _ops
from tp_ext.group import Group, parallel_group
from tp_ext.optimizer_state import full_optimizer_state_dict, load_full_optimizer_state_dict
from tp_ext.state_dict import StateDict, full_state_dict, load_full_state_dict


def save_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: Group = None,
    **extra: Any,
) -> None:
    """One file with the full state of model and optimizer, and ``extra``. Every rank calls it, rank 0 writes.

    It is written beside ``path`` and renamed, so that ``path`` is always a whole checkpoint, this one or the last. All
    ranks return when it is there.

    Communicates as :func:`full_state_dict`, and one number at the end.

    Raises:
        OSError: on every rank, if rank 0 could not write; there its cause says why. ValueError: ``extra`` holds
            ``model`` or ``optimizer``.
    """
    if taken := extra.keys() & {"model", "optimizer"}:
        raise ValueError(f"extra: {sorted(taken)} must have other names, those are of the checkpoint itself")
    name, _, rank = parallel_group(group)
    content: StateDict = {"model": full_state_dict(module, group=group, rank0_only=True), **extra}
    if optimizer is not None:
        content["optimizer"] = full_optimizer_state_dict(module, optimizer, group=group, rank0_only=True)
    failure: Exception | None = None
    if rank == 0:
        try:
            _write(Path(path), content)
        except Exception as error:  # whatever it is, the other ranks must not wait for us
            failure = error
    device = next((t.device for t in module.parameters()), torch.device("cpu"))
    failed = torch.tensor([float(failure is not None)], device=device)
    if bool(_ops.reduce_from_region(failed, name)):
        raise OSError(f"path: {os.fspath(path)!r} could not be written by rank 0, where the cause is told") from failure


def _write(target: Path, content: StateDict) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            torch.save(content, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def load_checkpoint(
    path: str | os.PathLike[str],
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    group: Group = None,
) -> StateDict:
    """Loads what :func:`save_checkpoint` wrote, at any number of ranks; returns its ``extra``. Nothing but tensors and
    plain values is unpickled.

    Raises:
        FileNotFoundError: no such file. KeyError, ValueError: it is of another model.
    """
    content: StateDict = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    load_full_state_dict(module, content.pop("model"), group=group)
    saved = content.pop("optimizer", None)
    if optimizer is not None:
        if saved is None:
            raise KeyError(f"path: {os.fspath(path)} must hold the state of an optimizer")
        load_full_optimizer_state_dict(module, optimizer, saved, group=group)
    return content
