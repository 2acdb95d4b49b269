"""Gradients in blocks of codes: scales, codes, errors and means bit by bit by the formula in torch's operators."""

import re

import pytest
import torch
from torch.library import opcheck

from tests.helpers.compression import decoded_blocks
from tp_ext import _ops

pytestmark = pytest.mark.core

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def places_of(lengths, block, begin=0):
    """Places of consecutive ranges of a tensor, on the wire in the same order, and the bytes of the wire."""
    rows, first, byte = [], 0, begin
    for length in lengths:
        rows.append((first, length, byte))
        first, byte = first + length, byte + length + -(-length // block) * 4
    return torch.tensor(rows), byte


def values(n, dtype):
    """Returns numbers of many magnitudes: first zeros, then subnormals, then others."""
    x = torch.randn(n) * 10 ** torch.randn(n)
    x[: n // 4] = 0
    x[n // 4 : n // 2] *= 1e-38
    return x.to(dtype)


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_and_errors_by_the_formula(dtype, float8, device):
    for lengths, block in (([600, 64, 0, 65], 64), ([63], 64), ([0, 8, 3], 2), ([256, 300], 256)):
        n = sum(lengths)
        places, size = places_of(lengths, block, begin=3)  # any alignment
        x, error = values(n, dtype), torch.randn(n) / 100
        expected = torch.cat([decoded_blocks(v, block, float8) for v in (x.float() + error).split(lengths) if len(v)])
        kept, wire = error.clone().to(device), torch.zeros(size, dtype=torch.uint8, device=device)
        options = places.to(device), block, float8
        _ops.compress_blocks_(x.to(device), kept, wire, *options)
        assert torch.equal(kept.cpu(), x.float() + error - expected)
        out = torch.empty(n, dtype=dtype, device=device)
        _ops.decompress_blocks_(wire, out, *options)
        assert torch.equal(out.cpu(), (expected / len(lengths)).to(dtype))
        plain = torch.zeros_like(wire)
        _ops.compress_blocks_((x.float() + error).to(device), None, plain, *options)
        assert torch.equal(plain, wire)


@pytest.mark.parametrize("float8", [False, True])
def test_sums_in_the_order_of_the_ranks(float8, device):
    block, n, ranks = 64, 200, 3
    places, size = places_of([n], block)
    received = torch.zeros(ranks, size + 5, dtype=torch.uint8, device=device)
    total = torch.zeros(n)
    for rank in range(ranks):
        x = values(n, torch.float32)
        _ops.compress_blocks_(x.to(device), None, received[rank, 5:], places.to(device), block, float8)
        total = decoded_blocks(x, block, float8) if rank == 0 else total + decoded_blocks(x, block, float8)
    error = torch.randn(n) / 100
    expected = decoded_blocks(total + error, block, float8)
    kept, wire = error.clone().to(device), torch.full((size + 5,), 7, dtype=torch.uint8, device=device)
    _ops.sum_compressed_blocks_(received, kept, wire, 5, n, block, float8)
    assert torch.equal(kept.cpu(), total + error - expected)
    out = torch.empty(n, device=device)
    _ops.decompress_blocks_(wire[5:], out, places.to(device), block, float8)
    assert torch.equal(out.cpu(), expected) and wire[:5].eq(7).all()
    kept, again = error.clone().to(device), torch.full_like(wire, 7)
    _ops.sum_compressed_blocks_(received, None, again, 5, n, block, float8)
    _ops.decompress_blocks_(again[5:], out, places.to(device), block, float8)
    assert torch.equal(out.cpu(), decoded_blocks(total, block, float8))


@pytest.mark.parametrize("float8", [False, True])
@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_block_that_is_not_finite_is_nan_and_loses_nothing(bad, float8, device):
    x = torch.ones(130, device=device)
    x[70] = bad
    error, (places, size) = torch.full((130,), 0.5, device=device), places_of([130], 64)
    wire, out = torch.zeros(size, dtype=torch.uint8, device=device), torch.empty(130, device=device)
    _ops.compress_blocks_(x, error, wire, places.to(device), 64, float8)
    _ops.decompress_blocks_(wire, out, places.to(device), 64, float8)
    assert out[64:128].isnan().all() and out[:64].isfinite().all() and out[128:].isfinite().all()
    assert error[64:128].eq(0).all() and error.isfinite().all()


def test_errors_name_the_argument(device):
    x, wire = torch.ones(128, device=device), torch.zeros(136, dtype=torch.uint8, device=device)
    places, _ = places_of([128], 64)
    places = places.to(device)
    for kind, message, arguments in (
        (
            TypeError,
            "x: dtype Double must be float32, bfloat16 or float16",
            (x.double(), None, wire, places, 64, False),
        ),
        (ValueError, "x: must be contiguous", (x.view(2, 64).t(), None, wire, places, 64, False)),
        (TypeError, "wire: dtype Float must be uint8", (x, None, wire.float(), places, 64, False)),
        (ValueError, "places: shape [3] must be [ranks, 3]", (x, None, wire, places[0], 64, False)),
        (ValueError, "block: 0 must be positive", (x, None, wire, places, 0, False)),
        (ValueError, "residual: shape [5] must have 128 elements", (x, x[:5], wire, places, 64, False)),
    ):
        with pytest.raises(kind, match=re.escape(message)):
            _ops.compress_blocks_(*arguments)
    with pytest.raises(ValueError, match=re.escape("received: shape [136] must be [ranks, 136]")):
        _ops.sum_compressed_blocks_(wire, None, wire, 0, 128, 64, False)
    with pytest.raises(IndexError, match="byte: 1 must leave place for 128 elements"):
        _ops.sum_compressed_blocks_(wire[None], None, wire, 1, 128, 64, False)
    if device == "cpu":  # a GPU does not read the places on the host
        with pytest.raises(IndexError, match="places: those of rank 0 must be within x and wire"):
            _ops.compress_blocks_(x, None, wire[:-1], places, 64, False)
    opcheck(_ops.compress_blocks_, (x, torch.zeros_like(x), wire, places, 64, True))
    opcheck(_ops.sum_compressed_blocks_, (wire[None].clone(), torch.zeros_like(x), wire, 0, 128, 64, True))
    opcheck(_ops.decompress_blocks_, (wire, x, places, 64, True))
