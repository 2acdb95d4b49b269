"""RMSNorm and LayerNorm: errors against fp64, next to torch's; NaN and infinity stay in their row."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.accuracy import DTYPES, KINDS, assert_as_accurate, assert_as_special, values, with_specials
from tp_ext import _ops

SHAPE, EPS = (256, 512), 1e-5
every_norm = pytest.mark.parametrize("norm", ["rms", "layer"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def pair(norm):
    """Ours and torch's, of x, weight and, for a layer norm, bias."""
    if norm == "rms":
        return (lambda x, w: _ops.rms_norm(x, w, EPS)), (lambda x, w: F.rms_norm(x, x.shape[-1:], w, EPS))
    return (
        lambda x, w, b: _ops.layer_norm(x, w, b, EPS),
        lambda x, w, b: F.layer_norm(x, x.shape[-1:], w, b, EPS),
    )


def params(norm, n, dtype, device):
    return [values("random", (n,), dtype, device) for _ in range(1 if norm == "rms" else 2)]


@every_norm
@every_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_at_most_torchs(kind, dtype, norm, device):
    x, grad = values(kind, SHAPE, dtype, device), values("random", SHAPE, dtype, device)
    assert_as_accurate(*pair(norm), [x, *params(norm, SHAPE[1], dtype, device)], grad)


@every_norm
@every_dtype
def test_nan_and_infinity_stay_in_their_row(dtype, norm, device):
    x, grad = (values("random", (11, 77), dtype, device) for _ in range(2))
    # torch's RMSNorm on CUDA has NaN in a whole row with an infinity
    assert_as_special(*pair(norm), [with_specials(x), *params(norm, 77, dtype, device)], grad, on_cpu=True)
    # Whether the gradient of a row with an infinite one is NaN or infinite follows from the order of its terms
    assert_as_special(*pair(norm), [x, *params(norm, 77, dtype, device)], with_specials(grad), either=True)


@pytest.mark.parametrize("n", [1, 3, 100, 512, 5000, 20000])
def test_a_constant_row(n, device):
    """The pass that sums the squares finds what the sum rounds off the mean."""
    x, bias = torch.full((4, n), 0.7, device=device), torch.randn(n, device=device)
    assert torch.equal(_ops.layer_norm(x, None, bias, EPS), bias.expand(4, n))
