"""Cross entropy of the local share of a vocabulary (the kernels alone, one rank) against torch's on the same logits.

16 MiB of logits. The in-place rows copy the logits first, ours and torch's alike, since the gradient replaces them.
"""

import torch
import torch.nn.functional as F
from harness import Case, main
from torch import Tensor

from tp_ext import _ops

BYTES = 16 << 20


def cases(device: str, dtype: torch.dtype) -> list[Case]:
    return [case for vocab in (1024, 50257) for case in _cases(vocab, device, dtype)]


def _cases(vocab: int, device: str, dtype: torch.dtype) -> list[Case]:
    torch.manual_seed(0)
    rows = BYTES // dtype.itemsize // vocab
    logits = torch.randn(rows, vocab, device=device).to(dtype)
    leaf = logits.clone().requires_grad_()
    target = torch.randint(vocab, (rows,), device=device)
    size = logits.numel() * dtype.itemsize

    def ours(x: Tensor, inplace: bool = False) -> Tensor:
        cut = ("", 0, vocab, vocab, -100, 0.0, 0.0)
        return _ops.vocab_parallel_cross_entropy(x, target, *cut, "mean", inplace)

    def theirs(x: Tensor) -> Tensor:
        return F.cross_entropy(x, target)

    def grad(loss: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return loss.detach(), torch.autograd.grad(loss, x)[0]

    def copied(inplace: bool) -> tuple[Tensor, Tensor]:
        x = leaf * 1
        return grad(ours(x, True) if inplace else theirs(x), leaf)

    name = f"{rows} x {vocab}"
    return [
        Case(f"forward {name}", lambda: ours(logits), {"torch eager": lambda: theirs(logits)}, None, size),
        Case(
            f"forward+backward {name}",
            lambda: grad(ours(leaf), leaf),
            {"torch eager": lambda: grad(theirs(leaf), leaf)},
            None,
            3 * size,
        ),
        Case(f"in place {name}", lambda: copied(True), {"torch eager": lambda: copied(False)}, None, 6 * size),
    ]


if __name__ == "__main__":
    main(cases)
