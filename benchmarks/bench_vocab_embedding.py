"""Embedding lookup of one rank, against torch's: half of the ids belong to this rank.

torch: what the common implementations do, mask the ids, look them up, zero the rows of the others. 16 MiB of output.
"""

import torch
import torch.nn.functional as F
from harness import Case, main
from torch import Tensor

from tp_ext import _ops

BYTES, HIDDEN, VOCAB = 16 << 20, 1024, 8192


def cases(device: str, dtype: torch.dtype) -> list[Case]:
    torch.manual_seed(0)
    tokens, local = BYTES // dtype.itemsize // HIDDEN, VOCAB // 2
    weight = torch.randn(local, HIDDEN, device=device).to(dtype)
    leaf = weight.clone().requires_grad_()
    ids = torch.randint(VOCAB, (tokens,), device=device)
    upstream = torch.randn(tokens, HIDDEN, device=device).to(dtype)

    def ours(w: Tensor) -> Tensor:
        return _ops.vocab_parallel_embedding(ids, w, "", 0, local, VOCAB, False, None)

    def theirs(w: Tensor) -> Tensor:
        outside = ids >= local
        return F.embedding(ids.masked_fill(outside, 0), w).masked_fill(outside[:, None], 0)

    def grad(y: Tensor) -> tuple[Tensor, Tensor]:
        return y.detach(), torch.autograd.grad(y, leaf, upstream)[0]

    return [
        Case("forward", lambda: ours(weight), {"torch eager": lambda: theirs(weight)}, None, BYTES * 3 // 2),
        Case(
            "forward+backward",
            lambda: grad(ours(leaf)),
            {"torch eager": lambda: grad(theirs(leaf))},
            None,
            BYTES * 2 + weight.numel() * dtype.itemsize,
        ),
    ]


if __name__ == "__main__":
    main(cases)
