"""``torch.nn.init`` on a shard: the numbers of the unsharded tensor, of which the rank keeps its shard."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from tp_ext.model.carriers import is_sharded
from tp_ext.outside.live_shards import live_shards, memory_of
from tp_ext.sharding import Layout


def _layout(tensor: Tensor) -> Layout | None:
    """Returns the layout of a shard. Initialisers run on every parameter, so an attribute is read first. FSDP2's
    parameters and ``param.data`` have none, and are looked up."""
    layout: Layout | None = getattr(tensor, "tp_layout", None)
    if layout is None and (isinstance(tensor, DTensor) or not isinstance(tensor, nn.Parameter)):
        key = memory_of(tensor)
        layout = next((layout for param, layout in live_shards() if memory_of(param) == key), None)
    return layout if layout is not None and is_sharded(layout) else None


@torch.no_grad()
def initialise(torchs: Callable[..., Any], tensor: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Calls an initialiser on the full tensor of a shard, and returns the tensor with its shard. Each rank draws all
    numbers, so generators must be in the same state on the ranks, and are afterwards as in one process."""
    layout = _layout(tensor)
    if layout is None:
        result: Tensor = torchs(tensor, *args, **kwargs)
        return result
    full = torch.empty(layout.full_shape(tensor.shape), dtype=tensor.dtype, device=tensor.device)
    torchs(full, *args, **kwargs)
    shard = layout.shard(full)
    if isinstance(tensor, DTensor):
        # All ranks have drawn the same numbers, so nothing is sent
        part = distribute_tensor(shard, tensor.device_mesh, tensor.placements, src_data_rank=None)
        tensor.to_local().copy_(part.to_local())
    else:
        tensor.copy_(shard)
    return tensor


def fans(torchs: Callable[..., tuple[int, int]], tensor: Tensor) -> tuple[int, int]:
    """Returns the fans of the full tensor, by which ``reset_parameters`` of torch's modules bounds their biases."""
    layout = _layout(tensor)
    if layout is None:
        return torchs(tensor)
    return torchs(torch.empty(layout.full_shape(tensor.shape), device="meta"))
