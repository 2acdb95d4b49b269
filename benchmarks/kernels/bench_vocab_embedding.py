"""Embedding lookup of one rank, against torch's: half of the ids belong to this rank.

The torch version does what common implementations do: mask the ids, look them up, zero the rows of the others.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lib.harness import Case, main, passes, torch_peers
from tp_ext import _ops

HIDDEN, VOCAB = 1024, 8192


def cases(device: str, dtype: torch.dtype, size: int) -> list[Case]:
    torch.manual_seed(0)
    tokens, local = size // dtype.itemsize // HIDDEN, VOCAB // 2
    weight = torch.randn(local, HIDDEN, device=device).to(dtype).requires_grad_()
    ids = torch.randint(VOCAB, (tokens,), device=device)
    upstream = torch.randn(tokens, HIDDEN, device=device).to(dtype)

    def ours(w: Tensor) -> Tensor:
        return _ops.vocab_parallel_embedding(ids, w, "", 0, local, VOCAB, False, None)

    def theirs(w: Tensor) -> Tensor:
        outside = ids >= local
        return F.embedding(ids.masked_fill(outside, 0), w).masked_fill(outside[:, None], 0)

    # Forward writes y and reads each row that is looked up once; backward reads the gradients of this rank's ids, and
    # writes that of the table
    own = ids[ids < local]
    row = HIDDEN * dtype.itemsize
    moved = (size + len(own.unique()) * row, len(own) * row + weight.nbytes)
    exact = weight.detach().double().requires_grad_()

    def check() -> None:
        """Compares with fp64: in half precision torch sums the gradients of an id in half precision."""
        y, y64 = ours(weight), theirs(exact)
        assert torch.equal(y.double(), y64)
        (grad,), (want,) = (torch.autograd.grad(a, b, upstream.to(a.dtype)) for a, b in ((y, weight), (y64, exact)))
        assert (grad.double() - want).norm() <= 4 * torch.finfo(dtype).eps * want.norm()

    return passes("lookup", ours, torch_peers(theirs, device), [weight], upstream, moved, check)


if __name__ == "__main__":
    main(cases)
