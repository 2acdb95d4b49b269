"""Checks of the model and the options of ``parallelize``, and a note of the models that it has prepared."""

import weakref

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from tp_ext._checks import check_choice, check_int
from tp_ext._checksum import bits_of, checksum
from tp_ext._object_collectives import all_gather_objects
from tp_ext.group import global_ranks
from tp_ext.mesh import DATA_AXES
from tp_ext.model.fqn import resolve_fqn
from tp_ext.parallel.block_wrappers import RECOMPUTE
from tp_ext.parallel.pipeline.schedules import check_schedule

AUTOCAST = (None, torch.bfloat16, torch.float16)

_parallelized: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def check_model_is_new(model: nn.Module) -> None:
    """Raises ValueError if ``parallelize`` or ``pipeline_stages`` has been applied to the model."""
    if model in _parallelized:
        raise ValueError(
            f"model: {type(model).__name__} must not have been parallelized before, by parallelize or "
            "pipeline_stages; build the model anew"
        )


def check_trainable(model: nn.Module) -> None:
    """Raises ValueError if the model has no parameter that gets a gradient, or is sharded by FSDP2."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError("model: must not be sharded by fully_shard yet; pass zero=2 or 3, which shards its blocks")
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError(f"model: {type(model).__name__} must have a parameter that requires a gradient")


@torch.no_grad()
def check_replicas(model: nn.Module, mesh: DeviceMesh) -> None:
    """Raises ValueError, on all ranks, if replicas of a parameter along a data axis are not the same bits: FSDP2 would
    make one parameter of rows of several models. Parameters on meta are drawn alike later.

    Communicates: 8 bytes and the name of each parameter over each data axis, and what was found over every axis.
    """
    axes = {name: mesh[name].get_group() for name in mesh.mesh_dim_names or () if mesh[name].size() > 1}
    params = {name: param for name, param in model.named_parameters() if not param.is_meta}
    local = [param.to_local() if isinstance(param, DTensor) else param for param in params.values()]
    numbers = torch.stack([checksum(bits_of(tensor))[0].cpu() for tensor in local]).tolist() if local else []
    found: list[str] = []
    for axis in (axes[name] for name in DATA_AXES if name in axes):
        ranks = dist.get_process_group_ranks(axis)
        mine = {  # without those that this axis shards, experts: its ranks hold other slices of them
            name: number
            for name, number in zip(params, numbers, strict=True)
            if not any(global_ranks(group.name) == ranks for _, group in resolve_fqn(model, name).layout)
        }
        held = all_gather_objects(mine, axis)
        # A parameter that the other lacks is of a model with other names, which is not found here
        different = [name for name in mine if any(one.get(name, mine[name]) != mine[name] for one in held)]
        if different:
            own, other = ranks[axis.rank()], next(i for i, one in enumerate(held) if one != mine)
            more = f", as do {len(different) - 1} more" if len(different) > 1 else ""
            found.append(f"{different[0]!r} differs on the ranks {sorted((own, ranks[other]))}{more}")
    for group in axes.values():  # also those that have no difference
        found = [one for of_rank in all_gather_objects(found, group) for one in of_rank]
    if found:
        raise ValueError(
            f"model: must have the same weights on all data ranks, and {min(found)}; seed them alike before it is "
            "made, by tp_ext.manual_seed, or make it on meta"
        )


def note_parallelized(*models: nn.Module) -> None:
    """Notes models for :func:`check_model_is_new`; copies of them are other models."""
    _parallelized.update(models)


def check_options(
    schedule: object,
    microbatches: object,
    loss: object,
    reduction: object,
    zero: object,
    offload: bool,
    recompute: object,
    autocast: object,
) -> None:
    """Raises TypeError or ValueError unless ``parallelize`` takes these options."""
    if schedule is not None:
        check_schedule(schedule)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction: {reduction!r} must be 'mean' or 'sum'")
    if not callable(loss):
        raise TypeError(f"loss: {loss!r} must be a function of the output of the model and the target")
    if zero not in (0, 1, 2, 3) or isinstance(zero, bool):
        raise ValueError(f"zero: {zero!r} must be 0, 1, 2 or 3")
    if offload and zero not in (2, 3):
        raise ValueError(f"offload: True needs zero = 2 or 3, and zero is {zero}")
    check_choice(RECOMPUTE, recompute=recompute)
    check_int(least=1, microbatches=microbatches)
    check_choice(AUTOCAST, autocast=autocast)
