"""The regions: differentiable collectives, named after their forward.

=======================  ==============================  ==============  ====================================
region                   forward                         backward        input -> output
=======================  ==============================  ==============  ====================================
copy_to_region           identity                        all-reduce      replicated -> for sharded work
reduce_from_region       all-reduce                      identity        partial -> replicated
scatter_to_region        this rank's slice               all-gather      replicated -> sharded
gather_from_region       all-gather                      rank's slice    sharded -> for replicated work
all_gather_region        all-gather                      reduce-scatter  sharded -> full, for sharded work
reduce_scatter_region    reduce-scatter                  all-gather      partial -> sharded
all_to_all_region        split, exchange, concatenate    the inverse     sharded on one dim -> on another
=======================  ==============================  ==============  ====================================

Rows 1-2, 3-4 and 5-6 are conjugate pairs: each backward applies the other, so that double backward works. All are
linear: in forward-mode AD the tangent of a region is the region of the tangent. Inputs and upstream gradients are never
written; at p = 1 nothing is communicated and the input itself is returned. Any strides, any floating dtype, 0 rows.
``group`` is a ``ProcessGroup``, a 1-D ``DeviceMesh``, a group's name or None (p = 1).

A dim that p does not divide splits like ``torch.tensor_split``, or by ``sizes`` (one length per rank). Regions that
concatenate shards do not know the other ranks' lengths: without ``sizes`` all are taken to equal this rank's.

The pairs are those of Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), rows 5-6 of Korthikanti et al., "Reducing
activation recomputation in large transformer models" (arXiv:2205.05198).
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from tp_ext import _ops
from tp_ext._ops import batching as batching  # registers the rules of torch.vmap
from tp_ext.group import Group, group_name, parallel_group
from tp_ext.invariance import block_sizes, check_ranks, current_blocks, refuse_call

_INSTEAD = "use the layers, or leave the context for it"


def _records(x: Tensor) -> bool:
    return torch.is_grad_enabled() and isinstance(x, Tensor) and x.requires_grad  # others: the operator's own error


def copy_to_region(x: Tensor, group: Group) -> Tensor:
    """Enters sharded work with a replicated tensor: y = x; dx = sum over ranks of dy.

    Communicates: backward, one all-reduce of x's size. Conjugate: :func:`reduce_from_region`.
    """
    if current_blocks() is not None and _records(x):
        refuse_call("copy_to_region", _INSTEAD)
    return _ops.copy_to_region(x, group_name(group))


def reduce_from_region(x: Tensor, group: Group) -> Tensor:
    """Leaves sharded work whose results are partial sums: y = sum over ranks of x; dx = dy.

    Communicates: forward, one all-reduce of x's size. Conjugate: :func:`copy_to_region`.
    """
    refuse_call("reduce_from_region", _INSTEAD)
    return _ops.reduce_from_region(x, group_name(group))


def scatter_to_region(x: Tensor, group: Group, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
    """Slices a replicated x: y = this rank's slice of ``dim``; dx = the ranks' dy, concatenated.

    Args:
        x: ``[.., n, ..]``, the same on all ranks.
        dim: the dim that is split.
        sizes: one length per rank, their sum n; default as ``torch.tensor_split``, in :func:`tp_ext.tp_invariant` by
            its blocks.

    Communicates: backward, one all-gather. Conjugate: :func:`gather_from_region`.

    Raises:
        IndexError: no such ``dim``. ValueError: ``sizes`` has not p lengths or not the sum n.
    """
    blocks = current_blocks()
    if blocks is not None and sizes is None and -x.dim() <= dim < x.dim():
        p = parallel_group(group).size
        check_ranks(blocks, p)
        sizes = block_sizes(x.shape[dim], blocks, p)
    return _ops.scatter_to_region(x, group_name(group), dim, sizes)


def gather_from_region(x: Tensor, group: Group, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
    """Concatenates the ranks' x along ``dim``, for replicated work; dx = this rank's slice of dy.

    Args:
        x: this rank's shard.
        dim: the dim along which the full tensor is sharded.
        sizes: one length per rank, this rank's being that of x; default all equal to it.

    Communicates: forward, one all-gather. Conjugate: :func:`scatter_to_region`. If the ranks continue with *different*
    work, as a sharded linear does, use :func:`all_gather_region`: there the gradients are partial sums.

    Raises:
        IndexError: no such ``dim``. ValueError: ``sizes`` has not p lengths, or not x's length at this rank.
    """
    return _ops.gather_from_region(x, group_name(group), dim, sizes)


def all_gather_region(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """Concatenates the ranks' x along ``dim``, for sharded work; dx = this rank's slice of the sum of dy.

    Arguments and errors as :func:`gather_from_region`. Communicates: forward, one all-gather; backward, one
    reduce-scatter. Conjugate: :func:`reduce_scatter_region`.
    """
    if current_blocks() is not None and _records(x):
        refuse_call("all_gather_region", _INSTEAD)
    return _ops.all_gather_region(x, group_name(group), dim, sizes)


def reduce_scatter_region(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """Sums x over the ranks; y = this rank's slice of the sum along ``dim``; dx = the ranks' dy, concatenated.

    Arguments and errors as :func:`scatter_to_region`. Communicates: forward, one reduce-scatter; backward, one
    all-gather. Conjugate: :func:`all_gather_region`.
    """
    refuse_call("reduce_scatter_region", _INSTEAD)
    return _ops.reduce_scatter_region(x, group_name(group), dim, sizes)


def all_to_all_region(
    x: Tensor,
    group: Group,
    split_dim: int,
    concat_dim: int,
    split_sizes: Sequence[int] | None = None,
    concat_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Sends slice k of ``split_dim`` to rank k; y = the slices from ranks 0, 1, .. concatenated along ``concat_dim``.

    Re-shards a tensor from ``concat_dim`` to ``split_dim``. On one dim (``split_dim == concat_dim``) it is the
    all-to-all with split lists of Megatron: ``split_sizes`` are sent, ``concat_sizes`` received.

    Args:
        x: sharded along ``concat_dim``.
        split_sizes: lengths of the slices of ``split_dim``, their sum its length; default ``torch.tensor_split``.
        concat_sizes: lengths along ``concat_dim`` of the ranks' slices; default all equal to this rank's.

    Communicates: one all-to-all forward, one backward (the inverse exchange; it is its own conjugate).

    Raises:
        IndexError: no such dim. ValueError: the sizes do not fit.
    """
    return _ops.all_to_all_region(x, group_name(group), split_dim, concat_dim, split_sizes, concat_sizes)
