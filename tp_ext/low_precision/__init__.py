"""Fewer bits: linears that multiply in 8-bit floating point; frozen weights of 8 and 4 bits; gradients of 8 bits."""

from tp_ext.low_precision.compress import CompressedGradients as CompressedGradients
from tp_ext.low_precision.compress import compress_gradients as compress_gradients
from tp_ext.low_precision.float8 import float8 as float8
from tp_ext.low_precision.quantize import dequantize as dequantize
from tp_ext.low_precision.quantize import quantize_ as quantize_
from tp_ext.nn.float8 import Float8 as Float8
