"""Adapters in the files of PEFT: ``adapter_model.safetensors`` and ``adapter_config.json``."""

from __future__ import annotations

import json
import math
import os
import reprlib
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from tp_ext._checks import check_path, check_probability
from tp_ext.checkpoint.files.plain_values import read_json
from tp_ext.checkpoint.files.safetensors_slices import SafetensorsFile, SlicedTensor
from tp_ext.checkpoint.files.saved_dtypes import check_saved_dtype
from tp_ext.checkpoint.gather import Ranks, ranks_of, write_full
from tp_ext.checkpoint.pipeline import WholeTensor, agreed_entries, check_same, gather_whole
from tp_ext.checkpoint.safetensors import write_files
from tp_ext.model.census import census
from tp_ext.model.layouts import refuse_wrapped
from tp_ext.nn.float8 import Float8Linear
from tp_ext.nn.linear import ColumnParallelLinear, RowParallelLinear
from tp_ext.nn.lora import LoRALinear, add_lora

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
LARGEST = 1e9  # of r and lora_alpha
PREFIX = "base_model.model."  # of every name in the file
FACTORS = (".lora_A.weight", ".lora_B.weight")
WITHOUT_EFFECT = {  # options that say nothing about the function that is computed from the file's tensors
    "alora_invocation_tokens", "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config",
    "exclude_modules", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform", "lora_alpha",
    "lora_dropout", "megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "r",
    "revision", "target_modules", "task_type", "use_rslora",
}  # fmt: skip
CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq")  # values of init_lora_weights
TASKS = {
    "ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}  # fmt: skip


def load_adapter(model: nn.Module, path: str | os.PathLike[str]) -> list[str]:
    """Adds the adapter of a folder of PEFT to a model by :func:`tp_ext.add_lora`, and reads its factors.

    Each rank reads its slices. The factors have the dtype of the model's weights. All other parameters are frozen. A
    model that has this adapter's layers already, such as one to be trained further, keeps them and gets their values.

    Args:
        model: sharded, by :func:`from_pretrained`, :func:`tp_ext.auto.apply` or of layers of this package; or of one
            process. Each ``nn.Linear`` with an adapter becomes a layer of this package.
        path: a folder with ``adapter_model.safetensors`` and ``adapter_config.json`` of plain LoRA on linear layers.
            The names in the file decide which; r, lora_alpha, lora_dropout and use_rslora are honoured.

    Returns:
        The names of the layers.

    Communicates: one all-reduce of two numbers over each group, and those of :func:`tp_ext.add_lora`. Raises, on all
    ranks and before anything changes:
        OSError: a file that cannot be read. ValueError: files of another adapter on another rank; an option with an
        effect that is none of these (DoRA, rank_pattern, modules_to_save, ..), by name; tensors that are no factors; a
        layer that the model does not have, or that its plan leaves whole with a partial gradient; another shape; DDP.
        TypeError: an argument of another type.
    """
    _check(model, path)
    ranks = ranks_of(census(model))
    config: dict[str, Any] = {}
    tensors: dict[str, SlicedTensor] = {}
    names: list[str] = []
    with ExitStack() as opened:

        def describe() -> dict[str, str]:
            refuse_wrapped(model, "load adapters")
            config.update(_config_of(Path(path) / CONFIG))
            tensors.update(_factors_of(Path(path) / TENSORS, opened))
            names.extend(_checked(model, tensors, config, Path(path)))
            # Ranks may read files of their own disks: of another r their products would not fit
            options = {name: repr(config.get(name)) for name in ("r", "lora_alpha", "lora_dropout", "use_rslora")}
            return options | {name: f"of shape {tuple(tensor.shape)}" for name, tensor in sorted(tensors.items())}

        check_same("path", describe, ranks)
        r, alpha, dropout = config["r"], config["lora_alpha"], config.get("lora_dropout") or 0.0
        for name in names:
            layer = model.get_submodule(name)
            # add_lora takes layers of this package: whole on every rank is a layer of a group of one
            if type(layer) is nn.Linear:
                model.set_submodule(name, ColumnParallelLinear.from_linear(layer, group=None))
        if new := [name for name in names if not isinstance(model.get_submodule(name), LoRALinear)]:
            add_lora(model, targets=new, r=r, alpha=alpha, dropout=dropout)
        for name in names:
            # add_lora has set alpha / r; use_rslora divides by the root of r
            model.get_submodule(name).scaling = _scaling(config)  # type: ignore[assignment]
        # [Note: one census for each call]: add_lora has added the factors
        entries = census(model).state()
        with torch.no_grad():
            for name, tensor in tensors.items():
                write_full(tensor, entries[name].value, entries[name].layout)
    return names


def save_adapter(model: nn.Module, path: str | os.PathLike[str], *, lock_timeout: float = 60.0) -> None:
    """Writes the adapter of a model, for PEFT or :func:`load_adapter`; the base weights are not written.

    Every rank calls it, rank 0 writes, under the guarantees of :func:`tp_ext.save_safetensors`.

    Args:
        model: with layers by :func:`tp_ext.add_lora` or :func:`load_adapter`, of one r and scale.
        path: a folder; it is made if it does not exist. lock_timeout: as :func:`tp_ext.save_safetensors`.

    Communicates as :func:`tp_ext.save_safetensors`. Raises:
        ValueError, on all ranks: no adapter, or others on another rank; adapters that are merged, or of several r,
        scales or dropouts. OSError: on every rank, if rank 0 could not write. TypeError: an argument of another type.
    """
    _check(model, path)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoRALinear)}
    # The configuration has one of each for all layers
    kinds = {(layer.r, layer.scaling, layer.dropout) for layer in layers.values()}
    known = census(model)
    ranks = ranks_of(known)

    def describe() -> dict[str, str]:
        if len(kinds) != 1 or any(layer.merged for layer in layers.values()):
            kind = f"(r, scale, dropout) {sorted(kinds)}" if len(kinds) != 1 else "merged ones"
            raise ValueError(f"model: its adapters must be of one r, scale and dropout, not merged; it has {kind}")
        return dict.fromkeys(layers, f"of r, scale and dropout {kinds}")

    check_same("model", describe, ranks)
    entries = {
        PREFIX + name: entry
        for name, entry in agreed_entries(known, ranks).items()
        if name.endswith(FACTORS) and name[: -len(FACTORS[0])] in layers
    }
    whole = {name: _whole(entry.value, entry.shape, ranks) for name, entry in entries.items()}

    def gathered(shard: list[tuple[str, WholeTensor]]) -> Iterator[Tensor | None]:
        for name, tensor in shard:
            yield gather_whole(tensor, entries[name], ranks, rank0_only=True)

    write_files(
        Path(path) / TENSORS,
        [sorted(whole.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))],
        {"format": "pt"},
        gathered,
        ranks,
        lock_timeout,
        finish=lambda: _write_config(model, list(layers), kinds.pop(), Path(path) / CONFIG),
    )


