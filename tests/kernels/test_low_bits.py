"""Frozen weights of 8 and 4 bits: rows in fp32 bit by bit by the formula, products next to fp64."""

import re

import pytest
import torch
from torch.library import opcheck

from tp_ext import _ops

pytestmark = pytest.mark.core

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_by_the_formula(dtype, device):
    generator = torch.Generator().manual_seed(0)
    for rows, inputs, block in [(1, 2, 2), (7, 24, 6), (65, 192, 64), (3, 260, 4), (0, 8, 4), (3, 0, 4)]:
        q8 = torch.randint(-127, 128, (rows, inputs), generator=generator, dtype=torch.int8)
        scale = torch.rand(rows, generator=generator).to(dtype)
        got = _ops.dequantize_low_bits(q8.to(device), scale.to(device))
        assert got.dtype == torch.float32 and torch.equal(got.cpu(), q8.float() * scale.float()[:, None])
        q4 = torch.randint(-8, 8, (rows, inputs), generator=generator)
        packed = ((q4[:, 0::2] + 8) | (q4[:, 1::2] + 8) << 4).to(torch.uint8)
        scales = torch.rand(rows, inputs // block, generator=generator).to(dtype)
        expected = q4.float() * scales.float().repeat_interleave(block, 1)
        assert torch.equal(_ops.dequantize_low_bits(packed.to(device), scales.to(device), block).cpu(), expected)
        strided = torch.cat([packed, packed], 1).to(device)[:, : inputs // 2]
        assert torch.equal(_ops.dequantize_low_bits(strided, scales.to(device), block).cpu(), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("block", [None, 2, 6, 16, 32, 64, 96], ids=str)
def test_values_in_another_dtype_are_rounded_once(block, dtype, device):
    """The bits of torch's conversion, of scales that are large, small, Inf and NaN, and halfway between two of bf16."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (9, 192 if block is None else 96), generator=generator)
    packed = (packed - 128).to(torch.int8) if block is None else packed.to(torch.uint8)
    scale = torch.randn((9,) if block is None else (9, 192 // block), generator=generator)
    scale[1:6] *= torch.tensor([1e38, 1e-38, 0, torch.inf, torch.nan]).view(5, *[1] * (scale.dim() - 1))
    scale[6:8] = torch.tensor([1 + 2**-8, 1 + 3 * 2**-8]).view(2, *[1] * (scale.dim() - 1))
    packed, scale = packed.to(device), scale.to(device)
    got = _ops.dequantize_low_bits(packed, scale, block, dtype)
    expected = _ops.dequantize_low_bits(packed, scale, block).to(dtype)
    assert got.dtype == dtype and torch.equal(got.isnan(), expected.isnan())
    assert torch.equal(got.nan_to_num(nan=0.0), expected.nan_to_num(nan=0.0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [None, 2, 6, 32, 64], ids=str)
def test_products(dtype, block, device):
    generator = torch.Generator().manual_seed(0)
    for rows, inputs, tokens in [(1, 192, 1), (37, 384, 2), (5, 2112, 9), (3, 192, 0), (0, 192, 3), (3, 0, 2)]:
        packed = torch.randint(0, 256, (rows, inputs // (1 if block is None else 2)), generator=generator)
        packed = (packed - 128).to(torch.int8) if block is None else packed.to(torch.uint8)
        scale = torch.rand((rows,) if block is None else (rows, inputs // block), generator=generator).to(dtype)
        x = torch.randn(tokens, inputs, generator=generator).to(dtype)
        check_product(x.to(device), packed.to(device), scale.to(device), block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("block", [4, 8, 16, 32, 64, 128, 256, 512])
def test_products_of_whole_vectors(dtype, block, device):
    """Of inputs that are a multiple of 128, in blocks that a vector holds several of, one of, or a part of."""
    generator = torch.Generator().manual_seed(0)
    packed = torch.randint(0, 256, (11, 256), generator=generator).to(torch.uint8).to(device)
    scale = torch.randn(11, 512 // block, generator=generator).to(dtype).to(device)
    for tokens in range(1, 7):
        check_product(torch.randn(tokens, 512, generator=generator).to(dtype).to(device), packed, scale, block)


def check_product(x, packed, scale, block):
    """Within 16 roundings of fp32 of the sum of magnitudes; and of a token alone, the same bits as among others."""
    weight = _ops.dequantize_low_bits(packed, scale, block).double()
    y = _ops.low_bits_product(x, packed, scale, block)
    expected, magnitudes = x.double() @ weight.t(), x.double().abs() @ weight.abs().t()
    assert y.dtype == x.dtype and y.shape == expected.shape
    rounding = torch.finfo(x.dtype).eps / 2 * expected.abs() + torch.finfo(x.dtype).smallest_normal
    assert ((y.double() - expected).abs() <= 16 * 2**-24 * magnitudes + 1.01 * rounding).all()
    wide = torch.cat([x, x], 1)[:, : x.shape[1]]  # not contiguous
    for token in range(x.shape[0]):
        assert torch.equal(_ops.low_bits_product(wide[token : token + 1], packed, scale, block)[0], y[token])


def test_errors_name_the_argument(device):
    q8, q4 = torch.zeros(3, 8, dtype=torch.int8, device=device), torch.zeros(3, 4, dtype=torch.uint8, device=device)
    one, two = torch.ones(3, device=device), torch.ones(3, 2, device=device)
    call = _ops.dequantize_low_bits
    for kind, message, arguments in (
        (TypeError, "packed: dtype Byte must be uint8 with a block, int8 without", (q4, one)),
        (TypeError, "packed: dtype Char must be uint8 with a block, int8 without", (q8, two, 4)),
        (TypeError, "scale: dtype Int must be a floating point type", (q8, one.int())),
        (ValueError, "packed: shape [8] must have 2 dims", (q8[0], one)),
        (ValueError, "scale: shape [3, 2] must be [3], a number per row of packed", (q8, two)),
        (ValueError, "block: 3 must be even and divide the 8 inputs of packed", (q4, two, 3)),
        (ValueError, "block: 6 must be even and divide the 8 inputs of packed", (q4, two, 6)),
        (ValueError, "scale: shape [3, 2] must be [3, 4], a number per block", (q4, two, 2)),
    ):
        with pytest.raises(kind, match=re.escape(message)):
            call(*arguments)
    x = torch.ones(2, 8, device=device)
    product = _ops.low_bits_product
    with pytest.raises(TypeError, match="x: dtype Double must be float32, bfloat16 or float16"):
        product(x.double(), q8, one)
    with pytest.raises(ValueError, match=re.escape("x: shape [2, 8] must be [tokens, 4], the inputs of packed")):
        product(x, q8[:, :4], one)
    opcheck(product, (x, q8, one))
    opcheck(product, (x, q4, two, 4))
    opcheck(call, (q8, one))
    opcheck(call, (q4, two, 4))
    opcheck(call, (q4, two, 4, torch.bfloat16))
