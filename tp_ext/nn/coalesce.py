"""One all-reduce for the small sums of a block's backward.

Under sequence parallelism the gradient of every norm weight and row bias is a sum over the ranks, and so is, with fewer
KV heads than ranks, that of the heads that ranks hold copies of. Each is a collective of its own, of a few kilobytes:
all latency. :func:`coalesce_gradients` makes them one per block.
"""

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tp_ext import _ops
from tp_ext.nn.module import ParallelModule


class CoalescedGradients:
    """What :func:`coalesce_gradients` returns; ``remove()`` takes it back."""

    def __init__(self, *handles: torch.utils.hooks.RemovableHandle) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Each parameter's gradient is summed on its own again, from the next forward on."""
        for handle in self._handles:
            handle.remove()


def coalesce_gradients(module: nn.Module) -> CoalescedGradients:
    """The gradients in ``module`` that are summed over the ranks are summed by one all-reduce, per dtype and group.

    ::

        class Block(nn.Module):
            def __init__(self, ...):
                ...  # norms, attention, MLP
                tp_ext.coalesce_gradients(self)

    Nothing else changes: every gradient is complete when ``backward()`` returns, and before hooks, DDP or FSDP2 see it.
    Which parameters: norm weights and biases and row biases under SP, weights of qk-norm, copied KV heads, the
    replicated factor of an adapter. They enter the sharded work together, when the forward of ``module`` begins; so
    their gradients come together, when its backward ends: with a whole model as ``module``, at the very end. What is
    frozen, unused or not asked for is left out. The sums are those without it up to the order of addition, the same
    bits on every rank.

    Works on forward hooks: for calls of ``module`` itself, recomputed ones included (activation checkpointing), also
    after ``deepcopy``. A layer that is called in another way, added later (LoRA: coalesce after ``add_lora``), or whose
    parameters FSDP2 gathers later than those of ``module`` sums its own; so do all layers where a call of ``module`` is
    compiled (the hooks leave marks, which ``torch.compile`` does not allow under checkpointing) or transformed by
    ``torch.func``. No parallelism: nothing is done.

    Args:
        module: contains layers of this package; a transformer block, say.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``.
    """
    if not isinstance(module, nn.Module):
        raise TypeError(f"module: {type(module).__name__} must be an nn.Module")
    groups: dict[str, list[Entry]] = {}
    for layer in module.modules():
        if isinstance(layer, ParallelModule):
            for name in layer.summed_parameters():
                groups.setdefault(layer.tp_group.name, []).append((layer, name, layer.copied_rows(name)))
    if not groups:
        return CoalescedGradients()
    hooks = _Hooks(groups)
    return CoalescedGradients(
        module.register_forward_pre_hook(hooks.enter),
        module.register_forward_hook(hooks.leave, always_call=True),
    )


Entry = tuple[ParallelModule, str, list[int]]  # a layer, its parameter, and which rows of that are summed


def _in_transform() -> bool:
    """Under a transform of torch.func: each layer sums its own there."""
    level: int | None = torch._C._functorch.maybe_current_level()
    return level is not None


class _Hooks:
    """Of one module: its parameters, found once. One that is gone or new does no harm: layers can do without."""

    def __init__(self, groups: dict[str, list[Entry]]) -> None:
        self.groups = groups
        self.entered: list[tuple[ParallelModule, str]] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or _in_transform():
            return
        for group, entries in self.groups.items():
            names, values, pieces = [], [], []
            for layer, name, rows in entries:
                if name in layer.entered:  # by the hooks of a module around this one
                    continue
                value = layer.entering_parameter(name)
                if isinstance(value, Tensor) and value.requires_grad and not isinstance(value, DTensor):
                    names.append((layer, name))
                    values.append(value)
                    pieces += rows
            if values:
                results = _ops.copy_to_region_coalesced(values, group, pieces)
                for (layer, name), result in zip(names, results, strict=True):
                    layer.entered[name] = result
                self.entered += names

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if self.entered:
            for layer, name in self.entered:
                layer.entered.pop(name, None)
            self.entered.clear()
