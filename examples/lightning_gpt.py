"""Trains the model of train_gpt.py by Lightning, with data and tensor parallelism, and with the losses of train_gpt.py:

    torchrun --standalone --nproc-per-node 4 examples/lightning_gpt.py --dp 2 --tp 2 --data PATH --steps 300

The options are those of train_gpt.py for the axes ``--dp`` and ``--tp``. ``--resume`` continues a run on any number of
ranks along them.
"""

import sys

from data import batch_of, read_text, split
from options import parse_options

ONLY = {"pp": 1, "ep": 1, "cp": 1, "zero": 0, "optimizer": "adamw", "recompute": None, "compile": False, "experts": 0}

if __name__ == "__main__":  # before torch is imported: --help and mistakes are answered at once
    OPTIONS = parse_options(__doc__)
    for name, value in ONLY.items():
        if getattr(OPTIONS, name) != value:
            sys.exit(f"--{name}: {getattr(OPTIONS, name)} must be {value}; take train_gpt.py")
    TEXTS = split(read_text(OPTIONS.data, OPTIONS.max_mib * 2**20), OPTIONS.seq_length)

import argparse
import itertools
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import lightning
import torch
from gpt import GPT
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from run_log import RunLog
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from train_gpt import config_of, learning_rate, peak_memory_mib

import tp_ext
from tp_ext.lightning import TensorParallelStrategy

PRECISION = {"float32": "32-true", "bfloat16": "bf16-mixed", "float64": "64-true"}
Batch = tuple[Tensor, Tensor]


class Batches(IterableDataset[Batch]):
    """Batches of all data-parallel ranks, from the given step on."""

    def __init__(self, text: Tensor, steps: Any, options: argparse.Namespace) -> None:
        self.text, self.steps, self.options = text, steps, options

    def __iter__(self) -> Iterator[Batch]:
        for step in self.steps:
            yield batch_of(self.text, step, self.options, torch.device("cpu"))


class LightningGPT(lightning.LightningModule):
    """The model, its batches and its optimizer."""

    def __init__(self, options: argparse.Namespace, texts: tuple[bytes, bytes]) -> None:
        super().__init__()
        self.options, self.model = options, None
        self.texts = [torch.frombuffer(bytearray(text), dtype=torch.uint8) for text in texts]

    def configure_model(self) -> None:
        if self.model is not None:
            return
        self.model = GPT(config_of(self.options), self.device_mesh["tensor_parallel"])
        tp_ext.reset_parameters(self.model)  # by the names in GPT and the seed, as train_gpt.py

    def _loss(self, batch: Batch, step: int) -> Tensor:
        data = self.device_mesh["data_parallel"]
        ids, target = (one.chunk(data.size())[data.get_local_rank()] for one in batch)
        with tp_ext.random.at(step, 0, batch_offset=data.get_local_rank() * len(ids), seq=ids.shape[1]):
            return self.model.loss(ids, target)

    def training_step(self, batch: Batch, index: int) -> Tensor:
        loss = self._loss(batch, self.global_step)
        self.log("loss", loss, sync_dist=True)
        return loss

    def validation_step(self, batch: Batch, index: int) -> None:
        self.log("held_out_loss", self._loss(batch, self.global_step), sync_dist=True, batch_size=1)

    def configure_optimizers(self) -> Any:
        options = self.options
        optimizer = torch.optim.AdamW(self.parameters(), lr=options.lr, betas=(0.9, 0.95), weight_decay=0.1)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: learning_rate(step, options) / options.lr)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]

    def train_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(Batches(self.texts[0], itertools.count(self.global_step), self.options), batch_size=None)

    def val_dataloader(self) -> DataLoader[Batch]:
        return DataLoader(Batches(self.texts[1], range(self.options.eval_batches), self.options), batch_size=None)


