"""Methods of transformers' models that know of no shards: each sharded model has others in their place."""

from __future__ import annotations

from contextlib import nullcontext
from types import MethodType
from typing import Any

import transformers

from tp_ext._object_collectives import broadcast_from_first
from tp_ext.auto.modules.block_functions import generating
from tp_ext.group import process_group
from tp_ext.huggingface.new_weights import drawing_from, generator_states
from tp_ext.model.census import census


def replace_methods(model: transformers.PreTrainedModel) -> None:
    """Gives a sharded model its own ``generate`` and ``resize_token_embeddings``; copies of it have those, too."""
    model.resize_token_embeddings = MethodType(resize_token_embeddings, model)
    if model.can_generate():
        model.generate = MethodType(generate, model)


def resize_token_embeddings(model: transformers.PreTrainedModel, *_: Any, **__: Any) -> None:
    """Raises RuntimeError before anything changes; transformers would put whole layers in place of shards."""
    raise RuntimeError(
        "resize_token_embeddings: the model is sharded; resize before sharding: load it by transformers, resize it, "
        "call its save_pretrained, and load that folder by tp_ext.huggingface.from_pretrained"
    )


def generate(model: transformers.PreTrainedModel, *args: Any, **kwargs: Any) -> Any:
    """Runs the model's ``generate`` with the generator of the first rank on all ranks, which so sample the same tokens.

    Rank 0's own generator goes on as in one process, and so do those in the same state; others are left as they were.

    Communicates: a broadcast of the generator's state over each group that shards the model.

    Raises:
        ValueError: with ``invariant_blocks``: a part of the model has other bits with a cache than in a forward of the
            whole text.
    """
    device = model.device
    axes = [process_group(axis.name) for axis in census(model).groups.axes]
    states = broadcast_from_first(lambda: generator_states(device), axes)
    blocks = model.tp_ext_plan.invariant_blocks if hasattr(model, "tp_ext_plan") else None
    with drawing_from(states, device), generating(model) if blocks is not None else nullcontext():
        return type(model).generate(model, *args, **kwargs)
