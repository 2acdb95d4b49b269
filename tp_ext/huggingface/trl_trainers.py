"""Trainers of TRL over sharded models: options, gathers, seeds and rewards that would take a rank for a data-parallel
one, or a shard for the whole, are right under a trainer of :func:`tp_ext.huggingface.trainer_for`, or refused."""

from __future__ import annotations

import asyncio
import inspect
import os
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any

import accelerate
import accelerate.utils
import torch
from huggingface_hub import snapshot_download
from torch import nn
from torch.distributed import ProcessGroup

from tp_ext._object_collectives import all_gather_objects, broadcast_from_first
from tp_ext.huggingface.adapters import adapters_of, disable_adapters
from tp_ext.huggingface.folder import class_of
from tp_ext.huggingface.fused_head import check_replaced
from tp_ext.huggingface.load import from_pretrained

KNOWN = ("SFTTrainer", "DPOTrainer", "RewardTrainer", "KTOTrainer", "GRPOTrainer", "RLOOTrainer")
REFUSED = {  # options of trainers' arguments, and what to do in their place
    "use_liger_kernel": "its kernels take a shard for the whole",
    "use_vllm": "vLLM would read a rank's shards; generate by the model itself",
    "cast_lm_head_to_fp32": "its projection takes a shard of the head for the whole; load the model in fp32",
    "use_transformers_paged": "its generate_batch knows of no shards",
    "use_transformers_continuous_batching": "its generate_batch knows of no shards",
}
REFUSED_ARGUMENTS = {
    "peft_config": "PEFT's layers know of no shards; call tp_ext.add_lora(model, ..) before",
    "quantization_config": "from_pretrained(.., quantize=) quantises a sharded model",
    "tools": "each rank of a model would call them",
    "rollout_func": "each rank of a model would call it",
    "environment_factory": "each rank of a model would call its environments",
}


def check_class(cls: type) -> None:
    """Raises TypeError for a class of TRL that is not known to be right."""
    names = [kind.__name__ for kind in cls.__mro__ if kind.__module__.partition(".")[0] == "trl"]
    if not names:
        return
    if names[0] not in KNOWN:
        raise TypeError(f"cls: {names[0]} of TRL is not known over shards; those known are {', '.join(KNOWN)}")
    check_replaced()


def check_arguments(given: dict[str, Any], options: Any, ranks: int) -> None:
    """Raises ValueError for arguments of the constructor, and ``options``, its ``args``, that shards make wrong."""
    for name, reason in REFUSED_ARGUMENTS.items():
        # Of a model of one rank the layers are ours, too
        if given.get(name) is not None and (ranks > 1 or name.endswith("_config")):
            raise ValueError(f"{name}: must not be given for a sharded model: {reason}")
    if ranks == 1:
        return
    sizes = [vocabulary_of(given[name]) for name in ("model", "ref_model") if name in given]
    if None not in sizes and len(set(sizes)) > 1:
        raise ValueError(f"ref_model: has a vocabulary of {sizes[1]} and must have one of {sizes[0]}, that of model")
    for name, reason in REFUSED.items():
        if getattr(options, name, None):
            raise ValueError(f"args: {name} must be False for a sharded model: {reason}")
    # It cuts the batch over all processes itself
    if getattr(options, "train_sampling_strategy", None) == "batch_rebalance":
        raise ValueError("args: train_sampling_strategy must not be 'batch_rebalance' for a sharded model")


