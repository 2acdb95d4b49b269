"""The norm of order 0 of gradients."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from tp_ext import _ops
from tp_ext.parallel.block_norm import GradientRow


def nonzero_gradients(
    table: Sequence[GradientRow],
    skipped: set[int],
    axes: Sequence[str],
    extra_axes: Iterable[str],
    device: torch.device,
) -> Tensor:
    """Returns torch's norm of order 0, of the norms of all gradients: the number of gradients that are not zero.

    Args:
        table: the parameters, the same on all ranks.
        skipped: ids of parameters not to count.
        axes: the groups whose ranks have the rows. extra_axes: groups of ranks with other parameters.

    Communicates: an all-gather of two numbers, and an all-reduce of 8 bytes per row, over each group.

    Raises:
        ValueError: the tables have other lengths, on all ranks.
    """
    number = torch.tensor([[len(table), -len(table)]], dtype=torch.float64, device=device)
    for axis in axes:
        number = _ops.all_gather_region(number, axis, 0, None).amax(0, keepdim=True)
    most, least = number.abs()[0].tolist()
    if most != least:
        raise ValueError(
            f"norm_type: with 0 the gradients that are not zero are counted one by one, so every rank must list all of "
            f"them, and lists {least:g} to {most:g}; list empty shards, too"
        )
    counts = torch.zeros(len(table), dtype=torch.float64, device=device)
    for index, (param, layout, terms) in enumerate(table):
        if terms and id(param) not in skipped:
            grad = terms[0] if len(terms) == 1 else terms[0] + terms[1]
            parts = [grad.to_local()] if isinstance(grad, DTensor) else layout.owned(grad) if layout else [grad]
            counts[index] = sum(part.count_nonzero() for part in parts)
    for axis in axes:  # what several ranks count is not zero all the same
        counts = _ops.reduce_from_region(counts, axis)
    total = counts.count_nonzero().to(torch.float64)
    for axis in extra_axes:
        total = _ops.reduce_from_region(total, axis)
    return total
