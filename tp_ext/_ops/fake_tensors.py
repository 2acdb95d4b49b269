"""Results of fakes that several operators share."""

import torch
from torch import Tensor


def acc_dtype(dtype: torch.dtype) -> torch.dtype:
    """Returns the dtype that kernels compute in for tensors of ``dtype``: fp64 for fp64, otherwise fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def like(x: Tensor) -> Tensor:
    """Returns a contiguous tensor of x's shape and dtype."""
    return torch.empty_like(x, memory_format=torch.contiguous_format)
