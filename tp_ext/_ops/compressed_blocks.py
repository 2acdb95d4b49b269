"""Operators on gradients compressed to blocks. C++: compressed_blocks.

A block of the wire is a scale in fp32 and a code of 8 bits for each of its values: int8, or e4m3. ``places``, int64
``[ranks, 3]``, has for each rank the first element, the number of elements and the first byte of its blocks.
"""

from torch import Tensor

from tp_ext._ops.binding import primitive


@primitive("_compress_blocks_")
def compress_blocks_(
    x: Tensor, residual: Tensor | None, wire: Tensor, places: Tensor, block: int, float8: bool
) -> None:
    """Writes ``x + residual`` to the wire, and to the residual the rounding errors.

    Args:
        x: fp32, bf16 or fp16, contiguous.
        residual: fp32, of as many elements; None: no feedback.
        wire: uint8.
        block: elements that share a scale; the last block of a rank may have fewer.
    """


@primitive("_sum_compressed_blocks_")
def sum_compressed_blocks_(
    received: Tensor, residual: Tensor | None, wire: Tensor, byte: int, count: int, block: int, float8: bool
) -> None:
    """Writes the sum of the blocks of all ranks, in their order, plus the residual, to the wire; see above.

    Args:
        received: uint8 ``[ranks, bytes]``.
        wire: uint8 ``[bytes]``.
        byte, count: first byte and number of the elements to add.
    """


@primitive("_decompress_blocks_")
def decompress_blocks_(wire: Tensor, out: Tensor, places: Tensor, block: int, float8: bool) -> None:
    """Writes the values of the wire over the number of ranks to ``out``, contiguous, fp32, bf16 or fp16."""
