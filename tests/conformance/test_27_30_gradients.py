"""Conformance cases 27 to 30: gradients that add up, and what is kept for them (docs/reference/correctness.md)."""

import pytest
import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import tp_ext
from tests.conformance.test_25_26_linears import EVERY, FP64, SP, slices
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import own_input, own_output, own_tokens
from tests.helpers.small_gpt import batches, make
from tests.helpers.vocabulary import columns, make_rows
from tp_ext import ColumnParallelLinear, RowParallelLinear, Sharding, VocabParallelLMHead

pytestmark = pytest.mark.core


def _main_grad(group, kind, dense, xs, dys, sp):
    layer = kind.from_linear(dense, group=group, sequence_parallel=sp, grad_accumulation_fusion=True)
    layer.weight.main_grad = torch.full(layer.weight.shape, 0.5)
    ys = []
    for x, dy in zip(xs, dys, strict=True):
        ys.append(layer(own_input(x, layer, group), len(x)))
        ys[-1].backward(own_output(dy, layer, group))
    assert layer.weight.grad is None and layer.weight.main_grad.dtype == torch.float32
    return layer.weight.main_grad, *ys


@EVERY
@SP
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_case_27_gradients_add_up_in_main_grad(kind, sp, p):
    """Two microbatches in bf16, 7 tokens each, of whole numbers whose sums are exact."""
    dense, column = nn.Linear(6, 9, dtype=torch.bfloat16), kind is ColumnParallelLinear
    with torch.no_grad():
        for param in dense.parameters():
            param.copy_(torch.randint(-4, 5, param.shape))
    xs, dys = (torch.randint(-4, 5, (2, 7, n)).bfloat16() for n in (6, 9))
    want = 0.5 + sum(dy.float().T @ x.float() for x, dy in zip(xs, dys, strict=True))
    for rank, (main_grad, *ys) in enumerate(ranks.run(_main_grad, p, kind, dense, xs, dys, sp)):
        assert torch.equal(main_grad, slices(want, p, 0 if column else 1)[rank])
        for x, y in zip(xs, ys, strict=True):
            full = dense(x).detach()
            assert torch.equal(y, slices(full, p, -1)[rank] if column else slices(full, p, 0)[rank] if sp else full)


@EVERY
@SP
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@on_ranks()
def test_case_28_frozen_weight_saves_no_input(group, kind, sp):
    p, rank, column = group.size(), group.rank(), kind is ColumnParallelLinear
    dense = nn.Linear(8, 8)
    nn.init.ones_(dense.weight)
    dense.weight.requires_grad_(False)
    layer = kind.from_linear(dense, group=group, sequence_parallel=sp)
    layer.bias.data.zero_()
    x = torch.eye(8)
    x = x.tensor_split(p, -1)[rank].contiguous() if not column else own_tokens(x, group) if sp else x
    saved = []
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        y = layer(x.requires_grad_(), 8)
    assert all(t.data_ptr() != x.data_ptr() and t.shape == layer.weight.shape for t in saved), "the input is saved"
    assert {t.data_ptr() for t in saved} <= {layer.weight.data_ptr()}
    own = len(torch.arange(8).tensor_split(p)[rank])
    assert torch.equal(y, torch.ones(own if sp and not column else 8, own if column else 8))
    y.sum().backward()
    assert torch.equal(x.grad, torch.full_like(x, 8))
    assert layer.weight.grad is None
    saved.clear()  # and the other way round: an input without gradient needs no weight; what is kept is the shard
    layer.weight.requires_grad_(True)
    with saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        layer(x.detach(), 8).sum().backward()
    assert {t.untyped_storage().data_ptr() for t in saved} == {x.untyped_storage().data_ptr()}
    assert layer.weight.grad is not None


def _tied(group, dense, x):
    first = ColumnParallelLinear.from_linear(dense, group=group)
    second = ColumnParallelLinear(5, 6, group=group, dtype=torch.float64)
    second.weight, second.bias = first.weight, first.bias
    (first(x) + second(x) ** 2 + first(2 * x)).sum().backward()
    return first.weight.grad, first.bias.grad


