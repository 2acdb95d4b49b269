"""Fewer bits: frozen weights of 8 and 4 bits, the same values for every number of ranks."""

from tp_ext.low_precision.quantize import dequantize as dequantize
from tp_ext.low_precision.quantize import quantize_ as quantize_
