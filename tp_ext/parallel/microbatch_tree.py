"""The gradients of microbatches as one tree over those of all data ranks, for ``parallelize(invariant_blocks=)``."""

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn

from tp_ext import _ops
from tp_ext.group import ALONE, ParallelGroup
from tp_ext.invariance import blocks_of_rank

_BUCKET_BYTES = 32 << 20


# [Note: one tree of blocks]
class MicrobatchTree:
    """Sums the gradients of the microbatches of a step, in their order in the global batch, by one binary tree.

    The leaf of a microbatch is its gradient, and a node is fp32 (fp64 for fp64). A data rank adds the nodes that are
    complete on it while its microbatches follow one another; at the end of the step the ranks exchange the others.

    Args:
        params: the parameters, the same on all data ranks.
        blocks: the number of microbatches of all data ranks.
        data: the data ranks.
    """

    def __init__(self, params: Iterable[nn.Parameter], blocks: int, data: ParallelGroup = ALONE) -> None:
        self._params = [param for param in params if param.requires_grad]
        self._blocks, self._data = blocks, data
        self._nodes: list[tuple[int, int, list[Tensor]]] = []
        self._before: list[Tensor | None] = []
        self._next = 0

    def begin(self) -> None:
        """Begins a step: puts the gradients of earlier steps aside."""
        self._before = [param.grad for param in self._params]
        self._nodes, self._next = [], blocks_of_rank(self._blocks, self._data.rank, self._data.size).start
        for param in self._params:
            param.grad = None

    @torch.no_grad()
    def add(self) -> None:
        """Takes the gradients of the microbatch whose backward has just run."""
        leaves = []
        for param in self._params:
            wide = torch.promote_types(param.dtype, torch.float32)
            grad = torch.zeros_like(param) if param.grad is None else param.grad
            leaves.append(grad.to(wide))
            param.grad = None
        level, index = 0, self._next
        self._next += 1
        while True:
            last = ((index + 1) << level) >= self._blocks
            if index % 2 and self._nodes and self._nodes[-1][:2] == (level, index - 1):
                _, _, left = self._nodes.pop()
                leaves = list(torch._foreach_add(left, leaves))
            elif index % 2 or not last or index == 0:
                break  # its neighbour is on another rank, still to come, or this is the root
            level, index = level + 1, index // 2
        self._nodes.append((level, index, leaves))

    @torch.no_grad()
    def finish(self) -> None:
        """Sets the gradients to the sums, added to those of earlier steps.

        Communicates: for each 32 MiB of parameters an all-to-all of nodes over the data ranks, and an all-gather.
        """
        for bucket in self._buckets():
            flat = [torch.cat([nodes[i].reshape(-1) for i in bucket]) for _, _, nodes in self._nodes]
            total = _ops.block_sum(torch.stack(flat), self._data.name, self._blocks)
            for i, grad in zip(bucket, total.split([self._params[i].numel() for i in bucket]), strict=True):
                param, before = self._params[i], self._before[i]
                grad = grad.view_as(param).to(param.dtype)
                param.grad = grad.clone() if before is None else before + grad
        self._nodes = []

    def losses(self, own: Tensor) -> Tensor:
        """Returns the sums of the losses ``[microbatches, ..]`` of all data ranks, in one order.

        Communicates: one all-gather.
        """
        columns = _ops.all_gather_region(own, self._data.name, 0, None).reshape(self._blocks, -1)
        return _ops.column_sums(columns, [columns.shape[1]])

    def _buckets(self) -> Iterable[Sequence[int]]:
        bucket: list[int] = []
        size = 0
        for i, param in enumerate(self._params):
            if bucket and (size >= _BUCKET_BYTES or param.dtype != self._params[bucket[-1]].dtype):
                yield bucket
                bucket, size = [], 0
            bucket.append(i)
            size += param.numel() * 4
        if bucket:
            yield bucket
