"""The norm of the gradient of a model built in :func:`tp_ext.tp_invariant`."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tp_ext import _ops
from tp_ext.invariance import one_thread
from tp_ext.model.model_groups import ModelGroups
from tp_ext.sharding import Layout

# A parameter, its layout, and the terms of its gradient: .grad, main_grad, or both, for a weight tied to another
# layer's. There may be thousands: hence plain tuples, and loops without calls.
GradientRow = tuple[Tensor, Layout, list[Tensor]]


# [Note: one tree of blocks]
def norm_in_blocks(
    table: Sequence[GradientRow],
    norm_type: float,
    groups: ModelGroups,
    skipped: set[int],
    blocks: int,
    axes: Iterable[str],
    extra_axes: Iterable[str],
) -> Tensor:
    """Returns the fp64 norm: powers are summed for each parameter and block, and these sums in one order, whatever the
    number of ranks.

    Args:
        table: the parameters, the same on all ranks. norm_type: its order, finite. groups: of the model.
        skipped: ids of parameters not to count.
        blocks: of the model. axes: the groups of its layouts. extra_axes: groups of ranks with other parameters.

    Communicates: one all-reduce of ``8 blocks`` bytes per parameter over each axis; an all-gather of each gradient that
    FSDP2 shards.
    """
    leaves = torch.zeros(len(table), blocks, dtype=torch.float64, device=table[0][0].device)

    def power(part: Tensor) -> Tensor:
        if norm_type == 2:
            return _ops.multi_tensor_squared_norm([part.contiguous()])
        with one_thread():  # the order of torch's sum depends on the threads
            return part.contiguous().double().abs().pow(norm_type).sum()

    for row, (param, layout, terms) in zip(leaves, table, strict=True):
        if not terms or id(param) in skipped:
            continue
        grad = sum(terms[1:], terms[0])
        if isinstance(grad, DTensor):
            grad = grad.full_tensor()  # the shards of FSDP2 are no blocks: squares of a block may lie on two ranks
        if not layout:
            # All ranks have it: one counts it
            if groups.first:
                row[0] = power(grad)
        elif groups.counts(layout, grad):
            sharding, (_, p, rank) = next((entry for entry in layout if entry[0].blocks), layout[0])
            if not sharding.blocks or any(group.size > 1 and other is not sharding for other, group in layout):
                # Of a cut without blocks, or over two groups: right, but the order of its sum is that of the cut
                row[0] = sum(map(power, layout.owned(grad)), row[0])
                continue
            flat = iter(sharding.segments(rank, p))
            for block, start, length in zip(flat, flat, flat, strict=True):
                # Below 0: copies of KV heads that another rank counts
                if block >= 0 and length:
                    row[block] += power(grad.narrow(sharding.dim, start, length))
    # Each number is not zero on one rank at most: the order of these sums does not matter
    for axis in axes:
        leaves = _ops.reduce_from_region(leaves, axis)
    total = _ops.column_sums(leaves.reshape(-1, 1), [1])[0]
    for axis in extra_axes:
        total = _ops.reduce_from_region(total, axis)
    return total.sqrt() if norm_type == 2 else total.pow(1 / norm_type)
