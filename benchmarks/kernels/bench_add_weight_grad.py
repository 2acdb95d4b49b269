"""The accumulation of a weight's gradient by ``grad_accumulation_fusion``: main_grad += dy^T x, with main_grad in fp32.

``size`` is that of dy.
"""

import functools

import torch

from benchmarks.lib.harness import TOLERANCE, Call, Case, inference, main
from tp_ext import _ops


def cases(device: str, dtype: torch.dtype, size: int) -> list[Case]:
    torch.manual_seed(0)
    hidden, ffn = (4096, 4096) if device == "cuda" else (256, 1024)
    tokens = max(size // dtype.itemsize // ffn, 1)
    dy, x = (torch.randn(tokens, n, dtype=dtype, device=device) for n in (ffn, hidden))
    main_grad = torch.zeros(ffn, hidden, device=device)

    def check() -> None:
        want = dy.t().float() @ x.float()
        main_grad.zero_()
        _ops.add_weight_grad_(main_grad, dy, x)
        error = ((main_grad - want).norm() / want.norm()).item()
        if not error <= TOLERANCE[dtype]:
            raise AssertionError(f"weight gradient: differs from mm by {error:.2e} of its norm")

    peers: dict[str, Call] = {"mm, add_": lambda: main_grad.add_(dy.t() @ x)}
    if device == "cuda":
        peers["addmm_ of casts"] = lambda: main_grad.addmm_(dy.t().float(), x.float())
    recorded = {peer: functools.partial(inference, call) for peer, call in peers.items()}
    ours = functools.partial(inference, lambda: _ops.add_weight_grad_(main_grad, dy, x))
    return [Case("weight gradient, accumulated", ours, recorded, check, shape=(tokens, ffn))]


if __name__ == "__main__":
    main(cases)
