"""Frozen weights of few bits. C++: low_bits."""

import torch
from torch import Tensor

from tp_ext._ops.binding import primitive


@primitive("_dequantize_low_bits")
def dequantize_low_bits(
    packed: Tensor, scale: Tensor, block: int | None = None, dtype: torch.dtype | None = None
) -> Tensor:
    """Returns q scale in fp32 ``[m, n]``, rounded to ``dtype``.

    Args:
        packed: int8 ``[m, n]``; with ``block`` uint8 ``[m, n / 2]``, input 2j in the low and 2j + 1 in the high four
            bits, each as q + 8.
        scale: ``[m]``, of each row; with ``block`` ``[m, n / block]``, of each block of inputs.
    """
    shape = (packed.shape[0], packed.shape[1] * (1 if block is None else 2))
    return packed.new_empty(shape, dtype=dtype or torch.float32)


@primitive("_low_bits_product")
def low_bits_product(x: Tensor, packed: Tensor, scale: Tensor, block: int | None = None) -> Tensor:
    """Returns x W^T, ``[tokens, m]`` in the dtype of x, of the weight that :func:`dequantize_low_bits` gives.

    It reads the bits alone and sums in fp32. Every few tokens read the weight again: it is for few.

    Args:
        x: fp32, bf16 or fp16 ``[tokens, n]``.
        packed, scale, block: as there.
    """
    return x.new_empty(x.shape[0], packed.shape[0])
