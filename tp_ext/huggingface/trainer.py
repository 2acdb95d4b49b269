"""The Trainer of transformers for a sharded model."""

from __future__ import annotations

import functools
import inspect
import os
import shutil
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn
from torch.distributed import DeviceMesh

from tp_ext._object_collectives import broadcast_from_first, call_on_all_ranks
from tp_ext.checkpoint.directory import load_checkpoint, save_checkpoint
from tp_ext.checkpoint.files.plain_values import read_saved
from tp_ext.checkpoint.full_optimizer import load_full_optimizer_state_dict, with_names
from tp_ext.group import Group, process_group
from tp_ext.huggingface.accelerator import refuse_shards
from tp_ext.huggingface.adapters import adapters_of, load_adapter, save_adapter
from tp_ext.huggingface.load import load_weights
from tp_ext.huggingface.prepare import AcceleratorMethods, shared_mesh
from tp_ext.huggingface.save import save_pretrained
from tp_ext.huggingface.trl_trainers import (
    DataAccelerator,
    check_arguments,
    check_class,
    count_data_ranks,
    data_processes,
    give_reference,
    share_rewards,
)
from tp_ext.model.census import census

ARGUMENT = "resume_from_checkpoint"
OPTIMIZER = "tp_ext_optimizer"
FOREIGN_OPTIMIZER = "optimizer.pt"  # of transformers.Trainer in one process
SCHEDULER = "scheduler.pt"
STATE_FILES = ("*optimizer*", SCHEDULER, "rng_state*", "global_step*")  # the last of DeepSpeed; "optimizer_0" of FSDP
_NO_MODEL_INIT = (
    "models must be made and sharded before; pass model=, and for each trial of a search make a model and a Trainer, "
    "with values that rank 0 has chosen"
)
OPTIONAL = {"initial_lr", "param_names"}  # of a parameter group: set by schedulers, by torch for named parameters


