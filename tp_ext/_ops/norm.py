"""RMSNorm and LayerNorm over the last dim, with a residual that is added first: sum = x + residual, y = norm(sum).

x and residual ``[.., n]``, weight and bias ``[n]``; mean and rstd, one per row, in fp32 (fp64 for fp64). In a backward,
``output_mask`` says which gradients are needed (the others are empty), and ``grad_sum`` is the gradient of sum. C++:
csrc/autograd/norm.cpp; with a sharded last dim, sharded_norm.cpp.
"""

import math
from collections.abc import Sequence

from torch import Tensor

from tp_ext._ops.binding import direct_operator, operator, primitive
from tp_ext._ops.fake_tensors import acc_dtype, like


@direct_operator
def rms_norm(x: Tensor, weight: Tensor | None, eps: float) -> Tensor:
    """Returns x / sqrt(mean(x^2) + eps) * weight."""


@direct_operator
def rms_norm_residual(x: Tensor, residual: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Returns y = :func:`rms_norm` of sum, and sum."""


@direct_operator
def all_reduce_rms_norm(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, group: str
) -> tuple[Tensor, Tensor]:
    """Returns y = :func:`rms_norm` of sum, and sum = residual + the sum of x over the ranks.

    Gives the bits of :func:`reduce_from_region` and then :func:`rms_norm_residual`, and is composed of these where
    gradients are recorded. C++: csrc/autograd/all_reduce_rms_norm.cpp.

    Communicates: forward, one all-reduce of x.
    """


@operator
def sharded_rms_norm(x: Tensor, weight: Tensor | None, eps: float, group: str, n: int) -> Tensor:
    """Returns :func:`rms_norm` of rows of n elements, of which x and ``weight`` are this rank's shard.

    Communicates: one number per row, forward and backward, each by an all-reduce.
    """


@primitive("_rms_norm_fwd")
def rms_norm_fwd(x: Tensor, weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Returns y and rstd = 1 / sqrt(mean(x^2) + eps)."""
    return like(x), _per_row(x)


@primitive("_rms_norm_residual_fwd")
def rms_norm_residual_fwd(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y, sum and rstd."""
    return like(x), like(x), _per_row(x)


@primitive("_rms_norm_bwd")
def rms_norm_bwd(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    grad_sum: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True),
) -> tuple[Tensor, Tensor]:
    """Returns dx, with ``grad_sum`` added, and dweight."""
    return _like_if(output_mask[0], x, x), _like_if(output_mask[1], weight, x)


@direct_operator
def layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """Returns (x - mean(x)) / sqrt(var(x) + eps) * weight + bias."""


@direct_operator
def layer_norm_residual(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Returns y = :func:`layer_norm` of sum, and sum."""


@operator
def sharded_layer_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, group: str, n: int) -> Tensor:
    """Returns :func:`layer_norm` of rows of n elements, of which x, ``weight`` and ``bias`` are this rank's shard.

    Communicates: two numbers per row: forward an all-gather, backward an all-reduce.
    """


@primitive("_layer_norm_fwd")
def layer_norm_fwd(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """Returns y, mean and rstd = 1 / sqrt(var(x) + eps)."""
    return like(x), _per_row(x), _per_row(x)


@primitive("_layer_norm_residual_fwd")
def layer_norm_residual_fwd(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Returns y, sum, mean and rstd."""
    return like(x), like(x), _per_row(x), _per_row(x)


@primitive("_layer_norm_bwd")
def layer_norm_bwd(
    grad: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    grad_sum: Tensor | None = None,
    output_mask: Sequence[bool] = (True, True, True),
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns dx, with ``grad_sum`` added, dweight and dbias."""
    return _like_if(output_mask[0], x, x), _like_if(output_mask[1], weight, x), _like_if(output_mask[2], weight, x)


def _per_row(x: Tensor) -> Tensor:
    return x.new_empty(math.prod(x.shape[:-1]), dtype=acc_dtype(x.dtype))


def _like_if(wanted: bool, x: Tensor | None, default: Tensor) -> Tensor:
    """Returns a tensor like x; empty if it is not wanted, and of default's dtype if there is no x."""
    if x is None:
        return default.new_empty(0)
    return like(x) if wanted else x.new_empty(0)
