"""RMSNorm and LayerNorm against torch's: forward, and forward with every gradient, on a 16 MiB activation."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from harness import TOLERANCE, Case, main
from torch import Tensor

from tp_ext import _ops

BYTES = 16 << 20
EPS = 1e-5
Norm = Callable[..., Tensor]


def peer(*inputs: Tensor) -> Tensor:
    x, weight, *bias = inputs
    n = (x.shape[-1],)
    return F.layer_norm(x, n, weight, bias[0], EPS) if bias else F.rms_norm(x, n, weight, EPS)


def ours(*inputs: Tensor) -> Tensor:
    return _ops.layer_norm(*inputs, EPS) if len(inputs) == 3 else _ops.rms_norm(*inputs, EPS)


def infer(norm: Norm, inputs: list[Tensor]) -> Tensor:
    with torch.no_grad():
        return norm(*inputs)


def train(norm: Norm, inputs: list[Tensor], grad: Tensor) -> list[Tensor]:
    y = norm(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


def check(inputs: list[Tensor], grad: Tensor) -> None:
    """Against torch in fp64: in bf16 its own weight gradients over 65536 rows are off by a quarter."""
    wide = [t.detach().double().requires_grad_() for t in inputs]
    for got, exact in zip(train(ours, inputs, grad), train(peer, wide, grad.double()), strict=True):
        assert (got.double() - exact).norm() <= TOLERANCE[got.dtype] * exact.norm()


def cases(device: str, dtype: torch.dtype) -> list[Case]:
    result = []
    for n in (128, 1024, 4096):  # an attention head, a small and a large model
        torch.manual_seed(0)
        shape = (BYTES // dtype.itemsize // n, n)
        x, grad = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
        weight, bias = (torch.randn(n, dtype=dtype, device=device) for _ in range(2))
        for name, tensors in (("rms_norm", [x, weight]), ("layer_norm", [x, weight, bias])):
            ins = [t.detach().requires_grad_() for t in tensors]
            right = partial(check, ins, grad)
            for what, call, args, moved in (("fwd", infer, (ins,), 2), ("fwd+bwd", train, (ins, grad), 5)):
                peers = {"torch eager": partial(call, peer, *args)}
                result.append(Case(f"{name} {n} {what}", partial(call, ours, *args), peers, right, moved * BYTES))
    return result


if __name__ == "__main__":
    main(cases)
