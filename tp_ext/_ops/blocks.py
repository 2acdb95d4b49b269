"""Linears and sums in the blocks of :func:`tp_ext.tp_invariant`: the same bits for every number of ranks and threads.

C++: csrc/autograd/block_linear.cpp, block_sums.cpp; the tree: csrc/comm/tree_sum.h.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tp_ext._ops.binding import Sizes, operator, primitive
from tp_ext._ops.fake_tensors import acc_dtype


@operator
def block_column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: str,
    sequence_parallel: bool,
    sizes: Sizes,
    blocks: Sequence[int],
    segments: Sequence[int],
) -> Tensor:
    """Returns :func:`column_parallel_linear` with the same bits for every number of ranks: products are computed by
    blocks, and dx is summed by one tree over them.

    Args:
        blocks: how many each rank has.
        segments: triples (block, start, length) that make up the rows of ``weight``; block -1: copies of rows whose dx
            another rank counts.

    Communicates: backward, an all-to-all and an all-gather of x, in fp32; under SP the all-gathers of x, and for dx the
    all-to-all alone.
    """


@operator
def block_row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: str,
    sequence_parallel: bool,
    blocks: Sequence[int],
    segments: Sequence[int],
) -> Tensor:
    """Returns :func:`row_parallel_linear` with the same bits for every number of ranks; arguments as
    :func:`block_column_linear`, the segments being columns of ``weight``.

    Communicates: forward, an all-to-all and an all-gather of the result, in fp32 and its own dtype; under SP the
    all-to-all alone, and backward an all-gather of dy and the tree of the bias gradient.
    """


@operator
def block_copies(x: Tensor, group: str, blocks: Sequence[int]) -> list[Tensor]:
    """Returns x once for each block of this rank, or once where it has none; dx is the tree over the gradients of all
    blocks.

    Communicates: backward, an all-to-all and an all-gather of x.
    """


@operator
def block_sum(nodes: Tensor, group: str, blocks: Sequence[int], scatter: bool = False) -> Tensor:
    """Returns the tree over all blocks, ``[..]``, the same on all ranks, in the dtype of the nodes. Each node has the
    gradient dy.

    Args:
        nodes: ``[nodes, ..]``: the nodes that are complete on this rank, in their order.
        scatter: returns this rank's slice of dim 0, cut as by ``torch.tensor_split``.

    Communicates: an all-to-all of the nodes, and, without ``scatter``, an all-gather; backward that of the slices.
    """


@operator
def block_bmm(a: Tensor, b: Tensor) -> Tensor:
    """Returns ``torch.bmm(a, b)``, each product computed on one thread: its bits depend on ``a[i]`` and ``b[i]`` alone.

    Args:
        a, b: ``[n, rows, k]`` and ``[n, k, columns]``.
    """


@operator
def block_softmax(x: Tensor, blind: bool) -> Tensor:
    """Returns ``softmax(x, -1)`` of ``[n, rows, columns]``, each ``x[i]`` computed on one thread.

    Args:
        blind: rows may be -inf throughout, and become 0.
    """


@operator
def block_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    padding: Tensor | None,
    kv_heads: Sequence[int],
    causal: bool,
    scale: float | None,
    window: int | None,
    softcap: float | None,
) -> Tensor:
    """Returns ``softmax(cap(scale q k^T) + mask) v``, whose rows depend on their own query and keys alone: a query has
    the same bits alone and among others, on every rank and for every number of threads.

    Args:
        q: ``[batch, heads, n, head_dim]``, the last n of m keys if ``causal`` or with a window.
        k, v: ``[batch, kv_heads, m, ..]``.
        mask: 4-D, broadcastable to ``[batch, heads, n, m]``, bool (True: may attend) or added to the scores.
        padding: ``[batch]``, int64: the leading keys of each sequence that no query sees.
        kv_heads: the head of k and v of each head of q; empty: as many heads, in their order. Not where gradients of k
            or v are recorded.
        window: w of ``i - w < j < i + w``.

    Returns: ``[batch, heads, n, v_dim]``; 0 for a query that sees no key.
    """


@primitive("_tree_total")
def tree_total(nodes: Tensor, joins: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Returns the root of a tree of nodes, ``[..]``, added in their dtype and rounded once to ``dtype``.

    Args:
        nodes: ``[nodes, ..]``, fp32; fp64 for a root in fp64.
        joins: for each node how many of the sums that wait are added to it, the latest first; then it waits itself.
    """
    return nodes.new_empty(nodes.shape[1:], dtype=dtype)


@primitive("_column_sums")
def column_sums(x: Tensor, lengths: Sequence[int]) -> Tensor:
    """Returns the sum of each column, ``[columns]``, in fp32 (fp64 for fp64), in the order of the rows.

    Args:
        x: ``[rows, columns]``.
        lengths: of the slices of columns whose sums must not depend on the others; they add up to ``columns``.
    """
    return x.new_empty([x.shape[1]], dtype=acc_dtype(x.dtype))
