"""8-bit floating point: largest magnitudes and values bit by bit by the formula in torch's operators."""

import itertools
import re

import pytest
import torch
from torch.library import opcheck

from tests.helpers.float8 import MAX, scaled
from tp_ext import _ops

pytestmark = pytest.mark.core

DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def drawn(m, n, dtype):
    x = torch.randn(m, n) * 10 ** (3 * torch.randn(m, n))
    x[m // 2 :] *= 1e-38
    return x.to(dtype)


@pytest.mark.parametrize("format", MAX, ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_values_by_the_formula(dtype, format, device):
    for (m, n), dim in itertools.product([(1, 1), (7, 33), (64, 130), (3, 0), (0, 5)], [None, 0, 1]):
        x = drawn(m, n, dtype)
        if m * n > 40:
            x[1, 2], x[2, 3], x[3, 4] = float("nan"), float("inf"), -float("inf")
        amax = _ops.finite_amax(x.to(device), dim)
        size = torch.where(x.isfinite(), x, 0).float().abs()
        dims = [d for d in (0, 1) if d != dim] if dim is None else [dim]
        expected = (
            size.amax(dims, keepdim=True) if x.numel() else torch.zeros(m if dim == 1 else 1, n if dim == 0 else 1)
        )
        if dim is not None and x.numel():
            expected = size.amax(0 if dim == 0 else 1, keepdim=True)
        assert torch.equal(amax.cpu(), expected), (m, n, dim)
        values, inverse = _ops.float8_quantize(x.to(device), amax, format)
        want, want_inverse = scaled(x, expected, format)
        assert values.dtype == format and torch.equal(inverse.cpu(), want_inverse)
        number = x.isfinite()  # the sign of a NaN is any
        assert values.cpu().float()[~number].isnan().all()
        assert torch.equal(values.cpu().view(torch.uint8)[number], want.view(torch.uint8)[number]), (m, n, dim)
    strided = drawn(9, 6, dtype).t()
    assert torch.equal(
        _ops.float8_quantize(strided.to(device), _ops.finite_amax(strided.to(device)), format)[0]
        .cpu()
        .view(torch.uint8),
        _ops.float8_quantize(strided.contiguous(), _ops.finite_amax(strided.contiguous()), format)[0].view(torch.uint8),
    )


@pytest.mark.parametrize("format", MAX, ids=str)
def test_every_code_and_the_middles_between_codes(format, device):
    """Ties go to the even code, at subnormals, too."""
    codes = torch.arange(256, dtype=torch.uint8).view(format)
    numbers = codes.float()
    numbers = numbers[numbers.isfinite()].unique()
    middles = (numbers[1:] + numbers[:-1]) / 2
    around = [middles, middles.nextafter(torch.tensor(1e9)), middles.nextafter(torch.tensor(-1e9))]
    x = torch.cat([numbers, *around])[None]
    most = torch.tensor([[MAX[format]]])
    values, inverse = _ops.float8_quantize(x.to(device), most.to(device), format)
    assert inverse.item() == 1
    assert torch.equal(values.cpu().float(), x.to(format).float())


def test_errors_name_the_argument(device):
    x, amax = torch.ones(3, 4, device=device), torch.ones(1, 1, device=device)
    e4m3 = torch.float8_e4m3fn
    for kind, message, call in (
        (TypeError, "x: dtype Double must be float32", lambda: _ops.finite_amax(x.double())),
        (ValueError, "x: shape [3] must have 2 dims", lambda: _ops.finite_amax(x[:, 0])),
        (ValueError, "dim: 2 must be 0, 1 or None", lambda: _ops.finite_amax(x, 2)),
        (TypeError, "dtype: Float must be float8_e4m3fn", lambda: _ops.float8_quantize(x, amax, torch.float32)),
        (ValueError, "amax: shape [3, 4] must be [1, 1]", lambda: _ops.float8_quantize(x, x, e4m3)),
    ):
        with pytest.raises(kind, match=re.escape(message)):
            call()
    opcheck(_ops.finite_amax, (x, 1))
    opcheck(_ops.float8_quantize, (x, amax, e4m3))
