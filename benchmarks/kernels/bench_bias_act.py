"""bias_act against torch's two operators, one without a bias: forward, backward and both, with every gradient."""

import functools

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lib.harness import Case, main, passes, torch_peers
from tp_ext import _ops

PEERS = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def cases(device: str, dtype: torch.dtype, size: int) -> list[Case]:
    torch.manual_seed(0)
    n = 4096
    x = torch.randn(size // dtype.itemsize // n, n, dtype=dtype, device=device, requires_grad=True)
    bias = torch.randn(n, dtype=dtype, device=device, requires_grad=True)
    grad = torch.randn_like(x)
    result = []
    for name, activation in PEERS.items():

        def ours(x: Tensor, bias: Tensor | None = None, name: str = name) -> Tensor:
            return _ops.bias_act(x, bias, name)

        def eager(x: Tensor, bias: Tensor | None = None, activation=activation) -> Tensor:
            return activation(x if bias is None else x + bias)

        peers, moved = torch_peers(eager, device), (2 * size, 3 * size)
        result += passes(name, ours, peers, [x, bias], grad, moved)
        result += passes(f"{name} no bias", ours, peers, [x], grad, moved)
    return result


if __name__ == "__main__":
    main(cases)
