"""Coalescing of the small gradient sums of a block's backward into one all-reduce.

Under sequence parallelism the gradient of every norm weight and row bias is a sum over the ranks, and so is, with fewer
KV heads than ranks, that of the replicated heads. Each sum is a collective of a few kilobytes, dominated by latency.
:func:`coalesce_gradients` makes them one per block.
"""

import sys
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tp_ext import _ops
from tp_ext._checks import check_type
from tp_ext.model.module import ParallelModule


class CoalescedGradients:
    """The handle that :func:`coalesce_gradients` returns; ``remove()`` undoes it."""

    def __init__(self, *handles: torch.utils.hooks.RemovableHandle) -> None:
        self._handles = handles

    def remove(self) -> None:
        """Removes the hooks: from the next forward on each layer sums its own gradients again."""
        for handle in self._handles:
            handle.remove()


def coalesce_gradients(module: nn.Module) -> CoalescedGradients:
    """Sums all gradients in ``module`` that need a sum over the ranks by one all-reduce per dtype and group.

    ::

        class Block(nn.Module):
            def __init__(self, ...):
                ...  # norms, attention, MLP
                tp_ext.coalesce_gradients(self)

    Nothing else changes: every gradient is complete when ``backward()`` returns, and before hooks, DDP or FSDP2 see it.
    It applies to norm weights and biases and row biases under SP, weights of qk-norm, copied KV heads, and the
    replicated factor of an adapter. They enter the sharded work together, when the forward of ``module`` begins; so
    their gradients are complete together, when its backward ends: with a whole model as ``module``, at the very end.
    Gradients of frozen or unused parameters, or not requested ones, are left out. The sums equal those without it up to
    the order of addition, with the same bits on every rank.

    It works by forward hooks, for calls of ``module`` itself, including recomputed ones (activation checkpointing), and
    also after ``deepcopy``. A layer that is called in another way, added later (LoRA: coalesce after ``add_lora``), or
    whose parameters FSDP2 gathers later than those of ``module`` sums its own gradients; so do all layers if a call of
    ``module`` is compiled (the hooks have side effects, which ``torch.compile`` does not allow under checkpointing) or
    transformed by ``torch.func``. Without parallelism it does nothing.

    Pipeline schedules that split the backward (``ScheduleInterleavedZeroBubble``, ``ScheduleZBVZeroBubble``,
    ``ScheduleDualPipeV``) need :func:`uncoalesce_gradients`: they compute the gradients of weights group by group, and
    weights whose gradients are summed together form one group that spans the whole block. With it torch would run the
    input's backward of the block again. Its forward raises RuntimeError under such a schedule of torch.

    Args:
        module: a module with layers of this package, such as a transformer block.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``. ValueError: it has layers built in :func:`tp_ext.tp_invariant`.
    """
    check_type(nn.Module, "an nn.Module", module=module)
    groups: dict[str, list[SummedParameter]] = {}
    for layer in module.modules():
        if isinstance(layer, ParallelModule):
            if layer.invariant_blocks is not None:
                raise ValueError(
                    "module: must not have layers built in tp_invariant, which sum each gradient by blocks of its own"
                )
            for name, rows in layer.summed_parameters().items():
                groups.setdefault(layer.tp_group.name, []).append((layer, name, rows))
    if not groups:
        return CoalescedGradients()
    hooks = _Hooks(groups)
    return CoalescedGradients(
        module.register_forward_pre_hook(hooks.enter),
        # Also after an error in forward: the next one would take tensors of this graph
        module.register_forward_hook(hooks.leave, always_call=True),
    )


def uncoalesce_gradients(module: nn.Module) -> None:
    """Undoes :func:`coalesce_gradients` for ``module`` and all its submodules: from the next forward on each layer sums
    its own gradients.

    For pipeline schedules that split the backward, with blocks that coalesce in their constructor.

    Args:
        module: a model, or a stage of a pipeline.

    Communicates nothing.

    Raises:
        TypeError: ``module`` is not an ``nn.Module``.
    """
    check_type(nn.Module, "an nn.Module", module=module)
    for each in module.modules():
        for hook in each._forward_pre_hooks.values():
            hooks = getattr(hook, "__self__", None)
            if isinstance(hooks, _Hooks):
                # The handle that could remove the hooks is the caller's; without groups they do nothing
                hooks.groups = {}


SummedParameter = tuple[ParallelModule, str, list[int]]  # layer, name of its parameter, rows of it to sum


def _in_transform() -> bool:
    """Returns True under a transform of torch.func, where each layer sums its own gradients."""
    level: int | None = torch._C._functorch.maybe_current_level()
    return level is not None


def _splitting_schedule() -> str:
    """Returns the class of the schedule of torch that runs this forward, if it splits the backward; else ""."""
    known = sys.modules.get("torch.distributed.pipelining.schedules")
    # Nothing else says that a schedule runs: no flag does [Note: a backward in two halves keeps results, not flags]
    frame: FrameType | None = sys._getframe(1) if known is not None else None
    while frame is not None:
        schedule = frame.f_locals.get("self") if frame.f_code.co_filename == getattr(known, "__file__", "") else None
        if schedule is not None:
            orders = getattr(schedule, "pipeline_order", None) or {}
            kinds = {
                action.computation_type.name for order in orders.values() for action in order if action is not None
            }
            return type(schedule).__name__ if "BACKWARD_INPUT" in kinds else ""
        frame = frame.f_back
    return ""


class _Hooks:
    """The hooks of one module. Its parameters are collected once; layers sum gradients of later ones themselves."""

    def __init__(self, groups: dict[str, list[SummedParameter]]) -> None:
        self.groups = groups
        self.entered: list[tuple[ParallelModule, str]] = []

    def enter(self, module: nn.Module, args: Any) -> None:
        if not torch.is_grad_enabled() or torch.compiler.is_compiling() or _in_transform():
            return
        if self.groups and (schedule := _splitting_schedule()):
            raise RuntimeError(
                f"coalesce_gradients: must be undone, by tp_ext.uncoalesce_gradients(stage), for {schedule}: it "
                "computes the gradients of weights apart from those of activations, which would go through the block's "
                "graph twice"
            )
        for group, entries in self.groups.items():
            names, values, rows_of_all = [], [], []
            for layer, name, rows in entries:
                if layer.is_coalesced(name):  # by the hooks of an outer module
                    continue
                value = layer.entering_parameter(name)
                # What FSDP2 has not gathered yet is the layer's to sum
                if isinstance(value, Tensor) and value.requires_grad and not isinstance(value, DTensor):
                    names.append((layer, name))
                    values.append(value)
                    rows_of_all += rows
            if values:
                results = _ops.copy_to_region_coalesced(values, group, rows_of_all)
                for (layer, name), result in zip(names, results, strict=True):
                    layer._coalesced[name] = result
                self.entered += names

    def leave(self, module: nn.Module, args: Any, result: Any) -> None:
        if self.entered:
            for layer, name in self.entered:
                layer._coalesced.pop(name, None)
            self.entered.clear()
