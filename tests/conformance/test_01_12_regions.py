"""Conformance cases 1 to 12: what each region computes, numbers written out. The table: docs/reference/correctness.md.

g_r is the upstream gradient of rank r, S = 1 + ... + p. All comparisons are exact. A case, given odd=True, runs with
strided inputs (case 13); each works in any group (case 17).
"""

import pytest
import torch

from tests.helpers import ranks
from tp_ext import (
    all_gather_region,
    all_to_all_region,
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    reduce_scatter_region,
    scatter_to_region,
)

pytestmark = pytest.mark.core

every_p = pytest.mark.parametrize("p", [1, 2, 3, 4])


def blocks(p, *shape, dim=-1):
    """Block k of `dim` is filled with k."""
    return torch.cat([torch.full(shape, float(k)) for k in range(p)], dim)


def ramp(*shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def check(y, x, g, want_y, want_dx):
    dx = torch.autograd.grad(y, x, g)[0]
    assert torch.equal(y, want_y)
    assert torch.equal(dx, want_dx)


def leaf(t, odd):
    """t as a leaf; if odd, with a stride of 2 along its transposed memory."""
    if odd:
        wide = t.new_zeros(*t.mT.shape, 2)
        wide[..., 0] = t.mT
        t = wide[..., 0].mT
        assert not t.is_contiguous() or t.numel() <= 1
    return t.detach().requires_grad_()


def spread(value, *shape):
    """A gradient as .sum() gives it: one number, all strides 0."""
    return torch.tensor(float(value)).expand(shape)


def _case_01(group, odd=False):
    r, p = group.rank(), group.size()
    x = leaf(ramp(2, 3), odd)
    check(copy_to_region(x, group), x, spread(r + 1, 2, 3), ramp(2, 3), torch.full((2, 3), p * (p + 1) / 2))


@every_p
def test_case_01_copy(p):
    ranks.run(_case_01, p)


def _case_02(group, odd=False):
    r, p = group.rank(), group.size()
    x, g = leaf(torch.full((2, 3), r + 1.0), odd), torch.rand(2, 3)
    check(reduce_from_region(x, group), x, g, torch.full((2, 3), p * (p + 1) / 2), g)
    y = reduce_from_region(x, group)
    if r == 0:  # no collective in backward: a rank may do it alone
        torch.autograd.grad(y, x, g)


@every_p
def test_case_02_reduce(p):
    ranks.run(_case_02, p)


def _case_03(group, odd=False):
    r, p = group.rank(), group.size()
    x = leaf(ramp(8, 4 * p), odd)
    check(scatter_to_region(x, group), x, spread(r, 8, 4), ramp(8, 4 * p)[:, 4 * r : 4 * r + 4], blocks(p, 8, 4))


@every_p
def test_case_03_scatter_last(p):
    ranks.run(_case_03, p)


def _case_04(group, odd=False):
    r, p = group.rank(), group.size()
    x, g = leaf(torch.full((8, 4), float(r)), odd), ramp(8, 4 * p)
    check(gather_from_region(x, group), x, g, blocks(p, 8, 4), g[:, 4 * r : 4 * r + 4])


@every_p
def test_case_04_gather_last(p):
    ranks.run(_case_04, p)


def _case_05(group, odd=False):
    r, p = group.rank(), group.size()
    x = leaf(ramp(2 * p, 4), odd)
    check(
        scatter_to_region(x, group, dim=0),
        x,
        spread(r, 2, 4),
        ramp(2 * p, 4)[2 * r : 2 * r + 2],
        blocks(p, 2, 4, dim=0),
    )


@every_p
def test_case_05_scatter_seq(p):
    ranks.run(_case_05, p)


def _case_06(group, odd=False):
    r, p = group.rank(), group.size()
    x = leaf(torch.full((1, 4), float(r)), odd)
    g = (r + 1) * blocks(p, 1, 4, dim=0)
    check(all_gather_region(x, group), x, g, blocks(p, 1, 4, dim=0), torch.full((1, 4), p * (p + 1) / 2 * r))


@every_p
def test_case_06_gather_seq_sharded_consumer(p):
    ranks.run(_case_06, p)


def _case_07(group, odd=False):
    r, p = group.rank(), group.size()
    x = leaf(torch.full((1, 4), float(r)), odd)
    g = (r + 1) * ramp(p, 4)
    check(gather_from_region(x, group, dim=0), x, g, blocks(p, 1, 4, dim=0), g[r : r + 1])


@every_p
def test_case_07_gather_seq_replicated_consumer(p):
    ranks.run(_case_07, p)


def _case_08(group, odd=False):
    r, p = group.rank(), group.size()
    x = leaf(blocks(p, 1, 4, dim=0), odd)
    check(reduce_scatter_region(x, group), x, spread(r, 1, 4), torch.full((1, 4), float(p * r)), blocks(p, 1, 4, dim=0))


@every_p
def test_case_08_reduce_scatter_seq(p):
    ranks.run(_case_08, p)


def _case_09(group, odd=False):
    r, p = group.rank(), group.size()
    sizes, full = list(range(1, p + 1)), ramp(p * (p + 1) // 2, 3)
    own = full.split(sizes)[r]
    x, g = leaf(own, odd), (r + 1) * full
    check(all_gather_region(x, group, sizes=sizes), x, g, full, p * (p + 1) / 2 * own)
    x = leaf((r + 1) * full, odd)
    check(reduce_scatter_region(x, group, sizes=sizes), x, own, p * (p + 1) / 2 * own, full)


@every_p
def test_case_09_uneven_gather_and_reduce_scatter(p):
    ranks.run(_case_09, p)


def _case_10(group, odd=False):
    r, p = group.rank(), group.size()
    x, g = leaf(ramp(3, 5) + 100 * r, odd), ramp(3, 5) - r
    y = reduce_scatter_region(all_gather_region(x, group, dim=-1), group, dim=-1)
    check(y, x, g, p * x.detach(), p * g)


@every_p
def test_case_10_gather_last_then_reduce_scatter_last(p):
    ranks.run(_case_10, p)


def _case_11(group, odd=False):
    r, p = group.rank(), group.size()
    full = ramp(2 * p, 3 * p)
    rows, columns = full[2 * r : 2 * r + 2], full[:, 3 * r : 3 * r + 3]
    x, g = leaf(rows, odd), 2 * full
    y = all_to_all_region(x, group, split_dim=1, concat_dim=0)
    check(y, x, g[:, 3 * r : 3 * r + 3], columns, g[2 * r : 2 * r + 2])
    y = all_to_all_region(x, group, split_dim=1, concat_dim=0)
    check(all_to_all_region(y, group, split_dim=0, concat_dim=1), x, rows, rows, rows)


@every_p
def test_case_11_sequence_to_hidden_and_back(p):
    ranks.run(_case_11, p)


def _case_12(group, odd=False):
    # Rank s sends counts[s][d] rows of its own to rank d; every row contains s and d.
    r, p = group.rank(), group.size()
    counts = [[(2 * s + d) % 3 for d in range(p)] for s in range(p)]

    def block(s, d):
        return torch.tensor([[100.0 * s + 10 * d + i, -i] for i in range(counts[s][d])]).view(-1, 2)

    sent = torch.cat([block(r, d) for d in range(p)])
    received = torch.cat([block(s, r) for s in range(p)])
    x = leaf(sent, odd)
    y = all_to_all_region(x, group, 0, 0, split_sizes=counts[r], concat_sizes=[counts[s][r] for s in range(p)])
    check(y, x, 3 * received, received, 3 * sent)


@every_p
def test_case_12_all_to_all_with_split_lists(p):
    ranks.run(_case_12, p)


CASES = [
    _case_01,
    _case_02,
    _case_03,
    _case_04,
    _case_05,
    _case_06,
    _case_07,
    _case_08,
    _case_09,
    _case_10,
    _case_11,
    _case_12,
]
