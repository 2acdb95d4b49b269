"""Checks of the model and the options of ``parallelize``, and a note of the models that it has prepared."""

import weakref

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

from tp_ext.parallel.block_wrappers import RECOMPUTE
from tp_ext.parallel.pipeline_schedules import check_schedule

AUTOCAST = (None, torch.bfloat16, torch.float16)

_parallelized: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def check_model_is_new(model: nn.Module) -> None:
    """Raises ValueError if ``parallelize`` or ``pipeline_stages`` has been applied to the model."""
    if model in _parallelized:
        raise ValueError(
            f"model: {type(model).__name__} must not have been parallelized before, by parallelize or "
            "pipeline_stages; build the model anew"
        )


def check_trainable(model: nn.Module) -> None:
    """Raises ValueError if the model has no parameter that gets a gradient, or is sharded by FSDP2."""
    if any(isinstance(module, FSDPModule) for module in model.modules()):
        raise ValueError("model: must not be sharded by fully_shard yet; pass zero=2 or 3, which shards its blocks")
    if not any(param.requires_grad for param in model.parameters()):
        raise ValueError(f"model: {type(model).__name__} must have a parameter that requires a gradient")


def note_parallelized(*models: nn.Module) -> None:
    """Notes models for :func:`check_model_is_new`; copies of them are other models."""
    _parallelized.update(models)


def check_options(
    schedule: object,
    microbatches: object,
    loss: object,
    reduction: object,
    zero: object,
    offload: bool,
    recompute: object,
    autocast: object,
) -> None:
    """Raises TypeError or ValueError unless ``parallelize`` takes these options."""
    if schedule is not None:
        check_schedule(schedule)
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction: {reduction!r} must be 'mean' or 'sum'")
    if not callable(loss):
        raise TypeError(f"loss: {loss!r} must be a function of the output of the model and the target")
    if zero not in (0, 1, 2, 3) or isinstance(zero, bool):
        raise ValueError(f"zero: {zero!r} must be 0, 1, 2 or 3")
    if offload and zero not in (2, 3):
        raise ValueError(f"offload: True needs zero = 2 or 3, and zero is {zero}")
    if recompute not in RECOMPUTE:
        raise ValueError(f"recompute: {recompute!r} must be one of {RECOMPUTE}")
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        raise ValueError(f"microbatches: {microbatches!r} must be a positive integer")
    if autocast not in AUTOCAST:
        raise ValueError(f"autocast: {autocast!r} must be one of {AUTOCAST}")
