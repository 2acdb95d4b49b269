"""rms_norm and layer_norm, alone or of a sum with a residual: calls, inputs and results."""

import torch
from torch import Tensor

from tp_ext import _ops

EPS = 1e-5
HALF = (torch.bfloat16, torch.float16)
KINDS = ["rms", "layer"]


def plain(kind: str, x: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    return _ops.rms_norm(x, weight, EPS) if kind == "rms" else _ops.layer_norm(x, weight, bias, EPS)


def fused(kind: str, x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None) -> tuple[Tensor, Tensor]:
    if kind == "rms":
        return _ops.rms_norm_residual(x, residual, weight, EPS)
    return _ops.layer_norm_residual(x, residual, weight, bias, EPS)


def either(kind: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None):
    """Returns y, and the sum if there is a residual."""
    return (plain(kind, x, weight, bias),) if residual is None else fused(kind, x, residual, weight, bias)


def inputs(
    kind: str, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, params: str = "wb", adds: bool = True
) -> list[Tensor | None]:
    """Returns x, residual, weight and bias; None for what is left out."""
    torch.manual_seed(0)
    x, residual = (torch.randn(shape, dtype=torch.float64) * scale + 0.5 for scale in (2, 1))
    weight = torch.randn(shape[-1], dtype=torch.float64) if "w" in params else None
    bias = torch.randn(shape[-1], dtype=torch.float64) if "b" in params and kind == "layer" else None
    tensors = (x, residual if adds else None, weight, bias)
    return [t if t is None else t.to(device, dtype).requires_grad_() for t in tensors]


def grads(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    return [torch.randn(shape, dtype=torch.float64).to(device, dtype) for _ in range(2)]


def results(function, kind: str, tensors: list[Tensor | None], dys: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """Returns the outputs and all gradients, computed in dtype from the values of `tensors`."""
    leaves = [t if t is None else t.detach().to(dtype).requires_grad_() for t in tensors]
    outputs = function(kind, *leaves)
    outputs = outputs if isinstance(outputs, tuple) else (outputs,)
    dys = [dy.to(dtype) for dy in dys[: len(outputs)]]
    return [*(t.detach() for t in outputs), *torch.autograd.grad(outputs, [t for t in leaves if t is not None], dys)]
