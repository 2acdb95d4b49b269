"""Clipping by the norm of the full gradient."""

import functools
import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from tp_ext import _ops
from tp_ext.group import Group, parallel_group
from tp_ext.module import shardings
from tp_ext.sharding import Sharding


@torch.no_grad()
def clip_grad_norm_(
    parameters_or_module: nn.Module | Iterable[Tensor] | Tensor,
    max_norm: float,
    norm_type: float = 2.0,
    *,
    group: Group = None,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
) -> Tensor:
    """``torch.nn.utils.clip_grad_norm_`` of the unsharded model: every element of its gradient counts once, shards on
    their rank, replicated gradients on rank 0, of copied KV heads the first copy, padding never.

    Args:
        parameters_or_module: the module; or parameters that still carry ``tp_sharding``.
        max_norm, norm_type, error_if_nonfinite, foreach: as torch; ``norm_type`` may be infinite.
        group: the tensor-parallel group.

    Returns:
        The norm before clipping, the same on all ranks.

    Communicates: one all-reduce of one number.

    Raises:
        ValueError: a bare parameter without ``tp_sharding`` (pass the module); a norm_type that is not positive, a
            negative max_norm. TypeError: what is no parameter.
        RuntimeError: ``error_if_nonfinite`` and the norm is not finite.
    """
    max_norm, norm_type = float(max_norm), float(norm_type)  # as torch, "inf" too
    if not norm_type > 0:
        raise ValueError(f"norm_type: {norm_type} must be positive")
    if not max_norm >= 0:
        raise ValueError(f"max_norm: {max_norm} must be at least 0")
    name, p, rank = parallel_group(group)
    table = _table(parameters_or_module, p)
    owned: list[Tensor] = []
    for param, sharding in table:
        if param.grad is None:
            continue
        if sharding is not None:
            owned += sharding.owned(param.grad, rank, p)
        elif rank == 0:
            owned.append(param.grad)
    grads = [param.grad for param, _ in table if param.grad is not None]
    # A rank that owns nothing here has no dtype to go by: that of the result, and of what is sent, is everyone's
    dtype = functools.reduce(torch.promote_types, (grad.dtype for grad in grads)) if grads else torch.float32
    device = grads[0].device if grads else torch.device("cpu")
    total = torch.nn.utils.get_total_norm(owned, norm_type, foreach=foreach).to(device)
    if p > 1:
        total = _combine(total.double(), norm_type, name)
    total = total.to(dtype)
    if error_if_nonfinite and not bool(total.isfinite()):
        raise RuntimeError(
            f"error_if_nonfinite: the norm of order {norm_type} of the gradients is {float(total)} and must be finite"
        )
    torch.nn.utils.clip_grads_with_norm_(
        [param for param, _ in table if param.grad is not None], max_norm, total, foreach
    )
    return total


def _table(given: nn.Module | Iterable[Tensor] | Tensor, p: int) -> list[tuple[Tensor, Sharding | None]]:
    if isinstance(given, nn.Module):
        params = dict(given.named_parameters())
        return [(params[name], sharding) for name, sharding in shardings(given)]
    table = []
    for param in [given] if isinstance(given, Tensor) else list(given):
        if not isinstance(param, Tensor):
            raise TypeError(f"parameters_or_module: {param!r} must be a module, a parameter or several")
        if p > 1 and not hasattr(param, "tp_sharding"):
            raise ValueError(
                f"parameters_or_module: a bare parameter of shape {tuple(param.shape)} must carry tp_sharding, "
                "which tells how it is cut; pass the module instead"
            )
        table.append((param, getattr(param, "tp_sharding", None)))
    return table


def _combine(norm: Tensor, norm_type: float, group: str) -> Tensor:
    """The norm of all ranks' elements from the norms of each rank's."""
    if math.isinf(norm_type):
        return _ops.all_gather_region(norm.reshape(1), group, 0, None).amax()
    return _ops.reduce_from_region(norm**norm_type, group) ** (1 / norm_type)
