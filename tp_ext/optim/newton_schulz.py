"""Newton-Schulz orthogonalization of a matrix, and the same in terms of its Gram matrix.

X <- a X + (b G + c G^2) X with G = X X^T, from X = U / |U|, a few times: singular values move towards 1 (Jordan et al.,
"Muon", 2024). In terms of the Gram matrix alone: with P = a + b G + c G^2 each step is X <- P X and G <- P G P, so the
result is Q U, where Q is the product of all P. Q is as small as the short side of U, and G is a sum over the columns of
U: ranks that hold columns add their Gram matrices, and multiply their own columns by Q.

Letters of shapes: U and X are [m, n], tall ones (m > n) transposed; with s = min(m, n), G, P and Q are [s, s].
"""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tp_ext._build import load

_C = load()

Coefficients = tuple[float, float, float]


def adjusted_lr(lr: float, adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """Returns the learning rate of a matrix of this shape, as ``torch.optim.Muon``."""
    if adjust_lr_fn is None or adjust_lr_fn == "original":
        return lr * math.sqrt(max(1, rows / columns))
    if adjust_lr_fn == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    return lr * math.sqrt(rows / columns)


def orthogonalized(update: Tensor, coefficients: Coefficients, steps: int, eps: float) -> Tensor:
    """Returns the orthogonalized matrix, in its dtype; csrc/optim/newton_schulz.h.

    It has the operators of ``torch.optim.Muon`` in their order, so equal matrices in bfloat16 give the same bits.
    """
    return _C.orthogonalized(update, coefficients, steps, eps)


def gram_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype of Gram matrices, whose eigenvalues are squares: at least fp32."""
    return torch.promote_types(dtype, torch.float32)


def gram_matrix(block: Tensor, tall: bool) -> Tensor:
    """Returns what a block of the matrix adds to its Gram matrix; the block has the whole short side."""
    return block.T @ block if tall else block @ block.T


def gram_factor(gram: Tensor, coefficients: Coefficients, steps: int, eps: float) -> Tensor:
    """Returns Q with Q U the orthogonalized matrix U of this Gram matrix U U^T, or U Q of U^T U."""
    a, b, c = coefficients
    # The trace of U U^T is the square of Frobenius' norm of U: no rank needs all of U
    norm = gram.diagonal().sum().sqrt().clamp(min=eps)
    gram = gram / norm.square()
    factor = torch.eye(len(gram), dtype=gram.dtype, device=gram.device) / norm
    for step in range(steps):
        polynomial = torch.addmm(gram, gram, gram, beta=b, alpha=c)
        polynomial.diagonal().add_(a)
        factor = polynomial @ factor if step else polynomial / norm
        # Only another step would read it
        if step + 1 < steps:
            gram = polynomial @ gram @ polynomial
    return factor


def times_factor(block: Tensor, factor: Tensor, tall: bool) -> Tensor:
    """Returns a block of the orthogonalized matrix."""
    return block @ factor if tall else factor @ block


def cost(shape: Sequence[int], steps: int, gram: bool) -> int:
    """Returns the multiplications on the rank that iterates: of the whole matrix, or of its Gram matrix."""
    short, long = min(shape), max(shape)
    if gram:
        # Products of [s, s]: per step one for P, one for Q except in the first, two for G except in the last
        return (4 * steps - 3) * short**3
    return steps * (2 * short * short * long + short**3)
