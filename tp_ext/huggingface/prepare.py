"""An accelerator of accelerate around a model that is sharded over its processes, or over some of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from typing import Any

import accelerate
import torch
import torch.distributed as dist
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import recursively_apply
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from tp_ext._checks import check_type
from tp_ext._object_collectives import (
    all_gather_objects,
    broadcast_from_first,
    call_and_gather,
    call_on_all_ranks,
    true_on_any_rank,
)
from tp_ext.checkpoint.directory import load_checkpoint, save_checkpoint
from tp_ext.checkpoint.full import full_state_dict
from tp_ext.group import process_group
from tp_ext.huggingface.accelerator import check_new, refuse_shards, share, without_repeated_rows
from tp_ext.model.census import census
from tp_ext.outside.trainers import check_replicated
from tp_ext.parallel.replicas import check_layers, copy_from_first

_AXES = ("dp", "tp")
_FOLDER = "tp_ext_{}"  # in that of save_state: of the model and the optimizer with this number


def prepare(accelerator: accelerate.Accelerator, model: nn.Module, *others: Any) -> Any:
    """Prepares a sharded model and its optimizers, loaders and schedulers, as ``accelerator.prepare`` does a model that
    fits one process.

    ::

        accelerator = Accelerator(mixed_precision="bf16", gradient_accumulation_steps=2)
        model, optimizer, loader = tp_ext.huggingface.prepare(accelerator, model, optimizer, loader)
        for inputs, target in loader:
            with accelerator.accumulate(model):
                loss = loss_fn(model(inputs), target)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()

    Processes that share a model's tensors read the same batches; others read other ones, and DDP averages their
    gradients. ``clip_grad_norm_`` is that of the unsharded model; ``gather``, ``gather_for_metrics``, ``reduce`` and
    ``split_between_processes`` are over the data-parallel ranks, ``check_trigger`` over all; a scheduler steps once
    with its optimizer, whatever the number of processes. ``get_state_dict`` and ``save_model`` have the unsharded
    model; ``save_state`` writes a folder that ``load_state`` reads on any number of ranks.

    Args:
        accelerator: new: nothing has been prepared by it. Its ``parallelism_config`` is None, or has the sizes
            ``tp_size`` and ``dp_replicate_size`` of the job; without it the model's groups say which ranks share it.
        model: its layers sharded over one group, a part of the job of ``WORLD_SIZE`` processes, of one rank maybe.
        others: optimizers of the model's parameters, loaders, schedulers.

    Returns:
        The model, and the others, in this order.

    Communicates: the ranks of each group and what a rank raises, a checksum of each replicated parameter, the creation
    of the data-parallel groups, one broadcast of each parameter and buffer over them; then what DDP does.

    Raises:
        TypeError: another type. ValueError, on all ranks: the model has no groups, or they do not divide the job;
            replicated parameters differ on ranks that share a model; the sizes of ``parallelism_config`` are others;
            parameters on several devices, or under FSDP2; an optimizer of another model; see also
            :func:`share_batches`.
    """
    check_type(accelerate.Accelerator, "an accelerate.Accelerator", accelerator=accelerator)
    check_type(nn.Module, "an nn.Module", model=model)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if world == 1:
        return accelerator.prepare(model, *others)
    AcceleratorMethods(accelerator, model, shared_mesh(accelerator, model, others, world))
    return accelerator.prepare(model, *others)


def share_batches(accelerator: accelerate.Accelerator, model: nn.Module) -> accelerate.Accelerator:
    """Makes all processes of an accelerator one data-parallel rank, which computes each batch together, in place.

    ::

        model = from_pretrained(path, group=dist.group.WORLD).train()
        accelerator = share_batches(Accelerator(mixed_precision="bf16"), model)
        model, optimizer, batches = accelerator.prepare(model, optimizer, batches)

    Then ``prepare`` puts the model's forward under autocast, converts its outputs to fp32 and compiles it, as in one
    process, but does not wrap it in DDP; all ranks get whole batches, shuffled alike; ``clip_grad_norm_`` is that of
    the unsharded model; with fp16 all ranks skip the same steps; ``gather``, ``gather_for_metrics``, ``reduce`` and
    schedulers are those of one process.

    Args:
        accelerator: new: nothing has been prepared by it.
        model: sharded over all ranks of the job by :func:`from_pretrained` or :func:`tp_ext.auto.apply`.

    Returns:
        The accelerator. ``save_state``, ``load_state``, ``save_model`` and ``get_state_dict``, which know of no shards,
        raise RuntimeError and name what to call.

    Communicates: the creation of groups; ``prepare`` of a loader broadcasts rank 0's seed and generators (torch's,
    numpy's and ``random``), from which all ranks draw rows then; a step with fp16 all-reduces the overflow flag;
    ``clip_grad_norm_`` is :func:`tp_ext.clip_grad_norm_`.

    Raises:
        TypeError: another type. ValueError: the model is not sharded over all ranks of the job, or ``accelerator`` does
            not know of all of them (start the job by torchrun), or it has prepared something, or shards by itself.
    """
    check_type(accelerate.Accelerator, "an accelerate.Accelerator", accelerator=accelerator)
    world = check_sharded_over_all(model)
    check_new(accelerator, world)
    if world > 1:
        ranks = [list(range(world))]
        AcceleratorMethods(accelerator, model, DeviceMesh(accelerator.device.type, ranks, mesh_dim_names=_AXES))
        refuse_shards(accelerator)
    return accelerator


def check_sharded_over_all(model: nn.Module) -> int:
    """Returns the number of ranks of the job; raises ValueError if the model is not sharded over all of them."""
    plan = getattr(model, "tp_ext_plan", None)
    world = dist.get_world_size() if dist.is_initialized() else 1
    if plan is None or plan.p != world:
        state = "is not sharded" if plan is None else f"is sharded over {plan.p} ranks"
        raise ValueError(f"model: {state} and must be sharded over all {world} ranks of the job")
    return world


def shared_mesh(accelerator: Any, model: nn.Module, others: Sequence[Any], world: int) -> DeviceMesh:
    """Returns the mesh ``dp`` x ``tp`` of a job whose ranks share models; their weights are the same along ``dp`` then.

    Communicates and raises as :func:`prepare`."""
    everyone = process_group(dist.group.WORLD)
    own_ranks = call_and_gather(everyone, lambda: _checked_ranks(accelerator, model, others, world))
    mesh = _mesh(accelerator, own_ranks, world)
    # Groups whose ranks have no error would go on to the broadcasts over dp
    call_on_all_ranks(everyone, lambda: check_layers(census(model), mesh["tp"], mesh["dp"]))
    advice = "call tp_ext.manual_seed before the model is made, or load one file"
    if mesh["tp"].size() > 1:
        call_on_all_ranks(everyone, lambda: check_replicated(model, mesh["tp"], advice))
    # Before the broadcast: NCCL sends tensors of the GPU alone
    model.to(accelerator.device)
    copy_from_first(census(model), mesh["dp"])
    return mesh


def _checked_ranks(accelerator: Any, model: nn.Module, others: Sequence[Any], world: int) -> tuple[int, ...]:
    """Checks what a rank can see by itself; returns the ranks that share its model."""
    check_new(accelerator, world)
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError("model: must not be sharded by fully_shard; DDP averages its gradients")
    # An optimizer of another model's parameters would leave this one untrained, without a word
    ids = {id(param) for param in model.parameters()}
    for other in others:
        if isinstance(other, Optimizer) and any(
            id(p) not in ids for group in other.param_groups for p in group["params"]
        ):
            raise ValueError(f"others: {type(other).__name__} must be an optimizer of parameters of the model")
    known = census(model)
    # With experts over data ranks there are two; DDP over these is refused. With tp = 1 each process has the model
    own_ranks = [ranks for ranks in known.sharded_over if dist.get_rank() in ranks][:1]
    return own_ranks[0] if own_ranks else (dist.get_rank(),) if known.has_groups else ()


def _mesh(accelerator: Any, own_ranks: Sequence[tuple[int, ...]], world: int) -> DeviceMesh:
    """Returns the mesh ``dp`` x ``tp`` of all processes: tp, those that share the model."""
    rows = sorted(set(own_ranks))
    if sorted(rank for ranks in rows for rank in ranks) != list(range(world)) or len({len(r) for r in rows}) > 1:
        groups_ = [list(ranks) for ranks in rows if ranks]
        raise ValueError(
            f"model: is sharded over the groups of ranks {groups_}, which must be equally large and hold each of the "
            f"{world} ranks of the job once"
        )
    config = accelerator.parallelism_config
    sizes = None if config is None else (config.dp_replicate_size, config.tp_size)
    if sizes is not None and sizes != (len(rows), len(rows[0])):
        raise ValueError(
            f"accelerator: parallelism_config has dp_replicate_size = {sizes[0]} and tp_size = {sizes[1]}, and the "
            f"model is sharded over {len(rows[0])} of {world} ranks: they must be {len(rows)} and {len(rows[0])}"
        )
    return DeviceMesh(accelerator.device.type, list(map(list, rows)), mesh_dim_names=_AXES)


def _check_folder(folder: Any) -> None:
    if not (Path(folder) / _FOLDER.format(0)).is_dir():
        raise ValueError(
            f"input_dir: {str(folder)!r} has no {_FOLDER.format(0)!r}: save_state of an accelerator of "
            "tp_ext.huggingface.prepare has not written it, or not to its end"
        )


class AcceleratorMethods:
    """Replaces the methods of an accelerator that would take each process for a data-parallel rank."""

    def __init__(self, accelerator: Any, model: nn.Module, mesh: DeviceMesh) -> None:
        self.accelerator, self.model, self.mesh = accelerator, model, mesh
        self.group = mesh["dp"].get_group()
        self.folder: Path | None = None
        share(accelerator, model, mesh)
        # share() has set it; it is replaced below
        self._prepare_model = accelerator.prepare_model
        for name in ("prepare_model", "prepare_scheduler", "gather", "gather_for_metrics", "reduce"):
            setattr(accelerator, name, getattr(self, name))
        for name in ("save_state", "load_state", "get_state_dict", "check_trigger"):
            setattr(accelerator, name, getattr(self, name))
        accelerator.register_save_state_pre_hook(self._note_saved)
        accelerator.register_load_state_pre_hook(self._note_loaded)

    def prepare_model(self, model: Any, device_placement: Any = None, evaluation_mode: bool = False) -> Any:
        prepared = self._prepare_model(model)
        if evaluation_mode or self.mesh["dp"].size() == 1 or isinstance(prepared, DistributedDataParallel):
            return prepared
        handler = self.accelerator.ddp_handler
        # accelerate unwraps, saves and clears what this list holds, so it must be the wrapped model
        self.accelerator._models.remove(prepared)
        prepared = DistributedDataParallel(
            prepared, process_group=self.group, **({} if handler is None else handler.to_kwargs())
        )
        if handler is not None:
            handler.register_comm_hook(prepared)
        self.accelerator._models.append(prepared)
        return prepared

    def prepare_scheduler(self, scheduler: Any) -> Any:
        prepared = type(self.accelerator).prepare_scheduler(self.accelerator, scheduler)
        if isinstance(prepared, AcceleratedScheduler):
            prepared.split_batches = True  # else a step for each process, and a resumed run would go on at another rate
        return prepared

    def gather(self, tensor: Any) -> Any:
        def of_all(tensor: Tensor) -> Tensor:
            # Numbers become rows, as by accelerate
            rows = (tensor[None] if tensor.dim() == 0 else tensor).contiguous()
            gathered = [torch.empty_like(rows) for _ in range(self.mesh["dp"].size())]
            dist.all_gather(gathered, rows, group=self.group)
            return torch.cat(gathered)

        return recursively_apply(of_all, tensor, error_on_other_type=True)

    def gather_for_metrics(self, values: Any, use_gather_object: bool = False) -> Any:
        try:
            if use_gather_object:
                raise TypeError
            rows = self.gather(values)
        except TypeError:  # not tensors
            rows = [*chain.from_iterable(all_gather_objects(values, self.group))]
            use_gather_object = True
        # accelerate fills up the last batch of all data ranks with rows of the first ones
        return without_repeated_rows(self.accelerator, rows, use_gather_object)

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        def over_data(tensor: Tensor) -> Tensor:
            reduced = tensor.clone()
            if reduction != "none":
                dist.all_reduce(reduced, group=self.group)
            return reduced * scale / (self.mesh["dp"].size() if reduction == "mean" else 1)

        return recursively_apply(over_data, tensor, error_on_other_type=True)

    def check_trigger(self) -> bool:
        """Over all processes, of which one may have been triggered alone; ``reduce`` is over some of them."""
        accelerator, world = self.accelerator, process_group(dist.group.WORLD)
        flag = accelerator.flag_tensor
        triggered = true_on_any_rank(flag is not None and bool(flag), [world], accelerator.device)
        if triggered:
            accelerator.flag_tensor = None
        return triggered

    def get_state_dict(self, model: Any, unwrap: bool = True) -> dict[str, Any]:
        """The unsharded model's, on all ranks."""
        return full_state_dict(self.accelerator.unwrap_model(model))

    def save_state(self, *args: Any, **options: Any) -> Any:
        with self._without_shards() as optimizers:
            saved = type(self.accelerator).save_state(self.accelerator, *args, **options)
        for path, optimizer in self._parts(optimizers):
            save_checkpoint(path, self.model, optimizer)
        return saved

    def load_state(self, *args: Any, **options: Any) -> None:
        accelerator = self.accelerator
        with self._without_shards() as optimizers:
            folder = args[0] if args else options.get("input_dir")
            # Before accelerate loads schedulers and counters: nothing has changed then
            if folder is not None:
                call_on_all_ranks(process_group(dist.group.WORLD), lambda: _check_folder(folder))
            type(accelerator).load_state(accelerator, *args, **options)
        for path, optimizer in self._parts(optimizers):
            load_checkpoint(path, self.model, optimizer)
        # A job of more ranks has more of them than files of their random numbers
        accelerator.step = broadcast_from_first(lambda: accelerator.step, [process_group(dist.group.WORLD)])
        # Over tp alone: ranks that share a model draw alike, data ranks differently
        states = torch.get_rng_state(), torch.cuda.get_rng_state() if accelerator.device.type == "cuda" else None
        cpu, cuda = broadcast_from_first(lambda: states, [self.mesh["tp"].get_group()])
        torch.set_rng_state(cpu)
        if cuda is not None:
            torch.cuda.set_rng_state(cuda)

    def _note_saved(self, models: Any, weights: Any, folder: str) -> None:
        self.folder = Path(folder)

    def _note_loaded(self, models: Any, folder: str) -> None:
        self.folder = Path(folder)

    @contextmanager
    def _without_shards(self) -> Iterator[list[Any]]:
        """Within it the accelerator knows of no model and no optimizer, which it would save as this rank has them."""
        accelerator = self.accelerator
        kept = accelerator._models, accelerator._optimizers
        accelerator._models, accelerator._optimizers = [], []
        try:
            yield [getattr(optimizer, "optimizer", optimizer) for optimizer in kept[1]]
        finally:
            accelerator._models, accelerator._optimizers = kept

    def _parts(self, optimizers: list[Any]) -> Iterator[tuple[Path, Any]]:
        assert self.folder is not None
        for i, optimizer in enumerate(optimizers or [None]):
            yield self.folder / _FOLDER.format(i), optimizer
