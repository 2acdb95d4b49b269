"""gated_act against torch's add, chunk, activation and product: forward, and with every gradient, x of 16 MiB."""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from harness import Case, inference, main, trained

from tp_ext import _ops

BYTES = 16 << 20
PEERS = {"swiglu": F.silu, "geglu": F.gelu}


def _composition(
    activation: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    gate, up = (x if bias is None else x + bias).chunk(2, -1)
    return activation(gate) * up


def cases(device: str, dtype: torch.dtype) -> list[Case]:
    torch.manual_seed(0)
    n = 8192
    x = torch.randn(BYTES // dtype.itemsize // n, n, dtype=dtype, device=device, requires_grad=True)
    with_bias = torch.randn(n, dtype=dtype, device=device, requires_grad=True)
    grad = torch.randn(x.shape[0], n // 2, dtype=dtype, device=device)
    result = []
    for name, peer in PEERS.items():
        for bias, label in ((with_bias, name), (None, f"{name} no bias")):
            inputs = [x] if bias is None else [x, bias]
            ours = functools.partial(_ops.gated_act, x, bias, name)
            theirs = functools.partial(_composition, peer, x, bias)
            a, b = (functools.partial(inference, f) for f in (ours, theirs))
            result.append(Case(f"{label} fwd", a, {"torch eager": b}, None, BYTES * 3 // 2))
            a, b = (functools.partial(trained, f, grad, inputs) for f in (ours, theirs))
            result.append(Case(f"{label} fwd+bwd", a, {"torch eager": b}, None, 4 * BYTES))
    return result


if __name__ == "__main__":
    main(cases)
