"""The Trainer of transformers for a sharded model."""

from __future__ import annotations

import os
from typing import Any

import torch
import transformers
from torch import nn

from tp_ext.checkpoint.directory import load_checkpoint, save_checkpoint
from tp_ext.huggingface.accelerator import check_sharded_over_all, share_batches
from tp_ext.huggingface.load import load_weights
from tp_ext.huggingface.save import save_pretrained

OPTIMIZER = "tp_ext_optimizer"
SCHEDULER = "scheduler.pt"


class Trainer(transformers.Trainer):
    """``transformers.Trainer`` for a model sharded over all ranks of the job.

    All ranks read the same batches; gradients are clipped by the norm of the unsharded model; checkpoints have the
    files of transformers, which every other program reads, and the optimizer's state for any number of ranks. (Its base
    class would take the norm of a rank's shards, and write shards.)

    Args:
        model: of :func:`tp_ext.huggingface.from_pretrained`, or sharded by :func:`tp_ext.auto.apply`.
        args, kwargs: as for ``transformers.Trainer``, which needs ``accelerate``.

    Communicates: the plan's collectives in forward and backward; :func:`tp_ext.clip_grad_norm_` at each step.

    Raises:
        ValueError: the model is not sharded, or not over all ranks of the job (with a data axis, write the loop
        yourself); the environment lacks the variables of torchrun.
    """

    def __init__(self, model: nn.Module, args: Any = None, **kwargs: Any) -> None:
        self._ranks = check_sharded_over_all(model)
        super().__init__(model, args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator; its ranks are one data-parallel rank (:func:`share_batches`)."""
        super().create_accelerator_and_postprocess()
        if self.args.world_size != self._ranks:
            raise ValueError(
                f"args: know of {self.args.world_size} processes and must know of all {self._ranks} of the job; start "
                "it by torchrun, or set RANK, LOCAL_RANK and WORLD_SIZE"
            )
        share_batches(self.accelerator, self.model)
        self.gather_function = self.accelerator.gather_for_metrics

    def get_tp_size(self) -> int:
        """The number of ranks that read the same batch."""
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
        if checkpoint is None or not os.path.isdir(os.path.join(checkpoint, OPTIMIZER)):  # save_only_model
            return
        load_checkpoint(os.path.join(checkpoint, OPTIMIZER), self.model, _unwrapped(self.optimizer))
        state = torch.load(os.path.join(checkpoint, SCHEDULER), weights_only=True)
        self.lr_scheduler.load_state_dict(state)

    def _load_best_model(self) -> None:
        load_weights(self.model, self.state.best_model_checkpoint)


def _unwrapped(optimizer: Any) -> Any:
    """The optimizer itself, which accelerate wraps."""
    return getattr(optimizer, "optimizer", optimizer)
