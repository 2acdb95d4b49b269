"""Rotary embedding, fused, against the usual composition of torch operators."""

import torch
from harness import Case, main

from tp_ext import _ops

BYTES, HEADS, HEAD_DIM = 16 << 20, 16, 64


def rotate_half(x: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, -1)
    return torch.cat([-b, a], -1)


def rotate_neighbours(x: torch.Tensor) -> torch.Tensor:
    return torch.stack([-x[..., 1::2], x[..., 0::2]], -1).flatten(-2)


def cases(device: str, dtype: torch.dtype) -> list[Case]:
    tokens = BYTES // dtype.itemsize // (HEADS * HEAD_DIM)
    x, grad = (torch.randn(tokens, HEADS, HEAD_DIM, device=device, dtype=dtype) for _ in range(2))
    leaf = x.detach().requires_grad_()
    frequencies = 10000.0 ** -(torch.arange(HEAD_DIM // 2, device=device) * 2 / HEAD_DIM)
    angle = (torch.arange(tokens, device=device) % 4096)[:, None] * frequencies
    cos, sin = angle.cos(), angle.sin()
    result = []
    for interleaved, turn in ((False, rotate_half), (True, rotate_neighbours)):
        spread = (lambda t: t.repeat_interleave(2, -1)) if interleaved else (lambda t: torch.cat([t, t], -1))
        wide_cos, wide_sin = (spread(t)[:, None].to(dtype) for t in (cos, sin))

        def ours(x: torch.Tensor, interleaved: bool = interleaved) -> torch.Tensor:
            return _ops.rope(x, cos, sin, interleaved)

        def eager(x: torch.Tensor, turn=turn, cos=wide_cos, sin=wide_sin) -> torch.Tensor:
            return x * cos + turn(x) * sin

        name = "interleaved" if interleaved else "half"
        result += [
            Case(f"{name} forward", lambda f=ours: f(x), {"torch eager": lambda f=eager: f(x)}, None, 2 * BYTES),
            Case(
                f"{name} forward+backward",
                lambda f=ours: torch.autograd.grad(f(leaf), leaf, grad),
                {"torch eager": lambda f=eager: torch.autograd.grad(f(leaf), leaf, grad)},
                None,
                4 * BYTES,
            ),
        ]
    return result


if __name__ == "__main__":
    main(cases)
