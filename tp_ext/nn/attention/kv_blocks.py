"""Key-value heads of an attention built in :func:`tp_ext.tp_invariant`."""

import torch
import torch.nn.functional as F
from torch import Tensor

from tp_ext import _ops
from tp_ext.group import ParallelGroup
from tp_ext.invariance import block_of, block_start, blocks_of_rank
from tp_ext.sharding import head_parts


class KVHeadsInBlocks:
    """The key-value heads that the query heads of a rank's blocks use, and their copies for each query head.

    A KV head may serve query heads of several blocks, on several ranks. Each block of query heads has a copy of it, and
    its gradient is the tree over those of the blocks; within a block it is the sum over the query heads in their order.

    Args:
        num_heads, num_kv_heads: of the full layer.
        blocks: of :func:`tp_ext.tp_invariant`.
        group: the ranks that hold the other heads.

    Attributes:
        segments: for q, and for k and v: block and number of heads of each segment that is computed by itself.
        of_queries: the KV head on this rank of each query head of this rank.
    """

    def __init__(self, num_heads: int, num_kv_heads: int, blocks: int, group: ParallelGroup) -> None:
        _, p, rank = group
        self.num_heads, self.num_kv_heads, self.blocks = num_heads, num_kv_heads, blocks
        self.share = num_heads // num_kv_heads
        parts = head_parts(num_heads, num_kv_heads, 1, p, blocks)
        self.segments = [list(part.segments(rank, p)) for part in parts]
        self.first, self.stop = parts[1].span(rank, p)
        self.held = blocks_of_rank(blocks, rank, p)
        self.of_queries = [head // self.share - self.first for head in range(*parts[0].span(rank, p))]
        # Where every KV head serves the query heads of one block, its gradient is a sum within the block
        self.within_blocks = all(
            block_of(head * self.share, num_heads, blocks) == block_of((head + 1) * self.share - 1, num_heads, blocks)
            for head in range(num_kv_heads)
        )
        # On all ranks alike: whether some rank holds heads that another one counts
        self.group = group.name if any(parts[1].copied(other, p) for other in range(p)) else ""

    def expanded(self, x: Tensor) -> Tensor:
        """Returns the KV head of each query head of this rank.

        Args:
            x: ``[.., kv_heads_local, head_dim]``.

        Returns: ``[.., heads_local, head_dim]``.

        Communicates: backward, if ranks share KV heads, an all-to-all and an all-gather of the gradient of all of them.
        """
        if self.share == 1:
            return x
        base, held = self.first, self.held
        if self.within_blocks:
            copies = [x] * len(held)
        elif self.group:
            base = 0
            copies = _ops.block_copies(
                F.pad(x, (0, 0, self.first, self.num_kv_heads - self.stop)), self.group, self.blocks
            )
        else:
            # The blocks of other ranks use other heads: their leaves are zeros
            copies = _ops.block_copies(x, "", self.blocks)[held.start : held.stop]
        heads = [
            copy.narrow(-2, head // self.share - base, 1)
            for copy, block in zip(copies, held, strict=True)
            for head in range(
                block_start(self.num_heads, block, self.blocks), block_start(self.num_heads, block + 1, self.blocks)
            )
        ]
        return torch.cat(heads, -2)
