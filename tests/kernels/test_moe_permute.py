"""Tokens to the rows of their experts and back: against index_select and index_add of torch, in fp64."""

import pytest
import torch
from torch import Tensor
from torch.autograd import gradcheck, gradgradcheck
from torch.library import opcheck

from tp_ext import _ops

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
SHAPES = [(0, 2, 4, 0), (3, 1, 0, 5), (4, 8, 1, 32), (7, 3, 33, 40), (5, 0, 6, 2), (129, 2, 1030, 300), (2, 2, 5, 0)]


def problem(tokens: int, choices: int, hidden: int, num_rows: int, dtype: torch.dtype, device: torch.device | str):
    """x, y, rows, weights: a third of the slots, or more if the rows are too few, has none; some rows have no slot."""
    torch.manual_seed(0)
    slots = tokens * choices
    rows = torch.full((slots,), -1)
    kept = torch.randperm(slots)[: min(slots - slots // 3, num_rows)]
    rows[kept] = torch.randperm(num_rows)[: len(kept)]
    x, y = torch.randn(tokens, hidden), torch.randn(num_rows, hidden)
    weights = torch.rand(tokens, choices, dtype=torch.promote_types(dtype, torch.float32))
    return x.to(device, dtype), y.to(device, dtype), rows.view(tokens, choices).to(device), weights.to(device)


def by_index(rows: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Token, row and place in rows.flatten() of every slot that has a row."""
    slots = (rows.flatten() >= 0).nonzero()[:, 0]
    return slots // max(rows.shape[1], 1), rows.flatten()[slots], slots


def permuted(x: Tensor, rows: Tensor, num_rows: int, weights: Tensor) -> Tensor:
    token, row, slot = by_index(rows)
    return x.new_zeros(num_rows, x.shape[1]).index_copy(0, row, x[token] * weights.flatten()[slot, None])


def unpermuted(y: Tensor, rows: Tensor, weights: Tensor) -> Tensor:
    token, row, slot = by_index(rows)
    return y.new_zeros(len(rows), y.shape[1]).index_add(0, token, y[row] * weights.flatten()[slot, None])


def dots(x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
    token, row, slot = by_index(rows)
    return x.new_zeros(rows.numel()).index_copy(0, slot, (x[token] * y[row]).sum(1)).view_as(rows)


def assert_rounded_once(ours: Tensor, exact: Tensor, terms: Tensor) -> None:
    """fp32 (fp64) arithmetic inside; `terms`: the sum of the absolute values of what is added up."""
    eps = torch.finfo(ours.dtype).eps
    inner = min(eps, torch.finfo(torch.float32).eps)
    least = torch.finfo(ours.dtype).smallest_normal * eps
    assert ((ours.double() - exact).abs() <= eps / 2 * exact.abs() + 8 * inner * terms + least).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_values_and_gradients(shape, dtype, device):
    """Every output and gradient, with and without weights; the backward run twice gives the same bits."""
    x, y, rows, weights = problem(*shape, dtype, device)
    num_rows, half = len(y), torch.float64 if dtype == torch.float64 else dtype
    x64, y64 = x.double(), y.double()
    for given in (weights, weights.to(half), None):
        w = (torch.ones_like(weights) if given is None else given).double()
        leaves = [t.detach().requires_grad_() for t in (x, y)]
        optional = [] if given is None else [given.detach().requires_grad_()]
        to_rows = _ops.moe_permute(leaves[0], rows, num_rows, *optional)
        assert to_rows.dtype == dtype and to_rows.shape == y.shape and to_rows.is_contiguous()
        back = _ops.moe_unpermute(leaves[1], rows, *optional)
        assert back.dtype == dtype and back.shape == x.shape and back.is_contiguous()
        exact = permuted(x64, rows, num_rows, w)
        if given is None:
            assert torch.equal(to_rows.double(), exact)
        assert_rounded_once(to_rows, exact, exact.abs())
        assert_rounded_once(back, unpermuted(y64, rows, w), unpermuted(y64.abs(), rows, w))

        for _ in range(2):
            grads = torch.autograd.grad(to_rows, [leaves[0], *optional], y, retain_graph=True)
            again = torch.autograd.grad(to_rows, [leaves[0], *optional], y, retain_graph=True)
            assert all(map(torch.equal, grads, again))
            assert_rounded_once(grads[0], unpermuted(y64, rows, w), unpermuted(y64.abs(), rows, w))
            grads_back = torch.autograd.grad(back, [leaves[1], *optional], x, retain_graph=True)
            assert_rounded_once(grads_back[0], exact, exact.abs())
            for dweights in (*grads[1:], *grads_back[1:]):
                assert dweights.dtype == given.dtype
                assert_rounded_once(dweights, dots(x64, y64, rows), dots(x64.abs(), y64.abs(), rows))


def test_each_gradient_alone_has_the_same_bits(device):
    """A backward asked for one input computes that one; together, the fused kernel gives the same."""
    x, y, rows, weights = problem(9, 3, 70, 25, torch.float32, device)
    for first, call in (
        (x, lambda t, w: _ops.moe_permute(t, rows, 25, w)),
        (y, lambda t, w: _ops.moe_unpermute(t, rows, w)),
    ):
        t, w = first.detach().requires_grad_(), weights.detach().requires_grad_()
        result = call(t, w)
        grad = result.detach().cos()
        both = torch.autograd.grad(result, (t, w), grad, retain_graph=True)
        for leaf, want in zip((t, w), both, strict=True):
            (alone,) = torch.autograd.grad(result, leaf, grad, retain_graph=True)
            assert torch.equal(alone, want)
        assert torch.equal(torch.autograd.grad(call(t, weights), t, grad)[0], both[0])
        assert torch.equal(torch.autograd.grad(call(first, w), w, grad)[0], both[1])


def test_derivatives_of_every_order(device):
    x, y, rows, weights = (t.requires_grad_(t.is_floating_point()) for t in problem(4, 2, 3, 7, torch.float64, device))
    for function, inputs in (
        (lambda x, w: _ops.moe_permute(x, rows, 7, w), (x, weights)),
        (lambda x: _ops.moe_permute(x, rows, 7), (x,)),
        (lambda y, w: _ops.moe_unpermute(y, rows, w), (y, weights)),
        (lambda y: _ops.moe_unpermute(y, rows), (y,)),
        (lambda x, y: _ops.moe_dot(x, y, rows), (x, y)),
    ):
        assert gradcheck(function, inputs)
        assert gradgradcheck(function, inputs)


def test_any_strides(device):
    x, y, rows, weights = problem(6, 2, 8, 11, torch.float32, device)

    def strided(t: Tensor) -> Tensor:
        return t.t().contiguous().t()

    for grad in (strided(y), y[:1, :1].expand_as(y)):
        leaf = strided(x).requires_grad_()
        ours = _ops.moe_permute(leaf, strided(rows), 11, strided(weights))
        assert torch.equal(ours, _ops.moe_permute(x, rows, 11, weights))
        (dx,) = torch.autograd.grad(ours, leaf, grad)
        assert torch.equal(dx, _ops.moe_unpermute(grad.contiguous(), rows, weights))
    assert torch.equal(_ops.moe_unpermute(strided(y), rows, None), _ops.moe_unpermute(y, rows, None))


def test_special_values_stay_with_their_slots(device):
    """A dropped slot's token and a row without a slot touch nothing: 0 times them is not added."""
    rows = torch.tensor([[0, -1], [-1, -1], [3, 1]], device=device)
    x, y = torch.ones(3, 5, device=device), torch.ones(4, 5, device=device)
    x[1], y[2], y[1, 3] = torch.nan, torch.inf, torch.nan
    weights = torch.full((3, 2), torch.nan, device=device).masked_fill(rows >= 0, 2.0)
    assert not _ops.moe_permute(x, rows, 4, weights).isnan().any()
    assert _ops.moe_permute(x, rows, 4)[2].eq(0).all()
    assert _ops.moe_unpermute(y, rows, weights).isnan().nonzero().tolist() == [[2, 3]]
    assert _ops.moe_dot(x, y, rows).isnan().nonzero().tolist() == [[2, 1]]


@pytest.mark.parametrize("shape, num_experts", [((0, 2), 3), ((5, 0), 2), ((1, 1), 1), ((300, 8), 7), ((700, 2), 90)])
def test_sort_is_stable(shape, num_experts, device):
    torch.manual_seed(0)
    experts = torch.randint(-1, num_experts, shape, device=device)
    experts[experts == num_experts // 2] = 0  # one without rows
    rows, counts = _ops.moe_sort(experts.t().contiguous().t(), num_experts)
    order = experts.flatten().argsort(stable=True)
    order = order[experts.flatten()[order] >= 0]
    want = torch.full((experts.numel(),), -1, device=device)
    want[order] = torch.arange(len(order), device=device)
    assert torch.equal(rows, want.view(shape))
    assert torch.equal(counts, experts[experts >= 0].bincount(minlength=num_experts))


def test_opcheck(device):
    x, y, rows, weights = problem(5, 2, 6, 9, torch.float32, device)
    leaves = [t.clone().requires_grad_() for t in (x, y, weights)]
    opcheck(_ops.moe_sort, (rows, 9))
    opcheck(_ops.moe_permute_fwd, (x, rows, 9, weights))
    opcheck(_ops.moe_unpermute_fwd, (y, rows, None))
    opcheck(_ops.moe_unpermute_bwd, (x, y, rows, weights))
    opcheck(_ops.moe_dot_fwd, (x, y, rows))
    opcheck(torch.ops.tp_ext.moe_permute, (leaves[0], rows, 9, leaves[2]))
    opcheck(torch.ops.tp_ext.moe_unpermute, (leaves[1], rows, leaves[2]))
    opcheck(torch.ops.tp_ext.moe_dot, (leaves[0], leaves[1], rows))


def test_compile(device):
    """Whole, forward and backward, with a number of rows that is known only when the graph runs."""

    def layer(x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        rows, counts = _ops.moe_sort(experts, 4)
        num_rows = int(counts.sum())
        torch._check(num_rows >= 0)
        return _ops.moe_unpermute(_ops.moe_permute(x, rows, num_rows).sin(), rows, weights)

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager", dynamic=True)
    for tokens in (6, 9):
        x = torch.randn(tokens, 8, device=device, requires_grad=True)
        weights = torch.rand(tokens, 2, device=device, requires_grad=True)
        experts = torch.randint(-1, 4, (tokens, 2), device=device)
        with torch._dynamo.config.patch(capture_scalar_outputs=True):
            results = [f(x, experts, weights) for f in (layer, compiled)]
        assert torch.equal(*results)
        grads = [torch.autograd.grad(result.square().sum(), (x, weights)) for result in results]
        assert all(map(torch.equal, *grads))


def test_errors_name_value_and_rule():
    x, y, rows, weights = problem(3, 2, 4, 6, torch.float32, "cpu")
    for call, error, word in (
        (lambda: _ops.moe_permute(x, rows.int(), 6), TypeError, "rows: dtype Int must be int64"),
        (lambda: _ops.moe_permute(x, rows[:2], 6), ValueError, "must have as many tokens as rows, 2"),
        (lambda: _ops.moe_permute(x, rows[0], 6), ValueError, r"rows: shape \[2\] must be \[tokens, choices\]"),
        (lambda: _ops.moe_permute(x[0], rows, 6), ValueError, r"x: shape \[4\] must have two dims"),
        (lambda: _ops.moe_permute(x.long(), rows, 6), TypeError, "x: dtype Long must be a floating"),
        (lambda: _ops.moe_permute(x, rows, -1), ValueError, "num_rows: -1 must be at least 0"),
        (lambda: _ops.moe_permute(x, rows, 6, weights.double()), TypeError, "weights: dtype Double must be Float"),
        (lambda: _ops.moe_permute(x, rows, 6, weights[:, :1]), ValueError, "weights: shape .* must be that of rows"),
        (lambda: _ops.moe_unpermute(y.double(), rows, weights), TypeError, "weights: dtype Float must be Double"),
        (lambda: _ops.moe_dot(x, y.double(), rows), TypeError, "y: dtype Double must be that of x"),
        (lambda: _ops.moe_dot(x, y[:, :3], rows), ValueError, "must have as many columns as x, 4"),
        (lambda: _ops.moe_sort(rows, 0), ValueError, "num_experts: 0 must be at least 1"),
        (lambda: _ops.moe_sort(rows.double(), 4), TypeError, "experts: dtype Double must be int64"),
    ):
        with pytest.raises(error, match=word):
            call()
    for bad in (-2, 6):
        wrong = rows.clone()
        wrong[1, 0] = bad
        for call in (
            lambda: _ops.moe_permute(x, wrong, 6),  # noqa: B023
            lambda: _ops.moe_unpermute(y, wrong),  # noqa: B023
            lambda: _ops.moe_dot(x, y, wrong),  # noqa: B023
            lambda: _ops.moe_unpermute_bwd(x, y, wrong, weights),  # noqa: B023
        ):
            with pytest.raises(IndexError, match=rf"rows: {bad} must be -1 or in \[0, num_rows\), \[0, 6\)"):
                call()
        with pytest.raises(IndexError, match=rf"experts: {bad} must be -1 or in \[0, num_experts\), \[0, 6\)"):
            _ops.moe_sort(wrong, 6)
    twice = torch.tensor([[0, 1], [2, -1], [1, -1]])
    for call in (lambda: _ops.moe_permute(x, twice, 6), lambda: _ops.moe_unpermute_bwd(x, y, twice, weights)):
        with pytest.raises(ValueError, match="rows: 1 must occur once"):
            call()
