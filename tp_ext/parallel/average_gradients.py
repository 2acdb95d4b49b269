"""Means of gradients over the data axes of a model with experts: of each parameter over those that do not shard it."""

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from tp_ext.group import Group, ParallelGroup
from tp_ext.mesh import data_axes
from tp_ext.model.census import census, holds_experts
from tp_ext.parallel.gradient_sum import average_over, check_over_axes
from tp_ext.sharding import Layout


@torch.no_grad()
def average_gradients(model: nn.Module, data_groups: Group | list[Group]) -> None:
    """Replaces the gradient of every parameter by its mean over the data axes that do not shard it, in place.

    The expert group is a data axis: its ranks have different tokens. A parameter of :class:`tp_ext.ParallelMoE`'s
    experts is sharded over it, and the layer has already taken the mean over it; so this takes the mean over the other
    axes. Of all other parameters it takes the mean over all. After it every gradient is that of the mean of the ranks'
    losses, as :func:`tp_ext.clip_grad_norm_` expects. To be called once, after the last backward of a step, by all
    ranks; with ``gradient_reduction="mean"``.

    Args:
        model: any module, without DDP, which takes the mean itself. Parameters under FSDP2, which does, too, are left.
        data_groups: the axes, such as ``[mesh["dp"], mesh["ep"]]``, one by one, the expert group among them.

    Communicates, over each axis: an all-reduce of four numbers per parameter, with several axes two, and all-reduces
    of the gradients of each dtype, in buffers of 64 MiB.

    Raises:
        ValueError: the experts are sharded over a group that shares several ranks with an axis and is not that axis.
            On all ranks, nothing has changed then: as :func:`sum_gradients`.
    """
    # FSDP2 has taken the mean of the gradient of a DTensor already
    params = [(name, entry) for name, entry in census(model).parameters.items() if not isinstance(entry.value, DTensor)]
    # All axes before the first collective: an axis that is refused must not leave other ranks waiting
    averaged = [
        (axis, [entry.value for name, entry in params if not is_sharded_over(entry.layout, axis, name)])
        for axis in data_axes(data_groups).axes
    ]
    check_over_axes([(over, axis.name) for axis, over in averaged])
    for axis, over in averaged:
        average_over(over, axis.name)


def is_sharded_over(layout: Layout, axis: ParallelGroup, name: str) -> bool:
    """Returns whether the parameter is sharded over a data axis, and so has no mean over it."""
    ranks = axis.ranks
    for _, group in layout:
        sharded_ranks = group.ranks if group.size > 1 else []
        # By ranks: the layer and the axis may have made two groups of the same ranks
        if sharded_ranks == ranks:
            return True
        # One common rank is this rank, in which two axes of a mesh cross. With several the axis has copies and other
        # experts at once: neither its mean nor none would be right
        if len(common := sorted(set(sharded_ranks) & set(ranks))) > 1:
            raise ValueError(
                f"data_groups: ranks {ranks} share {common} with those over which {name!r} is sharded, "
                f"{sharded_ranks}; pass the axes of the mesh one by one, such as [mesh['dp'], mesh['ep']]"
            )
    return False


def expert_modules(model: nn.Module) -> list[nn.Module]:
    """Returns the modules of the model whose experts are sharded over several ranks, so that their data axes are not
    those of the other parameters, for FSDP2: ``fully_shard(experts, mesh=mesh["dp"])`` of each, before the modules
    around them are sharded over all data ranks."""
    return [module for module in model.modules() if holds_experts(module)]


def ignore_experts(model: nn.Module) -> list[nn.Parameter]:
    """Has DDP ignore the parameters of the experts, and returns them: DDP over all data ranks would overwrite and
    average different experts. To be called before ``DistributedDataParallel(model, ..)``; their gradients are averaged
    by :func:`average_gradients` of each of :func:`expert_modules`, over the data axes without the expert group."""
    ignored: dict[str, nn.Parameter] = {}
    for path, module in model.named_modules():
        if holds_experts(module):
            ignored |= {f"{path}.{name}".lstrip("."): param for name, param in module.named_parameters()}
    # DDP reads the names in its constructor, before it broadcasts; they are those of the module that it wraps
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, list(ignored))
    return list(ignored.values())
