"""bias_act against torch's two operators: forward, and forward with every gradient, on a 16 MiB activation."""

import functools

import torch
import torch.nn.functional as F
from harness import Case, inference, main, trained

from tp_ext import _ops

BYTES = 16 << 20
PEERS = {
    "gelu": F.gelu,
    "gelu_tanh": functools.partial(F.gelu, approximate="tanh"),
    "relu": F.relu,
    "silu": F.silu,
}


def cases(device: str, dtype: torch.dtype) -> list[Case]:
    torch.manual_seed(0)
    n = 4096
    x = torch.randn(BYTES // dtype.itemsize // n, n, dtype=dtype, device=device, requires_grad=True)
    bias = torch.randn(n, dtype=dtype, device=device, requires_grad=True)
    grad = torch.randn_like(x)
    result = []
    for name, peer in PEERS.items():
        ours = functools.partial(_ops.bias_act, x, bias, name)
        theirs = functools.partial(lambda f: f(x + bias), peer)
        a, b = (functools.partial(inference, f) for f in (ours, theirs))
        result.append(Case(f"{name} fwd", a, {"torch eager": b}, None, 2 * BYTES))
        a, b = (functools.partial(trained, f, grad, [x, bias]) for f in (ours, theirs))
        result.append(Case(f"{name} fwd+bwd", a, {"torch eager": b}, None, 5 * BYTES))
    return result


if __name__ == "__main__":
    main(cases)