def _check(model: Any, path: Any) -> None:
    if not isinstance(model, nn.Module):
        raise TypeError(f"model: {type(model).__name__} must be an nn.Module")
    check_path("the path of a folder", path=path)


def _whole(value: Tensor, shape: torch.Size, ranks: Ranks) -> WholeTensor:
    return WholeTensor((ranks.stage,), shape, value.dtype, ranks.device.type)


def _scaling(config: dict[str, Any]) -> float:
    return float(config["lora_alpha"] / (math.sqrt(config["r"]) if config.get("use_rslora") else config["r"]))


def _config_of(file: Path) -> dict[str, Any]:
    """Returns the options of an adapter whose function is that of :class:`LoRALinear`."""
    config = read_json(file)
    # Other kinds have other tensors under the same names
    if (kind := config.get("peft_type")) != "LORA":
        raise ValueError(f"path: {str(file)!r} must be of peft_type 'LORA', not {kind!r}")
    # An option of a newer PEFT may change what an adapter computes: only those without effect pass
    for name, value in config.items():
        if name not in WITHOUT_EFFECT and value and not (name == "bias" and value == "none"):
            raise ValueError(f"path: {str(file)!r} has {name} = {reprlib.repr(value)}, which must not be set")
    # Such an initialiser has written its factors' product into base weights that are not in this file
    if str(config.get("init_lora_weights", "")).startswith(CHANGE_THE_BASE):
        how = config["init_lora_weights"]
        raise ValueError(f"path: {str(file)!r} has init_lora_weights = {how!r}, which changes the base weights")
    for name, kinds in (("r", int), ("lora_alpha", int | float)):
        if not isinstance(value := config.get(name), kinds) or isinstance(value, bool) or not 0 < value < LARGEST:
            raise ValueError(f"path: {str(file)!r} has {name} = {value!r:.100}, which must be a positive number")
    check_probability(**{f"path: {str(file)!r} has lora_dropout, which": config.get("lora_dropout") or 0.0})
    return config