@EVERY
def test_case_29_tied_weights_add_their_gradients(p):
    dense, x = nn.Linear(5, 6, dtype=torch.float64), torch.randn(4, 5, dtype=torch.float64)
    (dense(x) + dense(x) ** 2 + dense(2 * x)).sum().backward()
    got = ranks.run(_tied, p, dense, x)
    for i, param in enumerate(dense.parameters()):
        torch.testing.assert_close(Sharding(0, (6,)).unshard([g[i] for g in got]), param.grad, **FP64)


def _external(group, kind, dense, x, sp):
    layer = kind.from_linear(nn.Linear(6, 9, dtype=torch.float64), group=group, sequence_parallel=sp)
    layer.bias = None
    cut = layer.tp_shardings["weight"]
    weight = cut.shard(dense.weight, group.rank(), group.size()).detach().requires_grad_()
    own = own_input(x, layer, group).clone().requires_grad_()
    y = layer(own, len(x), weight=weight) + layer(2 * own, len(x), weight=weight) ** 2
    y.backward(own_output(torch.ones(len(x), 9, dtype=torch.float64), layer, group))
    assert layer.weight.grad is None
    return y, own.grad, weight.grad


@EVERY
@SP
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_case_29_a_weight_of_the_callers_used_twice(kind, sp, p):
    column, dense = kind is ColumnParallelLinear, nn.Linear(6, 9, bias=False, dtype=torch.float64)
    x = torch.randn(7, 6, dtype=torch.float64, requires_grad=True)
    y = dense(x) + dense(2 * x) ** 2
    y.sum().backward()
    sharded, outside = (lambda t: slices(t, p, -1)), (lambda t: slices(t, p, 0) if sp else [t] * p)
    ys, dxs = (sharded(y), outside(x.grad)) if column else (outside(y), sharded(x.grad))
    dws = slices(dense.weight.grad, p, 0 if column else 1)
    for rank, got in enumerate(ranks.run(_external, p, kind, dense, x.detach(), sp)):
        for a, b in zip(got, (ys[rank].detach(), dxs[rank], dws[rank]), strict=True):
            torch.testing.assert_close(a, b, **FP64)


def _wrong_weight(group, kind):
    layer = kind(8, 8, group=group)
    layer(torch.ones(2, 8 if kind is not RowParallelLinear else layer.weight.shape[1]), weight=torch.ones(3, 5))


@EVERY
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear, VocabParallelLMHead])
def test_case_29_a_weight_of_another_shape_is_refused(kind, p):
    match = r"weight: shape \(3, 5\) must be " + (r"\(8, \d\)" if kind is RowParallelLinear else r"\(\d, 8\)")
    ranks.run_raises(_wrong_weight, p, ValueError, match, kind)


@EVERY
@SP
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@on_ranks()
def test_case_30_backward_twice_doubles_the_gradients(group, kind, sp):
    layer = kind(8, 8, group=group, sequence_parallel=sp)
    rows = torch.randn(4, 8)
    x = rows if kind is ColumnParallelLinear else rows.tensor_split(group.size(), -1)[group.rank()].contiguous()
    x.requires_grad_()
    y = layer(x)
    g = torch.randn_like(y)
    tensors = [x, layer.weight, layer.bias]
    before = [t.detach().clone() for t in (*tensors, g)]
    y.backward(g, retain_graph=True)
    once = [t.grad.clone() for t in tensors]
    y.backward(g)
    assert all(torch.equal(t.grad, 2 * a) for t, a in zip(tensors, once, strict=True))
    assert all(torch.equal(a, b) for a, b in zip((*tensors, g), before, strict=True))


@EVERY
@SP
@on_ranks()
def test_case_30_backward_twice_through_every_layer(group, sp):
    ids, target = batches(1)[0]
    model = make(group, sequence_parallel=sp)
    loss = model.loss(ids, target)
    loss.backward(retain_graph=True)
    once = {name: param.grad.clone() for name, param in model.named_parameters()}
    loss.backward()
    for name, param in model.named_parameters():
        assert once[name].any() and torch.equal(param.grad, 2 * once[name]), name


@EVERY
@on_ranks()
def test_case_30_backward_twice_through_the_loss(group):
    full, target = make_rows(13)
    local = columns(full, group.size(), group.rank()).requires_grad_()
    loss = tp_ext.vocab_parallel_cross_entropy(local, target, group, vocab_size=13, label_smoothing=0.1, z_loss=0.1)
    loss.backward(retain_graph=True)
    once = local.grad.clone()
    loss.backward()
    assert torch.equal(local.grad, 2 * once)
