"""The Trainer of transformers for a sharded model."""

from __future__ import annotations

import inspect
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import transformers
from torch import nn

from tp_ext._object_collectives import call_on_all_ranks
from tp_ext.checkpoint.directory import load_checkpoint, save_checkpoint
from tp_ext.checkpoint.files.plain_values import read_saved
from tp_ext.checkpoint.full_optimizer import load_full_optimizer_state_dict, with_names
from tp_ext.huggingface.accelerator import check_sharded_over_all, share_batches
from tp_ext.huggingface.load import load_weights
from tp_ext.huggingface.save import save_pretrained

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


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` for a model sharded over all ranks of the job.

    All ranks read the same batches; gradients are clipped by the norm of the unsharded model; checkpoints have the
    files of transformers, which every other program reads, and the optimizer's state for any number of ranks. (Its base
    class would take the norm of a rank's shards, and write shards.) Mixed precision and ``torch_compile`` are those of
    one process. ``train(resume_from_checkpoint=)`` also goes on from a checkpoint of ``transformers.Trainer`` in one
    process; one of ``save_only_model`` starts anew, with a warning, and another kind is a ValueError.

    Args:
        model: of :func:`tp_ext.huggingface.from_pretrained`, or sharded by :func:`tp_ext.auto.apply`.
        args, rest, kwargs: as for ``transformers.Trainer``, which needs ``accelerate``, but for ``model_init``.

    Communicates: the plan's collectives in forward and backward; :func:`tp_ext.clip_grad_norm_` at each step.

    Raises:
        ValueError: the model is not sharded, or not over all ranks of the job (with a data axis, write the loop
        yourself); the environment lacks the variables of torchrun; ``model_init`` is given, or no model.
        NotImplementedError: a search for hyperparameters.
    """

    def __init__(self, model: nn.Module | None = None, args: Any = None, *rest: Any, **kwargs: Any) -> None:
        given = inspect.signature(transformers.Trainer.__init__).bind(self, model, args, *rest, **kwargs).arguments
        if model is None or given.get("model_init") is not None:
            raise ValueError(f"model_init: {_NO_MODEL_INIT}")
        # Before the base class, which makes the accelerator and takes the ranks for data-parallel ones
        self._ranks = check_sharded_over_all(model)
        super().__init__(model, args, *rest, **kwargs)

    def hyperparameter_search(self, *args: Any, **kwargs: Any) -> Any:
        """Raises NotImplementedError: its trials would be chosen on each rank."""
        raise NotImplementedError(f"hyperparameter_search: {_NO_MODEL_INIT}")

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator; its ranks are one data-parallel rank (:func:`share_batches`)."""
        super().create_accelerator_and_postprocess()
        if self.args.world_size != self._ranks:
            raise ValueError(
                f"args: know of {self.args.world_size} processes and must know of all {self._ranks} of the job; start "
                "it by torchrun, or set RANK, LOCAL_RANK and WORLD_SIZE"
            )
        share_batches(self.accelerator, self.model)
        # The base class has taken the method that share_batches has replaced since
        self.gather_function = self.accelerator.gather_for_metrics

    def get_tp_size(self) -> int:
        """Returns the number of ranks that read the same batch."""
        return self._ranks

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Writes the model as :func:`tp_ext.huggingface.save_pretrained`; every rank calls it."""
        folder = output_dir or self.args.output_dir
        save_pretrained(self.model, folder)
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
        load_weights(self.model, resume_from_checkpoint)

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
        load_weights(self.model, self.state.best_model_checkpoint)


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
