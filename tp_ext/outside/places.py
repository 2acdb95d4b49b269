"""The place of a shard in the full tensor, as attributes of the ordinary tensors that state dicts hold.

Four of them are those of torch's ``CheckpointableTensor`` (torch 2.15), which ``torch.distributed.checkpoint`` asks
for; ``deepcopy``, ``torch.save`` and the stagers of asynchronous saves keep them.
"""

import math
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, cast

from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from tp_ext.chunks import mesh_position, start_of
from tp_ext.group import ALONE, ParallelGroup
from tp_ext.model.census import declares_shardings_alone
from tp_ext.model.fqn import resolve_fqn
from tp_ext.model.layouts import layouts_of
from tp_ext.sharding import Layout

Ints = tuple[int, ...]
UNKNOWN = "a rank of a group that is not known"


# [Note: values of torch's state dicts are ordinary tensors with attributes]
class TensorPlace(NamedTuple):
    """The chunks of a full tensor that a local one holds, in the words of torch's ``CheckpointableTensor``.

    Attributes:
        global_shape: that of the full tensor. global_offsets, local_offsets, local_sizes: of each chunk, its first
        index in the full and in the local tensor, and
            its shape. No chunk contains padding.
        held_by: the rank that holds it, in words; :data:`UNKNOWN`, and no chunks, if the group is not known.
    """

    global_shape: Ints
    global_offsets: tuple[Ints, ...]
    local_offsets: tuple[Ints, ...]
    local_sizes: tuple[Ints, ...]
    held_by: str

    @property
    def chunks(self) -> tuple[Any, ...]:
        """All but the rank: equal for two tensors that hold the same elements at the same places."""
        return self[:4]


_ATTRIBUTES = (*TensorPlace._fields[:4], "tp_held_by")


def place_of(tensor: Tensor, layout: Layout) -> TensorPlace:
    """Returns the place of a shard of this layout; communicates nothing.

    Args:
        tensor: a plain tensor, or the DTensor that FSDP2 made of it over data axes.

    Raises:
        ValueError: the tensor has another length than the layout gives this rank.
    """
    local = local_of(tensor)
    if len(layout) == 1 and layout[0][1] is ALONE:
        full = layout.full_shape(tensor.shape)  # of a module with tp_shardings alone
        if layout.local_shape(full) != tensor.shape:
            return TensorPlace(tuple(full), (), (), (), UNKNOWN)
    shape, chunks = layout.local_chunks(tensor)
    if not shape.numel():  # of an empty tensor every rank has all
        nothing = ((0,) * len(shape),)
        return TensorPlace(tuple(shape), nothing, nothing, nothing, _holder(tensor, layout))
    return TensorPlace(
        tuple(shape),
        tuple(tuple(chunk.offsets) for chunk in chunks),
        tuple(start_of(chunk.tensor, local) for chunk in chunks),
        tuple(tuple(chunk.tensor.shape) for chunk in chunks),
        _holder(tensor, layout),
    )


def local_of(tensor: Tensor) -> Tensor:
    """Returns what this rank stores of a tensor, as a new object over the same storage."""
    return (cast(DTensor, tensor.detach()).to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _holder(tensor: Tensor, layout: Layout) -> str:
    ranks = [(group.rank, group.size) for _, group in layout]
    if isinstance(tensor, DTensor):
        mesh = tensor.device_mesh
        ranks += zip(mesh_position(mesh) or [-1] * mesh.ndim, mesh.shape, strict=True)
    return " x ".join(f"rank {rank} of {size}" for rank, size in ranks if size > 1)


def is_placed(tensor: Tensor, layout: Layout) -> bool:
    """Returns whether values of the tensor are given a place: of shards, of tensors with padding, and of DTensors on a
    mesh whose ranks do not ascend, which ``torch.distributed.checkpoint`` writes by their place in the table of ranks,
    not by that of their bytes."""
    # A number has no dim along which it could have a place
    if math.prod(layout.sizes) > 1 or layout.full_shape(tensor.shape) != tensor.shape:
        return tensor.dim() > 0
    return isinstance(tensor, DTensor) and list(mesh_position(tensor.device_mesh) or ()) != list(
        tensor.device_mesh.get_coordinate() or ()
    )


def put_place(value: Tensor, place: TensorPlace) -> None:
    """Sets the place on a tensor that no one else holds."""
    for name, entry in zip(_ATTRIBUTES, place, strict=True):
        setattr(value, name, entry)


def found_place(value: Any) -> TensorPlace | None:
    """Returns the place that a tensor carries; None if it carries none of ours."""
    attributes = getattr(value, "__dict__", {}) if isinstance(value, Tensor) else {}
    if "tp_held_by" not in attributes:
        return None
    return TensorPlace._make(attributes[name] for name in _ATTRIBUTES)


class Held(NamedTuple):
    """A parameter or persistent buffer of a module: its name in it, the live tensor, its layout."""

    name: str
    tensor: Tensor
    layout: Layout


def held_by(module: nn.Module, group: ParallelGroup = ALONE) -> Iterator[Held]:
    """Yields the tensors of a module that may be given a place: those of a module with layouts, with what its
    parametrizations store, and DTensors of others. ``group`` is that of ``tp_shardings``."""
    tensors = [(name, tensor) for table in (module._parameters, module._buffers) for name, tensor in table.items()]
    layouts = layouts_of(module) or declares_shardings_alone(module)
    if layouts and (computed := module._modules.get("parametrizations")) is not None:
        named: Iterable[tuple[str, Tensor]] = [*computed.named_parameters(), *computed.named_buffers()]
        tensors += [(f"parametrizations.{name}", tensor) for name, tensor in named]
    for name, tensor in tensors:
        if tensor is not None and (layouts or isinstance(tensor, DTensor)):
            yield Held(name, tensor, resolve_fqn(module, name, group).layout if layouts else Layout())
