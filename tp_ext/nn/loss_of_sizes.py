"""Cross-entropy over a vocabulary of which the ranks hold any numbers of columns, for :func:`tp_ext.shares`.

It is that of ``vocab_parallel_cross_entropy``, by the same kernels. Only the ranks' comparison differs: they exchange a
number of the list of sizes that each was given, in the place of the widths.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tp_ext import _ops
from tp_ext._checks import check_int

_HALF = 1 << 20  # as kCeHalf: fp32 holds each half exactly


def check_sizes(sizes: Sequence[int], p: int, vocab_size: int | None) -> None:
    """Raises unless sizes are one number of columns for each of p ranks, which make up the vocabulary."""
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        raise TypeError(f"sizes: {sizes!r} must be a list of integers, one for each rank")
    for size in sizes:
        check_int(least=0, sizes=size)
    if len(sizes) != p:
        raise ValueError(f"sizes: {list(sizes)} must have one length per rank, p = {p}")
    if not any(sizes) or vocab_size not in (None, sum(sizes)):
        raise ValueError(f"sizes: {list(sizes)} must sum to vocab_size = {vocab_size}, at least 1")


def number_of_sizes(sizes: Sequence[int], rank: int, width: int) -> int:
    """Returns what a rank says of the sizes that it was given: a number above all widths, 0 if its width is another."""
    number = 0
    for size in sizes:  # no hash of a library, which compiled code could not compute
        number = (number * 1000003 + size + 1) % 2147483647
    return (1 << 39 | number) if sizes[rank] == width else 0


def check_same_sizes(numbers: Tensor, sizes: Sequence[int]) -> None:
    """Raises a ValueError on all ranks (a device assert on CUDA) if their numbers, ``[p]``, are not the same."""
    same = (numbers == numbers.max()).all()
    if torch.compiler.is_compiling() or not numbers.is_cpu:
        torch._assert_async(same, "sizes: must be the same on all ranks, and those of their columns")
    elif not same:
        raise ValueError(
            f"sizes: {list(sizes)} must be the same on all ranks, and each rank must have its number of columns, p = "
            f"{len(sizes)}"
        )


def cross_entropy_of_sizes(
    logits: Tensor, target: Tensor, group: str, sizes: Sequence[int], rank: int, reduction: str, options: Any
) -> Tensor:
    """Returns the loss; arguments as :func:`tp_ext.vocab_parallel_cross_entropy`, ``options`` those of its operator
    from the first column to z_loss.

    Communicates: forward, one all-gather of four numbers per row, and of four more.
    """
    if target.dtype != torch.int64:
        raise TypeError(f"target: dtype {target.dtype} must be int64")
    if target.shape != logits.shape[:-1]:
        raise ValueError(
            f"target: shape {tuple(target.shape)} must be that of logits, {tuple(logits.shape)}, without the last dim"
        )
    smoothing, z_loss = options[4:]
    if not 0 <= smoothing <= 1:
        raise ValueError(f"label_smoothing: {smoothing} must be in [0, 1]")
    if not z_loss >= 0:
        raise ValueError(f"z_loss: {z_loss} must be at least 0")
    number = number_of_sizes(sizes, rank, logits.shape[-1])
    rows: Tensor = _RowLosses.apply(logits, target, group, number, list(sizes), options)
    dtype = logits.dtype
    if torch.is_autocast_enabled(logits.device.type) and dtype != torch.float64:
        dtype = torch.float32
    if reduction == "none":
        return rows.view(target.shape).to(dtype)
    total = rows.sum()
    if reduction == "mean":
        total = total / (target != options[3]).sum().clamp(min=1)
    return total.to(dtype)


class _RowLosses(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, logits: Tensor, target: Tensor, group: str, number: int, sizes: list[int], options: Any
    ) -> Tensor:
        start, local, full, ignore, smoothing, z_loss = options
        stats = _ops.vocab_ce_stats(logits, target, start, local, full, ignore)
        row = [number // _HALF, number % _HALF, full // _HALF, full % _HALF]
        stats = torch.cat([stats, stats.new_tensor([row])])
        everyone = _ops.all_gather_region(stats[None], group)
        check_same_sizes(everyone[:, -1, 0] * _HALF + everyone[:, -1, 1].double(), sizes)
        loss, lse = _ops.vocab_ce_loss(everyone[:, :-1].contiguous(), target, full, ignore, smoothing, z_loss)
        ctx.save_for_backward(logits, target, lse)
        ctx.options = options
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        logits, target, lse = ctx.saved_tensors
        start, local, full, ignore, smoothing, z_loss = ctx.options
        grad = grad.to(lse.dtype).contiguous()
        dlogits = _ops.vocab_ce_bwd(grad, logits, target, lse, start, local, full, ignore, smoothing, z_loss)
        return dlogits, None, None, None, None, None
