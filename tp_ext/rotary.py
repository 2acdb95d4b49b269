"""Rotary position embedding (RoPE). Su et al., "RoFormer" (arXiv:2104.09864)."""

import torch
from torch import Tensor, nn

from tp_ext import _ops
from tp_ext.module import check_positive


class RotaryEmbedding(nn.Module):
    """Rotates pairs of features by position * base^(-2 i / rotary_dim): pair i is features (i, i + rotary_dim / 2), or
    (2 i, 2 i + 1) if ``interleaved``.

    Holds no buffer: angles are computed in fp64 from the positions, so no cast of the model can spoil them.

    Args:
        head_dim: features of a head.
        base: of the angles' geometric series.
        interleaved: which features make a pair.
        rotary_dim: rotate only so many leading features, the rest pass through; default all.

    Raises:
        ValueError: ``rotary_dim`` is odd or larger than ``head_dim``; ``base`` is not positive.
    """

    def __init__(
        self,
        head_dim: int,
        base: float = 10000.0,
        interleaved: bool = False,
        *,
        rotary_dim: int | None = None,
    ) -> None:
        super().__init__()
        rotary_dim = head_dim if rotary_dim is None else rotary_dim
        check_positive(head_dim=head_dim, rotary_dim=rotary_dim)
        if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
            raise ValueError(f"rotary_dim: {rotary_dim} must be even and at most head_dim = {head_dim}")
        if not isinstance(base, int | float) or not base > 0:
            raise ValueError(f"base: {base!r} must be a positive number")
        self.head_dim = head_dim
        self.base = float(base)
        self.interleaved = interleaved
        self.rotary_dim = rotary_dim

    def cos_sin(self, positions: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosine and sine, ``[tokens, rotary_dim / 2]``, for x of ``dtype``, at integer ``positions`` ``[tokens]``."""
        exponents = torch.arange(0, self.rotary_dim, 2, device=positions.device, dtype=torch.float64)
        angles = positions.to(torch.float64)[:, None] * self.base ** (-exponents / self.rotary_dim)
        table = torch.float64 if dtype == torch.float64 else torch.float32
        return angles.cos().to(table), angles.sin().to(table)

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        """
        Args:
            x: ``[tokens, heads, head_dim]``.
            positions: ``[tokens]``, integers.

        Raises:
            ValueError: other shapes.
        """
        if x.dim() != 3 or x.shape[-1] != self.head_dim:
            raise ValueError(f"x: shape {tuple(x.shape)} must be [tokens, heads, head_dim = {self.head_dim}]")
        if positions.shape != x.shape[:1]:
            raise ValueError(f"positions: shape {tuple(positions.shape)} must be [tokens], of x ({x.shape[0]},)")
        cos, sin = self.cos_sin(positions, x.dtype)
        return _ops.rope(x, cos, sin, self.interleaved)

    def extra_repr(self) -> str:
        return f"{self.head_dim}, base={self.base}, interleaved={self.interleaved}, rotary_dim={self.rotary_dim}"
