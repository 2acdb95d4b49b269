"""Rotary position embedding: tables of angles, and the rotation. C++: rope; formulas: csrc/kernels/rope.h."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tp_ext._ops.binding import direct_operator, primitive
from tp_ext._ops.fake_tensors import like


@primitive("_rope_tables")
def rope_tables(
    positions: Tensor,
    rotary_dim: int,
    base: float,
    dtype: torch.dtype,
    frequencies: Sequence[float] | None = None,
    amplitude: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """Returns amplitude times cosine and sine of position * frequencies[i], computed in fp64, as ``dtype``.

    Args:
        positions: ``[n]``, integers; the tables are ``[n, rotary_dim / 2]``.
        frequencies: default base^(-2 i / rotary_dim).
    """
    cos = positions.new_empty([positions.shape[0], rotary_dim // 2], dtype=dtype)
    return cos, torch.empty_like(cos)


@direct_operator
def rope(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, positions: Tensor | None = None) -> Tensor:
    """Returns x with the first ``rotary_dim`` elements of each head rotated; backward rotates by the opposite angle.

    Args:
        x: ``[tokens, heads, head_dim]`` or ``[batch, seq, heads, head_dim]``.
        cos, sin: ``[positions, rotary_dim / 2]``.
        interleaved: pairs are (0, 1), (2, 3), ..; otherwise (i, i + rotary_dim / 2).
        positions: ``[tokens]`` or ``[batch, seq]``, the row of the tables that each token uses; default 0, 1, .. of
            each sequence.
    """


@primitive("_rope")
def rope_rotate(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool, inverse: bool, positions: Tensor | None = None
) -> Tensor:
    """Computes :func:`rope`, or with ``inverse`` its backward."""
    return like(x)
