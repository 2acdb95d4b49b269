"""The wrappers that recompute or compile the blocks of a model."""

from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts

from tp_ext.model.census import Census

RECOMPUTE = (None, "full", "selective")


def wrap_blocks(model: Census, recompute: str | None, compile: bool) -> nn.Module:
    """Replaces each block by its wrappers, in the model; returns the model, or its wrapper if it is the block."""
    for block in model.blocks if recompute or compile else ():
        wrapped: Any = block
        if recompute is not None:
            options: dict[str, Any] = {}
            if recompute == "selective":
                options["context_fn"] = partial(create_selective_checkpoint_contexts, _policy)
            wrapped = checkpoint_wrapper(wrapped, **options)
        if compile:
            wrapped = torch.compile(wrapped)
        # The root has no parent in which it could be replaced
        if block is model.model:
            return cast(nn.Module, wrapped)
        model.model.set_submodule(model.paths[block], wrapped)
    return model.model


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
