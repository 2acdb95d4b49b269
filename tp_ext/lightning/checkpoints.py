"""Checkpoints of Lightning, read into shards: folders of ``torch.distributed.checkpoint`` and single files."""

from contextlib import closing
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint._nested_dict import flatten_state_dict
from torch.distributed.checkpoint._traverse import set_element
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)
from torch.optim import Optimizer

from tp_ext._object_collectives import call_on_all_ranks
from tp_ext.checkpoint.files.plain_values import read_saved
from tp_ext.checkpoint.files.reader import CheckpointReader
from tp_ext.checkpoint.files.saved_dtypes import check_saved_dtype
from tp_ext.checkpoint.full import load_full_state_dict
from tp_ext.checkpoint.full_optimizer import load_full_optimizer_state_dict, with_names
from tp_ext.checkpoint.sharded_load import read_values
from tp_ext.model.census import census
from tp_ext.model.fqn import StateDict
from tp_ext.outside.places import found_place

_ARGUMENT = "ckpt_path"
META = "meta.pt"  # what is no tensor of model and optimizers; written last
_MODEL = "state_dict"


def load_checkpoint(
    path: Path, model: nn.Module, optimizers: list[Optimizer], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    """Loads the weights of a model and the states of its optimizers; returns the other entries.

    The files need not be trusted: nothing in them is executed, unless ``weights_only`` is False.

    Communicates: errors of reading; what ``torch.distributed.checkpoint.load`` does.

    Raises:
        ValueError: no checkpoint, or not a whole one; of another model, other optimizers. pickle.UnpicklingError: more
            than tensors and plain values. OSError: a file that cannot be read. Nothing has been loaded, on any rank.
    """
    kind = call_on_all_ranks(dist.group.WORLD, lambda: _kind_of(path))
    load = _load_folder if kind == "folder" else _load_file
    return load(path, model, optimizers, strict, weights_only)


def _kind_of(path: Path) -> str:
    if path.is_file():
        return "file"
    if not path.exists():
        raise ValueError(f"{_ARGUMENT}: {str(path)!r} must be an existing file or folder")
    if missing := [name for name in (META, ".metadata") if not (path / name).is_file()]:
        raise ValueError(
            f"{_ARGUMENT}: {str(path)!r} has no {missing[0]!r}: it is no checkpoint, or was not written to its end"
        )
    return "folder"


def _load_folder(
    path: Path, model: nn.Module, optimizers: list[Optimizer], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    states: dict[str, Any] = {_MODEL: get_model_state_dict(model)}
    for i, optimizer in enumerate(optimizers):
        states[f"optimizer_{i}"] = get_optimizer_state_dict(model, optimizer)
    flat, paths = flatten_state_dict(states)
    with closing(CheckpointReader(path)) as reader:

        def check() -> tuple[dict[str, Any], set[str]]:
            saved = reader.read_metadata().state_dict_metadata
            _check_entries(path, flat, saved, strict)
            return read_saved(path / META, _ARGUMENT, weights_only=weights_only), set(saved)

        meta, saved = call_on_all_ranks(dist.group.WORLD, check)
        # Those that are absent are the model's, without strict
        flat = {name: value for name, value in flat.items() if name in saved}
        read_values(flat, reader, dist.group.WORLD, lambda: None)
    for name, value in flat.items():
        set_element(states, paths[name], value)
    present = {paths[name][1] for name in flat if paths[name][0] == _MODEL}
    states[_MODEL] = {name: value for name, value in states[_MODEL].items() if name in present}
    model.load_state_dict(states[_MODEL], strict=strict)
    for i, optimizer in enumerate(optimizers):
        set_optimizer_state_dict(model, optimizer, states[f"optimizer_{i}"], options=StateDictOptions(cpu_offload=True))
    return meta


def _check_entries(path: Path, flat: StateDict, saved: dict[str, Any], strict: bool) -> None:
    """Raises ValueError unless each entry has been saved, a tensor in the shape of the unsharded one."""
    of_model = f"{_MODEL}."
    missing = [name for name in flat if name not in saved and (strict or not name.startswith(of_model))]
    others = sorted(name for name in saved if name.startswith(of_model) and name not in flat) if strict else []
    if missing or others:
        raise ValueError(
            f"{_ARGUMENT}: {str(path)!r} is of another model, or has no optimizer: missing {missing[:3]}, "
            f"unexpected {others[:3]}"
        )
    for name, entry in ((name, saved[name]) for name in flat if name in saved):
        value = flat[name]
        # torch would leave a weight as it is for which the file has no tensor
        if isinstance(value, Tensor) != isinstance(entry, TensorStorageMetadata):
            what = "a tensor" if isinstance(value, Tensor) else "no tensor"
            raise ValueError(f"{_ARGUMENT}: {str(path)!r} is of another model: {name!r} must be {what}")
        if not isinstance(value, Tensor):
            continue
        place = found_place(value)
        shape = tuple(value.shape) if place is None else place.global_shape
        if (other := tuple(entry.size)) != shape:
            raise ValueError(
                f"{_ARGUMENT}: {str(path)!r} is of another model: {name!r} has shape {other} and must have {shape}"
            )
        if shape:
            check_saved_dtype(name, entry.properties.dtype, value.dtype, f"{_ARGUMENT}: {str(path)!r}")


def _load_file(
    path: Path, model: nn.Module, optimizers: list[Optimizer], strict: bool, weights_only: bool | None
) -> dict[str, Any]:
    def read() -> tuple[dict[str, Any], StateDict, list[StateDict]]:
        saved = read_saved(path, _ARGUMENT, mmap=True, weights_only=weights_only)
        weights, states = saved.pop(_MODEL, None), saved.get("optimizer_states") or []
        if not isinstance(weights, dict) or not isinstance(states, list):
            raise ValueError(f"{_ARGUMENT}: {str(path)!r} must have the dict {_MODEL!r} and a list 'optimizer_states'")
        if optimizers and len(states) != len(optimizers):
            raise ValueError(
                f"{_ARGUMENT}: {str(path)!r} has {len(states)} optimizers, and there are {len(optimizers)}"
            )
        return saved, weights, [_named(path, model, *pair) for pair in zip(optimizers, states, strict=False)]

    saved, weights, states = call_on_all_ranks(dist.group.WORLD, read)
    load_full_state_dict(model, weights, strict=strict)
    for optimizer, state in zip(optimizers, states, strict=True):
        load_full_optimizer_state_dict(model, optimizer, state)
    return saved


def _named(path: Path, model: nn.Module, optimizer: Optimizer, saved: Any) -> StateDict:
    """Returns the state of an optimizer with names in place of the numbers of parameters."""
    name_of = {id(param.param): param.name for param in census(model).optimized(optimizer)}
    names = [[name_of[id(param)] for param in group["params"]] for group in optimizer.param_groups]
    return with_names(saved, names, f"{_ARGUMENT}: {str(path)!r}")
