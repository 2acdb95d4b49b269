"""residual + dropout(x + bias): errors against fp64, next to torch's, given the mask; NaN, infinities."""

import pytest
import torch

from tests.helpers.accuracy import DTYPES, KINDS, assert_as_accurate, assert_as_special, values, with_specials
from tp_ext import _ops

SHAPE, P = (256, 512), 0.3
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def pair(shape, device):
    """Ours and torch's, of x, bias and residual: torch's multiplies by a mask of 0 and 1 / (1 - p), as its dropout."""
    seed = torch.tensor(77, device=device)
    n = shape[0] * shape[1]
    kept = _ops.bias_dropout_residual(torch.ones(shape, device=device), None, None, seed, P, n, n, 0) != 0

    def ours(x, bias, residual):
        return _ops.bias_dropout_residual(x, bias, residual, seed, P, n, n, 0)

    def theirs(x, bias, residual):
        return (x + bias) * kept.to(x.dtype).div(1 - P) + residual

    return ours, theirs


@every_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_at_most_torchs(kind, dtype, device):
    x, residual = (values(kind, SHAPE, dtype, device) for _ in range(2))
    bias = values(kind, SHAPE[1:], dtype, device)
    grad = values("random" if kind == "huge" else kind, SHAPE, dtype, device)
    assert_as_accurate(*pair(SHAPE, device), [x, bias, residual], grad)


@every_dtype
def test_nan_and_infinity_are_torchs(dtype, device):
    """A dropped infinity is 0 times infinity."""
    x, residual, grad = (values("random", (11, 77), dtype, device) for _ in range(3))
    bias = torch.zeros(77, dtype=dtype, device=device)
    for inputs, g in (
        ([with_specials(x), bias, residual], grad),
        ([x, bias, with_specials(residual)], grad),
        ([x, bias, residual], with_specials(grad)),
    ):
        assert_as_special(*pair((11, 77), device), inputs, g)