class BaseOfAdapters(nn.Module):
    """The reference of a model with adapters: the model itself, whose adapters are switched off during a call."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model, self.config = model, model.config

    def __call__(self, *args: Any, **options: Any) -> Any:
        # Not forward: trainers give a reference another one
        with disable_adapters(self.model):
            return self.model(*args, **options)


def give_reference(bound: inspect.BoundArguments, options: Any) -> None:
    """Makes the base the reference of a model with adapters, where a trainer has a ``ref_model`` and none is given.

    Raises:
        ValueError: the reference must follow the model, which with adapters it cannot.
    """
    model = bound.arguments.get("model")
    if not isinstance(model, nn.Module) or not adapters_of(model) or bound.arguments.get("ref_model") is not None:
        return
    if getattr(options, "sync_ref_model", False):
        raise ValueError("args: sync_ref_model must be False for a model with adapters, whose reference is its base")
    if "ref_model" in bound.signature.parameters:
        bound.arguments["ref_model"] = BaseOfAdapters(model)


def vocabulary_of(model: Any) -> int | None:
    """Returns the number of tokens that a model of transformers knows; None for what is no such model."""
    config = getattr(model, "config", None)
    return None if config is None else getattr(config.get_text_config(), "vocab_size", None)


def count_data_ranks(options: Any, data_size: int) -> None:
    """Counts data ranks alone as the processes of a generation batch; the arguments were made before any model.

    Raises:
        ValueError: the batch has no whole groups of generations.
    """
    steps = getattr(options, "steps_per_generation", None)
    if steps is None:
        return
    before, size = options.generation_batch_size, options.per_device_train_batch_size * data_size * steps
    groups = {"generation_batch_size": (size, options.num_generations)}
    if options.eval_strategy != "no":
        count = getattr(options, "num_generations_eval", None) or options.num_generations
        groups["per_device_eval_batch_size"] = options.per_device_eval_batch_size * data_size, count
    for name, (batch, count) in groups.items():
        if batch % count:
            raise ValueError(
                f"args: {name} = {batch} over {data_size} data-parallel ranks must be a multiple of the {count} "
                "generations of a prompt; ranks that share a model count once"
            )
    if before != size and steps != options.gradient_accumulation_steps:
        warnings.warn(
            f"args: generation_batch_size = {before} counts ranks that share a model; it is {size}, by "
            f"steps_per_generation = {steps}",
            stacklevel=4,
        )
    options.generation_batch_size = size


@contextmanager
def data_processes(trainer: Any) -> Iterator[None]:
    """Within it, functions of accelerate that the modules of a trainer's classes have imported are over data ranks, and
    models that they load are sharded."""
    functions: dict[str, Callable[..., Any]] = {
        "gather": lambda tensor: trainer.accelerator.gather(tensor),
        "gather_object": lambda rows: [*chain.from_iterable(all_gather_objects(rows, trainer.data_group))],
        "set_seed": partial(_set_seed, trainer),
        "create_model_from_path": partial(_load, trainer),
        "disable_dropout_in_model": _disable_dropout,
        "hash_module": lambda model: hash_of_ranks(model, trainer.sharing_group),
    }
    sources = accelerate.utils, sys.modules.get("trl.trainer.utils")
    with ExitStack() as undone:
        for name in dict.fromkeys(kind.__module__ for kind in type(trainer).__mro__):
            module = None if name.partition(".")[0] in ("transformers", "tp_ext") else sys.modules.get(name)
            for function, ours in functions.items():
                theirs = getattr(module, function, None)
                if theirs is not None and any(theirs is getattr(source, function, None) for source in sources):
                    undone.callback(setattr, module, function, theirs)
                    setattr(module, function, ours)
        yield


def _set_seed(trainer: Any, seed: int, device_specific: bool = False, deterministic: bool = False) -> None:
    """Seeds ranks that share a model alike, as one process."""
    shift = trainer.accelerator.process_index if device_specific else 0
    accelerate.utils.set_seed(seed + shift, deterministic=deterministic)


def _load(trainer: Any, path: str, architecture: Any = None, **options: Any) -> Any:
    """Loads what TRL would load whole on each rank: the model, by its path, or the reference."""
    # The second one is the reference
    model = getattr(trainer, "model", None)
    if model is not None and adapters_of(model):
        return BaseOfAdapters(model)
    options = {name: value for name, value in options.items() if value not in (None, False) and name != "device_map"}
    revision = options.pop("revision", None)
    folder = path if os.path.isdir(path) else snapshot_download(path, revision=revision)
    config_class = class_of(Path(folder), None).config_class
    model_class = None if architecture is None else architecture._model_mapping[config_class]
    dtype = options.pop("dtype", "float32")
    options["dtype"] = None if dtype == "auto" else getattr(torch, dtype) if isinstance(dtype, str) else dtype
    return from_pretrained(folder, group=trainer.model_group, model_class=model_class, **options)


def _disable_dropout(model: nn.Module) -> None:
    """As TRL's ``disable_dropout_in_model``, which knows of ``nn.Dropout`` alone."""
    sys.modules["trl.trainer.utils"].disable_dropout_in_model(model)
    for adapter in adapters_of(model):
        adapter.dropout = 0.0


def hash_of_ranks(model: nn.Module, group: ProcessGroup | None) -> str:
    """Returns TRL's hashes of the shards of all ranks: a file of log-probabilities is named by it, and models may
    differ in one rank's shards alone."""
    return ",".join(all_gather_objects(sys.modules["trl.trainer.utils"].hash_module(model), group))


def called_once(function: Callable[..., Any], trainer: Any) -> Callable[..., Any]:
    """Returns a reward function that the first of the ranks that share a model calls, for all of them."""
    logs = {"log_extra", "log_metric"}

    def rewards(**given: Any) -> Any:
        def call() -> tuple[list[Any], list[tuple[str, tuple[Any, ...]]]]:
            calls: list[tuple[str, tuple[Any, ...]]] = []
            kept = {name: (lambda *args, name=name: calls.append((name, args))) for name in logs & given.keys()}
            result = function(**{**given, **kept})
            return list(asyncio.run(result) if inspect.iscoroutine(result) else result), calls

        values, calls = broadcast_from_first(call, [trainer.sharing_group])
        for name, args in calls:
            given[name](*args)
        return values

    return rewards


def share_rewards(trainer: Any) -> None:
    """Has each reward function of a trainer called once for the ranks that share a model."""
    functions: list[Any] = getattr(trainer, "reward_funcs", [])
    for i, function in enumerate(functions):
        if not isinstance(function, nn.Module):
            functions[i] = called_once(function, trainer)


class DataAccelerator(accelerate.Accelerator):
    """An accelerator whose processes are the data ranks."""

    data_size: int
    data_rank: int

    @property
    def num_processes(self) -> int:
        return self.data_size

    @property
    def process_index(self) -> int:
        return self.data_rank
