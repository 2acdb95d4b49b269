"""What a model must be before it is made parallel, and which models have been."""

import weakref

from torch import nn
from torch.distributed.fsdp import FSDPModule

_parallelized: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()


def check_model_is_new(model: nn.Module) -> None:
    """Raises ValueError if ``parallelize`` or ``pipeline_stages`` has been applied to the model."""
    if model in _parallelized:
        raise ValueError(
            f"model: {type(model).__name__} must not be parallelized before, by parallelize or pipeline_stages; build "
            "the model anew"
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
