"""Capacity of experts: which slots (token, choice) are dropped when an expert has more than its share of a batch. It is
decided from the tokens of all data ranks, so that the same tokens are dropped for every number of ranks."""

import math

import torch
from torch import Tensor

from tp_ext.mesh import DataAxes

DROP_ORDERS = ("token", "weight")


@torch.no_grad()
def drop_over_capacity(
    experts: Tensor, weights: Tensor, num_experts: int, factor: float, order: str, ranks: DataAxes
) -> Tensor:
    """Returns ``experts`` ``[tokens, top_k]`` with -1 for the slots over capacity.

    An expert keeps ceil(factor * top_k * T / num_experts) slots of the T tokens on all data ranks: with order
    ``"token"`` those of the first tokens of the batch, with ``"weight"`` those of the largest weights, of equal weights
    those of the first tokens. The tokens of the batch are those of data rank 0, 1, .. one after the other.

    Communicates, over each axis of the data ranks: one all-gather of num_experts numbers; ``"weight"``: one of experts
    and weights of all tokens, too, for which the host waits for the device.
    """
    tokens, top_k = experts.shape
    flat = experts.flatten()
    one_each = torch.ones_like(flat)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add(0, flat, one_each)
    table = ranks.stack(counts)
    capacity = _capacity(factor, table.sum().double(), num_experts)
    if order == "token":
        position = _positions(flat, num_experts) + table[: ranks.rank].sum(0)[flat]
    else:
        lengths = [n // top_k for n in table.sum(1).tolist()]
        slots = torch.cat([experts.double(), weights.double()], 1)  # experts are exact in fp64
        everyone = ranks.concatenate(slots, lengths)
        all_experts, all_weights = everyone[:, :top_k].long().flatten(), everyone[:, top_k:].flatten()
        by_weight = all_weights.sort(descending=True, stable=True).indices
        all_positions = torch.empty_like(all_experts)
        all_positions[by_weight] = _positions(all_experts[by_weight], num_experts)
        first = sum(lengths[: ranks.rank]) * top_k
        position = all_positions[first : first + tokens * top_k]
    return torch.where(position < capacity, flat, -1).view_as(experts)


def _capacity(factor: float, slots: Tensor, num_experts: int) -> Tensor:
    """Returns the number of slots of an expert, 0-d."""
    return (slots * factor / num_experts).ceil()


def _positions(experts: Tensor, num_experts: int) -> Tensor:
    """Returns the position of each slot among those of its expert, in their order."""
    order = experts.sort(stable=True).indices
    counts = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
    counts = counts.scatter_add(0, experts, torch.ones_like(experts))
    starts = counts.cumsum(0) - counts
    position = torch.empty_like(experts)
    position[order] = torch.arange(experts.numel(), device=experts.device) - starts[experts[order]]
    return position


def check_capacity(capacity: float | None, drop_order: str) -> None:
    """Raises unless the arguments of that name are valid."""
    if capacity is not None and (
        not isinstance(capacity, int | float) or isinstance(capacity, bool) or not 0 < capacity < math.inf
    ):
        raise ValueError(f"capacity: {capacity!r} must be a positive number or None")
    if drop_order not in DROP_ORDERS:
        raise ValueError(f"drop_order: {drop_order!r} must be one of {DROP_ORDERS}")
