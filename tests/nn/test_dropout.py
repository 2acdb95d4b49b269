"""Dropout: the masks are those of the unsharded tensor wherever it is cut. Inputs are ones, so that the output is the
mask. Masks over ranks and recomputed ones: conformance case 46."""

import copy

import pytest
import torch
from torch import nn

import tp_ext
from tests.helpers import ranks
from tests.helpers.oracle import count_collectives_of, own_tokens
from tp_ext import Dropout, dropout
from tp_ext.sharding import split_sizes

pytestmark = pytest.mark.core

EVERY = pytest.mark.parametrize("p", [1, 2, 3, 4])
P = 0.375


def _unsharded(shape, dtype=torch.float64, p=P):
    """The mask of one process, and the generator's next draw."""
    torch.manual_seed(9)
    x = torch.ones(shape, dtype=dtype, requires_grad=True)
    y = dropout(x, p)
    y.sum().backward()
    assert torch.equal(x.grad, y), "the mask of backward is that of forward"
    return y.detach(), torch.rand(())


def _module(group, shape, sp, dtype):
    torch.manual_seed(9)
    x = torch.ones(shape, dtype=dtype)
    x = (own_tokens(x, group) if sp else x).requires_grad_()
    layer = Dropout(P, group=group, sequence_parallel=sp)
    y = []
    assert count_collectives_of(lambda: y.append(layer(x, total_tokens=shape[0] if sp else None))) == {}
    assert count_collectives_of(lambda: y[0].sum().backward()) == {}
    return y[0], x.grad, torch.rand(())


@EVERY
@pytest.mark.parametrize("shape", [(12, 5), (7, 3, 2), (2, 9), (13,)], ids=str)
@pytest.mark.parametrize("sp", [False, True])
def test_module_has_the_masks_of_the_unsharded_model(sp, shape, p):
    """13, 7 and 2 tokens: uneven, and fewer than ranks."""
    for dtype in (torch.float64, torch.bfloat16):
        want, draw = _unsharded(shape, dtype)
        assert set(want.unique().tolist()) == {0.0, float(torch.tensor(1 / (1 - P), dtype=dtype))}
        for rank, (y, dx, next_draw) in enumerate(ranks.run(_module, p, shape, sp, dtype)):
            local = want.tensor_split(p)[rank] if sp else want
            assert torch.equal(y, local)
            assert torch.equal(dx, local)
            assert next_draw == draw, "the generator advances as it does for one rank"


