"""Random numbers by global index: every number is a function of the seed and the element's index in the full tensor.

Element i of a contiguous local tensor is element ``(i / local_inner) * full_inner + offset + i % local_inner`` of the
full one; seed is a 0-d int64 tensor. For dropout it may also be ``[2]``, with the number of the first row of
``local_inner`` elements in the full tensor, or ``[1 + rows]``, with that of each row. C++:
bias_dropout_residual, random_fill; :mod:`tp_ext.random` draws the seeds.
"""

from torch import Tensor

from tp_ext._ops.binding import direct_operator, primitive
from tp_ext._ops.fake_tensors import like


@direct_operator
def bias_dropout_residual(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    seed: Tensor,
    p: float,
    local_inner: int,
    full_inner: int,
    offset: int,
) -> Tensor:
    """Returns residual + dropout(x + bias), ``[.., n]``, with probability p; bias ``[n]``. Saves the seed only."""


@primitive("_bias_dropout_residual_fwd")
def bias_dropout_residual_fwd(
    x: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    seed: Tensor,
    p: float,
    local_inner: int,
    full_inner: int,
    offset: int,
) -> Tensor:
    """Computes :func:`bias_dropout_residual`."""
    return like(x)


@primitive("_dropout_bwd")
def dropout_bwd(grad: Tensor, seed: Tensor, p: float, local_inner: int, full_inner: int, offset: int) -> Tensor:
    """Returns dx = dropout(grad) with the mask of forward, drawn again."""
    return like(grad)


@primitive("_bias_dropout_bwd")
def bias_dropout_bwd(
    grad: Tensor, seed: Tensor, p: float, local_inner: int, full_inner: int, offset: int
) -> tuple[Tensor, Tensor]:
    """Returns dx, as :func:`dropout_bwd`, and its sums over rows, dbias."""
    return like(grad), grad.new_empty(grad.shape[-1:])


@primitive("_philox_uniform_")
def philox_uniform_(
    self: Tensor, seed: Tensor, low: float, high: float, local_inner: int, full_inner: int, offset: int
) -> None:
    """Fills with numbers uniform in [low, high)."""


@primitive("_philox_normal_")
def philox_normal_(
    self: Tensor, seed: Tensor, mean: float, std: float, local_inner: int, full_inner: int, offset: int
) -> None:
    """Fills with normal numbers, computed in fp64 and rounded."""


@primitive("_philox_truncated_normal_")
def philox_truncated_normal_(
    self: Tensor,
    seed: Tensor,
    mean: float,
    std: float,
    low: float,
    high: float,
    local_inner: int,
    full_inner: int,
    offset: int,
) -> None:
    """Fills with normal numbers conditioned on [low, high]."""
