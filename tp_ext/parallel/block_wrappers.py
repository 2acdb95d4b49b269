"""The blocks of a model, and the wrappers that recompute or compile them."""

from collections.abc import Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

RECOMPUTE = (None, "full", "selective")


def blocks_of(model: nn.Module) -> Sequence[nn.Module]:
    """Returns the blocks of a model: those of ``pipeline_parts()``, the modules of an ``nn.Sequential``, or itself."""
    if hasattr(model, "pipeline_parts"):
        blocks = cast(Any, model).pipeline_parts()[1]
        return list(blocks.values() if isinstance(blocks, nn.ModuleDict) else blocks)
    return list(model) if isinstance(model, nn.Sequential) else [model]


def wrap_blocks(model: nn.Module, recompute: str | None, compile: bool) -> nn.Module:
    """Replaces each block by its wrappers, in the model; returns the model, or its wrapper if it is the block."""
    names = {id(module): name for name, module in model.named_modules()}
    for block in blocks_of(model) if recompute or compile else ():
        wrapped: Any = block
        if recompute is not None:
            options: dict[str, Any] = {}
            if recompute == "selective":
                options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
            wrapped = checkpoint_wrapper(wrapped, **options)
        if compile:
            wrapped = torch.compile(wrapped)
        if block is model:
            return cast(nn.Module, wrapped)
        model.set_submodule(names[id(block)], wrapped)
    return model


def _policy(context: Any, op: Any, *args: Any, **options: Any) -> CheckpointPolicy:
    """Saves results of matrix products, attention and collectives, which take longest to compute again."""
    package, _, name = str(op).partition(".")
    if package == "tp_ext":  # traced
        saved = any(
            word in name for word in ("linear", "mlp", "attention", "reduce", "gather", "scatter", "all_to_all")
        )
    else:
        # Not mm.out, by which experts write into parts of one tensor: what is saved must not change afterwards
        matmul = name in ("mm.default", "addmm.default", "bmm.default") or name.startswith("_scaled_dot_product")
        saved = matmul or package == "_c10d_functional"
    return CheckpointPolicy.MUST_SAVE if saved else CheckpointPolicy.PREFER_RECOMPUTE
