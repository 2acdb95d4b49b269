"""Rotary embedding, fused, against the usual composition of torch operators: a row of the tables for each token;
sequences that share the rows; packed sequences, which look up their rows.
"""

import torch
from torch import Tensor

from benchmarks.lib.harness import Case, main, passes, torch_peers
from tp_ext import RotaryEmbedding, _ops

HEADS, HEAD_DIM, SEQ = 16, 64, 1024


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def rotate_neighbours(x: Tensor) -> Tensor:
    return torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)


def cases(device: str, dtype: torch.dtype, size: int) -> list[Case]:
    tokens = size // dtype.itemsize // (HEADS * HEAD_DIM)
    x, grad = (torch.randn(tokens, HEADS, HEAD_DIM, device=device, dtype=dtype) for _ in range(2))
    x.requires_grad_()
    frequencies = 10000.0 ** -(torch.arange(HEAD_DIM // 2, device=device) * 2 / HEAD_DIM)
    angle = (torch.arange(tokens, device=device) % 4096)[:, None] * frequencies
    cos, sin = angle.cos(), angle.sin()
    tables = cos.nbytes + sin.nbytes  # read once in either direction
    result = []
    for interleaved, turn in ((False, rotate_half), (True, rotate_neighbours)):
        spread = (lambda t: t.repeat_interleave(2, -1)) if interleaved else (lambda t: torch.cat([t, t], -1))
        wide_cos, wide_sin = (spread(t)[:, None].to(dtype) for t in (cos, sin))

        def ours(x: Tensor, interleaved: bool = interleaved) -> Tensor:
            return _ops.rope(x, cos, sin, interleaved, None)

        def eager(x: Tensor, turn=turn, cos=wide_cos, sin=wide_sin) -> Tensor:
            return x * cos + turn(x) * sin

        name, moved = "interleaved" if interleaved else "half", 2 * size + tables
        result += passes(name, ours, torch_peers(eager, device), [x], grad, (moved, moved))
    return result + sequences(device, dtype, size)


def sequences(device: str, dtype: torch.dtype, size: int) -> list[Case]:
    seq = min(SEQ, max(size // dtype.itemsize // (HEADS * HEAD_DIM), 1))
    batch = max(size // dtype.itemsize // (HEADS * HEAD_DIM) // seq, 1)
    x, grad = (torch.randn(batch, seq, HEADS, HEAD_DIM, device=device, dtype=dtype) for _ in range(2))
    x.requires_grad_()
    cos, sin = RotaryEmbedding(HEAD_DIM).cos_sin(torch.arange(seq, device=device), dtype)
    wide_cos, wide_sin = (torch.cat([t, t], -1)[:, None].to(dtype) for t in (cos, sin))
    # Sequences of a half, a quarter, .. of the length, again and again
    lengths = [max(seq >> i, 1) for i in (1, 2, 3, 3)]
    positions = torch.cat([torch.arange(n, device=device) for n in lengths]).repeat(batch * 2)[: batch * seq]
    positions = positions.view(batch, seq)

    def batched(x: Tensor) -> Tensor:
        return x * wide_cos + rotate_half(x) * wide_sin

    def packed(x: Tensor) -> Tensor:
        return x * wide_cos[positions] + rotate_half(x) * wide_sin[positions]

    moved = 2 * x.nbytes + cos.nbytes + sin.nbytes
    return [
        *passes(
            "batch",
            lambda x: _ops.rope(x, cos, sin, False, None),
            torch_peers(batched, device),
            [x],
            grad,
            (moved, moved),
        ),
        *passes(
            "packed",
            lambda x: _ops.rope(x, cos, sin, False, positions),
            torch_peers(packed, device),
            [x],
            grad,
            (moved + positions.nbytes, moved + positions.nbytes),
        ),
    ]


if __name__ == "__main__":
    main(cases)