def _over_data_ranks(name: str) -> Any:
    """Returns a method of the base class, in which functions of accelerate are over data ranks."""

    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        with data_processes(self):
            return getattr(super(Trainer, self), name)(*args, **kwargs)

    return method


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` for a model sharded over all ranks of the job, or over equal parts of them.

    Ranks that share a model read the same batches, others other ones, whose gradients DDP averages; gradients are
    clipped by the norm of the unsharded model; checkpoints have the files of transformers, which every other program
    reads, and the optimizer's state for any number of ranks. (Its base class would take the norm of a rank's shards,
    and write shards.) Mixed precision and ``torch_compile`` are those of one process.
    ``train(resume_from_checkpoint=)`` also goes on from a checkpoint of ``transformers.Trainer`` in one process; one of
    ``save_only_model`` starts anew, with a warning, and another kind is a ValueError.

    Args:
        model: of :func:`tp_ext.huggingface.from_pretrained`, or sharded by :func:`tp_ext.auto.apply`.
        args, kwargs: as for ``transformers.Trainer``, which needs ``accelerate``, but for ``model_init``.

    Communicates: the plan's collectives in forward and backward; :func:`tp_ext.clip_grad_norm_` at each step; as
    :func:`tp_ext.huggingface.prepare`.

    Raises:
        ValueError: the model is not sharded, or not over equal parts of the job; the environment lacks the variables of
            torchrun; ``model_init`` is given, or no model.
        NotImplementedError: a search for hyperparameters.
    """

    shares_model = True  # plain trainers around a sharded model are refused
    mesh: DeviceMesh | None = None  # dp x tp; None in one process

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(super().__init__).bind(*args, **kwargs)
        model, options = bound.arguments.get("model"), bound.arguments.get("args")
        if model is None or bound.arguments.get("model_init") is not None:
            raise ValueError(f"model_init: {_NO_MODEL_INIT}")
        # Before the base class, which makes the accelerator and takes the ranks for data-parallel ones
        self._ranks = world_of(model, options)
        self.model_group = group_of(model)
        check_arguments(bound.arguments, options, self._ranks)
        self._reference = bound.arguments.get("ref_model")
        give_reference(bound, options)
        with data_processes(self):
            super().__init__(*bound.args, **bound.kwargs)
        if self._ranks > 1:
            share_rewards(self)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Raises NotImplementedError: its trials would be chosen on each rank."""
        raise NotImplementedError(f"hyperparameter_search: {_NO_MODEL_INIT}")

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator; ranks that share a model are one data-parallel rank."""
        super().create_accelerator_and_postprocess()
        if self.args.world_size != self._ranks:
            raise ValueError(
                f"args: know of {self.args.world_size} processes and must know of all {self._ranks} of the job; start "
                "it by torchrun, or set RANK, LOCAL_RANK and WORLD_SIZE"
            )
        if self._ranks == 1:
            return
        # A path has become a model
        check_arguments({"model": self.model, "ref_model": self._reference}, self.args, self._ranks)
        accelerator = self.accelerator
        self.mesh = shared_mesh(accelerator, self.model, (), self._ranks)
        AcceleratorMethods(accelerator, self.model, self.mesh)
        accelerator.__class__ = DataAccelerator
        accelerator.data_size, accelerator.data_rank = self.mesh["dp"].size(), self.mesh["dp"].get_local_rank()
        refuse_shards(accelerator)
        count_data_ranks(self.args, accelerator.data_size)
        # The base class has taken the method that has been replaced since
        gather, objects = accelerator.gather_for_metrics, self.args.eval_use_gather_object
        self.gather_function = functools.partial(gather, use_gather_object=objects)

    @property
    def data_group(self) -> dist.ProcessGroup | None:
        """The ranks that read other batches, this one among them."""
        return None if self.mesh is None else self.mesh["dp"].get_group()

    @property
    def sharing_group(self) -> dist.ProcessGroup | None:
        """The ranks that share this rank's model."""
        return None if self.mesh is None else self.mesh["tp"].get_group()

    def get_tp_size(self) -> int:
        """Returns 1: the processes of the accelerator are data ranks."""
        return 1

    def get_total_train_batch_size(self, args: Any) -> int:
        """Returns the rows of a step of all data ranks."""
        return int(self._train_batch_size * args.gradient_accumulation_steps * self.accelerator.num_processes)

    def _get_dataloader(self, *args: Any, **kwargs: Any) -> Any:
        loader = super()._get_dataloader(*args, **kwargs)
        base = getattr(loader, "base_dataloader", loader)
        seeds = base.worker_init_fn
        # transformers seeds the workers of each process differently: those of ranks that share a model must be alike
        if isinstance(seeds, functools.partial) and "rank" in seeds.keywords:
            rank = self.accelerator.process_index
            base.worker_init_fn = functools.partial(seeds.func, *seeds.args, **{**seeds.keywords, "rank": rank})
        return loader

    def _precompute_ref_logps(self, dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Of TRL: the first rank writes a file that all read; for a data set in memory each rank would name another."""
        path_of = dataset._get_cache_file_path
        groups = [process_group(dist.group.WORLD)] if self._ranks > 1 else []
        dataset._get_cache_file_path = lambda fingerprint: broadcast_from_first(lambda: path_of(fingerprint), groups)
        try:
            return super()._precompute_ref_logps(dataset, *args, **kwargs)
        finally:
            del dataset._get_cache_file_path

    train, evaluate, predict = map(_over_data_ranks, ("train", "evaluate", "predict"))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model as :func:`tp_ext.huggingface.save_pretrained`, of one with adapters these alone; every rank
        calls it."""
        folder = output_dir or self.args.output_dir
        save: Callable[[Any, str], None] = save_adapter if adapters_of(self.model) else save_pretrained
        # Ranks of other data have the same weights: the first of them write
        is_first = self.accelerator.process_index == 0
        call_on_all_ranks(self.data_group, lambda: save(self.model, folder) if is_first else None)
        if self.args.should_save:
            tokenizer = self.processing_class or getattr(self.data_collator, "tokenizer", None)
            if tokenizer is not None:
                tokenizer.save_pretrained(folder)
            torch.save(self.args, os.path.join(folder, "training_args.bin"))
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save", revision=self.args.hub_revision)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        save_checkpoint(os.path.join(output_dir, OPTIMIZER), self.model, _unwrapped(self.optimizer))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), os.path.join(output_dir, SCHEDULER))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        _load(self.model, resume_from_checkpoint)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        """Loads moments and schedule of a checkpoint of this class, or of ``transformers.Trainer`` in one process."""
        if checkpoint is None:
            return
        kind = self._on_all_ranks(lambda: _kind_of(Path(checkpoint)))
        optimizer = _unwrapped(self.optimizer)
        if kind == OPTIMIZER:
            load_checkpoint(os.path.join(checkpoint, OPTIMIZER), self.model, optimizer)
        elif kind == FOREIGN_OPTIMIZER:
            names = {id(parameter): name for name, parameter in self.model.named_parameters()}
            groups = [[names[id(parameter)] for parameter in group["params"]] for group in optimizer.param_groups]
            path = os.path.join(checkpoint, FOREIGN_OPTIMIZER)
            state = self._on_all_ranks(lambda: _named(path, optimizer, groups))
            load_full_optimizer_state_dict(self.model, optimizer, state)
        else:
            if self.args.process_index == 0:
                warnings.warn(
                    f"resume_from_checkpoint: {checkpoint!r} has no optimizer, as save_only_model saves it; moments "
                    "and learning rate start anew",
                    stacklevel=2,
                )
            return
        schedule = os.path.join(checkpoint, SCHEDULER)
        self.lr_scheduler.load_state_dict(
            self._on_all_ranks(lambda: read_saved(Path(schedule), ARGUMENT, ("last_epoch",)))
        )

    def _on_all_ranks(self, act: Callable[[], Any]) -> Any:
        return call_on_all_ranks(dist.group.WORLD if self._ranks > 1 else None, act)

    def _load_rng_state(self, checkpoint: str | None) -> None:
        """Restores the generators; after training on another number of ranks those of rank 0, which all ranks follow.

        The base class names the files by the number of processes, and would find none."""
        files = sorted(Path(checkpoint).glob("rng_state*.pth")) if checkpoint is not None else []
        if not files or len(files) == self._ranks:
            return super()._load_rng_state(checkpoint)
        name = "rng_state.pth" if self._ranks == 1 else f"rng_state_{self.args.process_index}.pth"
        with tempfile.TemporaryDirectory() as folder:
            shutil.copy(files[0], Path(folder) / name)
            return super()._load_rng_state(folder)

    def _load_best_model(self) -> None:
        _load(self.model, self.state.best_model_checkpoint)


def trainer_for(cls: type) -> type:
    """Returns the subclass of a trainer that trains a sharded model as ``cls`` trains the unsharded one.

    ::

        SFT = tp_ext.huggingface.trainer_for(trl.SFTTrainer)
        SFT(model, trl.SFTConfig(..), train_dataset=rows, processing_class=tokenizer).train()

    It is used as ``cls``: the same arguments, logs and files; see :class:`Trainer`, which is that of
    ``transformers.Trainer``. Where ``model`` may be a path, the model is read by :func:`from_pretrained`, sharded over
    all ranks; so are references that ``cls`` loads. Reward functions are called on one of the ranks that share a model.

    Args:
        cls: ``transformers.Trainer`` or a subclass, of TRL SFT, DPO, Reward, KTO, GRPO or RLOO.

    Returns:
        The same class for the same ``cls``.

    Raises:
        TypeError: no such class; its methods have other parameters than those of the installed transformers.
        The class raises what :class:`Trainer` raises, and ValueError, if there are several ranks, for options that are
        not right over shards: ``peft_config`` (:func:`tp_ext.add_lora` is), ``use_vllm``, ``use_liger_kernel``, ..
    """
    if not (isinstance(cls, type) and issubclass(cls, transformers.Trainer)):
        raise TypeError(f"cls: {cls!r} must be transformers.Trainer or a subclass")
    return _trainer_for(cls)


@functools.cache
def _trainer_for(cls: type) -> type:
    if cls is transformers.Trainer or issubclass(cls, Trainer):
        return Trainer if cls is transformers.Trainer else cls
    check_class(cls)
    for name in vars(Trainer).keys() & vars(transformers.Trainer).keys():
        theirs, plain = getattr(cls, name), getattr(transformers.Trainer, name)
        if name == "__init__" or not inspect.isfunction(plain):
            continue
        found, expected = (list(inspect.signature(function).parameters) for function in (theirs, plain))
        if found != expected and "args" not in found:
            package = sys.modules[theirs.__module__.partition(".")[0]]
            version = getattr(package, "__version__", "?")
            raise TypeError(
                f"cls: {cls.__name__}.{name} of {package.__name__} {version} has parameters {found} and must have "
                f"{expected}, those of transformers {transformers.__version__}"
            )
    return type(f"Sharded{cls.__name__}", (Trainer, cls), {"__doc__": cls.__doc__, "__module__": __name__})


def world_of(model: Any, options: Any) -> int:
    """Returns the number of ranks of the job; raises ValueError unless the model is sharded, over some of them."""
    if isinstance(model, str):
        # Arguments of transformers begin the process group of torchrun. The base class would make its own too late
        known = (transformers.TrainingArguments() if options is None else options).world_size
        if known != (started := int(os.environ.get("WORLD_SIZE", 1))):
            raise ValueError(
                f"args: know of {known} processes and must know of all {started} of torchrun, which share the model; "
                "on CPUs pass args with use_cpu=True"
            )
    world = dist.get_world_size() if dist.is_initialized() else 1
    # Over which, all ranks find together. A path is read by the base class
    if not isinstance(model, str) and getattr(model, "tp_ext_plan", None) is None:
        raise ValueError(f"model: is not sharded and must be sharded over all {world} ranks of the job, or equal parts")
    return world


def group_of(model: Any) -> Group:
    """Returns the ranks over which the model is sharded; all ranks for one that the base class loads."""
    if isinstance(model, str):
        return dist.group.WORLD if dist.is_initialized() else None
    return next((axis.name for axis in census(model).groups.axes), None)


def _load(model: Any, folder: Any) -> None:
    """Reads what :meth:`Trainer.save_model` has written."""
    (load_adapter if adapters_of(model) else load_weights)(model, folder)


def _unwrapped(optimizer: Any) -> Any:
    """Returns the optimizer itself, which accelerate wraps."""
    return getattr(optimizer, "optimizer", optimizer)


def _kind_of(checkpoint: Path) -> str | None:
    """Returns the name of the optimizer's state in a checkpoint; None: there is none, as ``save_only_model`` saves
    it."""
    for name in (OPTIMIZER, FOREIGN_OPTIMIZER):
        if (checkpoint / name).exists() and (checkpoint / SCHEDULER).is_file():
            return name
    if files := sorted(file.name for pattern in STATE_FILES for file in checkpoint.glob(pattern)):
        raise ValueError(
            f"resume_from_checkpoint: {str(checkpoint)!r} has {files}; the state of training can only be read from "
            f"{SCHEDULER} with {OPTIMIZER}, or with {FOREIGN_OPTIMIZER} of one process. To start anew from its "
            "weights, load them by from_pretrained, and train without resume_from_checkpoint"
        )
    return None


def _named(path: str, optimizer: torch.optim.Optimizer, groups: list[list[str]]) -> dict[str, Any]:
    """Returns the state of an optimizer of the unsharded model, with names in place of the numbers of parameters.

    torch numbers them in the order of the parameter groups, which is that of the model: the sharded one has it, too."""
    # Mapped: each rank reads its shards, and p copies of the full state would not fit the host
    saved = read_saved(Path(path), ARGUMENT, ("state", "param_groups"), mmap=True)
    where = f"{ARGUMENT}: {path!r}"
    named = with_names(saved, groups, where)
    options = [sorted(group[0].keys() - OPTIONAL) for group in (optimizer.param_groups, named["param_groups"]) if group]
    if options[0] != options[-1]:
        raise ValueError(f"{where} is of another optimizer: options {options[-1]}, here {options[0]}")
    return named
