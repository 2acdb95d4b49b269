"""The files of PEFT: options of ``adapter_config.json``, and what the tensors of ``adapter_model.safetensors`` are."""

from __future__ import annotations

import json
import math
import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.utils import parametrize
from transformers.pytorch_utils import Conv1D

from tp_ext._checks import check_probability
from tp_ext.auto.modules.leaves import RowConv1D
from tp_ext.checkpoint.files.plain_values import read_json
from tp_ext.checkpoint.files.safetensors_slices import SlicedTensor
from tp_ext.checkpoint.files.saved_dtypes import check_saved_dtype
from tp_ext.checkpoint.gather import chunk_slices
from tp_ext.model.census import Census
from tp_ext.model.fqn import Entry
from tp_ext.nn.float8 import Float8Linear
from tp_ext.nn.linear import ColumnParallelLinear, RowParallelLinear
from tp_ext.nn.lora import LoRALinear
from tp_ext.nn.lora_weight import LoRAWeight

TENSORS, CONFIG = "adapter_model.safetensors", "adapter_config.json"
LARGEST = 1e9  # of r and lora_alpha
PREFIX = "base_model.model."  # of every name in the file
FACTOR = re.compile(r"(.+)\.(?:lora_(?:embedding_)?([AB])(?:\.weight)?|lora_(magnitude)_vector(?:\.weight)?)")
BASE = ".base_layer"
WITHOUT_EFFECT = {  # options that say nothing about the function that is computed from the file's tensors
    "alora_invocation_tokens", "auto_mapping", "base_model_name_or_path", "ensure_weight_tying", "eva_config",
    "exclude_modules", "fan_in_fan_out", "inference_mode", "init_lora_weights", "layers_pattern", "layers_to_transform",
    "lora_dropout", "megatron_config", "megatron_core", "peft_type", "peft_version", "qalora_group_size", "revision",
    "target_modules", "task_type",
}  # fmt: skip
HONOURED = {
    "alpha_pattern", "bias", "lora_alpha", "modules_to_save", "r", "rank_pattern", "target_parameters", "use_dora",
    "use_rslora",
}  # fmt: skip
CHANGE_THE_BASE = ("pissa", "olora", "corda", "loftq")  # values of init_lora_weights
TASKS = {
    "ForCausalLM": "CAUSAL_LM", "LMHeadModel": "CAUSAL_LM", "ForConditionalGeneration": "SEQ_2_SEQ_LM",
    "ForSequenceClassification": "SEQ_CLS", "ForTokenClassification": "TOKEN_CLS",
    "ForQuestionAnswering": "QUESTION_ANS",
}  # fmt: skip
LINEAR = ColumnParallelLinear | RowParallelLinear | nn.Linear


class LayerAdapter(NamedTuple):
    """An adapter of a layer in a file.

    Attributes:
        layer: the path of the module. parameter: the name of the weight in it.
        tensors: the names in the file, without the prefix, by ``lora_A``, ``lora_B``, ``lora_magnitude``.
        r, alpha, scaling: of this layer.
        of_weight: whether it is a :class:`LoRAWeight`, else a :class:`LoRALinear`.
        transposed: whether the weight is ``[in, out]``.
    """

    layer: str
    parameter: str
    tensors: dict[str, str]
    r: int
    alpha: float
    scaling: float
    of_weight: bool
    transposed: bool

    def state_names(self) -> dict[str, str]:
        """Returns the names of the factors in the state of a model."""
        inside = f"{self.layer}.parametrizations.{self.parameter}.0." if self.of_weight else f"{self.layer}."
        return {factor: f"{inside}{factor}{'' if self.of_weight else '.weight'}" for factor in self.tensors}


@dataclass
class LoadedAdapter:
    """What a model remembers of the file of its adapter.

    Attributes:
        config: its options.
        names: the names in the file, without the prefix, by those in the state of the model.
        originals: this rank's shards of the base's tensors that the file replaces, by their names in the state.
    """

    config: dict[str, Any]
    names: dict[str, str] = field(default_factory=dict)
    originals: dict[str, nn.Parameter] = field(default_factory=dict)


def loaded_adapter(known: Census) -> LoadedAdapter | None:
    """Returns what a model remembers of the file of its adapter, if that is more than factors of linear layers."""
    records = (module.__dict__.get("tp_ext_adapter") for _, module in known.modules)
    return next((record for record in records if record is not None), None)


