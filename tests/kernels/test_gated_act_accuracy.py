"""gated_act: errors against fp64, next to torch's; NaN, infinities."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.accuracy import DTYPES, KINDS, assert_as_accurate, assert_as_special, values, with_specials
from tp_ext import _ops

GATES = {"swiglu": F.silu, "geglu": F.gelu}
ROWS, WIDTH = 256, 256
every_activation = pytest.mark.parametrize("activation", GATES)
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def pair(activation):
    """Ours and torch's, of x = gate | up and bias."""

    def theirs(x, bias):
        gate, up = (x + bias).chunk(2, -1)
        return GATES[activation](gate) * up

    return (lambda x, b: _ops.gated_act(x, b, activation)), theirs


@every_activation
@every_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_at_most_torchs(kind, dtype, activation, device):
    x = values(kind, (ROWS, 2 * WIDTH), dtype, device)
    bias = values("random" if kind in ("random", "constant") else kind, (2 * WIDTH,), dtype, device)
    n = WIDTH if kind == "constant" else None
    grad = values("random", (ROWS, WIDTH), dtype, device)
    assert_as_accurate(*pair(activation), [x, bias], grad, independent=n)


@every_activation
@every_dtype
def test_nan_and_infinity_are_torchs(dtype, activation, device):
    """In the gate, in what it gates, and in the gradient."""
    gate, up, grad = (values("random", (11, 77), dtype, device) for _ in range(3))
    bias = torch.zeros(2 * 77, dtype=dtype, device=device)
    for x, g in (
        (torch.cat([with_specials(gate), up], 1), grad),
        (torch.cat([gate, with_specials(up)], 1), grad),
        (torch.cat([gate, up], 1), with_specials(grad)),
    ):
        assert_as_special(*pair(activation), [x, bias], g)
