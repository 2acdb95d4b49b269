"""A strategy of Lightning: data parallelism around layers that shard their weights by themselves."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import ModelParallelStrategy
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim import Optimizer

from tp_ext._object_collectives import call_on_all_ranks, true_on_any_rank
from tp_ext.group import process_group
from tp_ext.lightning.checkpoints import META, load_checkpoint
from tp_ext.model.census import census
from tp_ext.model.names import reset_parameters
from tp_ext.parallel.average_gradients import average_gradients
from tp_ext.parallel.pipeline.stages import materialise
from tp_ext.parallel.replicas import check_layers, copy_from_first
from tp_ext.random import manual_seed

_SIZES = "data_parallel_size", "tensor_parallel_size"


class TensorParallelStrategy(ModelParallelStrategy):
    """Trains a LightningModule whose layers are sharded over the tensor-parallel ranks, on other batches along the
    data-parallel ones.

    ::

        class Model(lightning.LightningModule):
            def configure_model(self):
                if not hasattr(self, "model"):  # Lightning calls it for each fit, validate and test
                    self.model = GPT(group=self.device_mesh["tensor_parallel"])

        strategy = TensorParallelStrategy(data_parallel_size=2, tensor_parallel_size=4)
        Trainer(strategy=strategy, devices=8, gradient_clip_val=1.0).fit(Model(), loader)

    Losses and gradients are those of one process that sees the batches of all data-parallel ranks, as their mean. The
    initial weights are drawn from ``seed_everything``'s seed, or from rank 0's, on all ranks; a model on meta gets them
    by :func:`tp_ext.reset_parameters`. Modules under ``fully_shard(.., mesh=device_mesh["data_parallel"])``
    average their gradients by themselves. ``self.log(.., sync_dist=True)`` and ``self.all_gather`` are over the
    data-parallel ranks.

    Args: those of ``ModelParallelStrategy``.
        save_distributed_checkpoint: True: a folder of ``torch.distributed.checkpoint``, for torch 2.15 and newer.
            False: one file with the unsharded model and its optimizers, which the same LightningModule without ranks
            loads, too. ``fit(ckpt_path=)`` loads both forms, of any sizes.

    Communicates: after the last backward of a step :func:`tp_ext.parallel.average_gradients` over the data-parallel
    ranks; in ``setup`` one broadcast of each parameter and buffer over them.

    Raises:
        ValueError: the sizes do not multiply to the number of ranks; a layer is sharded over other ranks than
            ``device_mesh["tensor_parallel"]``, or none is sharded; parameters on several devices; a checkpoint that is
            not whole, or of another model. On all ranks, and nothing has changed.
    """

    averages_gradients = True  # for tp_ext.outside.trainers, which checks Lightning's own strategies
    _synchronise, _seed = True, -1

    def setup_environment(self) -> None:
        """Makes the mesh and seeds all ranks alike."""
        self._check_sizes()
        super().setup_environment()
        if self._seed < 0:  # of the first fit, validate or test
            self._seed = int(os.environ.get("PL_GLOBAL_SEED") or self.broadcast(torch.initial_seed()))
            manual_seed(self._seed)

    def _check_sizes(self) -> None:
        ranks, local = self.num_nodes * self.num_processes, self.num_processes
        sizes_wanted = self._data_parallel_size, self._tensor_parallel_size
        sizes = [
            auto if size == "auto" else size for size, auto in zip(sizes_wanted, (self.num_nodes, local), strict=True)
        ]
        for name, size in zip(_SIZES, sizes, strict=True):
            if not isinstance(size, int) or isinstance(size, bool) or size < 1:
                raise ValueError(f"{name}: {size!r} must be an integer of at least 1, or 'auto'")
        if sizes[0] * sizes[1] != ranks:
            raise ValueError(
                f"data_parallel_size: {sizes[0]} times tensor_parallel_size = {sizes[1]} must be the {ranks} ranks of "
                f"num_nodes = {self.num_nodes} times devices = {local}"
            )

    def setup(self, trainer: Trainer) -> None:
        """Draws the weights of a model on meta, checks its layers, and makes replicas equal."""
        model: Any = self.model
        data = self.device_mesh["data_parallel"]
        tensor = self.device_mesh["tensor_parallel"]
        call_on_all_ranks(process_group(dist.group.WORLD), lambda: check_layers(census(model), tensor, data))
        materialise(model, self.root_device, reset_parameters)
        manual_seed(self._seed, self.device_mesh, "tensor_parallel")  # masks of other batches are others
        super().setup(trainer)
        copy_from_first(census(model), data)

    @property
    def _averages(self) -> bool:
        """True if gradients are averaged after this backward."""
        return self._synchronise and self.device_mesh["data_parallel"].size() > 1

    def backward(self, closure_loss: Tensor, optimizer: Optimizer | None, *args: Any, **kwargs: Any) -> Tensor:
        """Runs as in the base class; gradients are complete before ``on_after_backward``."""
        module: Any = self.lightning_module
        self.pre_backward(closure_loss)
        loss: Tensor = self.precision_plugin.pre_backward(closure_loss, module)
        self.precision_plugin.backward(loss, module, optimizer, *args, **kwargs)
        if self._averages:
            average_gradients(module, self.device_mesh["data_parallel"])
        loss = self.precision_plugin.post_backward(loss, module)
        self.post_backward(loss)
        return loss

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Within it backwards accumulate this rank's gradients alone."""
        model: Any = self.model
        sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        try:
            self._set_synchronise(sharded, False)
            yield
        finally:
            self._set_synchronise(sharded, True)

    def _set_synchronise(self, sharded: list[FSDPModule], synchronise: bool) -> None:
        self._synchronise = synchronise
        for module in sharded:
            module.set_requires_gradient_sync(synchronise, recurse=False)

    def reduce(self, tensor: Any, group: Any = None, reduce_op: Any = "mean") -> Any:
        """Reduces over the data-parallel ranks: others have the same numbers."""
        group = group or self.device_mesh["data_parallel"].get_group()
        if isinstance(tensor, Tensor) and reduce_op in ("mean", "avg"):  # which backends lack, for integers or at all
            total = super().reduce(tensor, group, "sum")
            return total.copy_(total / dist.get_world_size(group))
        return super().reduce(tensor, group, reduce_op)

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:
        """Reduces over all ranks: callbacks decide by it whether to stop, and which checkpoint is the best."""
        # All agree if none disagrees
        return true_on_any_rank(bool(decision) != all, [process_group(dist.group.WORLD)], self.root_device) != all

    def all_gather(self, tensor: Tensor, group: Any = None, sync_grads: bool = False) -> Tensor:
        """Gathers over the data-parallel ranks: others have the same numbers."""
        return super().all_gather(tensor, group or self.device_mesh["data_parallel"].get_group(), sync_grads)

    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        """Writes a checkpoint; every rank calls it. One that is not written to its end cannot be loaded."""
        if self._save_distributed_checkpoint:
            if self.is_global_zero:
                (Path(filepath) / META).unlink(missing_ok=True)
            self.barrier()
        super().save_checkpoint(checkpoint, filepath, storage_options)

    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        """Loads model and optimizers from a checkpoint of any sizes; returns what else is in it."""
        module: Any = self.lightning_module
        path = Path(self.broadcast(checkpoint_path))
        return load_checkpoint(path, module, self.optimizers, module.strict_loading, weights_only)
