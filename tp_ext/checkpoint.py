"""Full state dicts: what an unsharded model would have, from shards and back. Keys, shapes and layouts do not depend on
the number of ranks, so what p ranks saved any other number loads.
"""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tp_ext import _ops
from tp_ext.group import Group, ParallelGroup, parallel_group
from tp_ext.module import sharding_of, shardings
from tp_ext.sharding import Sharding

StateDict = dict[str, Any]


@torch.no_grad()
def gather_full(local: Tensor, sharding: Sharding | None, group: Group) -> Tensor:
    """The full tensor, on every rank, from the shards: one all-gather; of a replicated tensor a copy, so that no entry
    changes as training goes on."""
    name, p, _ = parallel_group(group)
    if sharding is None:
        return local.detach().clone()
    if p == 1:
        return sharding.unshard([local.detach()])
    sizes = sharding.local_sizes(p)
    gathered = _ops.gather_from_region(local.detach(), name, sharding.dim, sizes)
    return sharding.unshard(gathered.split(sizes, sharding.dim))


def _entries(module: nn.Module) -> dict[str, tuple[Tensor, Sharding | None]]:
    """The module's state dict with the sharding of each entry."""
    owners = dict(module.named_modules())
    entries = {}
    for name, value in module.state_dict().items():
        owner, _, local = name.rpartition(".")
        entries[name] = (value, sharding_of(owners[owner], local) if owner in owners else None)
    return entries


def full_state_dict(module: nn.Module, *, group: Group = None, rank0_only: bool = False) -> StateDict:
    """The state dict of the unsharded module, tensors on the module's device.

    Args:
        module: with parameters sharded over ``group``.
        rank0_only: the other ranks take part and return an empty dict; one full tensor at a time is then made there.

    Communicates: one all-gather per sharded entry.
    """
    rank = parallel_group(group).rank
    state = {}
    for name, (value, sharding) in _entries(module).items():
        full = gather_full(value, sharding, group) if isinstance(value, Tensor) else value
        if rank == 0 or not rank0_only:
            state[name] = full
    return state


@torch.no_grad()
def load_full_state_dict(
    module: nn.Module, state: Mapping[str, Any], *, group: Group = None, strict: bool = True
) -> None:
    """Keeps this rank's shard of each entry of an unsharded module's state dict, given on every rank.

    Args:
        strict: missing or unexpected keys are an error; else they are passed over.

    Raises:
        KeyError: under ``strict``, naming the missing and the unexpected keys.
        ValueError, TypeError: an entry has another shape than the unsharded parameter, or is no tensor; names the key
            and both shapes. Nothing has been loaded then.
    """
    resolved = parallel_group(group)
    entries = _entries(module)
    missing, unexpected = (
        sorted(entries.keys() - state.keys()),
        sorted(state.keys() - entries.keys()),
    )
    if strict and (missing or unexpected):
        raise KeyError(f"state: missing keys {missing}, unexpected keys {unexpected}")
    known = {name: entry for name, entry in entries.items() if name in state}
    for name, (local, sharding) in known.items():
        _check_full(name, state[name], local, sharding)
    for name, (local, sharding) in known.items():
        if isinstance(local, Tensor):
            local.copy_(_shard(state[name], sharding, resolved))
        else:
            module.get_submodule(name.rpartition(".")[0]).set_extra_state(state[name])


def _check_full(name: str, full: Any, local: Any, sharding: Sharding | None) -> None:
    if not isinstance(local, Tensor):  # extra state, the module's own business
        return
    if not isinstance(full, Tensor):
        raise TypeError(f"state: {name!r} is {type(full).__name__} and must be a tensor")
    expected = list(local.shape)
    if sharding is not None:
        expected[sharding.dim] = sharding.size
    if list(full.shape) != expected:
        raise ValueError(
            f"state: {name!r} has shape {tuple(full.shape)} and must have {tuple(expected)}, "
            "that of the unsharded module"
        )


def _shard(full: Tensor, sharding: Sharding | None, group: ParallelGroup) -> Tensor:
    return full if sharding is None else sharding.shard(full, group.rank, group.size)


def full_optimizer_state_dict(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    *,
    group: Group = None,
    rank0_only: bool = False,
) -> StateDict:
    """The optimizer's state for the unsharded module: ``state`` by parameter name, ``param_groups`` with names for
    parameters. State tensors of a parameter's own shape are sharded as it is.

    Communicates: one all-gather per such tensor. Raises ValueError if the optimizer holds a parameter that is not the
    module's.
    """
    names = {param: name for name, param in module.named_parameters()}
    table = dict(shardings(module))
    rank = parallel_group(group).rank
    states: StateDict = {}
    groups = []
    for param_group in optimizer.param_groups:
        for param in param_group["params"]:
            if param not in names:
                raise ValueError(f"optimizer: a parameter of shape {tuple(param.shape)} must be one of the module's")
        groups.append({**param_group, "params": [names[param] for param in param_group["params"]]})
    for param in (param for g in optimizer.param_groups for param in g["params"]):
        entry = {}
        for key, value in optimizer.state.get(param, {}).items():
            sharded = isinstance(value, Tensor) and value.shape == param.shape
            sharding = table[names[param]] if sharded else None
            entry[key] = gather_full(value, sharding, group) if isinstance(value, Tensor) else value
        if entry and (rank == 0 or not rank0_only):
            states[names[param]] = entry
    return {} if rank0_only and rank else {"state": states, "param_groups": groups}


def load_full_optimizer_state_dict(
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    *,
    group: Group = None,
) -> None:
    """The inverse of :func:`full_optimizer_state_dict`, at any number of ranks; ``state`` is given on every rank.

    Raises:
        ValueError: parameter groups that hold other names, or a state tensor of another shape.
    """
    resolved = parallel_group(group)
    names = {param: name for name, param in module.named_parameters()}
    table = dict(shardings(module))
    order = [[names[param] for param in g["params"]] for g in optimizer.param_groups]
    saved = [list(g["params"]) for g in state["param_groups"]]
    if order != saved:
        raise ValueError(f"state: parameter groups {saved} must be the optimizer's, {order}")
    params = dict(module.named_parameters())
    numbers = {name: i for i, name in enumerate(name for g in order for name in g)}
    local_states = {}
    for name, entry in state["state"].items():
        if name not in numbers:
            raise ValueError(f"state: {name!r} must be a parameter of the optimizer, {list(numbers)}")
        local_states[numbers[name]] = local = dict(entry)
        for key, value in entry.items():
            # One number (a step) is not cut, unless the parameter is one number too
            if isinstance(value, Tensor) and (value.dim() > 0 or params[name].dim() == 0):
                _check_full(f"{name}.{key}", value, params[name], table[name])
                local[key] = _shard(value, table[name], resolved)
    groups = [{**g, "params": [numbers[name] for name in g["params"]]} for g in state["param_groups"]]
    optimizer.load_state_dict({"state": local_states, "param_groups": groups})


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
