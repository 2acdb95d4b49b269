"""Operators on all tensors of a list at once. C++: multi_tensor, multi_tensor_copy."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tp_ext._ops.binding import primitive


@primitive("_multi_tensor_squared_norm")
def multi_tensor_squared_norm(xs: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the squares of all elements, 0-d, fp64; at least one tensor, floating dtypes, one device."""
    return xs[0].new_empty((), dtype=torch.float64)


@primitive("_multi_tensor_scale_")
def multi_tensor_scale_(xs: Sequence[Tensor], scale: Tensor) -> None:
    """Multiplies every element by the 0-d ``scale``, which leaves every bit if it is 1; floating dtypes, one device."""


@primitive("_multi_tensor_copy_")
def multi_tensor_copy_(outs: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Copies each value to the tensor of its shape in ``outs``, any dtypes, on a CPU; they share no memory. Long rows
    go past the caches if all are more than a cache keeps for a reader."""
