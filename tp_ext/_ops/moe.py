"""Mixture of experts: the order of the rows by expert, and the copies of tokens to these rows and back.

A token has ``choices`` experts; a *slot* is one choice of one token. ``rows``, ``[tokens, choices]``, int64, holds the
row of each slot in the tensor sorted by expert, or -1 for a slot without one (dropped). No row belongs to two slots.
The tensor's rows without a slot are zeros, and have gradients of zero.

The operators are deterministic: sums have the order of the choices, in fp32 (fp64 for fp64), without atomics. A row out
of range is an ``IndexError`` on the CPU and a device-side assert on CUDA, as is a row of two slots (``ValueError``).

C++: moe_sort, moe_permute; formulas: csrc/kernels/moe_permute.h, gradients: csrc/autograd/moe_permute.cpp.
"""

from torch import Tensor

from tp_ext._ops.binding import direct_operator, operator, primitive
from tp_ext._ops.fake_tensors import acc_dtype, like


@primitive("_moe_sort")
def moe_sort(experts: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Sorts the slots by expert, and within an expert by token and choice.

    Args:
        experts: ``[tokens, choices]``, int64: the expert of each slot; -1: dropped.

    Returns rows, ``[tokens, choices]``, and counts, ``[num_experts]``, the number of rows of each expert: expert e has
    those from ``sum(counts[:e])`` on. No gradient; on CUDA no host synchronisation.
    """
    return like(experts), experts.new_empty(num_experts)


@direct_operator
def moe_permute(x: Tensor, rows: Tensor, num_rows: int, weights: Tensor | None = None) -> Tensor:
    """Returns y, ``[num_rows, hidden]``: ``y[rows[t, j]] = weights[t, j] * x[t]``.

    Backward: ``dx[t]`` is the sum over j of ``weights[t, j] * dy[rows[t, j]]``, ``dweights[t, j]`` the inner product of
    ``x[t]`` and ``dy[rows[t, j]]``, 0 where the row is -1. Derivatives of any order.

    Args:
        x: ``[tokens, hidden]``.
        weights: ``[tokens, choices]``, of x's dtype or fp32 (fp64 for fp64); default 1.
    """


@primitive("_moe_permute")
def moe_permute_fwd(x: Tensor, rows: Tensor, num_rows: int, weights: Tensor | None) -> Tensor:
    """Computes :func:`moe_permute`; weights in fp32 (fp64 for fp64)."""
    return x.new_empty([num_rows, x.shape[1]])


@direct_operator
def moe_unpermute(y: Tensor, rows: Tensor, weights: Tensor | None = None) -> Tensor:
    """Returns x, ``[tokens, hidden]``: ``x[t]`` is the sum over j of ``weights[t, j] * y[rows[t, j]]``.

    Backward: ``dy[rows[t, j]] = weights[t, j] * dx[t]``, ``dweights[t, j]`` the inner product of ``dx[t]`` and
    ``y[rows[t, j]]``, 0 where the row is -1. Derivatives of any order.

    Args:
        y: ``[rows, hidden]``.
        weights: ``[tokens, choices]``, of y's dtype or fp32 (fp64 for fp64); default 1.
    """


@primitive("_moe_unpermute")
def moe_unpermute_fwd(y: Tensor, rows: Tensor, weights: Tensor | None) -> Tensor:
    """Computes :func:`moe_unpermute`; weights in fp32 (fp64 for fp64)."""
    return y.new_empty([rows.shape[0], y.shape[1]])


@primitive("_moe_unpermute_bwd")
def moe_unpermute_bwd(grad: Tensor, y: Tensor, rows: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
    """Returns dy and dweights of :func:`moe_unpermute`, in one pass over grad."""
    return like(y), like(weights)


@operator
def moe_dot(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """Returns the inner products of ``x[t]`` and ``y[rows[t, j]]``, ``[tokens, choices]``, in fp32 (fp64 for fp64).

    They are 0 where the row is -1. x ``[tokens, hidden]``, y ``[rows, hidden]``. Derivatives of any order.
    """


@primitive("_moe_dot")
def moe_dot_fwd(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    """Computes :func:`moe_dot`."""
    return x.new_empty(rows.shape, dtype=acc_dtype(x.dtype))
