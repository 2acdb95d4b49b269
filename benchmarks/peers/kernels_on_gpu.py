"""Peers that run on a GPU only, if installed: Liger-Kernel's Triton kernels, as a user calls them."""

import importlib
import importlib.util
from collections.abc import Callable
from typing import Any

from torch import Tensor


def liger(name: str, device: str) -> dict[str, Callable[..., Tensor]]:
    """{"Liger-Kernel": its function of the same arguments as ours}, or {} without a GPU or without Liger-Kernel."""
    if device != "cuda" or name not in LIGER or importlib.util.find_spec("liger_kernel") is None:
        return {}
    return {"Liger-Kernel": LIGER[name]} if name in LIGER else {}


def _function(module: str, name: str) -> Any:
    return getattr(importlib.import_module(f"liger_kernel.ops.{module}"), name).apply


def _swiglu(x: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)  # it makes both contiguous
    return _function("swiglu", "LigerSiLUMulFunction")(gate, up)


def _rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-5) -> Tensor:
    return _function("rms_norm", "LigerRMSNormFunction")(x, weight, eps, 0.0, "llama", False)  # not in place


def _layer_norm(x: Tensor, weight: Tensor, bias: Tensor, eps: float = 1e-5) -> Tensor:
    return _function("layer_norm", "LigerLayerNormFunction")(x, weight, bias, eps)


def _add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-5) -> tuple[Tensor, Tensor]:
    """The normalised sum, and the sum."""
    apply = _function("fused_add_rms_norm", "LigerFusedAddRMSNormFunction")
    y, total = apply(x, residual, weight, eps, 0.0, "llama", False)
    return y, total


def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
    """The gradient overwrites the logits."""
    loss: Tensor = importlib.import_module("liger_kernel.transformers").LigerCrossEntropyLoss()(logits, target)
    return loss


LIGER: dict[str, Callable[..., Any]] = {
    "swiglu": _swiglu,
    "rms_norm": _rms_norm,
    "layer_norm": _layer_norm,
    "add_rms_norm": _add_rms_norm,
    "cross_entropy": _cross_entropy,
}