def file_names(known: Census, entries: Mapping[str, Entry]) -> dict[str, str]:
    """Returns the names of a model's adapters in files, without the prefix, by their names in its state.

    Raises:
        ValueError: there are others than those of the file that the model remembers.
    """
    layers = [layer for layer in known.layers.values() if isinstance(layer, LoRALinear)]
    owners = {factor for layer in layers for factor in (layer.lora_A, layer.lora_B)}
    factors = {name: name for name, entry in entries.items() if entry.owner in owners}
    if (record := loaded_adapter(known)) is None:
        return factors
    if others := [name for name in factors if name not in record.names]:
        raise ValueError(f"model: {others[0]!r} must be of the file that load_adapter has read, as its other adapters")
    return record.names


def read_config(file: Path) -> dict[str, Any]:
    """Returns the options of an adapter whose function is known."""
    config = read_json(file)
    # Other kinds have other tensors under the same names
    if (kind := config.get("peft_type")) != "LORA":
        raise ValueError(f"path: {str(file)!r} must be of peft_type 'LORA', not {kind!r}")
    # An option of a newer PEFT may change what an adapter computes: only those without effect pass
    for name, value in config.items():
        if name not in WITHOUT_EFFECT | HONOURED and value:
            raise ValueError(f"path: {str(file)!r} has {name} = {reprlib.repr(value)}, which must not be set")
    # Such an initialiser has written its factors' product into base weights that are not in this file
    if str(config.get("init_lora_weights", "")).startswith(CHANGE_THE_BASE):
        how = config["init_lora_weights"]
        raise ValueError(f"path: {str(file)!r} has init_lora_weights = {how!r}, which changes the base weights")
    if config.get("bias", "none") not in ("none", "all", "lora_only"):
        raise ValueError(
            f"path: {str(file)!r} has bias = {config['bias']!r}, which must be 'none', 'all' or 'lora_only'"
        )
    numbers: list[tuple[str, Any, Any]] = [
        ("r", config.get("r"), int),
        ("lora_alpha", config.get("lora_alpha"), int | float),
    ]
    for option, kinds in (("rank_pattern", int), ("alpha_pattern", int | float)):
        patterns = config.get(option) or {}
        if not isinstance(patterns, dict):
            raise ValueError(f"path: {str(file)!r} has {option} = {patterns!r:.100}, which must be a dict")
        numbers += [(f"{option}[{pattern!r}]", value, kinds) for pattern, value in patterns.items()]
    for name, value, kinds in numbers:
        if not isinstance(value, kinds) or isinstance(value, bool) or not 0 < value < LARGEST:
            raise ValueError(f"path: {str(file)!r} has {name} = {value!r:.100}, which must be a positive number")
    check_probability(**{f"path: {str(file)!r} has lora_dropout, which": config.get("lora_dropout") or 0.0})
    return config


