"""Rotary embedding: errors against fp64, next to torch's; NaN and infinity stay in their pair."""

import pytest
import torch

from tests.helpers.accuracy import DTYPES, KINDS, assert_as_accurate, assert_as_special, values
from tp_ext import _ops

SHAPE, ROTARY = (128, 8, 64), 48
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
both = pytest.mark.parametrize("interleaved", [False, True], ids=["half", "interleaved"])


def pair(tokens, rotary, interleaved, device):
    """Ours and torch's, of x; cosine and sine are the same fp32 numbers, which torch rounds to x's dtype."""
    positions = torch.arange(tokens, dtype=torch.float64, device=device)[:, None]
    angles = positions * 10000.0 ** -(torch.arange(0, rotary, 2, device=device) / rotary)
    cos, sin = angles.cos().float(), angles.sin().float()

    def theirs(x):
        half = rotary // 2
        a, b = (x[..., 0:rotary:2], x[..., 1:rotary:2]) if interleaved else (x[..., :half], x[..., half:rotary])
        c, s = cos[:, None].to(x.dtype), sin[:, None].to(x.dtype)
        turned = [a * c - b * s, b * c + a * s]
        turned = torch.stack(turned, -1).flatten(-2) if interleaved else torch.cat(turned, -1)
        return torch.cat([turned, x[..., rotary:]], -1)

    return (lambda x: _ops.rope(x, cos, sin, interleaved)), theirs


@both
@every_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_at_most_torchs(kind, dtype, interleaved, device):
    x, grad = (values(kind, SHAPE, dtype, device) for _ in range(2))
    assert_as_accurate(*pair(SHAPE[0], ROTARY, interleaved, device), [x], grad)


@both
@every_dtype
def test_nan_and_infinity_stay_in_their_pair(dtype, interleaved, device):
    x, grad = (values("random", (6, 2, 34), dtype, device) for _ in range(2))
    for t in (x, grad):
        for token, value in enumerate([torch.nan, torch.inf, -torch.inf] * 2):
            t[token, token % 2, 3 * token] = value  # the last one passes through
    assert_as_special(*pair(6, 14, interleaved, device), [x], grad)
    assert_as_special(*pair(6, 14, interleaved, device), [values("random", x.shape, dtype, device)], grad)
