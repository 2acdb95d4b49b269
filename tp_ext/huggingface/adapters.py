"""Adapters in the files of PEFT: ``adapter_model.safetensors`` and ``adapter_config.json``."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tp_ext._checks import check_path, check_type
from tp_ext.checkpoint.files.safetensors_slices import SafetensorsFile, SlicedTensor
from tp_ext.checkpoint.gather import Ranks, ranks_of, write_full
from tp_ext.checkpoint.pipeline import WholeTensor, agreed_entries, check_same, gather_whole
from tp_ext.checkpoint.safetensors import write_files
from tp_ext.huggingface.adapter_files import (
    CONFIG,
    PREFIX,
    TENSORS,
    AdapterReader,
    LoadedAdapter,
    file_names,
    loaded_adapter,
    read_config,
    write_config,
)
from tp_ext.model.census import census
from tp_ext.model.fqn import Entry
from tp_ext.model.layouts import refuse_wrapped
from tp_ext.nn.linear import ColumnParallelLinear
from tp_ext.nn.lora import LoRALinear, add_lora
from tp_ext.nn.lora_weight import LoRAWeight, add_lora_weight


def load_adapter(model: nn.Module, path: str | os.PathLike[str]) -> list[str]:
    """Adds the adapter of a folder of PEFT to a model, and reads its tensors.

    Each rank reads its slices. The tensors have the dtype of the model's weights. All other parameters are frozen. A
    model that has this adapter's layers already, such as one to be trained further, keeps them and gets their values.

    Linear layers get adapters by :func:`tp_ext.add_lora`. Those of GPT-2 (``Conv1D``), of embeddings, of
    ``target_parameters`` (stacks of experts) and of DoRA are parametrizations of the weights, which in training need
    the memory of a gradient of each, and refuse to be trained with ``lora_dropout``. Tensors of ``bias`` and
    ``modules_to_save`` replace the model's, and are trained.

    Args:
        model: sharded, by :func:`from_pretrained`, :func:`tp_ext.auto.apply` or of layers of this package; or of one
            process. Each ``nn.Linear`` with an adapter becomes a layer of this package.
        path: a folder with ``adapter_model.safetensors`` and ``adapter_config.json`` of LoRA. The names in the file
            decide which layers; r, lora_alpha, rank_pattern, alpha_pattern, lora_dropout, use_rslora, use_dora, bias,
            modules_to_save and target_parameters are honoured.

    Returns:
        The names of the layers.

    Communicates: two all-reduces of two numbers over each group, and those of :func:`tp_ext.add_lora`. Raises, on all
    ranks and before anything changes:
        OSError: a file that cannot be read. ValueError: files of another adapter on another rank; an option with an
            effect that is none of these, by name; tensors that are neither factors nor replace others; a
            layer that the model does not have, or that its plan leaves whole with a partial gradient; another shape; a
            replaced tensor that is tied to one that stays; DDP, FSDP2.
        TypeError: an argument of another type.
    """
    _check(model, path)
    known = census(model)
    ranks = ranks_of(known)
    entries = agreed_entries(known, ranks)
    tensors: dict[str, SlicedTensor] = {}
    readers: list[AdapterReader] = []
    configs: list[dict[str, Any]] = []
    with ExitStack() as opened:

        def describe() -> dict[str, str]:
            refuse_wrapped(model, "load adapters")
            configs.append(read_config(Path(path) / CONFIG))
            tensors.update(_tensors_of(Path(path) / TENSORS, opened))
            readers.append(AdapterReader(model, entries, tensors, configs[0], Path(path)))
            if known.meshes and any(adapter.of_weight for adapter in readers[0].adapters):
                raise ValueError("model: must not be sharded by FSDP2 when it gets adapters; load them before")
            # Ranks may read files of their own disks: of another r their products would not fit
            numbers = {
                f"{adapter.layer}.{adapter.parameter}": repr(
                    (adapter.r, adapter.scaling, configs[0].get("lora_dropout"))
                )
                for adapter in readers[0].adapters
            }
            return numbers | {name: f"of shape {tuple(tensor.shape)}" for name, tensor in sorted(tensors.items())}

        check_same("path", describe, ranks)
        config, reader = configs[0], readers[0]
        record = _add(model, config, reader, entries)
        # [Note: one census for each call]: the factors are new
        state = census(model).state()
        with torch.no_grad():
            for name, of_file in record.names.items():
                write_full(tensors[of_file], state[name].value, state[name].layout)
    linear = all(name.endswith((".lora_A.weight", ".lora_B.weight")) for name in record.names)
    kinds = {(adapter.r, adapter.scaling) for adapter in reader.adapters}
    # save_adapter writes others with the options that they came with
    if not linear or len(kinds) > 1:
        model.__dict__["tp_ext_adapter"] = record
    return list(dict.fromkeys(adapter.layer for adapter in reader.adapters))


def _add(
    model: nn.Module, config: dict[str, Any], reader: AdapterReader, entries: Mapping[str, Entry]
) -> LoadedAdapter:
    """Gives a model the adapters of a file, without their values, and freezes all other parameters."""
    dropout, before = config.get("lora_dropout") or 0.0, model.__dict__.get("tp_ext_adapter")
    record = LoadedAdapter(config, originals={} if before is None else before.originals)
    originals: dict[int, nn.Parameter] = {}  # tied ones are one, too
    for name in reader.whole:
        value = entries[name].value
        if id(value) not in originals:
            originals[id(value)] = nn.Parameter(value.detach().clone(), requires_grad=False)
        record.originals.setdefault(name, originals[id(value)])
    new: dict[tuple[int, float], list[str]] = {}
    for adapter in reader.adapters:
        layer = model.get_submodule(adapter.layer)
        record.names |= {name: adapter.tensors[factor] for factor, name in adapter.state_names().items()}
        if adapter.of_weight:
            if adapter.parameter in layer._parameters:
                weight = layer._parameters[adapter.parameter]
                assert weight is not None
                entry = entries[f"{adapter.layer}.{adapter.parameter}"]
                options = {"transposed": adapter.transposed, "dora": bool(config.get("use_dora"))}
                made = LoRAWeight(weight, entry.layout, adapter.r, adapter.scaling, **options)
                made.dropout = 0.0 if isinstance(layer, nn.Embedding) else dropout
                add_lora_weight(layer, adapter.parameter, made.train(layer.training))
            continue
        # add_lora takes layers of this package: whole on every rank is a layer of a group of one
        if type(layer) is nn.Linear:
            model.set_submodule(adapter.layer, ColumnParallelLinear.from_linear(layer, group=None))
        if not isinstance(layer, LoRALinear):
            new.setdefault((adapter.r, adapter.alpha), []).append(adapter.layer)
    for (r, alpha), names in new.items():
        add_lora(model, targets=names, r=r, alpha=alpha, dropout=dropout, freeze=False)
    for adapter in reader.adapters:
        if not adapter.of_weight:
            # add_lora has set alpha / r; use_rslora divides by the root of r
            model.get_submodule(adapter.layer).scaling = adapter.scaling  # type: ignore[assignment]
    # A bias of a layer that has got its adapter now is inside of it
    state = {name.replace(".base_layer.", "."): name for name in census(model).state()}
    moved = {name: state[name.replace(".base_layer.", ".")] for name in reader.whole}
    record.names |= {moved[name]: of_file for name, of_file in reader.whole.items()}
    record.originals = {moved.get(name, name): value for name, value in record.originals.items()}
    trained = {id(entry.value) for name, entry in census(model).state().items() if name in record.names}
    for parameter in model.parameters():
        parameter.requires_grad_(id(parameter) in trained)
    return record


def adapters_of(model: nn.Module) -> list[LoRALinear | LoRAWeight]:
    """Returns the adapters in a model."""
    return [module for module in model.modules() if isinstance(module, LoRALinear | LoRAWeight)]


@contextmanager
def disable_adapters(model: nn.Module) -> Iterator[None]:
    """Makes a model its base, bit for bit, within a ``with``: the reference model of DPO or GRPO.

    Adapters of :func:`tp_ext.add_lora` and :func:`load_adapter` do nothing meanwhile, and tensors that
    :func:`load_adapter` has replaced (``bias``, ``modules_to_save``) are those of the base. Contexts may be nested; the
    state before is restored also after an exception. Communicates nothing: every rank enters it.

    Raises:
        TypeError: ``model`` is no module. ValueError: it has no adapters, or merged ones, whose base is rounded;
            replaced tensors under FSDP2.
    """
    check_type(nn.Module, "an nn.Module", model=model)
    adapters = adapters_of(model)
    if not adapters:
        raise ValueError(f"model: {type(model).__name__} must have adapters, of add_lora or load_adapter")
    if any(isinstance(adapter, LoRALinear) and adapter.merged for adapter in adapters):
        raise ValueError("model: its adapters must not be merged: unmerge() gives the base up to rounding alone")
    places: list[tuple[dict[str, Any], str, Any, nn.Parameter]] = []
    for root in model.modules():
        record: LoadedAdapter | None = root.__dict__.get("tp_ext_adapter")
        for name, original in record.originals.items() if record is not None else ():
            path, _, local = name.rpartition(".")
            table = root.get_submodule(path)._parameters
            if isinstance(table.get(local), DTensor):
                raise ValueError(f"model: {name!r} was replaced by load_adapter, and is sharded by FSDP2")
            places.append((table, local, table[local], original))
    before = [adapter.disabled for adapter in adapters]
    try:
        for adapter in adapters:
            adapter.disabled = True
        # Other parameters, not other values: a backward may still need those
        for table, local, _, original in places:
            original.data = original.to(table[local])
            table[local] = original
        yield
    finally:
        for adapter, state in zip(adapters, before, strict=True):
            adapter.disabled = state
        for table, local, parameter, _ in places:
            table[local] = parameter


def save_adapter(model: nn.Module, path: str | os.PathLike[str], *, lock_timeout: float = 60.0) -> None:
    """Writes the adapter of a model, for PEFT or :func:`load_adapter`; the base weights are not written.

    Every rank calls it, rank 0 writes, under the guarantees of :func:`tp_ext.save_safetensors`.

    Args:
        model: with layers by :func:`tp_ext.add_lora`, of one dropout; or by :func:`load_adapter`, whose options are
            written again.
        path: a folder; it is made if it does not exist. lock_timeout: as :func:`tp_ext.save_safetensors`.

    Communicates as :func:`tp_ext.save_safetensors`. Raises:
        ValueError, on all ranks: no adapter, or others on another rank; adapters that are merged, or of several
        dropouts; some of :func:`tp_ext.add_lora` next to those of :func:`load_adapter` that are more than factors of
        linear layers. OSError: on every rank, if rank 0 could not write. TypeError: an argument of another type.
    """
    _check(model, path)
    layers = {name: layer for name, layer in model.named_modules() if isinstance(layer, LoRALinear)}
    weights = [name for name, module in model.named_modules() if isinstance(module, LoRAWeight)]
    # The configuration has one dropout for all layers
    dropouts = {layer.dropout for layer in layers.values()}
    known = census(model)
    ranks, record = ranks_of(known), loaded_adapter(known)
    names: dict[str, str] = {}
    state: dict[str, Entry] = {}

    def describe() -> dict[str, str]:
        if any(layer.merged for layer in layers.values()) or not (layers or weights) or len(dropouts) > 1:
            kind = "merged ones" if any(layer.merged for layer in layers.values()) else f"dropouts {sorted(dropouts)}"
            raise ValueError(f"model: its adapters must be of one dropout, not merged; it has {kind}")
        state.update(known.state())
        names.update(file_names(known, state))
        kinds = {name: f"of r {layer.r}, scale {layer.scaling}, {layer.dropout}" for name, layer in layers.items()}
        return kinds | names

    check_same("model", describe, ranks)
    state = agreed_entries(known, ranks, lambda: state)
    entries = {PREFIX + names[name]: entry for name, entry in state.items() if name in names}
    whole = {name: _whole(entry.value, entry.shape, ranks) for name, entry in entries.items()}

    def gathered(shard: list[tuple[str, WholeTensor]]) -> Iterator[Tensor | None]:
        for name, tensor in shard:
            yield gather_whole(tensor, entries[name], ranks, rank0_only=True)

    def finish() -> None:
        if record is None:
            write_config(model, layers, Path(path) / CONFIG)
        else:
            (Path(path) / CONFIG).write_text(json.dumps(record.config, indent=2) + "\n")

    write_files(
        Path(path) / TENSORS,
        [sorted(whole.items(), key=lambda item: (-item[1].dtype.itemsize, item[0]))],
        {"format": "pt"},
        gathered,
        ranks,
        lock_timeout,
        finish=finish,
    )


def _check(model: Any, path: Any) -> None:
    check_type(nn.Module, "an nn.Module", model=model)
    check_path("the path of a folder", path=path)


def _whole(value: Tensor, shape: torch.Size, ranks: Ranks) -> WholeTensor:
    return WholeTensor((ranks.stage,), shape, value.dtype, ranks.device.type)


def _tensors_of(file: Path, opened: ExitStack) -> dict[str, SlicedTensor]:
    """Returns the tensors of a file by their names without the prefix."""
    tensors = opened.enter_context(SafetensorsFile(file)).tensors
    if others := sorted(name for name in tensors if not name.startswith(PREFIX)):
        raise ValueError(
            f"path: {str(file)!r} has {others}; all must be {PREFIX}<layer>.lora_A.weight or lora_B.weight"
        )
    return {name.removeprefix(PREFIX): tensor for name, tensor in tensors.items()}
