"""Permutation of tokens by expert, in operators of torch."""

import torch
from torch import Tensor


def moe_sort(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Returns the row of each slot (token, choice) in the order of experts, -1 for dropped slots, and the counts."""
    flat = experts.flatten()
    key = torch.where(flat < 0, num_experts, flat)
    order = torch.sort(key, stable=True).indices
    rows = torch.empty_like(flat)
    rows[order] = torch.arange(flat.numel(), device=flat.device)
    rows = torch.where(flat < 0, -1, rows)
    return rows.view_as(experts), torch.bincount(key, minlength=num_experts + 1)[:num_experts]


def moe_permute(x: Tensor, rows: Tensor, num_rows: int) -> Tensor:
    """Returns y with y[rows[t, j]] = x[t]."""
    kept = rows >= 0
    tokens = torch.empty(num_rows, dtype=torch.int64, device=x.device)
    tokens[rows[kept]] = torch.arange(x.shape[0], device=x.device)[:, None].expand_as(rows)[kept]
    return x[tokens]


def moe_unpermute(y: Tensor, rows: Tensor, weights: Tensor | None = None) -> Tensor:
    """Returns x with x[t] = sum over j of weights[t, j] y[rows[t, j]]."""
    if not y.shape[0]:
        zero = y.new_zeros(rows.shape[0], y.shape[1]) + y.sum()
        return zero if weights is None else zero + 0 * weights.sum().to(y.dtype)
    taken = y[rows.clamp(min=0)] * (rows >= 0)[..., None]
    if weights is not None:
        taken = taken * weights[..., None]
    return taken.sum(1).to(y.dtype)
