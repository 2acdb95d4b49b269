"""The black-box conformance cases of tensor-parallel regions, numbers written out.

g_r is the upstream gradient of rank r, S = 1 + ... + p. All comparisons are exact unless said.
"""

import pytest
import ranks
import torch
from torch import distributed as dist

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

every_p = pytest.mark.parametrize("p", [1, 2, 4])


def _blocks(p, *shape, dim=-1):
    """Block k of `dim` is filled with k."""
    return torch.cat([torch.full(shape, float(k)) for k in range(p)], dim)


def _ramp(*shape):
    return torch.arange(float(torch.Size(shape).numel())).view(shape)


def _check(y, x, g, want_y, want_dx):
    dx = torch.autograd.grad(y, x, g)[0]
    assert torch.equal(y, want_y)
    assert torch.equal(dx, want_dx)


def _leaf(t, odd):
    """t as a leaf; if odd, with a stride of 2 along its transposed memory."""
    if odd:
        wide = t.new_zeros(*t.mT.shape, 2)
        wide[..., 0] = t.mT
        t = wide[..., 0].mT
        assert not t.is_contiguous() or t.numel() <= 1
    return t.detach().requires_grad_()


def _grad(value, *shape):
    """A gradient as .sum() gives it: one number, all strides 0."""
    return torch.tensor(float(value)).expand(shape)


def _case_01(group, odd=False):
    r, p = group.rank(), group.size()
    x = _leaf(_ramp(2, 3), odd)
    _check(copy_to_region(x, group), x, _grad(r + 1, 2, 3), _ramp(2, 3), torch.full((2, 3), p * (p + 1) / 2))


def _case_02(group, odd=False):
    r, p = group.rank(), group.size()
    x, g = _leaf(torch.full((2, 3), r + 1.0), odd), torch.rand(2, 3)
    _check(reduce_from_region(x, group), x, g, torch.full((2, 3), p * (p + 1) / 2), g)
    y = reduce_from_region(x, group)
    if r == 0:  # no collective in backward: a rank may do it alone
        torch.autograd.grad(y, x, g)


def _case_03(group, odd=False):
    r, p = group.rank(), group.size()
    x = _leaf(_ramp(8, 4 * p), odd)
    _check(scatter_to_region(x, group), x, _grad(r, 8, 4), _ramp(8, 4 * p)[:, 4 * r : 4 * r + 4], _blocks(p, 8, 4))


def _case_04(group, odd=False):
    r, p = group.rank(), group.size()
    x, g = _leaf(torch.full((8, 4), float(r)), odd), _ramp(8, 4 * p)
    _check(gather_from_region(x, group), x, g, _blocks(p, 8, 4), g[:, 4 * r : 4 * r + 4])


def _case_05(group, odd=False):
    r, p = group.rank(), group.size()
    x = _leaf(_ramp(2 * p, 4), odd)
    _check(
        scatter_to_region(x, group, dim=0),
        x,
        _grad(r, 2, 4),
        _ramp(2 * p, 4)[2 * r : 2 * r + 2],
        _blocks(p, 2, 4, dim=0),
    )


def _case_06(group, odd=False):
    r, p = group.rank(), group.size()
    x = _leaf(torch.full((1, 4), float(r)), odd)
    g = (r + 1) * _blocks(p, 1, 4, dim=0)
    _check(all_gather_region(x, group), x, g, _blocks(p, 1, 4, dim=0), torch.full((1, 4), p * (p + 1) / 2 * r))


def _case_07(group, odd=False):
    r, p = group.rank(), group.size()
    x = _leaf(torch.full((1, 4), float(r)), odd)
    g = (r + 1) * _ramp(p, 4)
    _check(gather_from_region(x, group, dim=0), x, g, _blocks(p, 1, 4, dim=0), g[r : r + 1])


def _case_08(group, odd=False):
    r, p = group.rank(), group.size()
    x = _leaf(_blocks(p, 1, 4, dim=0), odd)
    _check(
        reduce_scatter_region(x, group), x, _grad(r, 1, 4), torch.full((1, 4), float(p * r)), _blocks(p, 1, 4, dim=0)
    )


