"""gated_act against torch's add, chunk, activation and product: forward, backward and both, with every gradient."""

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lib.harness import Case, main, passes, torch_peers
from benchmarks.peers.kernels_on_gpu import liger
from tp_ext import _ops

PEERS = {"swiglu": F.silu, "geglu": F.gelu}


def cases(device: str, dtype: torch.dtype, size: int) -> list[Case]:
    torch.manual_seed(0)
    n = 8192
    x = torch.randn(size // dtype.itemsize // n, n, dtype=dtype, device=device, requires_grad=True)
    with_bias = torch.randn(n, dtype=dtype, device=device, requires_grad=True)
    grad = torch.randn(x.shape[0], n // 2, dtype=dtype, device=device)
    result = []
    for name, activation in PEERS.items():

        def ours(x: Tensor, bias: Tensor | None = None, name: str = name) -> Tensor:
            return _ops.gated_act(x, bias, name)

        def eager(x: Tensor, bias: Tensor | None = None, activation=activation) -> Tensor:
            gate, up = (x if bias is None else x + bias).chunk(2, -1)
            return activation(gate) * up

        peers = torch_peers(eager, device)
        moved = (size * 3 // 2, size * 5 // 2)
        result += passes(name, ours, peers, [x, with_bias], grad, moved)
        if name == "swiglu":
            peers |= liger("swiglu", device)
        result += passes(f"{name} no bias", ours, peers, [x], grad, moved)
    return result


if __name__ == "__main__":
    main(cases)