class ShowRun(Callback):
    """Shows what train_gpt.py shows: losses, tokens a second and memory of each step, and the timeline of the third."""

    def __init__(self, options: argparse.Namespace) -> None:
        self.options, self.row = options, None

    def on_train_start(self, trainer: lightning.Trainer, module: Any) -> None:
        self.first, self.stack = trainer.global_step, ExitStack()
        self.lines = RunLog(self.options, self.first, trainer.global_rank)
        mesh = module.device_mesh
        own = sum(param.numel() for param in module.parameters())
        self.lines.print(f"dp {mesh.size(0)} x tp {mesh.size(1)} on {mesh.device_type}, {own:,} parameters on rank 0")

    def on_train_batch_start(self, trainer: lightning.Trainer, module: Any, batch: Batch, index: int) -> None:
        self._write()
        self.begin, self.lr = time.perf_counter(), trainer.optimizers[0].param_groups[0]["lr"]
        self.step = trainer.global_step
        if self.options.timeline and self.step == self.first + 2:
            self.timeline = self.stack.enter_context(tp_ext.debug.record_timeline())

    def on_train_batch_end(
        self, trainer: lightning.Trainer, module: Any, outputs: Any, batch: Batch, index: int
    ) -> None:
        rate = batch[0].numel() / (time.perf_counter() - self.begin)
        loss = trainer.callback_metrics["loss"].item()
        self.row = {"step": self.step, "loss": loss, "held_out": None, "lr": self.lr, "rate": rate}
        self.row["memory_mib"] = peak_memory_mib(module.device)
        if self.options.timeline and self.step == self.first + 2:
            self.stack.close()
            if trainer.is_global_zero:
                self.timeline.save(self.options.out / "timeline.png")

    def on_validation_end(self, trainer: lightning.Trainer, module: Any) -> None:
        if self.row is not None:
            self.row["held_out"] = trainer.callback_metrics["held_out_loss"].item()

    def _write(self) -> None:
        """A row is written when the next step begins: the loss of the held-out text comes after the step."""
        if self.row is not None:
            self.lines.step(**self.row)
            self.row = None

    def finish(self) -> None:
        """After the last evaluation."""
        self._write()
        self.lines.close()
        if self.lines.rank == 0:
            self.lines.print(f"{self.lines.summary()}; checkpoint and plot in {self.options.out}/")
            self.lines.plot(self.options.out / "loss.png")


def train(options: argparse.Namespace, texts: tuple[bytes, bytes], **settings: Any) -> None:
    """Trains by the options; ``settings`` are further arguments of the trainer."""
    options.out.mkdir(parents=True, exist_ok=True)
    path, every = options.out / "lightning.ckpt", {}
    if options.eval_every and options.eval_every <= options.steps:
        every = {"val_check_interval": options.eval_every, "check_val_every_n_epoch": None}
    local, ranks = int(os.environ["LOCAL_WORLD_SIZE"]), int(os.environ["WORLD_SIZE"])
    # Ranks of one host without GPUs communicate through shared memory
    backend = options.backend or (None if torch.cuda.is_available() or local < ranks else "tp_shm")
    lightning.seed_everything(options.seed, verbose=False)
    module, shown = LightningGPT(options, texts), ShowRun(options)
    saved = ModelCheckpoint(
        options.out, path.stem, every_n_train_steps=options.save_every or options.steps, enable_version_counter=False
    )
    trainer = lightning.Trainer(
        accelerator="gpu" if torch.cuda.is_available() else "cpu",
        devices=local,
        num_nodes=ranks // local,
        strategy=TensorParallelStrategy(options.dp, options.tp, process_group_backend=backend),
        precision=PRECISION[options.dtype],
        max_steps=options.steps,
        limit_val_batches=options.eval_batches if every else 0,
        num_sanity_val_steps=0,
        gradient_clip_val=1.0,
        use_distributed_sampler=False,
        callbacks=[shown, saved],
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        **every,
        **settings,
    )
    trainer.fit(module, ckpt_path=path if options.resume else None)
    trainer.save_checkpoint(path)
    if not every or options.steps % options.eval_every:
        trainer.limit_val_batches = options.eval_batches
        trainer.validate(module, verbose=False)
    shown.finish()


if __name__ == "__main__":
    train(OPTIONS, TEXTS)
