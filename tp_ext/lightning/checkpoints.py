"""Checkpoints of Lightning, read into shards: folders of ``torch.distributed.checkpoint`` and single files."""

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from tp_ext._object_collectives import call_on_all_ranks
from tp_ext.checkpoint.full import load_full_state_dict
from tp_ext.checkpoint.full_optimizer import load_full_optimizer_state_dict
from tp_ext.model.census import census
from tp_ext.outside.places import found_place

META = "meta.pt"  # what is no tensor of model and optimizers; written last
_MODEL = "state_dict"


def load_checkpoint(
    path: Path, model: nn.Module, optimizers: list[Optimizer], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Loads the weights of a model and the states of its optimizers; returns the other entries.

    Communicates: errors of reading; what ``torch.distributed.checkpoint.load`` does.

    Raises:
        ValueError: no checkpoint, or not a whole one; of another model, other optimizers. Nothing has been loaded.
    """
    kind = call_on_all_ranks(dist.group.WORLD, lambda: _kind_of(path))
    load = _load_folder if kind == "folder" else _load_file
    return load(path, model, optimizers, strict, weights_only)


def _kind_of(path: Path) -> str:
    if path.is_file():
        return "file"
    if not path.exists():
        raise ValueError(f"ckpt_path: {str(path)!r} must be an existing file or folder")
    if missing := [name for name in (META, ".metadata") if not (path / name).is_file()]:
        raise ValueError(
            f"ckpt_path: {str(path)!r} has no {missing[0]!r}: it is no checkpoint, or was not written to its end"
        )
    return "folder"


def _load_folder(
    path: Path, model: nn.Module, optimizers: list[Optimizer], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    states: dict[str, Any] = {_MODEL: get_model_state_dict(model)}
    for i, optimizer in enumerate(optimizers):
        states[f"optimizer_{i}"] = get_optimizer_state_dict(model, optimizer)

    def check() -> Any:
        saved = dcp.FileSystemReader(path).read_metadata().state_dict_metadata
        _check_entries(path, states, saved, strict)
        return torch.load(path / META, weights_only=weights_only), saved.keys()

    meta, saved = call_on_all_ranks(dist.group.WORLD, check)
    states[_MODEL] = {name: value for name, value in states[_MODEL].items() if f"{_MODEL}.{name}" in saved}
    dcp.load(states, checkpoint_id=path)
    model.load_state_dict(states[_MODEL], strict=strict)
    for i, optimizer in enumerate(optimizers):
        set_optimizer_state_dict(model, optimizer, states[f"optimizer_{i}"], options=StateDictOptions(cpu_offload=True))
    return meta


def _check_entries(path: Path, states: dict[str, Any], saved: dict[str, Any], strict: bool) -> None:
    """Raises ValueError unless each entry has been saved, in the shape of the unsharded tensor."""
    missing = []
    for part, state in states.items():
        for name, value in _tensors(state, part):
            if name not in saved:
                missing += [name] if strict or part != _MODEL else []
                continue
            place = found_place(value)
            shape = tuple(value.shape) if place is None else place.global_shape
            if (other := tuple(getattr(saved[name], "size", shape))) != shape:
                raise ValueError(
                    f"ckpt_path: {str(path)!r} is of another model: {name!r} has shape {other} and must have {shape}"
                )
    names = {name for name, _ in _tensors(states[_MODEL], _MODEL)}
    others = sorted(name for name in saved if name.startswith(f"{_MODEL}.") and name not in names) if strict else []
    if missing or others:
        raise ValueError(
            f"ckpt_path: {str(path)!r} is of another model, or has no optimizer: missing {missing[:3]}, "
            f"unexpected {others[:3]}"
        )


def _tensors(state: Any, name: str) -> Any:
    """Yields the names, as ``torch.distributed.checkpoint`` has them, and the values of all tensors of a state."""
    if isinstance(state, Tensor):
        yield name, state
    elif isinstance(state, dict):
        for key, value in state.items():
            yield from _tensors(value, f"{name}.{key}")


def _load_file(
    path: Path, model: nn.Module, optimizers: list[Optimizer], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    saved: dict[str, Any] = torch.load(path, mmap=True, map_location="cpu", weights_only=weights_only)
    states = saved.get("optimizer_states") or []
    if optimizers and len(states) != len(optimizers):
        raise ValueError(f"ckpt_path: {str(path)!r} has {len(states)} optimizers, and there are {len(optimizers)}")
    named = [_named(path, model, *pair) for pair in zip(optimizers, states, strict=False)]
    load_full_state_dict(model, saved.pop(_MODEL), strict=strict)
    for optimizer, state in zip(optimizers, named, strict=True):
        load_full_optimizer_state_dict(model, optimizer, state)
    return saved


def _named(path: Path, model: nn.Module, optimizer: Optimizer, saved: dict[str, Any]) -> dict[str, Any]:
    """Returns the state of an optimizer with names in place of the numbers of parameters, which follow one another in
    its parameter groups."""
    name_of = {id(param.param): param.name for param in census(model).optimized(optimizer)}
    names = [[name_of[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    lengths = [len(group) for group in names], [len(group["params"]) for group in saved["param_groups"]]
    if lengths[0] != lengths[1]:
        raise ValueError(
            f"ckpt_path: {str(path)!r} is of another optimizer: parameter groups of {lengths[1]} parameters, here "
            f"{lengths[0]}"
        )
    groups = [{**group, "params": parameters} for group, parameters in zip(saved["param_groups"], names, strict=True)]
    numbers = [number for group in saved["param_groups"] for number in group["params"]]
    name_of = dict(zip(numbers, [name for group in names for name in group], strict=True))
    return {"state": {name_of[number]: entry for number, entry in saved["state"].items()}, "param_groups": groups}
