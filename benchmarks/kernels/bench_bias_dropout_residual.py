"""residual + dropout(x + bias), fused and by seed, against torch's three operators; and dropout alone, where torch
keeps the mask and ours draws it again.
"""

import torch
import torch.nn.functional as F

from benchmarks.lib.harness import Case, main, passes, torch_peers
from tp_ext import _ops

HIDDEN, P = 1024, 0.1


def cases(device: str, dtype: torch.dtype, size: int) -> list[Case]:
    x, residual, grad = (
        torch.randn(size // dtype.itemsize // HIDDEN, HIDDEN, device=device, dtype=dtype) for _ in range(3)
    )
    bias = torch.randn(HIDDEN, device=device, dtype=dtype)
    index = (x.numel(), x.numel(), 0)

    def ours(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        seed = torch.randint(0, 2**62, (), dtype=torch.int64, device=device)
        return _ops.bias_dropout_residual(x, bias, residual, seed, P, *index)

    def eager(x: torch.Tensor, bias: torch.Tensor, residual: torch.Tensor) -> torch.Tensor:
        return F.dropout(x + bias, P) + residual

    def ours_alone(x: torch.Tensor) -> torch.Tensor:
        seed = torch.randint(0, 2**62, (), dtype=torch.int64, device=device)
        return _ops.bias_dropout_residual(x, None, None, seed, P, *index)

    def eager_alone(x: torch.Tensor) -> torch.Tensor:
        return F.dropout(x, P)

    def check() -> None:  # the masks differ: kept elements agree, and as many are kept
        rows = slice(0, min(len(x), 4096))
        few, own = (x[rows].detach(), residual[rows].detach()), bias.detach()
        part = (few[0].numel(), few[0].numel(), 0)
        seed = torch.zeros((), dtype=torch.int64, device=device)
        y = _ops.bias_dropout_residual(few[0].double(), own.double(), None, seed, P, *part)
        kept = y != 0
        torch.testing.assert_close(y[kept], ((few[0].double() + own.double()) / (1 - P))[kept])
        assert abs(kept.double().mean().item() - (1 - P)) < 3e-3
        fused = _ops.bias_dropout_residual(few[0], own, few[1], seed, P, *part)
        torch.testing.assert_close(fused.double(), y + few[1].double(), rtol=1e-2, atol=1e-2)

    leaves = [t.detach().requires_grad_() for t in (x, bias, residual)]
    # Forward reads x and the residual, backward the gradient; each writes one tensor
    fused = passes("dropout", ours, torch_peers(eager, device), leaves, grad, (3 * size, 2 * size), check)
    peers = torch_peers(eager_alone, device)
    return fused + passes("dropout alone", ours_alone, peers, leaves[:1], grad, (2 * size, 2 * size), check)


if __name__ == "__main__":
    main(cases)
