"""Rotary position embedding (RoPE). Su et al., "RoFormer" (arXiv:2104.09864)."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from tp_ext import _ops
from tp_ext.model.module import check_positive
from tp_ext.nn.attention.rope_scaling import RopeScaling, base_and_rotary_dim


# [Note: RoPE has no buffer]
class RotaryEmbedding(nn.Module):
    """Rotary embedding: rotates pairs of features by position * base^(-2 i / rotary_dim); pair i is features
    (i, i + rotary_dim / 2), or (2 i, 2 i + 1) if ``interleaved``.

    It has no buffer: angles are computed in fp64 from the positions, so casting the model does not affect them.
    Communicates nothing. Backward is the rotation by the negative angles; it keeps the tables, not x.

    Args:
        head_dim: features of a head.
        base: of the angles' geometric series; default ``rope_theta`` of ``scaling``, or 10000.
        interleaved: selects the features of a pair, see above.
        rotary_dim: the number of leading features to rotate, the rest pass through; default by
            ``partial_rotary_factor`` of ``scaling``, or all.
        scaling: Hugging Face's ``config.rope_scaling`` or ``config.rope_parameters``, for contexts longer than those of
            pretraining: linear, ntk, dynamic, llama3 or yarn, see
            :class:`tp_ext.nn.attention.rope_scaling.RopeScaling`. At most 512 rotated features.

    Raises:
        ValueError: ``rotary_dim`` is odd or larger than ``head_dim``; ``base`` is not positive; ``scaling`` has an
            unknown key, or a value outside its range.
    """

    def __init__(
        self,
        head_dim: int,
        base: float | None = None,
        interleaved: bool = False,
        *,
        rotary_dim: int | None = None,
        scaling: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        base, rotary_dim = base_and_rotary_dim(scaling, head_dim, base, rotary_dim)
        check_positive(head_dim=head_dim, rotary_dim=rotary_dim)
        if not 0 < rotary_dim <= head_dim or rotary_dim % 2:
            raise ValueError(f"rotary_dim: {rotary_dim} must be even and at most head_dim = {head_dim}")
        if not isinstance(base, int | float) or not base > 0:
            raise ValueError(f"base: {base!r} must be a positive number")
        self.head_dim = head_dim
        self.base = float(base)
        self.interleaved = interleaved
        self.rotary_dim = rotary_dim
        scaled = None if scaling is None else RopeScaling(scaling, rotary_dim, self.base)
        self.scaling = None if scaled is None or scaled.kind == "default" else scaled

    def cos_sin(self, positions: Tensor, dtype: torch.dtype, *, length: int | None = None) -> tuple[Tensor, Tensor]:
        """Returns cosine and sine, ``[positions, rotary_dim / 2]``, for x of ``dtype`` at integer ``positions``, 1-D.

        ``length``, for dynamic scaling only: the number of tokens of the longest sequence. Default: the largest
        position + 1, for which the host waits for the device.
        """
        table = torch.float64 if dtype == torch.float64 else torch.float32
        scaling = self.scaling
        if scaling is None:
            return _ops.rope_tables(positions, self.rotary_dim, self.base, table)
        if length is None:
            length = int(positions.max()) + 1 if scaling.dynamic and positions.numel() else 0
        frequencies = scaling.frequencies(length)
        return _ops.rope_tables(positions, self.rotary_dim, self.base, table, frequencies, scaling.amplitude)

    def forward(
        self,
        x: Tensor,
        positions: Tensor | None = None,
        *,
        offset: int = 0,
        cu_seqlens: Tensor | Sequence[int] | None = None,
    ) -> Tensor:
        """Rotates x.

        Args:
            x: ``[tokens, heads, head_dim]`` or ``[batch, seq, heads, head_dim]``, any strides.
            positions: integers, one for each token: ``[tokens]`` or ``[batch, seq]``. Default: 0, 1, 2, .. in each
                sequence, with one row of the tables for each, for any batch size.
            offset: position of the first token of each sequence, instead of 0.
            cu_seqlens: x ``[tokens, ..]`` consists of packed sequences; sequence i is tokens ``cu_seqlens[i]`` to
                ``cu_seqlens[i + 1]``, and positions restart in each. A list, or an integer tensor (one on a GPU is
                copied to the host).

        Raises:
            ValueError: other shapes; ``positions`` with an offset or ``cu_seqlens``; a negative offset; ``cu_seqlens``
                that do not rise from 0 to the number of tokens. TypeError: values that are no integers.
        """
        if x.dim() not in (3, 4) or x.shape[-1] != self.head_dim:
            raise ValueError(
                f"x: shape {tuple(x.shape)} must be [tokens, heads, head_dim = {self.head_dim}] or "
                f"[batch, seq, heads, head_dim = {self.head_dim}]"
            )
        if not isinstance(offset, int) or isinstance(offset, bool):
            raise TypeError(f"offset: {offset!r} must be an integer")
        if offset < 0:
            raise ValueError(f"offset: {offset} must not be negative")
        if positions is not None:
            if offset or cu_seqlens is not None:
                raise ValueError(
                    f"positions: must not be combined with offset = {offset} or cu_seqlens = {cu_seqlens}, which say "
                    "the same"
                )
            if positions.shape != x.shape[:-2]:
                raise ValueError(
                    f"positions: shape {tuple(positions.shape)} must be one for each token of x, {tuple(x.shape[:-2])}"
                )
            cos, sin = self.cos_sin(positions.flatten(), x.dtype)
            rows = x if x.dim() == 3 else x.flatten(0, 1)
            return _ops.rope(rows, cos, sin, self.interleaved, None).view(x.shape)
        seq, packed = x.shape[-3], None
        if cu_seqlens is not None:
            if x.dim() == 4:
                raise ValueError(
                    f"cu_seqlens: {cu_seqlens} must come with x [tokens, heads, head_dim], not of shape "
                    f"{tuple(x.shape)}"
                )
            lengths = sequence_lengths(cu_seqlens, seq)
            seq, packed = max(lengths), packed_positions(lengths, x.device)
        places = torch.arange(offset, offset + seq, device=x.device)
        cos, sin = self.cos_sin(places, x.dtype, length=offset + seq)
        return _ops.rope(x, cos, sin, self.interleaved, packed)

    def extra_repr(self) -> str:
        scaling = "" if self.scaling is None else f", scaling={self.scaling}"
        return (
            f"{self.head_dim}, base={self.base}, interleaved={self.interleaved}, rotary_dim={self.rotary_dim}{scaling}"
        )


def sequence_lengths(cu_seqlens: Tensor | Sequence[int], tokens: int) -> list[int]:
    """Returns the lengths of the packed sequences, which must sum to ``tokens``."""
    if not isinstance(cu_seqlens, Tensor | Iterable):
        raise TypeError(f"cu_seqlens: {cu_seqlens!r} must be a 1-D tensor or a list of integers")
    ends = cu_seqlens.tolist() if isinstance(cu_seqlens, Tensor) else list(cu_seqlens)
    if not all(isinstance(end, int) for end in ends):
        raise TypeError(f"cu_seqlens: {ends} must be integers")
    lengths = [stop - start for start, stop in pairwise(ends)]
    if not lengths or ends[0] != 0 or ends[-1] != tokens or min(lengths) < 0:
        raise ValueError(f"cu_seqlens: {ends} must rise from 0 to the number of tokens, {tokens}")
    return lengths


def packed_positions(lengths: list[int], device: torch.device) -> Tensor:
    """Returns the positions 0, 1, 2, .. of each sequence, one after the other."""
    return torch.cat([torch.arange(n, device=device) for n in lengths])
