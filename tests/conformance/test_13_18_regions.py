"""Conformance cases 13 to 18: regions with odd strides, aliases, uneven shards, other groups, shapes and dtypes."""

import pytest
import torch
from torch import distributed as dist

from tests.conformance.test_01_12_regions import CASES, check, every_p, ramp, spread
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tp_ext import (
    ParallelAttention,
    VocabParallelEmbedding,
    all_gather_region,
    all_to_all_region,
    copy_to_region,
    gather_from_region,
    reduce_from_region,
    reduce_scatter_region,
    scatter_to_region,
)

pytestmark = pytest.mark.core


@every_p
@pytest.mark.parametrize("case", CASES)
def test_case_13_strided_input_and_stride_0_gradient(case, p):
    ranks.run(case, p, odd=True)


@every_p
@on_ranks()
def test_case_14_aliasing(group):
    r, p = group.rank(), group.size()
    x = ramp(2, 3).requires_grad_()
    y = copy_to_region(x, group) + x
    check(y, x, spread(r + 1, 2, 3), 2 * ramp(2, 3), torch.full((2, 3), r + 1 + p * (p + 1) / 2))
    z = reduce_from_region(x, group)
    assert torch.equal(z, p * ramp(2, 3))
    assert torch.equal(x, ramp(2, 3))


@every_p
@on_ranks()
def test_case_15_double_backward(group):
    r, s = group.rank(), group.size() * (group.size() + 1) / 2
    x = ramp(2, 3).double().requires_grad_()
    v = (r + 1) * (copy_to_region(x, group) ** 3).sum()
    gx = torch.autograd.grad(v, x, create_graph=True)[0]
    assert torch.equal(gx, 3 * s * x**2)
    assert torch.equal(torch.autograd.grad(gx.sum(), x)[0], 6 * s * x)


@every_p
@on_ranks()
def test_case_16_uneven_shards(group):
    """In place of a refusal. Layers with features that p does not divide: cases 19 to 26."""
    # A length that p does not divide is cut as torch.tensor_split does, or as sizes= says.
    r, p = group.rank(), group.size()
    n = 2 * p + 1 if p > 1 else 3
    full = ramp(n, 2)
    sizes = [len(t) for t in full.tensor_split(p)]
    own = full.tensor_split(p)[r]
    x = full.clone().requires_grad_()
    check(scatter_to_region(x, group, dim=0), x, own, own, full)
    x = full.clone().requires_grad_()
    check(reduce_scatter_region(x, group), x, own, p * own, full)
    for gather, times in ((gather_from_region, 1), (all_gather_region, p)):
        x = own.clone().requires_grad_()
        check(gather(x, group, dim=0, sizes=sizes), x, full, full, times * own)
    wide = ramp(n, 3 * p)
    x = wide.tensor_split(p)[r].clone().requires_grad_()
    y = all_to_all_region(x, group, split_dim=1, concat_dim=0, concat_sizes=sizes)
    columns = wide[:, 3 * r : 3 * r + 3]
    check(y, x, columns, columns, wide.tensor_split(p)[r])
    x = columns.clone().requires_grad_()
    y = all_to_all_region(x, group, split_dim=0, concat_dim=1)
    check(y, x, wide.tensor_split(p)[r], wide.tensor_split(p)[r], columns)


def _uneven(group, what):
    p = group.size()
    if what == "heads":
        ParallelAttention(4 * (p - 1), p - 1, group=group)
    elif what == "kv_heads":
        ParallelAttention(4 * p, 2 * (p - 1), num_kv_heads=p - 1, head_dim=2, group=group)
    elif what == "vocabulary":
        VocabParallelEmbedding(p - 1, 4, group=group)
    else:
        scatter_to_region(torch.ones(2 * p, 3), group, dim=0, sizes=[1] * p)


@pytest.mark.parametrize(
    ("what", "match"),
    [
        ("heads", r"num_heads: must be at least the number of ranks; num_heads = {0}, num_kv_heads = {0}, p = {1}"),
        ("kv_heads", r"num_kv_heads: when fewer than the ranks, must divide .*num_kv_heads = {0}, p = {1}"),
        ("vocabulary", r"vocab_size: {0} must be at least the number of ranks, p = {1}"),
        ("sizes", r"sizes: .*must"),
    ],
)
@pytest.mark.parametrize("p", [3, 4])
def test_case_16_sizes_that_cannot_be_sharded_are_refused_alike(p, what, match):
    ranks.run_raises(_uneven, p, ValueError, match.format(p - 1, p), what)


@pytest.mark.parametrize("p", [2, 3, 4])
@on_ranks(backend="gloo")
def test_case_17_two_groups_do_not_hear_each_other(group):
    r, p = group.rank(), group.size()
    halves = [half.tolist() for half in torch.arange(p).tensor_split(2)]
    groups = [dist.new_group(half) for half in halves]
    own, members = next((g, half) for g, half in zip(groups, halves, strict=True) if r in half)
    for case in CASES:
        case(own)
    x = torch.tensor([10.0**r], requires_grad=True)
    total = torch.tensor([sum(10.0**rank for rank in members)])
    check(reduce_from_region(x, own), x, torch.ones(1), total, torch.ones(1))
    check(copy_to_region(x, own), x, x.detach(), x.detach(), total)


@every_p
@pytest.mark.parametrize("shape", [(0, 3), (5,), (2, 1, 3, 2, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@on_ranks()
def test_case_18_shapes_and_dtypes(group, dtype, shape):
    r, p = group.rank(), group.size()
    x = (torch.randint(-2, 3, shape) + r).to(dtype).requires_grad_()
    everyone = [(x.detach().double() - r + k).to(dtype) for k in range(p)]
    total = torch.stack(everyone).sum(0)
    g = torch.ones_like(x)
    check(copy_to_region(x, group), x, g, x.detach(), p * g)
    check(reduce_from_region(x, group), x, g, total, g)
    full = torch.cat(everyone)
    check(all_gather_region(x, group), x, full, full, p * x.detach())
    check(gather_from_region(x, group, dim=0), x, full, full, x.detach())
    x = full.clone().requires_grad_()
    n = len(full) // p
    own = full[n * r : n * r + n]
    check(reduce_scatter_region(x, group), x, own, p * own, full)
    check(scatter_to_region(x, group, dim=0), x, own, own, full)
    check(all_to_all_region(x, group, 0, 0), x, torch.cat([own] * p), torch.cat([own] * p), full)