def _case_09(group, odd=False):
    r, p = group.rank(), group.size()
    sizes, full = list(range(1, p + 1)), _ramp(p * (p + 1) // 2, 3)
    own = full.split(sizes)[r]
    x, g = _leaf(own, odd), (r + 1) * full
    _check(all_gather_region(x, group, sizes=sizes), x, g, full, p * (p + 1) / 2 * own)
    x = _leaf((r + 1) * full, odd)
    _check(reduce_scatter_region(x, group, sizes=sizes), x, own, p * (p + 1) / 2 * own, full)


def _case_10(group, odd=False):
    r, p = group.rank(), group.size()
    x, g = _leaf(_ramp(3, 5) + 100 * r, odd), _ramp(3, 5) - r
    y = reduce_scatter_region(all_gather_region(x, group, dim=-1), group, dim=-1)
    _check(y, x, g, p * x.detach(), p * g)


def _case_11(group, odd=False):
    r, p = group.rank(), group.size()
    full = _ramp(2 * p, 3 * p)
    rows, columns = full[2 * r : 2 * r + 2], full[:, 3 * r : 3 * r + 3]
    x, g = _leaf(rows, odd), 2 * full
    y = all_to_all_region(x, group, split_dim=1, concat_dim=0)
    _check(y, x, g[:, 3 * r : 3 * r + 3], columns, g[2 * r : 2 * r + 2])
    y = all_to_all_region(x, group, split_dim=1, concat_dim=0)
    _check(all_to_all_region(y, group, split_dim=0, concat_dim=1), x, rows, rows, rows)


def _case_12(group, odd=False):
    # Rank s sends counts[s][d] rows of its own to rank d: s and d are told by every row.
    r, p = group.rank(), group.size()
    counts = [[(2 * s + d) % 3 for d in range(p)] for s in range(p)]

    def piece(s, d):
        return torch.tensor([[100.0 * s + 10 * d + i, -i] for i in range(counts[s][d])]).view(-1, 2)

    sent = torch.cat([piece(r, d) for d in range(p)])
    received = torch.cat([piece(s, r) for s in range(p)])
    x = _leaf(sent, odd)
    y = all_to_all_region(x, group, 0, 0, split_sizes=counts[r], concat_sizes=[counts[s][r] for s in range(p)])
    _check(y, x, 3 * received, received, 3 * sent)


_CASES = {
    "01_copy": _case_01,
    "02_reduce": _case_02,
    "03_scatter_last": _case_03,
    "04_gather_last": _case_04,
    "05_scatter_seq": _case_05,
    "06_gather_seq_sharded_consumer": _case_06,
    "07_gather_seq_replicated_consumer": _case_07,
    "08_reduce_scatter_seq": _case_08,
    "09_uneven_gather_and_reduce_scatter": _case_09,
    "10_gather_last_then_reduce_scatter_last": _case_10,
    "11_sequence_to_hidden_and_back": _case_11,
    "12_all_to_all_with_split_lists": _case_12,
}


@every_p
@pytest.mark.parametrize("name", _CASES)
def test_case(name, p):
    ranks.run(_CASES[name], p)


@every_p
@pytest.mark.parametrize("name", _CASES)
def test_case_13_strided_input_and_stride_0_gradient(name, p):
    ranks.run(_CASES[name], p, odd=True)


def _case_14(group):
    r, p = group.rank(), group.size()
    x = _ramp(2, 3).requires_grad_()
    y = copy_to_region(x, group) + x
    _check(y, x, _grad(r + 1, 2, 3), 2 * _ramp(2, 3), torch.full((2, 3), r + 1 + p * (p + 1) / 2))
    z = reduce_from_region(x, group)
    assert torch.equal(z, p * _ramp(2, 3))
    assert torch.equal(x, _ramp(2, 3))


@every_p
def test_case_14_aliasing(p):
    ranks.run(_case_14, p)


def _case_15(group):
    r, s = group.rank(), group.size() * (group.size() + 1) / 2
    x = _ramp(2, 3).double().requires_grad_()
    v = (r + 1) * (copy_to_region(x, group) ** 3).sum()
    gx = torch.autograd.grad(v, x, create_graph=True)[0]
    assert torch.equal(gx, 3 * s * x**2)
    assert torch.equal(torch.autograd.grad(gx.sum(), x)[0], 6 * s * x)


@every_p
def test_case_15_double_backward(p):
    ranks.run(_case_15, p)


def _case_16(group):
    # A length that p does not divide is cut as torch.tensor_split does, or as sizes= says.
    r, p = group.rank(), group.size()
    n = 2 * p + 1 if p > 1 else 3
    full = _ramp(n, 2)
    sizes = [len(t) for t in full.tensor_split(p)]
    own = full.tensor_split(p)[r]
    x = full.clone().requires_grad_()
    _check(scatter_to_region(x, group, dim=0), x, own, own, full)
    x = full.clone().requires_grad_()
    _check(reduce_scatter_region(x, group), x, own, p * own, full)
    for gather, times in ((gather_from_region, 1), (all_gather_region, p)):
        x = own.clone().requires_grad_()
        _check(gather(x, group, dim=0, sizes=sizes), x, full, full, times * own)
    wide = _ramp(n, 3 * p)
    x = wide.tensor_split(p)[r].clone().requires_grad_()
    y = all_to_all_region(x, group, split_dim=1, concat_dim=0, concat_sizes=sizes)
    columns = wide[:, 3 * r : 3 * r + 3]
    _check(y, x, columns, columns, wide.tensor_split(p)[r])
    x = columns.clone().requires_grad_()
    y = all_to_all_region(x, group, split_dim=0, concat_dim=1)
    _check(y, x, wide.tensor_split(p)[r], wide.tensor_split(p)[r], columns)


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_case_16_uneven_shards(p):
    ranks.run(_case_16, p)


def _case_17(group):
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    own, first = pairs[group.rank() // 2], group.rank() // 2 * 2
    for name in _CASES:
        _CASES[name](own)
    x = torch.tensor([10.0 ** group.rank()], requires_grad=True)
    total = 10.0**first + 10.0 ** (first + 1)
    _check(reduce_from_region(x, own), x, torch.ones(1), torch.tensor([total]), torch.ones(1))
    _check(copy_to_region(x, own), x, x.detach(), x.detach(), torch.tensor([total]))


def test_case_17_two_groups_do_not_hear_each_other():
    ranks.run(_case_17, 4)


def _case_18(group, dtype, shape):
    r, p = group.rank(), group.size()
    x = (torch.randint(-2, 3, shape) + r).to(dtype).requires_grad_()
    everyone = [(x.detach().double() - r + k).to(dtype) for k in range(p)]
    total = torch.stack(everyone).sum(0)
    g = torch.ones_like(x)
    _check(copy_to_region(x, group), x, g, x.detach(), p * g)
    _check(reduce_from_region(x, group), x, g, total, g)
    full = torch.cat(everyone)
    _check(all_gather_region(x, group), x, full, full, p * x.detach())
    _check(gather_from_region(x, group, dim=0), x, full, full, x.detach())
    x = full.clone().requires_grad_()
    n = len(full) // p
    own = full[n * r : n * r + n]
    _check(reduce_scatter_region(x, group), x, own, p * own, full)
    _check(scatter_to_region(x, group, dim=0), x, own, own, full)
    _check(all_to_all_region(x, group, 0, 0), x, torch.cat([own] * p), torch.cat([own] * p), full)


@every_p
@pytest.mark.parametrize("shape", [(0, 3), (5,), (2, 1, 3, 2, 2)], ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_case_18_shapes_and_dtypes(dtype, shape, p):
    ranks.run(_case_18, p, dtype, shape)
