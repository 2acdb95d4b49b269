"""Copies of a sharded model along a data axis: checks of its groups, and equal weights to begin with."""

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tp_ext.group import Group, global_ranks, parallel_group, process_group
from tp_ext.model.fqn import layouts


def sharded_over(model: nn.Module) -> dict[tuple[int, ...], str]:
    """Returns the ranks of each group over which parameters are sharded -> the name of the first of them."""
    found: dict[tuple[int, ...], str] = {}
    for name, layout in layouts(model):
        for _, group in layout:
            if group.size > 1:
                found.setdefault(tuple(global_ranks(group.name)), name)
    return found


def check_layers(model: nn.Module, tensor_group: Group, data_group: Group) -> None:
    """Raises ValueError unless each parameter is sharded over the tensor-parallel ranks, or experts over the data
    ranks, and some parameter is sharded if these are several; and unless all are on one device. Communicates
    nothing."""
    own, data = tuple(global_ranks(tensor_group)), tuple(global_ranks(data_group))
    found = sharded_over(model)
    for ranks, name in found.items():
        if ranks != own and (ranks != data or len(own) == 1):
            raise ValueError(
                f"model: {name!r} is sharded over ranks {list(ranks)} and must be over the tensor-parallel ranks "
                f"{list(own)}: build its layers with the group of that axis of the mesh"
            )
    if len(own) > 1 and own not in found:
        raise ValueError(
            f"model: {type(model).__name__} has no parameter that is sharded over the tensor-parallel ranks "
            f"{list(own)}: build its layers with the group of that axis of the mesh"
        )
    devices = {str(param.device): name for name, param in model.named_parameters()}
    if len(devices) > 1:
        places = ", ".join(f"{name!r} on {device}" for device, name in devices.items())
        raise ValueError(f"model: its parameters must be on one device, and are on several: {places}")


@torch.no_grad()
def copy_from_first(model: nn.Module, data_group: Group) -> None:
    """Gives all ranks of a data axis the parameters and buffers of its first rank, but those that this axis shards:
    experts, and what FSDP2 has sharded.

    Communicates: one broadcast of each tensor.
    """
    if parallel_group(data_group).size == 1:
        return
    group, ranks = process_group(data_group), global_ranks(data_group)
    params = dict(model.named_parameters())
    tensors: list[Tensor] = [
        params[name] for name, layout in layouts(model) if all(global_ranks(one.name) != ranks for _, one in layout)
    ]
    for tensor in (*tensors, *model.buffers()):
        if not isinstance(tensor, DTensor):
            dist.broadcast(tensor, ranks[0], group=group)
