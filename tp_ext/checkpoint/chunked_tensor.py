"""A full tensor of which this rank holds some boxes, as torch.distributed.checkpoint sees it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from tp_ext.chunks import Box


class BoxTensor(torch.Tensor):
    """Has the shape of the full tensor, but no storage: its values are those of its boxes, views of live parameters.

    ``torch.distributed.checkpoint`` saves the owned boxes, fills all of them at load, and copies them when an
    asynchronous save stages them, through the three methods in double underscores (torch's ``_Checkpointable``).
    Nothing else can be done with it.
    """

    # Plain tuples in a plain list: the stager copies the attributes of a tensor, but of no classes of ours
    pieces: list[tuple[tuple[int, ...], Tensor, bool]]

    @staticmethod
    def __new__(cls, shape: Sequence[int], boxes: Iterable[Box], *, dtype: torch.dtype, device: Any) -> "BoxTensor":
        made = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        made.pieces = [(box.offsets, box.tensor, box.owned) for box in boxes]
        return made

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func.overloadpacket.__name__)
        if handler is None:
            raise NotImplementedError(f"{func}: a BoxTensor can be saved and loaded, not computed with")
        return handler(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        held = [(offsets, tuple(tensor.shape)) for offsets, tensor, _ in self.pieces]
        return f"BoxTensor({tuple(self.shape)}, dtype={self.dtype}, boxes={held})"

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        items = []
        for offsets, tensor, owned in self.pieces:
            if owned:
                chunk = ChunkStorageMetadata(torch.Size(offsets), tensor.size())
                properties = TensorProperties.create_from_tensor(tensor)
                data = TensorWriteData(chunk=chunk, properties=properties, size=self.size())
                items.append(WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), tensor.size()) for offsets, tensor, _ in self.pieces]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offsets, tensor, _ in self.pieces:
            if torch.Size(offsets) == index.offset:
                return tensor
        raise ValueError(f"index: {index} must be one of the boxes of {self!r}")


# What the stagers of asynchronous saves do to a tensor. One makes an empty one and copies the attributes, ..


def _new_empty(self: BoxTensor, size: Any, *, device: Any = None, **_: Any) -> BoxTensor:
    return BoxTensor(self.shape, [], dtype=self.dtype, device=self.device if device is None else device)


# .. the other makes one like it and copies the values


def _zeros_like(self: BoxTensor, *, device: Any = None, **_: Any) -> BoxTensor:
    boxes = [Box(offsets, torch.zeros_like(tensor, device=device), owned) for offsets, tensor, owned in self.pieces]
    return BoxTensor(self.shape, boxes, dtype=self.dtype, device=self.device if device is None else device)


def _copy(self: BoxTensor, source: BoxTensor, non_blocking: bool = False) -> BoxTensor:
    for (_, ours, _), (_, theirs, _) in zip(self.pieces, source.pieces, strict=True):
        ours.copy_(theirs, non_blocking=non_blocking)
    return self


def _same(self: BoxTensor) -> BoxTensor:
    return self


_HANDLERS: dict[str, Callable[..., BoxTensor]] = {
    "detach": _same,
    "new_empty": _new_empty,
    "zeros_like": _zeros_like,
    "copy_": _copy,
}