class AdapterReader:
    """The tensors of a file, checked against a model.

    Attributes:
        adapters: of the layers.
        whole: names in the file of tensors that replace the model's, by their names in its state.
    """

    def __init__(
        self,
        model: nn.Module,
        entries: Mapping[str, Entry],
        tensors: Mapping[str, SlicedTensor],
        config: dict[str, Any],
        path: Path,
    ) -> None:
        self._modules = dict(model.named_modules(remove_duplicate=False))
        self._entries, self._tensors, self._config, self._where = entries, tensors, config, f"path: {str(path)!r}"
        self._sharded = any(group.size > 1 for entry in entries.values() for _, group in entry.layout)
        self._plain = {name.replace(f"{BASE}.", "."): name for name in entries}
        factors: dict[str, dict[str, str]] = {}
        rest = []
        for name in sorted(tensors):
            if match := FACTOR.fullmatch(name):
                factors.setdefault(match[1], {})[f"lora_{match[2] or match[3]}"] = name
            else:
                rest.append(name)
        if not factors:
            raise ValueError(f"{self._where} has no adapter of a layer")
        # The innermost of a module first, which is the order in which they become parametrizations
        names = sorted(factors, key=lambda name: (name.replace(BASE, ""), -len(name)))
        self.adapters = [self._adapter(name, factors[name]) for name in names]
        self.whole = self._whole(rest)
        self._check_present()
        for adapter in self.adapters:
            self._check_shapes(adapter)

    def _adapter(self, raw: str, tensors: dict[str, str]) -> LayerAdapter:
        layer, level = raw, 0
        while layer.endswith(BASE):
            layer, level = layer.removesuffix(BASE), level + 1
        if (module := self._base(layer)) is None:
            raise ValueError(f"{self._where} has an adapter of {layer!r}, which does not exist in the model")
        targets = self._config.get("target_parameters") or []
        names = [*(getattr(module, "parametrizations", None) or {}), *module._parameters]
        wanted = [n for n in names if any(f"{layer}.{n}" == t or f"{layer}.{n}".endswith(f".{t}") for t in targets)]
        parameter, of_weight, transposed = "weight", bool(self._config.get("use_dora")), False
        if wanted and level < len(wanted):
            # PEFT wraps the parameters in their order, the first one innermost
            parameter, of_weight = wanted[len(wanted) - 1 - level], True
            transposed = bool(getattr(module, "is_transposed", False))
            if self._config.get("use_dora"):
                raise ValueError(
                    f"{self._where} has use_dora = True for the parameter {layer}.{parameter}, as PEFT has not"
                )
        elif isinstance(module, Conv1D | RowConv1D | nn.Embedding):
            of_weight = transposed = True
        elif not isinstance(module, LINEAR) or level:
            raise ValueError(f"{self._where} has an adapter of {layer!r}, which is no linear layer in the model")
        whole = parameter not in getattr(module, "tp_layouts", {}) and not isinstance(module, ColumnParallelLinear)
        # The factors' gradients would be this rank's terms, which no hook of the plan completes
        if self._sharded and whole and not isinstance(module, RowParallelLinear) and not _is_plain(module):
            raise ValueError(
                f"{self._where} has an adapter of {layer!r}, which is whole on all ranks and whose gradient the "
                "ranks complete together; use another number of ranks, or add an adapter to sharded layers only"
            )
        key = f"{layer}.{parameter}" if wanted else layer
        r = _of_pattern(self._config.get("rank_pattern"), key, layer, self._config["r"])
        alpha = _of_pattern(self._config.get("alpha_pattern"), key, layer, self._config["lora_alpha"])
        scaling = float(alpha / (math.sqrt(r) if self._config.get("use_rslora") else r))
        return LayerAdapter(layer, parameter, tensors, r, alpha, scaling, of_weight, transposed)

    def _base(self, layer: str) -> nn.Module | None:
        module = self._modules.get(layer)
        return module.base_layer if isinstance(module, LoRALinear) else module

    def _whole(self, names: Iterable[str]) -> dict[str, str]:
        """Returns the tensors that replace the model's: biases, and those of modules that were saved."""
        bias, saved = self._config.get("bias", "none"), self._config.get("modules_to_save") or []
        layers = {adapter.layer for adapter in self.adapters}
        whole: dict[str, str] = {}
        others = []
        for name in names:
            plain = name.replace(f"{BASE}.", ".")
            path, _, local = plain.rpartition(".")
            entry = self._entries.get(self._plain.get(plain, ""))
            is_bias = local == "bias" and (bias == "all" or (bias == "lora_only" and path in layers))
            is_saved = any(f".{path}.".find(f".{module}.") >= 0 for module in saved)
            if entry is not None and (is_bias or is_saved):
                whole[self._plain[plain]] = name
            elif entry is None or not self._is_base(name, entry):
                others.append(PREFIX + name)
        if others:
            raise ValueError(
                f"{self._where} has {others}; all must be {PREFIX}<layer>.lora_A.weight or lora_B.weight, or tensors "
                "that bias or modules_to_save of its configuration name"
            )
        ids = {id(self._entries[name].value) for name in whole}
        for name, entry in self._entries.items():
            # PEFT trains a copy of such a module, and the other one stays
            if id(entry.value) in ids and name not in whole:
                raise ValueError(f"{self._where} replaces a tensor that is tied to {name!r}, which must stay; untie it")
        for name in self._entries:
            path = name.rpartition(".")[0].replace(BASE, "")
            is_saved = any(f".{path}.".find(f".{module}.") >= 0 for module in saved)
            if is_saved and name not in whole and not path.endswith(("lora_A", "lora_B")):
                raise ValueError(f"{self._where} must have {PREFIX}{name}, of a module of its modules_to_save")
        for name, of_file in whole.items():
            self._check(of_file, tuple(self._entries[name].shape), self._entries[name].value.dtype)
        return whole

    def _is_base(self, name: str, entry: Entry) -> bool:
        """Returns whether a tensor is that of the model: PEFT writes embeddings of the base, too."""
        tensor = self._tensors[name]
        return tuple(tensor.shape) == tuple(entry.shape) and all(
            torch.equal(tensor[chunk_slices(offsets, chunk)].to(chunk), chunk)
            for offsets, chunk, _ in entry.layout.local_chunks(entry.value.detach())[1]
        )

    def _check_present(self) -> None:
        present = {name for name, module in self._modules.items() if isinstance(module, LoRALinear | LoRAWeight)}
        wanted = {
            f"{one.layer}.parametrizations.{one.parameter}.0" if one.of_weight else one.layer for one in self.adapters
        }
        # Adapters that the file lacks would keep their initial weights, silently
        if present and present != wanted:
            raise ValueError(f"{self._where} has adapters of {sorted(wanted)} and must have those of {sorted(present)}")

    def _check_shapes(self, adapter: LayerAdapter) -> None:
        module = self._base(adapter.layer)
        assert module is not None
        if adapter.of_weight:
            name = f"{adapter.layer}.{adapter.parameter}"
            if name not in self._entries:
                name = f"{adapter.layer}.parametrizations.{adapter.parameter}.original"
            if name not in self._entries:
                raise ValueError(
                    f"{self._where} has an adapter of {adapter.layer!r}, whose weight is quantised or computed"
                )
            shape, dtype = tuple(self._entries[name].shape), self._entries[name].value.dtype
        else:
            assert isinstance(module, LINEAR)
            shape, dtype = (module.out_features, module.in_features), module.weight.dtype
        experts = shape[0] if len(shape) == 3 else 1
        outputs, inputs = shape[:-3:-1] if adapter.transposed else shape[-2:]
        width = adapter.r * experts
        shapes: dict[str, tuple[int, ...]] = {"lora_A": (width, inputs), "lora_B": (outputs, width)}
        if self._config.get("use_dora"):
            shapes |= {"lora_magnitude": (outputs,)}
        for factor, wanted in shapes.items():
            if factor not in adapter.tensors:
                raise ValueError(f"{self._where} must have {PREFIX}{adapter.layer}.{factor}.weight")
            self._check(adapter.tensors[factor], wanted, dtype)
        if adapter.tensors.keys() != shapes.keys():
            raise ValueError(f"{self._where} has {sorted(adapter.tensors.values())}, but use_dora is not set")

    def _check(self, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> None:
        saved = tuple(self._tensors[name].shape)
        if saved != shape:
            raise ValueError(
                f"path: {name!r} has shape {saved} in {self._where.removeprefix('path: ')} and must have {shape}"
            )
        check_saved_dtype(name, self._tensors[name].dtype, dtype, self._where)


def _of_pattern(patterns: Any, key: str, layer: str, default: Any) -> Any:
    """Returns the number of the first pattern that PEFT would find for a layer."""
    for pattern, value in (patterns or {}).items():
        if any(re.match(rf"(.*\.)?({pattern})$", name) for name in (key, layer)):
            return value
    return default


def _is_plain(module: nn.Module) -> bool:
    """Returns True if all ranks compute the same with a whole layer, forward and backward: a plan completes partial
    gradients and inputs in hooks."""
    hooks = (module._forward_hooks, module._forward_pre_hooks, module._backward_hooks, module._backward_pre_hooks)
    cls = type(module).__bases__[0] if parametrize.is_parametrized(module) else type(module)
    return cls in (nn.Linear, Float8Linear, nn.Embedding, Conv1D) and not any(hooks)


def write_config(model: nn.Module, layers: Mapping[str, LoRALinear], file: Path) -> None:
    """Writes the options of adapters that :func:`tp_ext.add_lora` made."""
    first = next(iter(layers.values()))
    r, scaling, dropout = first.r, first.scaling, first.dropout
    alpha = scaling * r
    ends = sorted({name.rpartition(".")[2] for name in layers})
    inner = tuple(f"{name}." for name in layers)
    # PEFT takes every layer whose name ends so: if others do, too, it needs the full names
    same = [name for name, _ in model.named_modules() if name.rpartition(".")[2] in ends and not name.startswith(inner)]
    base = getattr(getattr(model, "config", None), "_name_or_path", None) or None
    # fully_shard puts FSDP before the name of the class
    kinds = (task for end, task in TASKS.items() if type(model).__name__.removeprefix("FSDP").endswith(end))
    config = {
        "alpha_pattern": {
            name: _number(layer.scaling * layer.r) for name, layer in layers.items() if layer.scaling * layer.r != alpha
        },
        "base_model_name_or_path": base,
        "bias": "none",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "lora_alpha": _number(alpha),
        "lora_dropout": dropout,
        "peft_type": "LORA",
        "r": r,
        "rank_pattern": {name: layer.r for name, layer in layers.items() if layer.r != r},
        "target_modules": ends if sorted(same) == sorted(layers) else sorted(layers),
        "task_type": next(kinds, None),
        "use_rslora": False,
    }
    file.write_text(json.dumps(config, indent=2) + "\n")


def _number(value: float) -> float:
    return int(value) if float(value).is_integer() else value
