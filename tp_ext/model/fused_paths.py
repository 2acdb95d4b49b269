"""Fused paths, which read the weights of several layers themselves: torch's are refused, and ours ask first."""

from collections.abc import Sequence

from torch import nn


def refuse_fused_paths(model: nn.Module, changed: Sequence[str]) -> None:
    """Keeps layers of ``nn.Transformer`` with one of the parameters or layers ``changed`` from torch's fused path of
    inference, which reads weights itself: it would take a shard for the full one, and know nothing of few bits."""
    for name, module in model.named_modules():
        if not isinstance(module, nn.TransformerEncoderLayer | nn.TransformerEncoder):
            continue
        inside = any(name_.startswith(f"{name}." if name else "") for name_ in changed)
        # A value of 0 fails a condition of the fused path, which torch takes where a layer has no hooks
        if inside and isinstance(module, nn.TransformerEncoderLayer):
            module.activation_relu_or_gelu = 0
        if inside and isinstance(module, nn.TransformerEncoder):
            module.use_nested_tensor = False


def is_plain(layer: nn.Module, kind: type) -> bool:
    """Returns whether a layer is of this class, without hooks and without another ``forward``: others may then call its
    operators."""
    if type(layer) is not kind or "forward" in layer.__dict__:
        return False
    hooks = (layer._forward_hooks, layer._forward_pre_hooks, layer._backward_hooks, layer._backward_pre_hooks)
    return not any(hooks)
