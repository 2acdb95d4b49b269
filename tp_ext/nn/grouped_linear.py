"""Linear layers of several experts over consecutive rows, one GEMM for each expert or one grouped GEMM for all.

The GEMMs of a loop write into one result and into one gradient of all weights, so that nothing is concatenated.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Tensor


def grouped_linear(x: Tensor, weight: Tensor, counts: Sequence[int]) -> Tensor:
    """Computes y with y[r] = weight[e] x[r] for the rows r of expert e: the first ``counts[0]`` are expert 0's, and so
    on.

    Shapes: x ``[rows, in]``, weight ``[experts, out, in]`` -> y ``[rows, out]``.

    The gradient of an expert without rows is zero. Twice differentiable. On CUDA in bf16, where both features are
    multiples of 8, it is ``torch._grouped_mm``; else a GEMM for each expert that has rows.
    """
    x, weight = _autocast(x, weight)
    y: Tensor = _GroupedLinear.apply(x, weight, tuple(counts))
    return y


def _autocast(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Returns the tensors in the dtype of GEMMs under autocast, as ``F.linear`` takes them; fp64 stays."""
    kind = tensors[0].device.type
    if not torch.is_autocast_enabled(kind):
        return tensors
    dtype = torch.get_autocast_dtype(kind)
    return tuple(t if t.dtype == torch.float64 else t.to(dtype) for t in tensors)


class _GroupedLinear(torch.autograd.Function):
    """y_e = x_e weight_e^T; dx = the same with weight^T, dweight = :class:`_GroupedOuter` of dy and x."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.counts = counts
        ctx.save_for_backward(x, weight)
        if _has_grouped_mm(x, weight):
            return torch._grouped_mm(x, weight.transpose(1, 2), _ends(counts, x))
        y = x.new_empty(x.shape[0], weight.shape[1])
        for expert, rows in _blocks(counts):
            torch.mm(x[rows], weight[expert].t(), out=y[rows])
        return y

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        dx = _GroupedLinear.apply(dy, weight.transpose(1, 2), ctx.counts) if ctx.needs_input_grad[0] else None
        dweight = _GroupedOuter.apply(dy, x, ctx.counts) if ctx.needs_input_grad[1] else None
        return dx, dweight, None


class _GroupedOuter(torch.autograd.Function):
    """z_e = a_e^T b_e, zero for an expert without rows; da = b z^T and db = a z, each for the rows of e."""

    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor, counts: tuple[int, ...]) -> Tensor:
        ctx.counts = counts
        ctx.save_for_backward(a, b)
        if _has_grouped_mm(a, b):
            return torch._grouped_mm(a.t(), b, _ends(counts, a))
        z = a.new_empty(len(counts), a.shape[1], b.shape[1])
        for expert, rows in _blocks(counts, empty=True):
            if rows.start == rows.stop:
                z[expert].zero_()
            else:
                torch.mm(a[rows].t(), b[rows], out=z[expert])
        return z

    @staticmethod
    def backward(ctx: Any, dz: Tensor) -> tuple[Tensor | None, ...]:
        a, b = ctx.saved_tensors
        da = _GroupedLinear.apply(b, dz, ctx.counts) if ctx.needs_input_grad[0] else None
        db = _GroupedLinear.apply(a, dz.transpose(1, 2), ctx.counts) if ctx.needs_input_grad[1] else None
        return da, db, None


def _blocks(counts: Sequence[int], empty: bool = False) -> Iterator[tuple[int, slice]]:
    """Yields each expert with the slice of its rows; without ``empty`` only experts that have rows."""
    start = 0
    for expert, count in enumerate(counts):
        if count or empty:
            yield expert, slice(start, start + count)
        start += count


def _has_grouped_mm(*operands: Tensor) -> bool:
    """Returns whether torch's grouped GEMM takes the operands: bf16 on CUDA, rows of whole 16 bytes."""
    first = operands[0]
    return (
        first.is_cuda
        and first.dtype == torch.bfloat16
        and first.shape[0] > 0
        and all(n % 8 == 0 for t in operands for n in t.shape[-2 if t.dim() == 3 else -1 :])
        and all(t.is_contiguous() or t.transpose(-2, -1).is_contiguous() for t in operands)
    )


def _ends(counts: Sequence[int], like: Tensor) -> Tensor:
    return torch.tensor(counts, dtype=torch.int32, device=like.device).cumsum(0, dtype=torch.int32)
