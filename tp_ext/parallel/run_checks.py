"""Checks of the model, its groups and the options of ``parallelize``, and a note of the models that it has prepared."""

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tp_ext._checks import check_bool, check_choice, check_int
from tp_ext._checksum import bits_of, checksum
from tp_ext._object_collectives import all_gather_along, all_gather_objects, raise_on_all_ranks
from tp_ext.group import ParallelGroup
from tp_ext.mesh import DATA_AXES, MeshAxes
from tp_ext.model.census import Census
from tp_ext.model.module import ParallelModule
from tp_ext.parallel.block_wrappers import RECOMPUTE
from tp_ext.parallel.schedules import check_schedule

AUTOCAST = (None, torch.bfloat16, torch.float16)

# Weak: the note must not keep a model alive
_parallelized: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def check_model_is_new(model: nn.Module) -> None:
    """Raises ValueError if ``parallelize`` or ``pipeline_stages`` has been applied to the model."""
    if model in _parallelized:
        raise ValueError(
            f"model: {type(model).__name__} must not have been parallelized before, by parallelize or "
            "pipeline_stages; build the model anew"
        )


def check_model(model: Census, mesh: DeviceMesh, zero: int, recompute: str | None) -> None:
    """Raises ValueError, on all ranks, unless ``parallelize`` can train the model over the axes of the mesh.

    Communicates: one number over each axis; see :func:`_check_replicas`.
    """
    failure: Exception | None = None
    try:
        check_model_is_new(model.model)
        _check_trainable(model)
        _check_axes(model, mesh)
        _check_experts(model, mesh, zero, recompute)
        if zero > 1:
            check_shards(model)
    except ValueError as error:  # which one rank alone may see
        failure = error
    axes = [mesh[name].get_group() for name in mesh.mesh_dim_names or () if mesh[name].size() > 1]
    raise_on_all_ranks(failure, axes, torch.device(mesh.device_type))
    _check_replicas(model, mesh)


def check_invariant_blocks(model: Census, axes: MeshAxes, blocks: int | None, microbatches: int, compile: bool) -> None:
    """Raises ValueError unless the model was built in blocks and the options can sum its gradients by one tree of
    ``blocks`` microbatches; communicates nothing."""
    if blocks is None:
        return
    check_int(least=1, invariant_blocks=blocks)
    data, context = axes.data, axes.data.context.size
    for name, module in model.modules:
        if isinstance(module, ParallelModule) and module.invariant_blocks is None:
            raise ValueError(f"model: {name!r} must have been built in tp_invariant, for invariant_blocks = {blocks}")
    refused = {
        "pp": axes.pp.size > 1,
        "cp": context > 1,
        "ep": len(data.axes) > 1,
        "a mixture of experts": bool(model.routing_layers),
        "compile": compile,
    }
    if found := next((name for name, given in refused.items() if given), None):
        raise ValueError(f"invariant_blocks: {blocks} must not be given with {found}")
    if data.size * microbatches != blocks:
        raise ValueError(
            f"invariant_blocks: {blocks} must be the ranks of dp, {data.size}, times microbatches = {microbatches}"
        )


def _check_trainable(model: Census) -> None:
    """Raises ValueError if the model has no parameter that gets a gradient, or is sharded by FSDP2."""
    if any(isinstance(module, FSDPModule) for _, module in model.modules):
        raise ValueError("model: must not be sharded by fully_shard yet; pass zero=2 or 3, which shards its blocks")
    if not any(entry.value.requires_grad for entry in model.parameters.values()):
        raise ValueError(f"model: {type(model.model).__name__} must have a parameter that requires a gradient")


def _check_axes(model: Census, mesh: DeviceMesh) -> None:
    """Raises ValueError if layers are sharded along an axis of the mesh whose ranks hold equal copies or other
    stages: ``dp``, ``ep``, ``cp`` or ``pp``. Communicates nothing."""
    axes = {name: dist.get_process_group_ranks(mesh[name].get_group()) for name in mesh.mesh_dim_names or ()}
    tensor_ranks = axes.get("tp", [])
    for path, layer in model.layers.items():
        if layer.tp_group.size > 1:
            ranks = layer.tp_group.ranks
            for name, others in axes.items():
                if ranks == others and ranks != tensor_ranks:
                    raise ValueError(
                        f"model: the group of {path!r} is mesh[{name!r}], and must be mesh['tp']; along {name!r} "
                        "weights are not sharded"
                    )