def _sharded(group, shape, dim, sizes):
    torch.manual_seed(9)
    local = list(shape)
    local[dim] = (sizes or [shape[dim] // group.size()] * group.size())[group.rank()]
    x = torch.ones(local, dtype=torch.float64).transpose(0, -1).contiguous().transpose(0, -1).requires_grad_()
    y = dropout(x, P, group=group, dim=dim, sizes=sizes)
    y.sum().backward()
    return y, x.grad, torch.rand(())


@EVERY
@pytest.mark.parametrize("dim", [0, 1, 2, -1, -2])
def test_function_has_the_mask_of_its_slice_of_any_dim(dim, p):
    even, odd = [12, 12, 12], [5, 5, 5]
    for shape, sizes in (
        (even, None),
        (even, split_sizes(12, p)),
        (odd, split_sizes(5, p)),
        (odd, [0] * (p - 1) + [5]),
    ):
        want, draw = _unsharded(shape)
        results = ranks.run(_sharded, p, shape, dim, sizes)
        assert torch.equal(torch.cat([y for y, _, _ in results], dim), want)
        for y, dx, next_draw in results:
            assert torch.equal(y, dx)
            assert next_draw == draw


def _compiled(group):
    layer = Dropout(P, group=group, sequence_parallel=True)
    x = torch.ones(2000, 3, requires_grad=True)
    models = [layer, *(lambda x, g=g: dropout(x, P, group=g, dim=0) for g in (group, group.group_name))]
    for model in models:
        torch._dynamo.reset()
        x.grad = None
        y = torch.compile(model, fullgraph=True, backend="aot_eager")(x)
        y.sum().backward()
        assert torch.equal(x.grad, y)
        assert abs(float((y == 0).float().mean()) - P) < 0.05
    return y


def test_compile_without_graph_breaks():
    a, b = ranks.run(_compiled, 2, timeout=120)
    assert not torch.equal(a, b), "one mask for two slices"


# What it computes


def test_share_of_dropped_elements():
    """Binomial: within 5 standard deviations."""
    n = 200_000
    for p in (0.01, 0.1, 0.5, 0.9):
        share = float((dropout(torch.ones(n), p) == 0).double().mean())
        assert abs(share - p) < 5 * (p * (1 - p) / n) ** 0.5


def _same_draw(fn):
    torch.manual_seed(3)
    return fn()


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("with_residual", [True, False])
@pytest.mark.parametrize("with_bias", [True, False])
def test_bias_and_residual(with_bias, with_residual, p, training):
    x, residual = torch.randn(2, 5, 6, dtype=torch.float64)
    bias = torch.randn(6, dtype=torch.float64)
    mask = _same_draw(lambda: dropout(torch.ones_like(x), p, training))
    given = [x, *([bias] if with_bias else []), *([residual] if with_residual else [])]
    leaves = [t.clone().requires_grad_() for t in given]
    names = {"bias": leaves[1]} if with_bias else {}
    names |= {"residual": leaves[-1]} if with_residual else {}
    y = _same_draw(lambda: dropout(leaves[0], p, training, **names))
    dy = torch.randn_like(y)
    got = torch.autograd.grad(y, leaves, dy)
    want = (x + (bias if with_bias else 0)) * mask + (residual if with_residual else 0)
    torch.testing.assert_close(y.detach(), want, rtol=1e-15, atol=1e-15)
    expected = [dy * mask, *([(dy * mask).sum(0)] if with_bias else []), *([dy] if with_residual else [])]
    torch.testing.assert_close(list(got), expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("p", [0.0, 0.25, 1.0])
@pytest.mark.parametrize("training", [True, False])
def test_off_and_all_as_torch(training, p):
    ours, torchs = Dropout(p).train(training), nn.Dropout(p).train(training)
    x = torch.randn(4, 5)
    if training and p == 0.25:
        assert not torch.equal(ours(x), x)
    else:
        assert torch.equal(ours(x), torchs(x))
        assert torch.equal(ours(x, residual=x), torchs(x) + x)


def test_nothing_drawn_and_nothing_copied_when_off():
    x, before = torch.randn(4), torch.random.get_rng_state()
    assert dropout(x, 0.5, False) is x
    assert dropout(x, 0.0) is x
    assert torch.equal(before, torch.random.get_rng_state())


def _residual(group):
    torch.manual_seed(9)
    layer = Dropout(P, group=group, sequence_parallel=True)
    x, residual = (own_tokens(t, group).requires_grad_() for t in (torch.ones(7, 3), torch.arange(21.0).view(7, 3)))
    y = layer(x, residual, total_tokens=7)
    y.sum().backward()
    assert torch.equal(residual.grad, torch.ones_like(residual))
    assert torch.equal(x.grad == 0, y == residual)
    return y


@EVERY
def test_residual_under_sequence_parallel(p):
    want = _unsharded((7, 3), torch.float32)[0] + torch.arange(21.0).view(7, 3)
    torch.testing.assert_close(torch.cat(ranks.run(_residual, p)), want, rtol=0, atol=0)


def test_copies_and_repr():
    layer = copy.deepcopy(Dropout(0.25))
    assert layer.p == 0.25 and "p=0.25" in repr(layer) and "ranks=1" in repr(layer)
    assert not list(layer.parameters()) and not layer.state_dict()


# Errors


@pytest.mark.parametrize("p", [-0.1, 1.5, float("nan"), "0.5", None])
def test_arguments_that_are_no_probability(p):
    for call in (Dropout, lambda p: dropout(torch.ones(3), p)):
        with pytest.raises(ValueError, match=r"p: .* must be a probability"):
            call(p)


def _call(group, options):
    dropout(torch.ones(4, 6), group=group, **options)


def test_slices_that_do_not_fit():
    for dim in (2, -3):
        ranks.run_raises(_call, 2, IndexError, f"dim: {dim} must be in", {"dim": dim})
    for sizes in ([4], [4, 4, 4], [3, 5, 0], [3, 3]):
        ranks.run_raises(_call, 2, ValueError, r"sizes: .* must have one length per rank", {"dim": 0, "sizes": sizes})


def test_more_arguments_that_do_not_fit():
    for options in ({"bias": torch.ones(5)}, {"residual": torch.ones(4, 5)}):
        with pytest.raises(ValueError, match=next(iter(options))):
            dropout(torch.ones(4, 6), **options)
    with pytest.raises(TypeError):
        tp_ext.dropout(torch.ones(4, dtype=torch.int64))


def test_nothing_is_drawn_where_nothing_is_dropped():
    """As torch's: an evaluation between two steps of a training leaves the masks of the second as they were."""
    x, residual, bias = torch.randn(4, 6), torch.randn(4, 6), torch.randn(6)
    state = torch.get_rng_state()
    for y in (
        tp_ext.Dropout(0.5).eval()(x, residual=residual),
        tp_ext.Dropout(0.0)(x, residual=residual),
        tp_ext.dropout(x, 0.5, False, residual=residual, group=None),
    ):
        assert torch.equal(y, residual + x)
    assert torch.equal(tp_ext.dropout(x, 0.0, bias=bias), x + bias)
    assert torch.equal(torch.get_rng_state(), state)
    tp_ext.Dropout(0.5)(x, residual=residual)
    assert not torch.equal(torch.get_rng_state(), state)
