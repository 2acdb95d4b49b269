"""Linears of 8-bit floating point. C++: float8, float8_linear."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tp_ext._ops.binding import Sizes, operator, primitive


@operator
def float8_column_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: str,
    sequence_parallel: bool,
    sizes: Sizes,
    by_row: bool,
    forward: torch.dtype,
    gradient: torch.dtype,
    communicate: bool,
    sum_input_grad: bool = True,
) -> Tensor:
    """Column-parallel linear whose products are of 8-bit floating point; see csrc/autograd/float8_linear.cpp.

    Args:
        by_row: a scale per row of each operand along the contracted dim; False: one for a tensor.
        forward, gradient: the formats of x and weight, and of dy: ``torch.float8_e4m3fn`` or ``torch.float8_e5m2``.
        communicate: gathers under sequence parallelism move 8 bits.
        sum_input_grad: False: the gradient of x is this rank's part of it (without sequence parallelism).
    """


@operator
def float8_row_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: str,
    sequence_parallel: bool,
    sizes: Sizes,
    by_row: bool,
    forward: torch.dtype,
    gradient: torch.dtype,
    communicate: bool,
    sum_bias_grad: bool = True,
) -> Tensor:
    """Row-parallel linear whose products are of 8-bit floating point; see :func:`float8_column_linear`."""


@operator
def float8_grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Sequence[int],
    group: str,
    inputs: bool,
    by_row: bool,
    forward: torch.dtype,
    gradient: torch.dtype,
    grad_scale: float = 1.0,
) -> Tensor:
    """Linears of several experts whose products are of 8-bit floating point, each with scales of its own.

    Args:
        group: shares the weights along their outputs, with ``inputs`` along their inputs. Results are not summed.
    """


@primitive("_finite_amax")
def finite_amax(x: Tensor, dim: int | None = None) -> Tensor:
    """Returns the largest finite magnitude of x ``[m, n]`` in fp32, ``[1, 1]``; of each row (``dim`` 1) ``[m, 1]``, or
    column (0) ``[1, n]``."""
    return x.new_empty((x.shape[0] if dim == 1 else 1, x.shape[1] if dim == 0 else 1), dtype=torch.float32)


@primitive("_float8_quantize")
def float8_quantize(x: Tensor, amax: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Returns ``x`` in 8 bits, scaled so that ``amax`` becomes the largest number of ``dtype``, and 1 / scale in the
    shape of ``amax``. NaN and Inf become NaN."""
    return x.new_empty(x.shape, dtype=dtype), torch.empty_like(amax)