def _check_experts(model: Census, mesh: DeviceMesh, zero: int, recompute: str | None) -> None:
    """Checks the groups of the model's experts against the mesh. Communicates nothing.

    Raises:
        ValueError: experts are sharded over another group than ``mesh["ep"]``; losses, capacities or correction biases
            over other ranks than all data axes of the mesh; gradients are combined as a sum; ``zero`` = 1, or 2 and 3
            with ``recompute="selective"``.
    """
    ep = dist.get_process_group_ranks(mesh["ep"].get_group()) if "ep" in (mesh.mesh_dim_names or ()) else None
    for path, layer in model.experts.items():
        assert isinstance(layer.expert_group, ParallelGroup)
        ranks = layer.expert_group.ranks
        if ranks != ep:
            raise ValueError(f"model: expert_group of {path!r}, ranks {ranks}, must be mesh['ep']")
        if zero == 1:
            raise ValueError("zero: 1 must be 0, 2 or 3 for a model whose experts are sharded over several ranks")
        if zero > 1 and recompute == "selective":
            # FSDP2's hooks of the experts are in the block, and selective checkpointing counts their operators
            raise ValueError(
                f"recompute: 'selective' must be None or 'full' with zero = {zero} for a model whose experts are "
                "sharded over several ranks"
            )
    axes = {tuple(axis.ranks) for axis in model.axes.data.axes}
    for path, router in model.routing_layers.items():
        if router.gradient_reduction != "mean":
            raise ValueError(f"model: gradient_reduction of {path!r}, 'sum', must be 'mean'")
        members = {tuple(axis.ranks) for axis in router.data_ranks.axes}
        if router.needs_data_ranks and members != axes:
            raise ValueError(
                f"model: data_groups and expert_group of {path!r} are the ranks {sorted(map(list, members))}, and must "
                f"be the data axes of the mesh, {sorted(map(list, axes))}"
            )


@torch.no_grad()
def _check_replicas(model: Census, mesh: DeviceMesh) -> None:
    """Raises ValueError, on all ranks, if replicas of a parameter along a data axis are not the same bits: FSDP2 would
    make one parameter of rows of several models. Parameters on meta are drawn alike later.

    Communicates: 8 bytes and the name of each parameter over each data axis, and what was found over every axis.
    """
    axes = {name: mesh[name].get_group() for name in mesh.mesh_dim_names or () if mesh[name].size() > 1}
    params = {name: entry for name, entry in model.parameters.items() if not entry.value.is_meta}
    values = [entry.value for entry in params.values()]
    local = [value.to_local() if isinstance(value, DTensor) else value for value in values]
    numbers = torch.stack([checksum(bits_of(tensor))[0].cpu() for tensor in local]).tolist() if local else []
    differences: list[str] = []
    for axis in (axes[name] for name in DATA_AXES if name in axes):
        ranks = dist.get_process_group_ranks(axis)
        mine = {  # without those that this axis shards, experts: its ranks hold other slices of them
            name: number
            for (name, entry), number in zip(params.items(), numbers, strict=True)
            if not any(group.ranks == ranks for _, group in entry.layout)
        }
        reports = all_gather_objects(mine, axis)
        # A parameter that the other lacks is of a model with other names, which is not found here
        different = [name for name in mine if any(report.get(name, mine[name]) != mine[name] for report in reports)]
        if different:
            rank, other = ranks[axis.rank()], next(i for i, report in enumerate(reports) if report != mine)
            more = f", as do {len(different) - 1} more" if len(different) > 1 else ""
            differences.append(f"{different[0]!r} differs on the ranks {sorted((rank, ranks[other]))}{more}")
    if known := all_gather_along(differences, [*axes.values()]):  # also along axes that have no difference
        raise ValueError(
            f"model: must have the same weights on all data ranks, and {min(known)}; seed them alike before it is "
            "made, by tp_ext.manual_seed, or make it on meta"
        )


def check_shards(model: Census) -> None:
    """Raises ValueError if FSDP2 could not shard the model, since some rank has no element of a parameter."""
    for name, entry in model.parameters.items():
        for sharding, group in entry.layout:
            # Of all ranks, not of this one alone, so that all raise
            empty = [rank for rank in range(group.size) if sharding.local_size(rank, group.size) == 0]
            if empty:
                raise ValueError(
                    f"model: {name!r} must have elements on all {group.size} ranks that share it, and has none on "
                    f"{empty}: FSDP2 cannot shard an empty parameter"
                )


def note_parallelized(*models: nn.Module) -> None:
    """Notes models for :func:`check_model_is_new`; copies of them are other models."""
    _parallelized.update(models)


@dataclass(frozen=True)
class RunOptions:
    """Options of :func:`tp_ext.parallelize`, under their names."""

    schedule: str | None
    microbatches: int
    loss: Callable[[Any, Tensor], Tensor]
    reduction: str
    count: Callable[[Tensor], Tensor | int]
    zero: int
    offload: bool
    recompute: str | None
    compile: bool
    autocast: torch.dtype | None
    invariant_blocks: int | None


def check_options(options: RunOptions) -> None:
    """Raises TypeError or ValueError unless ``parallelize`` takes these options."""
    zero = options.zero
    check_bool(offload=options.offload, compile=options.compile)
    if options.schedule is not None:
        check_schedule(options.schedule)
    if options.reduction not in ("mean", "sum"):
        raise ValueError(f"reduction: {options.reduction!r} must be 'mean' or 'sum'")
    if not callable(options.loss):
        raise TypeError(f"loss: {options.loss!r} must be a function of the output of the model and the target")
    if zero not in (0, 1, 2, 3) or isinstance(zero, bool):
        raise ValueError(f"zero: {zero!r} must be 0, 1, 2 or 3")
    if options.offload and zero not in (2, 3):
        raise ValueError(f"offload: True needs zero = 2 or 3, and zero is {zero}")
    check_choice(RECOMPUTE, recompute=options.recompute)
    check_int(least=1, microbatches=options.microbatches)
    check_choice(AUTOCAST, autocast=options.autocast)
