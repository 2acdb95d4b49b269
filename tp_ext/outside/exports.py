"""Files of safetensors that would hold one rank's shards under the names of the whole tensors."""

from collections.abc import Callable, Mapping
from typing import Any

from tp_ext.outside.places import found_place


def flatten(original: Callable[..., Any], tensors: Mapping[str, Any], *args: Any) -> Any:
    """Raises RuntimeError if a tensor is a shard of a state dict, before a file is written; else as safetensors."""
    for name, tensor in tensors.items():
        if (place := found_place(tensor)) is not None and place.global_shape != tuple(tensor.shape):
            raise RuntimeError(
                f"safetensors: {name!r} is a shard of {place.held_by or 'one rank'}, of a tensor of shape "
                f"{place.global_shape}, which the file would not show: take tp_ext.save_safetensors, or with "
                "accelerate tp_ext.huggingface.prepare"
            )
    return original(tensors, *args)
