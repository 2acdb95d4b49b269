"""Methods of an accelerator of accelerate whose processes share the batches of a data-parallel rank."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterable, Iterator
from types import SimpleNamespace
from typing import Any

import accelerate
import numpy
import torch
import torch.distributed as dist
from accelerate.data_loader import IterableDatasetShard, prepare_data_loader
from accelerate.state import PartialState
from accelerate.utils import find_batch_size, recursively_apply
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.utils.data import IterableDataset

from tp_ext._object_collectives import broadcast_from_first
from tp_ext.group import process_group
from tp_ext.parallel.grad_norm import clip_grad_norm_

SHARDS = {  # methods that would write or read this rank's shards as if they were the model
    "save_state": "tp_ext.save_checkpoint",
    "load_state": "tp_ext.load_checkpoint",
    "save_model": "tp_ext.huggingface.save_pretrained",
    "get_state_dict": "tp_ext.full_state_dict",
}


def check_new(accelerator: accelerate.Accelerator, world: int) -> None:
    """Raises ValueError unless the accelerator knows of all ranks, has prepared nothing and shards nothing itself."""
    if accelerator.num_processes != world:
        raise ValueError(
            f"accelerator: knows of {accelerator.num_processes} processes and must know of all {world} of the job; "
            "start it by torchrun, or set RANK, LOCAL_RANK and WORLD_SIZE"
        )
    # What it has prepared before is wrapped in DDP, or reads other batches on each rank
    if accelerator._models or accelerator._optimizers or accelerator._dataloaders:
        raise ValueError("accelerator: must not have prepared anything; call share_batches first")
    # FSDP, DeepSpeed and Megatron-LM would shard the shards
    if world > 1 and not accelerator.distributed_type.name.startswith("MULTI_"):
        raise ValueError(f"accelerator: must not shard by {accelerator.distributed_type.name}: the model is sharded")


def share(accelerator: Any, model: nn.Module, mesh: DeviceMesh) -> None:
    """Replaces the methods that would take another rank, other than those of ``mesh["dp"]``, for another batch."""
    cls = type(accelerator)
    place: dict[str, Any] = {
        "num_processes": mesh["dp"].size(),
        "process_index": mesh["dp"].get_local_rank(),
        # Rank 0 would dispatch the batches of an iterable data set to all processes, each another one
        "dispatch_batches": False,
        "split_batches": accelerator.split_batches,
        "even_batches": accelerator.even_batches,
    }

    def prepare_model(module: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> nn.Module:
        return cls.prepare_model(accelerator, module, device_placement=False, evaluation_mode=True)  # wraps in no DDP

    def seed() -> int:
        data_seed = accelerator.dataloader_config.data_seed
        return torch.initial_seed() if data_seed is None else data_seed

    def same_batches(loader: Any, device_placement: bool | None = None, slice_fn_for_dispatch: Any = None) -> Any:
        if getattr(loader, "_is_accelerate_prepared", False):
            return loader
        draw_as_first(mesh["tp"].get_group())
        prepared = prepare_data_loader(
            loader,
            accelerator.device,
            **place,
            put_on_device=accelerator.device_placement if device_placement is None else device_placement,
            use_seedable_sampler=True,  # all ranks shuffle alike, whatever their generators
            data_seed=broadcast_from_first(seed, [process_group(dist.group.WORLD)]),
            non_blocking=accelerator.non_blocking,
        )
        if place["num_processes"] == 1 and isinstance(prepared.dataset, IterableDataset):
            _count_last_rows(prepared)
        elif isinstance(prepared.dataset, IterableDatasetShard) and not prepared.dataset.drop_last:
            _count_shared_rows(prepared)
        accelerator._dataloaders.append(prepared)
        return prepared

    def clip(parameters: Iterable[Tensor] | Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
        # As accelerate's own: the norm is that of unscaled gradients
        accelerator.unscale_gradients()
        return clip_grad_norm_(_those(model, parameters), max_norm, norm_type)

    def split_between_processes(inputs: Any, apply_padding: bool = False) -> Any:
        own = SimpleNamespace(**{name: place[name] for name in ("num_processes", "process_index")})
        own.device = accelerator.device
        return PartialState.split_between_processes(own, inputs, apply_padding=apply_padding)

    accelerator.split_between_processes = split_between_processes
    accelerator.prepare_model = prepare_model
    accelerator.prepare_data_loader = same_batches
    accelerator.clip_grad_norm_ = clip
    if accelerator.scaler is not None:
        scaler = accelerator.scaler
        # An overflow in the shards of one rank must skip the step on all: this scaler reduces the flag
        accelerator.scaler = ShardedGradScaler(
            accelerator.device.type,
            # The user's options, which the accelerator has given its own scaler
            init_scale=scaler.get_scale(),
            growth_factor=scaler.get_growth_factor(),
            backoff_factor=scaler.get_backoff_factor(),
            growth_interval=scaler.get_growth_interval(),
            enabled=scaler.is_enabled(),
            process_group=dist.group.WORLD,
        )


def _count_last_rows(loader: Any) -> None:
    """Has a loader of an iterable data set say how many rows its last batch has, as accelerate's dispatcher does in one
    process: ``gather_for_metrics`` keeps that number."""
    batches = loader.base_dataloader.__iter__

    def counted() -> Iterator[Any]:
        batch = None
        for batch in batches():
            yield batch
        with contextlib.suppress(TypeError, ValueError, IndexError):  # no rows
            loader.remainder = find_batch_size(batch)

    loader.base_dataloader.__iter__ = counted  # which the loader calls by this name


class _CountedRows(IterableDataset[Any]):
    """An iterable data set that counts its rows in each pass."""

    def __init__(self, dataset: Any) -> None:
        self.dataset, self.rows = dataset, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["dataset"], name)

    def __len__(self) -> int:
        return len(self.dataset)

    def __iter__(self) -> Iterator[Any]:
        self.rows = 0
        for row in self.dataset:
            self.rows += 1
            yield row


def _count_shared_rows(loader: Any) -> None:
    """As :func:`_count_last_rows`, where data ranks share the rows: accelerate fills up the last batch of them all, and
    knows from no length how many rows are its own. Workers count in their own processes."""
    shard, batches = loader.dataset, loader.base_dataloader.__iter__
    if loader.num_workers or loader.batch_size is None:
        return
    shard.dataset = rows = _CountedRows(shard.dataset)

    def counted() -> Iterator[Any]:
        yield from batches()
        loader.remainder = rows.rows % (shard.batch_size * (1 if shard.split_batches else shard.num_processes))

    loader.base_dataloader.__iter__ = counted


def draw_as_first(group: dist.ProcessGroup) -> None:
    """Gives all ranks the generators of the group's first: samplers and data sets without a generator of their own draw
    from them, and ranks that share a model must read the same batches."""
    torch_state, state, numpy_state = broadcast_from_first(
        lambda: (torch.get_rng_state(), random.getstate(), numpy.random.get_state()), [group]
    )
    torch.set_rng_state(torch_state)
    random.setstate(state)
    numpy.random.set_state(numpy_state)


def without_repeated_rows(accelerator: Any, values: Any, use_gather_object: bool = False) -> Any:
    """Returns the values of a batch; of the last one, which accelerate fills up, the rows that are its own."""
    state = accelerator.gradient_state
    if not (state.end_of_dataloader and state.remainder > 0):
        return values
    try:
        if not use_gather_object:
            return recursively_apply(lambda rows: rows[: state.remainder], values, error_on_other_type=True)
    except TypeError:  # not tensors
        pass
    return values[: state.remainder]


def _those(model: nn.Module, parameters: Iterable[Tensor] | Tensor) -> Any:
    """Returns the model, if these are all of its parameters, which it can then look up; or they themselves."""
    listed = [parameters] if isinstance(parameters, Tensor) else list(parameters)
    return model if set(map(id, listed)) >= set(map(id, model.parameters())) else listed


def refuse_shards(accelerator: Any) -> None:
    """Has methods that know of no shards raise RuntimeError."""

    def refused(name: str, *args: Any, **options: Any) -> None:
        raise RuntimeError(f"accelerator.{name}: knows of no shards; call {SHARDS[name]}")

    for name in SHARDS:
        setattr(accelerator, name, functools.partial(refused, name))
