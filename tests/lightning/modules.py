"""A LightningModule of three sharded layers and one of torch's, and a run of it on the ranks of a pool."""

import contextlib
import warnings

import lightning
import torch
import torch.nn.functional as F
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import TorchElasticEnvironment
from lightning.pytorch.utilities import grad_norm
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader, DistributedSampler

import tp_ext
from tests.helpers import torchrun
from tp_ext.lightning import TensorParallelStrategy

QUIET = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}


class Module(lightning.LightningModule):
    def __init__(self, hidden=9, fsdp=False, meta=False, axis="tensor_parallel"):
        super().__init__()
        self.model, self.losses, self.hidden, self.fsdp, self.meta, self.axis = None, [], hidden, fsdp, meta, axis

    def configure_model(self):
        if self.model is not None:
            return
        mesh = self.device_mesh
        group = None if mesh is None else mesh[self.axis]
        if mesh is None and torch.distributed.is_initialized():  # under a strategy that makes no mesh
            group = torch.distributed.group.WORLD
        with torch.device("meta") if self.meta else contextlib.nullcontext():
            self.model = nn.Sequential(
                nn.Linear(4, 6),
                tp_ext.ColumnParallelLinear(6, self.hidden, group=group),
                nn.Tanh(),
                tp_ext.RowParallelLinear(self.hidden, 4, group=group),
            )
        if self.fsdp:
            fully_shard(self.model, mesh=mesh["data_parallel"])

    def _loss(self, batch):
        inputs, target = batch
        return F.mse_loss(self.model(inputs), target)

    def training_step(self, batch, index):
        loss = self._loss(batch)
        self.losses.append(self.trainer.strategy.reduce(loss.detach()).item())
        return loss

    def on_before_optimizer_step(self, optimizer):
        self.log_dict(grad_norm(self, 2))

    def validation_step(self, batch, index):
        loss = self._loss(batch)
        self.log("val", loss, sync_dist=True)
        self.log("rows", float(len(batch[0])), sync_dist=True, reduce_fx="sum")

    def test_step(self, batch, index):
        self.log("test", self._loss(batch), sync_dist=True)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=1e-2)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


def loader(data_size, data_rank=None):
    """Lightning gives each data-parallel rank its rows, and for training shuffles them: not if they are its already."""
    generator = torch.Generator().manual_seed(1)
    rows = [(torch.randn(4, generator=generator), torch.randn(4, generator=generator)) for _ in range(32)]
    sampler = None if data_rank is None else DistributedSampler(rows, data_size, data_rank, shuffle=False)
    return DataLoader(rows, batch_size=8 // data_size, sampler=sampler)


def fit(
    group,
    sizes,
    root,
    *,
    strategy=TensorParallelStrategy,
    save=True,
    ckpt=None,
    epochs=2,
    seed=3,
    monitor=None,
    **options,
):
    """Trains on the ranks of a pool, or without a group; returns losses, metrics and the path of the checkpoint."""
    module_options = {name: options.pop(name) for name in ("hidden", "fsdp", "meta", "axis") if name in options}
    settings = {**QUIET, "accelerator": "cpu", "max_epochs": epochs, "default_root_dir": root, **options}
    data_size, data_rank = 1, None
    if group is not None:
        data_size, data_rank = (sizes[0], group.rank() // sizes[1]) if sizes[0] in (1, 2) else (1, 0)
        settings |= {"strategy": strategy(*sizes, save_distributed_checkpoint=save), "devices": group.size()}
        settings |= {"plugins": [TorchElasticEnvironment()]}
    where = torchrun.variables(group.rank(), group.size()) if group is not None else contextlib.nullcontext()
    with where, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        lightning.seed_everything(seed if seed is not None else 3 + group.rank(), verbose=False)
        module = Module(**module_options)
        kept = ModelCheckpoint(
            root, monitor=monitor, filename="{step}" if monitor else "last", enable_version_counter=False
        )
        trainer = lightning.Trainer(callbacks=[kept], **settings)
        trainer.fit(module, loader(data_size, data_rank), loader(data_size), ckpt_path=ckpt)
        metrics = {name: value.item() for name, value in trainer.callback_metrics.items()}
        metrics |= trainer.test(module, loader(data_size), verbose=False)[0]
    return module.losses, metrics, kept.best_model_path
