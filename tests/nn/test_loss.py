"""vocab_parallel_cross_entropy against F.cross_entropy of the full logits. fp64 bound: 1e-12, rounding of short sums.

Its kernels, one by one: kernels/test_vocab_cross_entropy.py.
"""

import itertools

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

from tests.helpers import ranks
from tests.helpers.oracle import counts_by_kind
from tests.helpers.vocabulary import assert_dense, close, columns, dense, make_rows, run_loss, widths
from tp_ext import VocabParallelCrossEntropy, vocab_parallel_cross_entropy

pytestmark = pytest.mark.core

SIZES = (1, 2, 3, 4)


ALL = list(itertools.product((0.0, 0.1, 1.0), (0.0, 1e-2), ("none", "mean", "sum")))


@pytest.mark.thinned
@pytest.mark.parametrize(("smoothing", "z_loss", "reduction"), ALL)
@pytest.mark.parametrize("p", SIZES)
def test_every_option_with_even_uneven_and_padded_vocabularies(p, smoothing, z_loss, reduction):
    options = {"label_smoothing": smoothing, "z_loss": z_loss, "reduction": reduction}
    for vocab in (12, 13, 14, 23):
        for width in widths(p, vocab):
            assert_dense(p, *make_rows(vocab), width, **options)


def test_a_rank_with_padding_alone():
    """V = 9 at p = 4 with width 3 leaves the last rank nothing."""
    assert_dense(4, *make_rows(9), width=3, label_smoothing=0.1, z_loss=1e-2)
    assert_dense(4, *make_rows(5), width=4, label_smoothing=0.1)


@pytest.mark.parametrize("rows", [(), (0,), (1,), (2, 0, 3), (2, 1, 3, 2)], ids=str)
def test_rows_of_any_shape(rows):
    for reduction in ("none", "mean", "sum"):
        full, target = torch.randn(*rows, 7, dtype=torch.float64), torch.randint(0, 7, rows)
        reference = full.unsqueeze(0).requires_grad_()
        want = dense(reference, target.unsqueeze(0), reduction=reduction)
        want.sum().backward()
        got = ranks.run(
            run_loss, 2, full, target, None if want.dim() == 0 else torch.ones(rows), None, {"reduction": reduction}
        )
        torch.testing.assert_close(got[0][0], want.detach().view(got[0][0].shape), **close)
        torch.testing.assert_close(torch.cat([grad for _, grad in got], -1), reference.grad[0], **close)


def _module(group, full, target, options):
    local = columns(full, group.size(), group.rank(), None)
    module = VocabParallelCrossEntropy(group=group, vocab_size=full.shape[-1], **options)
    assert not module.state_dict()
    return module(local, target), vocab_parallel_cross_entropy(
        local, target, group, vocab_size=full.shape[-1], **options
    )


def test_module_is_the_function():
    options = {"label_smoothing": 0.1, "z_loss": 0.1, "reduction": "sum", "ignore_index": 4}
    full, target = make_rows(13)
    for a, b in ranks.run(_module, 2, full, target.clamp(min=0), options):
        assert torch.equal(a, b)


@pytest.mark.parametrize("p", [1, 2, 4])
def test_any_strides(p):
    assert_dense(p, *make_rows(13), odd_strides=True, label_smoothing=0.1)


def _count(group, full, target):
    local = columns(full, group.size(), group.rank(), None).requires_grad_()
    with CommDebugMode() as forward:
        loss = vocab_parallel_cross_entropy(local, target, group, label_smoothing=0.1, z_loss=0.1)
    with CommDebugMode() as backward:
        loss.backward()
    return counts_by_kind(forward), counts_by_kind(backward)


def test_one_all_gather_forward_and_nothing_backward():
    assert ranks.run(_count, 2, *make_rows(12)) == [({"all_gather": 1}, {})] * 2
    assert ranks.run(_count, 1, *make_rows(12)) == [({}, {})]