def _factors_of(file: Path, opened: ExitStack) -> dict[str, SlicedTensor]:
    """Returns the tensors of a file by the names that they have in the model."""
    tensors = opened.enter_context(SafetensorsFile(file)).tensors
    if others := sorted(name for name in tensors if not (name.startswith(PREFIX) and name.endswith(FACTORS))):
        raise ValueError(
            f"path: {str(file)!r} has {others}; all must be {PREFIX}<layer>.lora_A.weight or lora_B.weight"
        )
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}


def _checked(model: nn.Module, tensors: dict[str, SlicedTensor], config: dict[str, Any], path: Path) -> list[str]:
    """Checks that the tensors are the factors of layers of the model; returns the names of the layers."""
    names = sorted({name[: -len(FACTORS[0])] for name in tensors})
    modules = dict(model.named_modules(remove_duplicate=False))
    present = {name for name, layer in modules.items() if isinstance(layer, LoRALinear)}
    # Adapters that the file lacks would keep their initial weights, silently
    if not names or (present and present != set(names)):
        raise ValueError(
            f"path: {str(path)!r} has adapters of {names} and must have those of {sorted(present) or 'a layer'}"
        )
    layers: dict[str, Any] = {name: getattr(modules.get(name), "base_layer", modules.get(name)) for name in names}
    for name, layer in layers.items():
        if not isinstance(layer, ColumnParallelLinear | RowParallelLinear | nn.Linear):
            state = "is no linear layer" if name in modules else "does not exist"
            raise ValueError(f"path: {str(path)!r} has an adapter of {name!r}, which {state} in the model")
        # The factors' gradients would be this rank's terms, which no hook of the plan completes
        if isinstance(layer, nn.Linear) and not _is_plain(layer):
            raise ValueError(
                f"path: {str(path)!r} has an adapter of {name!r}, which is whole on all ranks and whose gradient the "
                "ranks complete together; use another number of ranks, or add an adapter to sharded layers only"
            )
    for name, layer in layers.items():
        shapes = ((config["r"], layer.in_features), (layer.out_features, config["r"]))
        for factor, shape in zip(FACTORS, shapes, strict=True):
            if name + factor not in tensors:
                raise ValueError(f"path: {str(path)!r} must have {PREFIX}{name}{factor}")
            if tuple(tensors[name + factor].shape) != shape:
                shape_in_file = tuple(tensors[name + factor].shape)
                raise ValueError(
                    f"path: {name + factor!r} has shape {shape_in_file} in {str(path)!r} and must have {shape}"
                )
            check_saved_dtype(name + factor, tensors[name + factor].dtype, layer.weight.dtype, f"path: {str(path)!r}")
    return names


def _is_plain(linear: nn.Linear) -> bool:
    """Returns True if all ranks compute the same with a whole layer, forward and backward: a plan completes partial
    gradients and inputs in hooks."""
    hooks = (linear._forward_hooks, linear._forward_pre_hooks, linear._backward_hooks, linear._backward_pre_hooks)
    return type(linear) in (nn.Linear, Float8Linear) and not any(hooks)


def _write_config(model: nn.Module, layers: list[str], kind: tuple[int, float, float], file: Path) -> None:
    r, scaling, dropout = kind
    alpha = scaling * r
    ends = sorted({name.rpartition(".")[2] for name in layers})
    inner = tuple(f"{name}." for name in layers)
    # PEFT takes every layer whose name ends so: if others do, too, it needs the full names
    same = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in ends and not name.startswith(inner)]
    base = getattr(getattr(model, "config", None), "_name_or_path", None) or None
    # fully_shard puts FSDP before the name of the class
    kinds = (task for end, task in TASKS.items() if type(model).__name__.removeprefix("FSDP").endswith(end))
    config = {
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": int(alpha) if float(alpha).is_integer() else alpha,
        "lora_dropout": dropout,
        "peft_type": "LORA",
        "r": r,
        "target_modules": ends if sorted(same) == sorted(layers) else sorted(layers),
        "task_type": next(kinds, None),
        "use_rslora": False,
    }
    file.write_text(json.dumps(config, indent=2) + "\n")
