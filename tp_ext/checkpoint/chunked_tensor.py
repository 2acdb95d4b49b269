"""A full tensor, some chunks of it on this rank, as torch.distributed.checkpoint sees it."""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from tp_ext.chunks import LocalChunk


class ChunkedTensor(torch.Tensor):
    """A tensor with the shape of the full one and no storage: its values are those of its chunks, views of parameters.

    ``torch.distributed.checkpoint`` saves the owned chunks, fills all of them at load, and copies them when an
    asynchronous save stages them, through the three methods in double underscores (torch's ``_Checkpointable``).
    It supports no other operation.
    """

    # Plain tuples in a plain list: the stager copies a tensor's attributes, but not objects of our classes
    local_chunks: list[tuple[tuple[int, ...], Tensor, bool]]

    @staticmethod
    def __new__(
        cls, shape: Sequence[int], chunks: Iterable[LocalChunk], *, dtype: torch.dtype, device: Any
    ) -> "ChunkedTensor":
        wrapper = torch.Tensor._make_wrapper_subclass(cls, torch.Size(shape), dtype=dtype, device=device)
        wrapper.local_chunks = [(chunk.offsets, chunk.tensor, chunk.owned) for chunk in chunks]
        return wrapper

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        handler = _HANDLERS.get(func.overloadpacket.__name__)
        if handler is None:
            raise NotImplementedError(f"{func}: a ChunkedTensor can be saved and loaded, not computed with")
        return handler(*args, **(kwargs or {}))

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        chunks = [(offsets, tuple(tensor.shape)) for offsets, tensor, _ in self.local_chunks]
        return f"ChunkedTensor({tuple(self.shape)}, dtype={self.dtype}, chunks={chunks})"

    def __create_write_items__(self, fqn: str, object: Any) -> list[WriteItem]:
        if not dist.is_initialized() and sum(tensor.numel() for _, tensor, _ in self.local_chunks) < self.numel():
            # torch then takes this process for the only one. The thread of its async_save is none of a simulation
            raise RuntimeError(
                f"state_dict: {fqn!r} has shards on other ranks and must be saved with a process group; for a "
                "simulated rank by dcp.save, or by save_checkpoint(asynchronous=True)"
            )
        items = []
        for offsets, tensor, owned in self.local_chunks:
            # Copies of a KV head, for example, are on several ranks and owned by one
            if owned:
                chunk = ChunkStorageMetadata(torch.Size(offsets), tensor.size())
                properties = TensorProperties.create_from_tensor(tensor)
                data = TensorWriteData(chunk=chunk, properties=properties, size=self.size())
                items.append(WriteItem(MetadataIndex(fqn, offsets), WriteItemType.SHARD, tensor_data=data))
        return items

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [ChunkStorageMetadata(torch.Size(offsets), tensor.size()) for offsets, tensor, _ in self.local_chunks]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        for offsets, tensor, _ in self.local_chunks:
            if torch.Size(offsets) == index.offset:
                return tensor
        raise ValueError(f"index: {index} must be one of the chunks of {self!r}")


# Operations by which the stagers of asynchronous saves copy a tensor. One makes an empty one and copies attributes, ..


def _new_empty(self: ChunkedTensor, size: Any, *, device: Any = None, **_: Any) -> ChunkedTensor:
    return ChunkedTensor(self.shape, [], dtype=self.dtype, device=self.device if device is None else device)


# .. the other makes a tensor like it and copies the values


def _zeros_like(self: ChunkedTensor, *, device: Any = None, **_: Any) -> ChunkedTensor:
    chunks = [
        LocalChunk(offsets, torch.zeros_like(tensor, device=device), owned)
        for offsets, tensor, owned in self.local_chunks
    ]
    return ChunkedTensor(self.shape, chunks, dtype=self.dtype, device=self.device if device is None else device)


def _copy(self: ChunkedTensor, source: ChunkedTensor, non_blocking: bool = False) -> ChunkedTensor:
    for (_, ours, _), (_, theirs, _) in zip(self.local_chunks, source.local_chunks, strict=True):
        ours.copy_(theirs, non_blocking=non_blocking)
    return self


def _same(self: ChunkedTensor) -> ChunkedTensor:
    return self


_HANDLERS: dict[str, Callable[..., ChunkedTensor]] = {
    "detach": _same,
    "new_empty": _new_empty,
    "zeros_like": _zeros_like,
    "copy_": _copy,
}
