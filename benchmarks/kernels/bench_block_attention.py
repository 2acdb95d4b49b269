"""Attention whose rows do not depend on other rows, next to torch's attention: forward, backward and both."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lib.harness import Case, main, passes, torch_peers
from tp_ext import _ops

HEADS, HEAD_DIM = 16, 128


def ours(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return _ops.block_attention(q, k, v, None, None, [], True, None, None, None)


def cases(device: str, dtype: torch.dtype, size: int) -> list[Case]:
    torch.manual_seed(0)
    n = 2048 if size >= 64 << 20 else 64
    q, k, v, grad = (torch.randn(1, HEADS, n, HEAD_DIM, dtype=dtype, device=device) for _ in range(4))
    peers = torch_peers(partial(F.scaled_dot_product_attention, is_causal=True), device)
    return passes(f"causal {n}", ours, peers, [t.requires_grad_() for t in (q, k, v)], grad, (0, 0))


if __name__ == "__main__":
    main(cases)
