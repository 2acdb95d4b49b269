"""RMSNorm and LayerNorm, alone and of a sum, against torch's: forward, backward and both, with every gradient."""

from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lib.harness import TOLERANCE, Case, Forward, Outputs, main, passes, torch_peers, trained
from benchmarks.peers.kernels_on_gpu import liger
from tp_ext import _ops

EPS = 1e-5


def peer(*inputs: Tensor) -> Tensor:
    x, weight, *bias = inputs
    n = (x.shape[-1],)
    return F.layer_norm(x, n, weight, bias[0], EPS) if bias else F.rms_norm(x, n, weight, EPS)


def ours(*inputs: Tensor) -> Tensor:
    return _ops.layer_norm(*inputs, EPS) if len(inputs) == 3 else _ops.rms_norm(*inputs, EPS)


def add_peer(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    x, residual, *params = inputs
    total = x + residual
    return peer(total, *params), total


def add_ours(*inputs: Tensor) -> tuple[Tensor, Tensor]:
    return (_ops.layer_norm_residual if len(inputs) == 4 else _ops.rms_norm_residual)(*inputs, EPS)


def check(norms: tuple[Forward, Forward], inputs: list[Tensor], grad: Outputs) -> None:
    """Compares with torch in fp64: in bf16 torch's own weight gradients over 65536 rows are off by a quarter."""
    mine, torchs = norms
    wide = [t.detach().double().requires_grad_() for t in inputs]
    wide_grad = grad.double() if isinstance(grad, Tensor) else [g.double() for g in grad]
    exact = trained(partial(torchs, *wide), wide_grad, wide)
    for got, want in zip(trained(partial(mine, *inputs), grad, inputs), exact, strict=True):
        assert (got.double() - want).norm() <= TOLERANCE[got.dtype] * want.norm()


def cases(device: str, dtype: torch.dtype, size: int) -> list[Case]:
    result = []
    for n in (128, 1024, 4096):  # an attention head, a small and a large model
        torch.manual_seed(0)
        shape = (size // dtype.itemsize // n, n)
        x, residual, *grads = (torch.randn(shape, dtype=dtype, device=device) for _ in range(4))
        weight, bias = (torch.randn(n, dtype=dtype, device=device) for _ in range(2))
        for name, params in (("rms_norm", [weight]), ("layer_norm", [weight, bias])):
            for adds, norms in ((False, (ours, peer)), (True, (add_ours, add_peer))):
                inputs = [t.detach().requires_grad_() for t in ([x, residual] if adds else [x]) + params]
                grad = grads if adds else grads[0]
                peers = torch_peers(norms[1], device) | liger(f"add_{name}" if adds else name, device)
                # Of a sum, forward reads two and writes two, backward reads three and writes one
                moved = (4 * size, 4 * size) if adds else (2 * size, 3 * size)
                right = partial(check, norms, inputs, grad)
                case = f"{name} residual {n}" if adds else f"{name} {n}"
                result += passes(case, norms[0], peers, inputs, grad, moved, right)
    return result


if __name__ == "__main__":
    main(cases)
