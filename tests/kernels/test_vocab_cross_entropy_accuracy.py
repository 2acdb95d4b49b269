"""Cross entropy: errors against fp64, next to torch's; masked rows, NaN, infinities."""

import pytest
import torch
import torch.nn.functional as F

from tests.helpers.accuracy import DTYPES, KINDS, assert_as_accurate, assert_as_special, values
from tp_ext import _ops

ROWS, VOCAB = 64, 3000
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_loss = pytest.mark.parametrize(("smoothing", "z"), [(0, 0), (0.1, 0), (0, 1e-3), (0.1, 1e-3)])


def pair(target, smoothing, z):
    """Ours and torch's, of the logits. z-loss in torch: lse = max + log(sum(exp(x - max))), whose gradient keeps the
    log of the sum next to a maximum of 1e30, unlike logsumexp's."""

    def ours(x):
        n = x.shape[-1]
        return _ops.vocab_parallel_cross_entropy(x, target, "", 0, n, n, -100, smoothing, z, "none", False)

    def theirs(x):
        loss = F.cross_entropy(x, target, label_smoothing=smoothing, reduction="none")
        if z:
            largest = x.detach().amax(-1)
            lse = largest + (x - largest[:, None]).logsumexp(-1)
            loss = loss + (z * lse**2).masked_fill(target == -100, 0)
        return loss

    return ours, theirs


@pytest.mark.thinned
@every_loss
@every_dtype
@pytest.mark.parametrize("kind", KINDS)
def test_errors_are_at_most_torchs(kind, dtype, smoothing, z, device):
    target = torch.randint(VOCAB, (ROWS,)).to(device)
    target[3] = -100
    logits, grad = values(kind, (ROWS, VOCAB), dtype, device), values("random", (ROWS,), dtype, device)
    assert_as_accurate(*pair(target, smoothing, z), [logits], grad, independent=ROWS)


def test_gradient_over_few_columns(device):
    """There a probability is near 1, and all of a row's gradient shares the rounding of the row's sum."""
    target = torch.randint(50, (4000,)).to(device)
    logits, grad = values("random", (4000, 50), torch.float32, device), values("random", (4000,), torch.float32, device)
    assert_as_accurate(*pair(target, 0, 0), [logits], grad, independent=4000)


@every_loss
@every_dtype
def test_nan_and_infinity_are_torchs(dtype, smoothing, z, device):
    """Some columns masked, all but the target, the target itself, all of them; NaN; infinity."""
    logits, inf = values("random", (8, 37), dtype, device), torch.inf
    target = torch.arange(8, device=device)
    logits[0, 20:] = -inf
    logits[1, torch.arange(37) != 1] = -inf
    logits[2, 2] = -inf
    logits[3] = -inf
    logits[4, 9] = torch.nan
    logits[5, 9] = inf
    logits[6, 6] = inf
    assert_as_special(*pair(target, smoothing, z), [logits], torch.ones(8, dtype=dtype, device=device))


@every_dtype
def test_an_ignored_row_is_zero_whatever_is_in_it(dtype, device):
    logits = values("random", (4, 37), dtype, device)
    logits[0], logits[1], logits[2, 5] = -torch.inf, torch.nan, torch.inf
    logits.requires_grad_()
    ours, _ = pair(torch.full((4,), -100, device=device), 0.1, 1e-3)
    loss = ours(logits)
    loss.sum().backward()
    assert not loss.any() and not logits.grad.any()
