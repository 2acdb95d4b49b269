"""The exchange of compressed gradients: an all-to-all to the owners of the blocks, and an all-gather of their sums."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup, Work

from tp_ext import _ops

_SCALE_BYTES = 4


class Share(NamedTuple):
    """The elements of a flattened parameter that a rank owns."""

    first: int
    length: int


def shares_of(numel: int, ranks: int, block: int, number: int) -> list[Share]:
    """Returns the elements that each rank owns of the parameter ``number``; by [Note: owners of blocks]."""
    blocks = -(-numel // block)
    lengths = [len(part) for part in torch.empty(blocks, device="meta").tensor_split(ranks)]
    shares, first = [], 0
    for rank in range(ranks):
        length = lengths[(rank - number) % ranks]
        end = min(first + length * block, numel)
        shares.append(Share(first, end - first))
        first = end
    return shares


@dataclass
class Compressed:
    """A parameter whose gradient is compressed.

    Attributes:
        shares: of all ranks.
        error: fp32, flat: what this rank's codes have lost; None: no feedback.
        share_error: fp32: the same of the sum of the elements that this rank owns.
    """

    name: str
    shape: torch.Size
    shares: list[Share]
    error: Tensor | None = None
    share_error: Tensor | None = None

    def keep_on(self, device: torch.device, rank: int) -> None:
        """Makes residuals of zeros, or moves those that there are."""
        if self.error is None or self.share_error is None:
            self.error = torch.zeros(self.shape.numel(), dtype=torch.float32, device=device)
            self.share_error = torch.zeros(self.shares[rank].length, dtype=torch.float32, device=device)
        elif self.error.device != device:
            self.error, self.share_error = self.error.to(device), self.share_error.to(device)


class Format(NamedTuple):
    """The format of blocks: the number of elements that share a scale, and codes of e4m3 or else of int8."""

    block: int
    float8: bool

    def bytes(self, elements: int) -> int:
        return elements + -(-elements // self.block) * _SCALE_BYTES


@dataclass
class GradientBucket:
    """Gradients on their way to their means: :meth:`send`, :meth:`sum`, :meth:`receive`, in this order.

    The same parameters in the same order on all ranks. The collectives of several buckets may overlap, if all ranks
    call the methods of all buckets in the same order.

    Attributes:
        exempt: gradients that are summed as they are.
    """

    params: Sequence[Compressed]
    grads: Sequence[Tensor]
    group: ProcessGroup
    format: Format
    exempt: Sequence[Tensor] = ()
    _work: list[Work] = field(default_factory=list, init=False)

    def send(self) -> None:
        """Starts the sum of the exempt gradients, compresses the others and starts the all-to-all."""
        if self.exempt:
            # Divided first, as DDP does: a sum of fp16 could overflow
            self._flat = torch.cat([grad.reshape(-1) / self.group.size() for grad in self.exempt])
            self._summed = dist.all_reduce(self._flat, group=self.group, async_op=True)
        if not self.params:
            return
        ranks, rank, device = self.group.size(), self.group.rank(), self.grads[0].device
        sizes = [0] * ranks  # of what each rank owns, in bytes
        starts = []  # of each parameter's share of each rank, within what the rank owns
        for param in self.params:
            starts.append(list(sizes))
            for owner, share in enumerate(param.shares):
                sizes[owner] += self.format.bytes(share.length)
        self._own_starts = [at[rank] for at in starts]
        self._largest = max(sizes)
        before = [sum(sizes[:owner]) for owner in range(ranks)]
        sent_places = self._places(starts, before, device)
        # The all-gather pads what a rank owns to the largest of all
        self._gathered_places = self._places(starts, [owner * self._largest for owner in range(ranks)], device)
        self._sent = torch.empty(sum(sizes), dtype=torch.uint8, device=device)
        for param, grad, places in zip(self.params, self.grads, sent_places, strict=True):
            _ops.compress_blocks_(grad.reshape(-1), param.error, self._sent, places, *self.format)
        self._received = torch.empty(ranks, sizes[rank], dtype=torch.uint8, device=device)
        self._start(
            dist.all_to_all_single(
                self._received.view(-1), self._sent, [sizes[rank]] * ranks, sizes, group=self.group, async_op=True
            )
        )

    def sum(self) -> None:
        """Adds up what this rank owns and starts the all-gather of the sums."""
        if not self.params:
            return
        self._wait()
        rank, own = self.group.rank(), self._received.shape[1]
        total = self._sent.new_empty(self._largest)
        for param, start in zip(self.params, self._own_starts, strict=True):
            count = param.shares[rank].length
            _ops.sum_compressed_blocks_(self._received, param.share_error, total[:own], start, count, *self.format)
        total[own:] = 0
        self._gathered = self._sent.new_empty(self.group.size() * self._largest)
        self._start(dist.all_gather_into_tensor(self._gathered, total, group=self.group, async_op=True))

    def receive(self) -> None:
        """Replaces the gradients by the means."""
        if self.params:
            self._wait()
            for grad, places in zip(self.grads, self._gathered_places, strict=True):
                mean = grad if grad.is_contiguous() else torch.empty_like(grad, memory_format=torch.contiguous_format)
                _ops.decompress_blocks_(self._gathered, mean.view(-1), places, *self.format)
                if mean is not grad:
                    grad.copy_(mean)
        if self.exempt:
            if self._summed is not None:
                self._summed.wait()
            parts = self._flat.split([grad.numel() for grad in self.exempt])
            torch._foreach_copy_(
                list(self.exempt), [part.view(grad.shape) for part, grad in zip(parts, self.exempt, strict=True)]
            )

    def _places(self, starts: Sequence[Sequence[int]], before: Sequence[int], device: torch.device) -> Tensor:
        """Returns first element, elements and byte of each rank's share of each parameter, ``[parameters, ranks, 3]``.

        Args:
            before: the first byte of what each rank owns.
        """
        rows = [
            [(*share, first + start) for share, first, start in zip(param.shares, before, at, strict=True)]
            for param, at in zip(self.params, starts, strict=True)
        ]
        return torch.tensor(rows, dtype=torch.int64).to(device)

    def _start(self, work: Work | None) -> None:
        self._work = [] if work is None else [work]

    def _wait(self) -> None:
        for work in self._work:
            work.wait()


class Pipeline:
    """Buckets one after the other, the all-to-all of one during the sums of the one before it."""

    def __init__(self) -> None:
        self._sent: list[GradientBucket] = []
        self._summed: list[GradientBucket] = []

    def add(self, bucket: GradientBucket) -> list[GradientBucket]:
        """Sends a bucket. Returns those that have arrived."""
        bucket.send()
        arrived, self._summed = self._summed, self._sent
        for earlier in self._summed:
            earlier.sum()
        for earliest in arrived:
            earliest.receive()
        self._sent = [bucket]
        return arrived

    def finish(self) -> list[GradientBucket]:
        """Completes all buckets. Returns those that have arrived."""
        for bucket in self._sent:
            bucket.sum()
        arrived = self._summed + self._sent
        self._sent, self._summed = [], []
        for bucket in arrived:
            bucket.receive()
        return arrived
