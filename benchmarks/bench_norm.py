"""RMSNorm and LayerNorm against torch's: forward, backward and both, with every gradient."""

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F
from harness import TOLERANCE, Case, main, passes, torch_peers, trained
from peers_on_gpu import liger
from torch import Tensor

from tp_ext import _ops

EPS = 1e-5
Norm = Callable[..., Tensor]


def peer(*inputs: Tensor) -> Tensor:
    x, weight, *bias = inputs
    n = (x.shape[-1],)
    return F.layer_norm(x, n, weight, bias[0], EPS) if bias else F.rms_norm(x, n, weight, EPS)


def ours(*inputs: Tensor) -> Tensor:
    return _ops.layer_norm(*inputs, EPS) if len(inputs) == 3 else _ops.rms_norm(*inputs, EPS)


def check(inputs: list[Tensor], grad: Tensor) -> None:
    """Against torch in fp64: in bf16 its own weight gradients over 65536 rows are off by a quarter."""
    wide = [t.detach().double().requires_grad_() for t in inputs]
    exact = trained(partial(peer, *wide), grad.double(), wide)
    for got, want in zip(trained(partial(ours, *inputs), grad, inputs), exact, strict=True):
        assert (got.double() - want).norm() <= TOLERANCE[got.dtype] * want.norm()


def cases(device: str, dtype: torch.dtype, size: int) -> list[Case]:
    result = []
    for n in (128, 1024, 4096):  # an attention head, a small and a large model
        torch.manual_seed(0)
        shape = (size // dtype.itemsize // n, n)
        x, grad = (torch.randn(shape, dtype=dtype, device=device) for _ in range(2))
        weight, bias = (torch.randn(n, dtype=dtype, device=device) for _ in range(2))
        for name, tensors in (("rms_norm", [x, weight]), ("layer_norm", [x, weight, bias])):
            inputs = [t.detach().requires_grad_() for t in tensors]
            peers = torch_peers(peer, device) | liger(name, device)
            right = partial(check, inputs, grad)
            result += passes(f"{name} {n}", ours, peers, inputs, grad, (2 * size, 3 * size), right)
    return result


if __name__ == "__main__":
    main(cases)
