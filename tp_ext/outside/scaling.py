"""Gradient scaling of torch, over shards: an overflow in one rank's shard is one on all ranks of the model's groups."""

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import Optimizer

from tp_ext.group import process_group
from tp_ext.outside.live_shards import layouts_by_id

Flags = dict[torch.device, Tensor]


def unscale_grads_(
    torchs: Callable[..., Flags],
    scaler: torch.amp.GradScaler,
    optimizer: Optimizer,
    inv_scale: Tensor,
    found_inf: Tensor,
    allow_fp16: bool,
) -> Flags:
    """Unscales the gradients of an optimizer as torch does, and returns by device whether one is not finite: on some
    rank, if the optimizer holds shards. ``unscale_`` and ``step`` call it, also for optimizers that skip by themselves.

    Communicates, if it holds shards: one all-reduce of a number over each group of their layouts, and over each axis of
    the meshes of FSDP2, since torch reduces over the first of several meshes alone.
    """
    flags = torchs(scaler, optimizer, inv_scale, found_inf, allow_fp16)
    params = [param for group in optimizer.param_groups for param in group["params"]]
    known = layouts_by_id(params)
    axes = {
        tuple(group.ranks): process_group(group.name)
        for param in params
        for _, group in known.get(id(param), ())
        if group.size > 1
    }
    if not axes:
        return flags
    meshes = {param.device_mesh for param in params if isinstance(param, DTensor)}
    axes |= {tuple(dist.get_process_group_ranks(axis)): axis for mesh in meshes for axis in mesh.get_all_groups()}
    # FSDP2 may offload gradients to a CPU, on which its groups do not communicate
    device = torch.device(next(iter(meshes)).device_type) if meshes else params[0].device
    overflow = torch.zeros((), device=device)
    for flag in flags.values():
        overflow = torch.maximum(overflow, flag.to(device))
    for ranks in sorted(axes):  # the same order on all ranks of a group
        dist.all_reduce(overflow, dist.ReduceOp.MAX, group=axes[ranks])
    for flag in flags.values():
        flag.copy_(overflow)
    # A rank without gradients must not take torch's assertion that an optimizer has some: others have
    return flags or {device: overflow}
