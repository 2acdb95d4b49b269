"""The embedding's gradient: errors against fp64, next to torch's; NaN and infinity stay in their row."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.accuracy import DTYPES, KINDS, assert_as_accurate, assert_as_special, values
from tp_ext import _ops

every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def pair(ids, vocab):
    """Ours and torch's, of the weight."""
    return (
        lambda w: _ops.vocab_parallel_embedding(ids, w, "", 0, vocab, vocab, False, None),
        lambda w: F.embedding(ids, w),
    )


@every_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_at_most_torchs(kind, dtype, device):
    """About 40 tokens per id; in fp32 the same additions as torch's on the CPU, in the same order."""
    ids = torch.randint(50, (2048,)).to(device)
    weight, grad = values("random", (50, 64), dtype, device), values(kind, (2048, 64), dtype, device)
    assert_as_accurate(*pair(ids, 50), [weight], grad)
    if kind == "random" and dtype == torch.float32 and device.type == "cpu":
        ours, theirs = (f(weight.requires_grad_()) for f in pair(ids, 50))
        assert torch.equal(*(torch.autograd.grad(y, weight, grad)[0] for y in (ours, theirs)))


@every_dtype
def test_nan_and_infinity_stay_in_their_row(dtype, device):
    ids = torch.arange(40, device=device) % 8
    weight, grad = values("random", (8, 33), dtype, device), values("random", (40, 33), dtype, device)
    for row, value in enumerate([torch.nan, torch.inf, -torch.inf]):
        weight[row, row], grad[8 + row, 2 * row] = value, value
    grad[16 + 1, 2], grad[16 + 2, 2] = -torch.inf, 5  # infinity less infinity; infinity alone
    assert_as_special(*pair(ids, 8), [weight], grad)
