"""The gradients of microbatches as one tree over those of all data ranks, for ``parallelize(invariant_blocks=)``."""

from collections.abc import Iterable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from tp_ext import _ops
from tp_ext.group import ALONE, ParallelGroup
from tp_ext.invariance import blocks_of_rank, blocks_of_ranks

_BUCKET_BYTES = 32 << 20


class CompleteNodes:
    """The nodes of a tree over ``blocks`` leaves that are complete on a rank, in their order; each is a list of
    tensors, fp32 (fp64 for fp64).

    Args:
        blocks: the number of leaves of all ranks.
        rank, p: this rank and the number of ranks, which have consecutive leaves.
    """

    def __init__(self, blocks: int, rank: int, p: int) -> None:
        own = blocks_of_rank(blocks, rank, p)
        self._blocks, self._next, self._end = blocks, own.start, own.stop
        self._nodes: list[tuple[int, int, list[Tensor]]] = []

    @property
    def all_added(self) -> bool:
        """True if all leaves of this rank have been added."""
        return self._next == self._end

    def add(self, leaf: Sequence[Tensor]) -> None:
        """Adds the next leaf, whose tensors are the caller's no more."""
        leaves = [grad.to(torch.promote_types(grad.dtype, torch.float32)) for grad in leaf]
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

    def stacked(self, tensors: Iterable[int]) -> Tensor:
        """Returns the nodes, ``[nodes, n]``: of each the elements of the tensors with these numbers."""
        return torch.stack([torch.cat([node[i].reshape(-1) for i in tensors]) for _, _, node in self._nodes])


# [Note: one tree of blocks]
class MicrobatchTree:
    """Sums the gradients of the microbatches of a step, in their order in the global batch, by one binary tree.

    The leaf of a microbatch is its gradient, and a node is fp32 (fp64 for fp64). A data rank adds the nodes that are
    complete on it while its microbatches follow one another; at the end of the step the ranks exchange the others.

    Args:
        model: the same parameters on all data ranks, or sharded over them by FSDP2, which then is to reduce the
            gradients of each microbatch.
        blocks: the number of microbatches of all data ranks.
        data: the data ranks.
    """

    def __init__(self, model: nn.Module, blocks: int, data: ParallelGroup = ALONE) -> None:
        self._blocks, self._data = blocks, data
        self._of_ranks = blocks_of_ranks(blocks, data.size)
        self._sharded = [module for module in model.modules() if isinstance(module, FSDPModule)]
        # FSDP2 sets the gradients of the parameters, and adds them to those of earlier steps
        self._params = [] if self._sharded else [param for param in model.parameters() if param.requires_grad]
        self._before: list[Tensor | None] = []
        self._nodes = CompleteNodes(blocks, data.rank, data.size)

    def begin(self) -> None:
        """Begins a step: puts the gradients of earlier steps aside."""
        for module in self._sharded:
            _ShardedTree(self._blocks, self._data).reduce_gradients_of(module)
        self._nodes = CompleteNodes(self._blocks, self._data.rank, self._data.size)
        self._before = [param.grad for param in self._params]
        for param in self._params:
            param.grad = None

    @torch.no_grad()
    def add(self) -> None:
        """Takes the gradients of the microbatch whose backward has just run."""
        if not self._params:  # all are sharded: FSDP2 has passed them on
            return
        self._nodes.add([torch.zeros_like(param) if param.grad is None else param.grad for param in self._params])
        for param in self._params:
            param.grad = None

    @torch.no_grad()
    def finish(self) -> None:
        """Sets the gradients to the sums, added to earlier steps' gradients.

        Communicates: for each 32 MiB of parameters an all-to-all of nodes over the data ranks, and an all-gather.
        """
        for bucket in self._buckets():
            total = _ops.block_sum(self._nodes.stacked(bucket), self._data.name, self._of_ranks)
            for i, grad in zip(bucket, total.split([self._params[i].numel() for i in bucket]), strict=True):
                param, before = self._params[i], self._before[i]
                grad = grad.view_as(param).to(param.dtype)
                param.grad = grad.clone() if before is None else before + grad
        del self._nodes

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


class _ShardedTree:
    """The tree over the gradients of the parameters that FSDP2 gathers together, in place of its reduce-scatters.

    FSDP2 adds the result of each microbatch to the gradient: that of all but the last is -0, which changes no bit.

    Communicates: in the last backward of a step an all-to-all of nodes over the data ranks.
    """

    def __init__(self, blocks: int, data: ParallelGroup) -> None:
        self._blocks, self._data = blocks, data
        self._of_ranks = blocks_of_ranks(blocks, data.size)
        self._nodes = CompleteNodes(blocks, data.rank, data.size)
        self._numel: int | None = None

    def reduce_gradients_of(self, module: FSDPModule) -> None:
        """Makes FSDP2 reduce the gradients of the module's own parameters by this tree, as a sum."""
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)
        if self._data.size > 1:
            module.set_custom_reduce_scatter(cast(Any, self))  # the class of the interface is private
        else:  # FSDP2 then reduces nothing, but calls this hook
            module.set_all_reduce_hook(lambda grad: self._reduce(grad, grad))

    def allocate(self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Returns memory for the gradients of a microbatch, and for the result, as torch's own reduce-scatter."""
        return torch.empty(*size, dtype=dtype, device=device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: Any, op: Any, async_op: bool = False
    ) -> None:
        """Takes the gradients of a microbatch: the ranks' shards, of equal lengths, one after the other."""
        self._reduce(output_tensor, input_tensor)

    @torch.no_grad()
    def _reduce(self, out: Tensor, grads: Tensor) -> None:
        if self._numel not in (None, grads.numel()):
            raise RuntimeError(
                "invariant_blocks: with zero 2 and 3 every microbatch must use the same parameters, and one used "
                f"{self._numel} elements of a block, another {grads.numel()}"
            )
        self._numel = grads.numel()
        # A copy: FSDP2 uses the memory again
        self._nodes.add([grads.to(torch.promote_types(grads.dtype, torch.float32), copy=True)])
        if not self._nodes.all_added:
            out.fill_(-0.0)
            return
        out.copy_(_ops.block_sum(self._nodes.stacked([0]), self._data.name, self._of_ranks, True))
        self._nodes = CompleteNodes(self._blocks, self._data.rank, self._data.size)
