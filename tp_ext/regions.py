"""The regions: differentiable collectives, named by what they do in forward.

=======================  ==============================  ==============  ====================================
region                   forward                         backward        input -> output
=======================  ==============================  ==============  ====================================
copy_to_region           identity                        all-reduce      replicated -> for sharded work
reduce_from_region       all-reduce                      identity        partial -> replicated
scatter_to_region        own slice                       all-gather      replicated -> sharded
gather_from_region       all-gather                      own slice       sharded -> for replicated work
all_gather_region        all-gather                      reduce-scatter  sharded -> full, for sharded work
reduce_scatter_region    reduce-scatter                  all-gather      partial -> sharded
all_to_all_region        split, exchange, concatenate    the inverse     sharded on one dim -> on another
=======================  ==============================  ==============  ====================================

Rows 1-2, 3-4 and 5-6 are conjugate pairs: each backward applies the other, so that double backward works. All are
linear: in forward-mode AD the tangent of a region is the region of the tangent. Inputs and upstream gradients are never
written; at p = 1 nothing is communicated and the input itself is returned. Any strides, any floating dtype, 0 rows.
``group`` is a ``ProcessGroup``, a 1-D ``DeviceMesh``, a group's name or None (p = 1).

A dim that p does not divide splits like ``torch.tensor_split``, or as ``sizes`` (one length per rank) says. Where
shards are put together nobody knows the others' lengths: without ``sizes`` they are all equal to the own one.

The pairs are those of Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), rows 5-6 of Korthikanti et al., "Reducing
activation recomputation in large transformer models" (arXiv:2205.05198).
"""

from collections.abc import Sequence

from torch import Tensor

from tp_ext import _ops
from tp_ext._ops import batching as batching  # registers the rules of torch.vmap
from tp_ext.group import Group, group_name


def copy_to_region(x: Tensor, group: Group) -> Tensor:
    """y = x; dx = sum over ranks of dy. Enters sharded work with a replicated tensor.

    Communicates: backward, one all-reduce of x's size. Conjugate: :func:`reduce_from_region`.
    """
    return _ops.copy_to_region(x, group_name(group))


def reduce_from_region(x: Tensor, group: Group) -> Tensor:
    """y = sum over ranks of x; dx = dy. Leaves sharded work whose results are addends.

    Communicates: forward, one all-reduce of x's size. Conjugate: :func:`copy_to_region`.
    """
    return _ops.reduce_from_region(x, group_name(group))


def scatter_to_region(x: Tensor, group: Group, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
    """y = own slice of ``dim`` of the replicated x; dx = the ranks' dy, concatenated.

    Args:
        x: ``[.., n, ..]``, the same on all ranks.
        dim: the dim that is cut.
        sizes: one length per rank, their sum n; default as ``torch.tensor_split``.

    Communicates: backward, one all-gather. Conjugate: :func:`gather_from_region`.

    Raises:
        IndexError: no such ``dim``. ValueError: ``sizes`` has not p lengths or not the sum n.
    """
    return _ops.scatter_to_region(x, group_name(group), dim, sizes)


def gather_from_region(x: Tensor, group: Group, dim: int = -1, sizes: Sequence[int] | None = None) -> Tensor:
    """y = the ranks' x concatenated along ``dim``, for replicated work; dx = own slice of dy.

    Args:
        x: the own shard.
        dim: the dim along which the full tensor is cut.
        sizes: one length per rank, the own one that of x; default all equal to it.

    Communicates: forward, one all-gather. Conjugate: :func:`scatter_to_region`. When every rank goes on with
    *different* work, as a sharded linear does, take :func:`all_gather_region`: there the gradients are addends.

    Raises:
        IndexError: no such ``dim``. ValueError: ``sizes`` has not p lengths, or not x's at the own rank.
    """
    return _ops.gather_from_region(x, group_name(group), dim, sizes)


def all_gather_region(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """y = the ranks' x concatenated along ``dim``, for sharded work; dx = own slice of the sum of dy.

    Arguments and errors as :func:`gather_from_region`. Communicates: forward, one all-gather; backward, one
    reduce-scatter. Conjugate: :func:`reduce_scatter_region`.
    """
    return _ops.all_gather_region(x, group_name(group), dim, sizes)


def reduce_scatter_region(x: Tensor, group: Group, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """y = own slice along ``dim`` of the sum over ranks of x; dx = the ranks' dy, concatenated.

    Arguments and errors as :func:`scatter_to_region`. Communicates: forward, one reduce-scatter; backward, one
    all-gather. Conjugate: :func:`all_gather_region`.
    """
    return _ops.reduce_scatter_region(x, group_name(group), dim, sizes)


def all_to_all_region(
    x: Tensor,
    group: Group,
    split_dim: int,
    concat_dim: int,
    split_sizes: Sequence[int] | None = None,
    concat_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Slice k of ``split_dim`` goes to rank k; y = what comes from ranks 0, 1, .. concatenated along ``concat_dim``.

    Re-shards a tensor from ``concat_dim`` to ``split_dim``. On one dim (``split_dim == concat_dim``) it is the
    all-to-all with split lists of Megatron: ``split_sizes`` are sent, ``concat_sizes`` received.

    Args:
        x: sharded along ``concat_dim``.
        split_sizes: lengths of the slices of ``split_dim``, their sum its length; default ``torch.tensor_split``.
        concat_sizes: lengths along ``concat_dim`` of what the ranks send; default all equal to the own one.

    Communicates: one all-to-all forward, one backward (the inverse exchange; it is its own conjugate).

    Raises:
        IndexError: no such dim. ValueError: the sizes do not fit.
    """
    return _ops.all_to_all_region(x, group_name(group), split_dim, concat_dim, split_sizes, concat_sizes)
