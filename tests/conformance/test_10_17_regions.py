"""Conformance cases of regions that are no rows of tests/test_regions.py: compositions, aliases, lengths, groups.

The table: docs/reference/correctness.md. g_r is the upstream gradient of rank r. All comparisons are exact.
"""

import pytest
import torch
from torch import distributed as dist

from tests.helpers.on_ranks import on_ranks
from tests.helpers.region_maps import simple_cases
from tp_ext import all_gather_region, all_to_all_region, copy_to_region, reduce_from_region, reduce_scatter_region

pytestmark = pytest.mark.core


def ramp(*shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def check(y, x, g, want_y, want_dx):
    dx = torch.autograd.grad(y, x, g)[0]
    assert torch.equal(y, want_y)
    assert torch.equal(dx, want_dx)


@on_ranks(1, 2, 3, 4)
def test_case_10_gather_last_then_reduce_scatter_last(group):
    r, p = group.rank(), group.size()
    x, g = (ramp(3, 5) + 100 * r).requires_grad_(), ramp(3, 5) - r
    y = reduce_scatter_region(all_gather_region(x, group, dim=-1), group, dim=-1)
    check(y, x, g, p * x.detach(), p * g)


@on_ranks(1, 2, 3, 4)
def test_case_12_all_to_all_with_split_lists(group):
    """Rank s sends counts[s][d] rows of its own to rank d; every row contains s and d."""
    r, p = group.rank(), group.size()
    counts = [[(2 * s + d) % 3 for d in range(p)] for s in range(p)]

    def block(s, d):
        return torch.tensor([[100.0 * s + 10 * d + i, -i] for i in range(counts[s][d])]).view(-1, 2)

    sent = torch.cat([block(r, d) for d in range(p)])
    received = torch.cat([block(s, r) for s in range(p)])
    x = sent.clone().requires_grad_()
    y = all_to_all_region(x, group, 0, 0, split_sizes=counts[r], concat_sizes=[counts[s][r] for s in range(p)])
    check(y, x, 3 * received, received, 3 * sent)


@on_ranks(1, 2, 3, 4)
def test_case_14_aliasing(group):
    r, p = group.rank(), group.size()
    x = ramp(2, 3).requires_grad_()
    g = torch.tensor(r + 1.0).expand(2, 3)
    check(copy_to_region(x, group) + x, x, g, 2 * ramp(2, 3), torch.full((2, 3), r + 1 + p * (p + 1) / 2))
    z = reduce_from_region(x, group)
    assert torch.equal(z, p * ramp(2, 3))
    assert torch.equal(x, ramp(2, 3))


@on_ranks(2, 3, 4, backend="gloo")
def test_case_17_two_groups_do_not_hear_each_other(group):
    halves = [half.tolist() for half in torch.arange(group.size()).tensor_split(2)]
    groups = [dist.new_group(half) for half in halves]
    own, members = next((g, half) for g, half in zip(groups, halves, strict=True) if group.rank() in half)
    for case in simple_cases(len(members)):
        xs = [(x + 10.0 ** members[0]).requires_grad_() for x in case.inputs(len(members))]
        ys = case.emulate(xs)
        dxs = torch.autograd.grad(sum(y.sum() for y in ys), xs)
        x = xs[own.rank()].detach().requires_grad_()
        y = case(x, own)
        check(y, x, torch.ones_like(y), ys[own.rank()], dxs[own.rank()])
