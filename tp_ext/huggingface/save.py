"""A sharded model written as transformers would have written the unsharded one."""

from __future__ import annotations

import copy
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import transformers
from huggingface_hub import get_torch_storage_size, split_state_dict_into_shards_factory
from torch import Tensor
from torch.distributed import DeviceMesh

from tp_ext._checks import check_path, check_type
from tp_ext.checkpoint.files.write_lock import check_lock_timeout
from tp_ext.checkpoint.gather import Ranks, ranks_of
from tp_ext.checkpoint.pipeline import WholeTensor, agreed_entries, gather_whole
from tp_ext.checkpoint.safetensors import write_files
from tp_ext.checkpoint.safetensors_files import FileEntries
from tp_ext.group import NOT_GIVEN, Group
from tp_ext.huggingface.conversion import groups_of_model
from tp_ext.mesh import mesh_axes
from tp_ext.model.census import census
from tp_ext.nn.low_bits import LowBits


def save_pretrained(
    model: transformers.PreTrainedModel,
    path: str | os.PathLike[str],
    max_shard_size: int | str = "5GB",
    *,
    group: Group = NOT_GIVEN,
    mesh: DeviceMesh | None = None,
    lock_timeout: float = 60.0,
) -> None:
    """Writes a sharded model and its configuration; the files have the bytes of ``PreTrainedModel.save_pretrained``.

    Every rank calls it, rank 0 writes, all return when the files are in place, under the guarantees of
    :func:`tp_ext.save_safetensors`: an interruption leaves the old export or the new one. Other files of the folder,
    such as those of a tokenizer, stay.

    Args:
        path: a folder; it is made if it does not exist.
        max_shard_size: bytes of a file, or text such as ``"5GB"``.
        group, mesh: as :func:`tp_ext.full_state_dict`. lock_timeout: as :func:`tp_ext.save_safetensors`.

    Communicates as :func:`tp_ext.save_safetensors`: rank 0 holds one full tensor at a time; if the files hold tensors
    in another form (the experts of Mixtral), those of a layer.

    Raises:
        OSError: on every rank, if rank 0 could not write. TypeError: an argument of another type, such as a
        ``model`` that is none of transformers. ValueError: ``max_shard_size``.
    """
    check_type(transformers.PreTrainedModel, "a PreTrainedModel", model=model)
    check_path("the path of a folder", path=path)
    if isinstance(max_shard_size, bool) or not isinstance(max_shard_size, int | str):
        raise TypeError(f"max_shard_size: {max_shard_size!r} must be a number of bytes, or text such as '5GB'")
    check_lock_timeout(lock_timeout)
    for name, module in model.named_modules():
        if isinstance(getattr(module, "form", None), LowBits):
            raise ValueError(f"model: {name!r} was quantised, which files of transformers cannot hold: save_checkpoint")
    known = census(model, mesh_axes(group, mesh))
    ranks = ranks_of(known)
    entries = agreed_entries(known, ranks)
    full = {
        name: torch.empty(entry.shape, dtype=entry.value.dtype, device="meta")
        for name, entry in entries.items()
        if not entry.extra
    }
    groups = groups_of_model(model, full, {name: entry.value for name, entry in entries.items()})
    group_of = {name: group for group in groups for name in group.targets}
    shapes = {name: tensor for group in groups for name, tensor in group.targets.items()}

    def gathered(shard: FileEntries) -> Iterator[Tensor | None]:
        converted: dict[str, Tensor | None] = {}  # a group that the next file needs as well is gathered again
        failure: Exception | None = None
        for name, _ in shard:
            if name not in converted:
                group_ = group_of[name]
                sources = [
                    gather_whole(_whole(full[source], ranks), entries[source], ranks, rank0_only=True)
                    for source in group_.sources
                ]
                converted |= dict.fromkeys(group_.targets)
                try:
                    # After a failure tensors are gathered all the same: the others send theirs
                    if ranks.first and failure is None:
                        converted |= group_.convert(model, [source for source in sources if source is not None])
                except Exception as error:  # raised when the other ranks have sent all of this file
                    failure = error
                del sources
            yield converted.pop(name)
        if failure is not None:
            raise failure

    write_files(
        path,
        _files(shapes, max_shard_size, ranks),
        {"format": "pt"},
        gathered,
        ranks,
        lock_timeout,
        index_metadata={"total_parameters": _count(model, entries)},
        finish=lambda: _save_configuration(model, Path(path)),
    )


def _whole(tensor: Tensor, ranks: Ranks) -> WholeTensor:
    return WholeTensor((ranks.stage,), tensor.shape, tensor.dtype, ranks.device.type)


def _files(tensors: dict[str, Tensor], max_size: int | str, ranks: Ranks) -> list[FileEntries]:
    """Returns the entries of each file, in the order of safetensors: wide dtypes first, then by name."""
    try:
        if not isinstance(max_size, str) and max_size < 1:
            raise ValueError
        split = split_state_dict_into_shards_factory(
            tensors,
            get_storage_size=get_torch_storage_size,
            get_storage_id=lambda tensor: tensor.untyped_storage()._cdata,  # views of one tensor share a file
            filename_pattern="model{suffix}.safetensors",
            max_shard_size=max_size,
        )
    except ValueError:
        raise ValueError(
            f"max_shard_size: {max_size!r} must be a positive number of bytes, or text such as '5GB'"
        ) from None
    return [
        sorted(
            ((name, _whole(tensors[name], ranks)) for name in names),
            key=lambda item: (-item[1].dtype.itemsize, item[0]),
        )
        for names in split.filename_to_tensors.values()
    ]


def _count(model: transformers.PreTrainedModel, entries: Any) -> int:
    """Elements of all parameters of the unsharded model, tied ones once."""
    shapes = {id(entry.value): entry.shape.numel() for entry in entries.values()}
    return sum(shapes.get(id(parameter), parameter.numel()) for parameter in model.parameters())


def full_config(config: Any, plan: Any) -> Any:
    """Returns a copy of a configuration with the numbers of the unsharded model, such as those of heads, which a plan
    sets to this rank's."""
    config = copy.deepcopy(config)
    for attribute, (full, _) in (plan.patches.get("", {}) if plan is not None else {}).items():
        holder, _, attribute_name = attribute.rpartition(".")
        if holder == "config":
            config.__dict__[attribute_name] = full
    return config


def _save_configuration(model: transformers.PreTrainedModel, path: Path) -> None:
    config = full_config(model.config, getattr(model, "tp_ext_plan", None))
    config.dtype = str(model.dtype).removeprefix("torch.")
    # fully_shard puts FSDP before the name of the class, which readers look up in transformers
    config.architectures = [type(model).__name__.removeprefix("FSDP")]
    config.save_pretrained(path)
    if model.can_generate():
        model.generation_config.save_pretrained(path)
