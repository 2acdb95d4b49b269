"""GEMMs that end in bias and gelu_tanh, in their gradients, or in a sum; and the MLP made of them.

``size`` is that of the activation between the two linears. On a CPU the first two cases are identical to the
composition that they are compared with, and the accumulation is the `addmm_` of casts: they are not measured.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.lib.harness import TOLERANCE, Call, Case, inference, main, passes, torch_peers
from tp_ext import ParallelMLP, _ops


def activation_cases(x: Tensor, up: Tensor, bias: Tensor, down: Tensor, dy: Tensor) -> list[Case]:
    """y = gelu(x up^T + bias) with pre-activation kept; (dy down) times gelu's slope, and the bias's gradient."""
    pre, without_bias = F.linear(x, up, bias), F.linear(x, up)

    def torch_backward() -> object:
        dpre = torch.ops.aten.gelu_backward(dy @ down, pre, approximate="tanh")
        return dpre, dpre.sum(0)

    def eager() -> object:
        kept = F.linear(x, up, bias)
        return F.gelu(kept, approximate="tanh")

    forward: dict[str, Call] = {
        "torch eager": eager,
        "F.linear, bias_act": lambda: _ops.bias_act_fwd(F.linear(x, up), bias, "gelu_tanh"),
    }
    backward: dict[str, Call] = {
        "torch eager": torch_backward,
        "mm, bias_act": lambda: _ops.bias_act_bwd(dy @ down, without_bias, bias, "gelu_tanh"),
    }
    shape = tuple(x.shape)
    return [
        _case("linear + gelu fwd", lambda: _ops.linear_gelu_fwd(x, up, bias, True)[0], forward, shape),
        _case("dgelu + bias bwd", lambda: _ops.linear_dgelu_bwd(dy, down, pre), backward, shape),
    ]


def _case(name: str, ours: Call, peers: Mapping[str, Call], shape: tuple[int, ...], check: Call | None = None) -> Case:
    recorded = {peer: functools.partial(inference, call) for peer, call in peers.items()}
    return Case(name, functools.partial(inference, ours), recorded, check, shape=shape)


def accumulation_case(dy: Tensor, x: Tensor) -> Case:
    """main_grad += dy^T x, main_grad in fp32."""
    main_grad = torch.zeros(dy.shape[1], x.shape[1], device=x.device)

    def check() -> None:
        want = dy.t().float() @ x.float()
        main_grad.zero_()
        _ops.add_weight_grad_(main_grad, dy, x)
        error = ((main_grad - want).norm() / want.norm()).item()
        if not error <= TOLERANCE[dy.dtype]:
            raise AssertionError(f"weight gradient: differs from mm by {error:.2e} of its norm")

    peers: dict[str, Call] = {"mm, add_": lambda: main_grad.add_(dy.t() @ x)}
    if x.is_cuda:
        peers["addmm_ of casts"] = lambda: main_grad.addmm_(dy.t().float(), x.float())
    return _case(
        "weight gradient, accumulated",
        lambda: _ops.add_weight_grad_(main_grad, dy, x),
        peers,
        tuple(dy.shape),
        check,
    )


def mlp_cases(x: Tensor, grad: Tensor, ffn: int, device: str) -> list[Case]:
    torch.manual_seed(0)
    options: dict[str, Any] = {"activation": "gelu_tanh", "device": x.device, "dtype": x.dtype}
    mlp = {on: ParallelMLP(x.shape[1], ffn, gemm_epilogue=on, **options) for on in (True, False)}
    parameters = list(mlp[True].parameters())
    for name, param in mlp[True].named_parameters():
        layer, _, own = name.partition(".")
        setattr(mlp[False].get_submodule(layer), own, param)

    def block(on: bool) -> Callable[..., Tensor]:
        return lambda x, *_parameters: mlp[on](x)

    def eager(x: Tensor, up: Tensor, up_bias: Tensor, down: Tensor, down_bias: Tensor) -> Tensor:
        return F.linear(F.gelu(F.linear(x, up, up_bias), approximate="tanh"), down, down_bias)

    peers = {**torch_peers(eager, device), "without gemm_epilogue": block(False)}
    return passes("MLP", block(True), peers, [x.requires_grad_(), *parameters], grad, (0, 0))


def cases(device: str, dtype: torch.dtype, size: int) -> list[Case]:
    torch.manual_seed(0)
    hidden, ffn = (4096, 4096) if device == "cuda" else (256, 1024)
    tokens = max(size // dtype.itemsize // ffn, 1)

    def draw(*shape: int, scale: float = 1.0) -> Tensor:
        return torch.randn(shape, dtype=dtype, device=device) * scale

    x, dy, dpre, bias = draw(tokens, hidden), draw(tokens, hidden), draw(tokens, ffn), draw(ffn)
    up, down = draw(ffn, hidden, scale=hidden**-0.5), draw(hidden, ffn, scale=ffn**-0.5)
    result = activation_cases(x, up, bias, down, dy) if device == "cuda" else []
    return [*result, accumulation_case(dpre, x), *mlp_cases(x, dy, ffn, device)]


if __name__ == "__main__":
    main(cases)
