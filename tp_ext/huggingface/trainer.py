"""The Trainer of transformers for a sharded model."""

from __future__ import annotations

import os
from typing import Any

import torch
import torch.distributed as dist
import transformers
from accelerate.data_loader import prepare_data_loader
from torch import nn

from tp_ext.checkpoint.directory import load_checkpoint, save_checkpoint
from tp_ext.huggingface.load import load_weights
from tp_ext.huggingface.save import save_pretrained
from tp_ext.parallel.grad_norm import clip_grad_norm_

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
        plan = getattr(model, "tp_ext_plan", None)
        world = dist.get_world_size() if dist.is_initialized() else 1
        if plan is None or plan.p != world:
            found = "is not sharded" if plan is None else f"is sharded over {plan.p} ranks"
            raise ValueError(f"model: {found} and must be sharded over all {world} ranks of the job")
        self._ranks = world
        super().__init__(model, args, **kwargs)
        if self.args.world_size != world:
            raise ValueError(
                f"args: know of {self.args.world_size} processes and must know of all {world} of the job; start it by "
                "torchrun, or set RANK, LOCAL_RANK and WORLD_SIZE"
            )

    def create_accelerator_and_postprocess(self) -> None:
        """Makes the accelerator; its ranks are one data-parallel rank: it neither wraps the model nor shards data."""
        super().create_accelerator_and_postprocess()
        if self._ranks == 1:
            return
        accelerator = self.accelerator

        def same_batches(loader: Any, **_: Any) -> Any:
            return prepare_data_loader(
                loader,
                accelerator.device,
                num_processes=1,
                process_index=0,
                put_on_device=accelerator.device_placement,
                use_seedable_sampler=True,  # all ranks shuffle alike, whatever their generators
                data_seed=accelerator.dataloader_config.data_seed,
                non_blocking=accelerator.non_blocking,
            )

        def own_values(values: Any, **options: Any) -> Any:
            accelerator.gather = lambda one: one  # all ranks have all values; only the last batch is cut
            try:
                return type(accelerator).gather_for_metrics(accelerator, values, **options)
            finally:
                del accelerator.gather

        accelerator.prepare_data_loader = same_batches
        accelerator.prepare_model = lambda model, **_: model
        accelerator.gather_for_metrics = self.gather_function = own_values

    def get_tp_size(self) -> int:
        """The number of ranks that read the same batch."""
        return self._ranks

    def _clip_grad_norm(self, model: nn.Module) -> Any:
        return clip_grad_norm_(self.model, self.args.max_grad_norm)

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        return clip_grad_norm_(self.model, float("inf")) if grad_norm is None else grad_norm

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
