"""Operators on all tensors of a list at once: any floating dtypes, one device. C++: multi_tensor."""

from collections.abc import Sequence

import torch
from torch import Tensor

from tp_ext._ops.binding import primitive


@primitive("_multi_tensor_squared_norm")
def multi_tensor_squared_norm(xs: Sequence[Tensor]) -> Tensor:
    """Returns the sum of the squares of all elements, 0-d, fp64; at least one tensor."""
    return xs[0].new_empty((), dtype=torch.float64)


@primitive("_multi_tensor_scale_")
def multi_tensor_scale_(xs: Sequence[Tensor], scale: Tensor) -> None:
    """Multiplies every element by the 0-d ``scale``; a scale of 1 leaves every bit."""
