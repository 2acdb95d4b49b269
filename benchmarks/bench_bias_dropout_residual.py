"""residual + dropout(x + bias), fused and by seed, against torch's three operators."""

import torch
import torch.nn.functional as F
from harness import Case, main

from tp_ext import _ops

BYTES, HIDDEN, P = 16 << 20, 1024, 0.1


def cases(device: str, dtype: torch.dtype) -> list[Case]:
    x, residual, grad = (
        torch.randn(BYTES // dtype.itemsize // HIDDEN, HIDDEN, device=device, dtype=dtype) for _ in range(3)
    )
    bias = torch.randn(HIDDEN, device=device, dtype=dtype)
    index = (x.numel(), x.numel(), 0)

    def ours(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        seed = torch.randint(0, 2**62, (), dtype=torch.int64, device=device)
        return _ops.bias_dropout_residual(x, bias, residual, seed, P, *index)

    def eager(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return F.dropout(x + bias, P) + residual

    leaves = [t.detach().requires_grad_() for t in (x, bias, residual)]

    def check() -> None:  # the masks differ: kept elements agree, and as many are kept
        seed = torch.zeros((), dtype=torch.int64, device=device)
        y = _ops.bias_dropout_residual(x.double(), bias.double(), None, seed, P, *index)
        kept = y != 0
        torch.testing.assert_close(y[kept], ((x.double() + bias.double()) / (1 - P))[kept])
        assert abs(kept.double().mean().item() - (1 - P)) < 1e-3
        fused = _ops.bias_dropout_residual(x, bias, residual, seed, P, *index)
        torch.testing.assert_close(fused.double(), y + residual.double(), rtol=1e-2, atol=1e-2)

    return [
        Case(
            "forward",
            lambda: ours(x, bias, residual),
            {"torch eager": lambda: eager(x, bias, residual)},
            check,
            3 * BYTES,
        ),
        Case(
            "forward+backward",
            lambda: torch.autograd.grad(ours(*leaves), leaves, grad),
            {"torch eager": lambda: torch.autograd.grad(eager(*leaves), leaves, grad)},
            check,
            5 * BYTES,
        ),
    ]


if __name__ == "__main__":
    main(cases)
