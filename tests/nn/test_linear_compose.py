"""Linears: second derivatives, collectives, compiled backwards, copies of data. Other modes: tests/training."""

import pytest
import torch
from torch._dynamo import compiled_autograd

from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import (
    count_collectives_of,
    full_gradients,
    gradients,
    own_input,
    own_output,
    results,
    small_input,
    small_layer,
    small_linear,
)
from tp_ext import ColumnParallelLinear, Part, RowParallelLinear

pytestmark = pytest.mark.core

KINDS = [
    pytest.param(kind, sp, id=f"{kind.__name__[:3]}{'-sp' * sp}")
    for kind in (ColumnParallelLinear, RowParallelLinear)
    for sp in (False, True)
]
BOTH = pytest.mark.parametrize(("kind", "sp"), KINDS)


# Double backward


def _second_order(y, inputs, w, us):
    """Second derivatives, to the inputs and to w, of a curved function of everything that backward returns."""
    first = torch.autograd.grad((y.sin() * w).sum(), inputs, create_graph=True)
    return torch.autograd.grad(sum((g.sin() * u).sum() for g, u in zip(first, us, strict=True)), [*inputs, w])


def _second_order_rank(group, kind, sp, x, w, us):
    rank, p = group.rank(), group.size()
    layer = small_layer(group, kind, sp)
    x = own_input(x, layer, group).contiguous().requires_grad_()
    w = own_output(w, layer, group).contiguous().requires_grad_()
    u = [own_input(us[0], layer, group)]
    for u_param, sharding in zip(us[1:], layer.tp_shardings.values(), strict=True):
        u.append(u_param if sharding is None else sharding.shard(u_param, rank, p))
    dx, dweight, dbias, dw = _second_order(layer(x, 5), [x, layer.weight, layer.bias], w, u)
    layer.weight.grad, layer.bias.grad = dweight, dbias
    return dx, dw, gradients(layer)


@pytest.mark.parametrize("p", [1, 2, 3])
@BOTH
def test_second_order_is_that_of_the_dense_layer(kind, sp, p):
    dense = small_linear()
    x, w = torch.randn(5, 6, dtype=torch.float64), torch.randn(5, 8, dtype=torch.float64)
    us = [torch.randn_like(t) for t in (x, dense.weight, dense.bias)]
    seconds = ranks.run(_second_order_rank, p, kind, sp, x, w, us)
    x.requires_grad_(), w.requires_grad_()
    dx, dweight, dbias, dw = _second_order(dense(x), [x, dense.weight, dense.bias], w, us)

    def close(got, want):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)

    split_x, split_w = (1, 0) if kind is RowParallelLinear else (0, 1)
    if kind is RowParallelLinear or sp:
        close(torch.cat([r[0] for r in seconds], split_x), dx)
    else:
        [close(r[0], dx) for r in seconds]
    if kind is ColumnParallelLinear or sp:
        close(torch.cat([r[1] for r in seconds], split_w), dw)
    else:
        [close(r[1], dw) for r in seconds]
    full = full_gradients([r[2] for r in seconds])
    close(full["weight"], dweight)
    close(full["bias"], dbias)


# Communication

COUNTS = {
    (ColumnParallelLinear, False): ({}, {"all_reduce": 1}),
    (RowParallelLinear, False): ({"all_reduce": 1}, {}),
    (ColumnParallelLinear, True): ({"all_gather": 1}, {"all_gather": 1, "reduce_scatter": 1}),
    (RowParallelLinear, True): ({"reduce_scatter": 1}, {"all_gather": 1, "all_reduce": 1}),
}


def _counts(group, kind, sp, frozen=(), x_needs_grad=True, **options):
    layer = small_layer(group, kind, sp, **options)
    for name in frozen:
        getattr(layer, name).requires_grad_(False)
    x = small_input(layer, group) if options.get("input_is_parallel", True) else torch.randn(4, 6, dtype=torch.float64)
    x.requires_grad_(x_needs_grad)
    y = []
    return count_collectives_of(lambda: y.append(layer(x))), count_collectives_of(lambda: y[0].sum().backward())


@BOTH
def test_collectives(kind, sp):
    assert ranks.run(_counts, 2, kind, sp) == [COUNTS[kind, sp]] * 2
    assert ranks.run(_counts, 1, kind, sp) == [({}, {})]


def test_collectives_without_a_use_are_not_issued():
    column, row = ColumnParallelLinear, RowParallelLinear
    for kind, sp, options, want in (
        (column, False, {"x_needs_grad": False}, ({}, {})),
        (column, True, {"x_needs_grad": False}, ({"all_gather": 1}, {"all_gather": 1})),
        (column, True, {"frozen": ["weight"]}, ({"all_gather": 1}, {"reduce_scatter": 1})),
        (row, True, {"frozen": ["bias"]}, ({"reduce_scatter": 1}, {"all_gather": 1})),
        (row, True, {"frozen": ["weight"], "x_needs_grad": False}, ({"reduce_scatter": 1}, {"all_reduce": 1})),
        (column, False, {"gather_output": True}, ({"all_gather": 1}, {"all_reduce": 1})),
        (row, False, {"input_is_parallel": False}, ({"all_reduce": 1}, {"all_gather": 1})),
    ):
        assert ranks.run(_counts, 2, kind, sp, **options) == [want] * 2, (kind, sp, options)


# Wrapped


@on_ranks(2, backend="gloo", timeout=120)
def test_compile_gather_output_with_copies(group):
    torch._dynamo.reset()
    options = {"parts": (Part(4, groups=2), Part(4, unit=2, copies=2)), "gather_output": True}
    layer = small_layer(group, ColumnParallelLinear, False, **options)
    x = small_input(layer, group)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(results(layer, x, compiled), results(layer, x), rtol=1e-12, atol=1e-12)


@pytest.mark.thinned(1)
@BOTH
@on_ranks(2, backend="gloo", timeout=120)
def test_compiled_autograd(group, kind, sp):
    """torch compiles the backward of a forward that ran as ever."""
    torch._dynamo.reset()
    layer = small_layer(group, kind, sp)
    x = small_input(layer, group)
    want = results(layer, x)
    with compiled_autograd._enable(torch.compile(backend="eager")):
        got = results(layer, x)
    assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


# Copies


@BOTH
@on_ranks(2, backend="gloo")
def test_nothing_is_copied(group, kind, sp):
    """The data that a rank sends are contiguous already, and its own to overwrite."""
    # Copies that a linear makes itself, not torch inside its GEMMs or a backend of its own accord.
    layer = small_layer(group, kind, sp)
    x = small_input(layer, group)
    with torch.profiler.profile() as profile:
        y = layer(x)
        torch.autograd.grad(y, [x, *layer.parameters()], torch.ones_like(y))
    parents = ((event.name, event.cpu_parent) for event in profile.events())
    assert [name for name, parent in parents if name == "aten::clone" and parent and "inear" in parent.name] == []
