"""Buffers of all replicas as the first one has them, as DDP takes its first rank's."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tp_ext._checksum import checksum
from tp_ext.parallel.grad_norm import local_gradient
from tp_ext.parallel.gradient_sum import gradient_buckets

AllReduce = Callable[[Tensor, bool], Any]
"""Begins an all-reduce, of the largest element if the flag is set, and waits for it."""


class SharedBuffers:
    """The persistent buffers that a step has written, such as running statistics: bit by bit those of one replica."""

    def __init__(self) -> None:
        self._seen: dict[Tensor, tuple[int, ...]] = {}
        self._received: list[tuple[Tensor, list[Tensor]]] = []

    @torch.no_grad()
    def receive(self, buffers: Sequence[Tensor], gives: bool, all_reduce: AllReduce) -> None:
        """Gets what some replica has written since the last :meth:`install`; the buffers stay as they are.

        Args:
            buffers: of the same shapes and dtypes on all replicas.
            gives: whether the values are those of this replica.

        Communicates: an all-reduce of one number per buffer, if there are any; those of the bytes that were written.
        """
        self._received = []
        if not buffers:
            return
        # By checksums: batch norm writes its statistics without a new version of the tensor
        written_here = [self._seen.get(buffer) != _checksum(buffer) for buffer in buffers]
        flags = torch.tensor(written_here, dtype=torch.int32)
        all_reduce(flags, True)
        written = [local_gradient(buffer) for buffer, flag in zip(buffers, flags.tolist(), strict=True) if flag]
        # As bytes: a sum with zeros keeps the bits of any dtype
        for bucket in gradient_buckets(written):
            flat = torch.cat([_bytes(tensor) for tensor in bucket])
            if not gives:
                flat.zero_()
            all_reduce(flat, False)
            self._received.append((flat, bucket))

    @torch.no_grad()
    def install(self, buffers: Sequence[Tensor]) -> None:
        """Writes what was received, and notes the buffers as they are now."""
        for flat, bucket in self._received:
            parts = flat.split([tensor.nbytes for tensor in bucket])
            for tensor, part in zip(bucket, parts, strict=True):
                tensor.copy_(part.clone().view(tensor.dtype).view(tensor.shape))  # a part may not be aligned
        self._received = []
        self._seen = {buffer: _checksum(buffer) for buffer in buffers}


def _checksum(buffer: Tensor) -> tuple[int, ...]:
    return tuple(checksum(_bytes(local_gradient(buffer))).tolist())


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)
