"""Rotary embedding, fused, against the usual composition of torch operators."""

import torch
from harness import Case, main, passes, torch_peers
from torch import Tensor

from tp_ext import _ops

HEADS, HEAD_DIM = 16, 64


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
            return _ops.rope(x, cos, sin, interleaved)

        def eager(x: Tensor, turn=turn, cos=wide_cos, sin=wide_sin) -> Tensor:
            return x * cos + turn(x) * sin

        name, moved = "interleaved" if interleaved else "half", 2 * size + tables
        result += passes(name, ours, torch_peers(eager, device), [x], grad, (moved, moved))
    return result


if __name__ == "__main__":
    main(cases)
