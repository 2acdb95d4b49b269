"""Symmetric memory on a GPU, which the ranks share: sums to the bit, in graphs too, and linears against dense ones."""

import os

import pytest
import torch
from torch import nn

import tp_ext
from tests.helpers import ranks
from tp_ext import symmetric_memory

pytestmark = [pytest.mark.cuda, pytest.mark.core]
LIMITS = {"one_shot_bytes": 4096, "max_bytes": 65536}


def enabled(group, **options):
    """The group with symmetric memory on device 0, which the ranks share."""
    os.environ |= dict.fromkeys(symmetric_memory.SHARING, "1")
    torch.cuda.set_device(0)
    name, why_not = symmetric_memory.enable(group, **LIMITS | options)
    assert why_not is None, why_not
    return name


def terms(p, shape, dtype, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(shape, device="cuda").to(dtype) for _ in range(p)]


def in_order(xs):
    """The sum as the kernels form it: rank by rank, each step rounded to the dtype."""
    total = xs[0]
    for x in xs[1:]:
        total = total + x
    return total


def sums(group, dtype, numel):
    """True if sums are right to the bit, and x unwritten: contiguous, strided, and off a 16-byte boundary."""
    name, same = enabled(group), []
    for seed in range(3):  # one after the other, so that a buffer is written while peers could still read it
        xs = terms(group.size(), (numel // 4, 4), dtype, seed)
        own, expected = xs[group.rank()], in_order(xs)
        shifted = torch.cat([own.new_zeros(1), own.flatten()])[1:].view_as(own)
        for x in (own, own.t().contiguous().t(), shifted if group.rank() else own):
            y = tp_ext.reduce_from_region(x, name)
            same += [torch.equal(y, expected), torch.equal(x, own), y.data_ptr() != x.data_ptr()]
    return symmetric_memory.algorithm(numel, dtype, name), all(same)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("numel, chosen", [(8, "one_shot"), (1000, "one_shot"), (4096, "two_shot")])
@pytest.mark.parametrize("p", [2, 4])
def test_sums_are_those_in_the_order_of_the_ranks(p, numel, chosen, dtype):
    assert ranks.run(sums, p, dtype, numel, timeout=180) == [(chosen, True)] * p


def three_ranks(group):
    name = enabled(group)
    xs = terms(3, (40,), torch.float32)
    return torch.equal(tp_ext.reduce_from_region(xs[group.rank()], name), in_order(xs))


def test_three_ranks_one_shot():
    assert ranks.run(three_ranks, 3, timeout=180) == [True] * 3


def gradient(group):
    name = enabled(group)
    grads = terms(group.size(), (8, 4), torch.float32)
    x = torch.zeros(8, 4, device="cuda", requires_grad=True)
    tp_ext.copy_to_region(x, name).backward(grads[group.rank()])
    return torch.equal(x.grad, in_order(grads))


def test_gradients_of_copies():
    assert ranks.run(gradient, 2, timeout=180) == [True, True]


def captured(group):
    """Both algorithms in one graph, replayed with other values."""
    name, p, rank = enabled(group), group.size(), group.rank()
    small, large = (torch.zeros(n, device="cuda") for n in (64, 2048))
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # warm up, before capture
        tp_ext.reduce_from_region(small, name), tp_ext.reduce_from_region(large, name)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        sums = [tp_ext.reduce_from_region(x, name) for x in (small, large, small)]
    same = []
    for seed in range(3):
        xs, ys = terms(p, 64, torch.float32, seed), terms(p, 2048, torch.float32, seed + 9)
        small.copy_(xs[rank])
        large.copy_(ys[rank])
        graph.replay()
        same += [torch.equal(s, in_order(e)) for s, e in zip(sums, (xs, ys, xs), strict=True)]
    return all(same)


def test_captured_in_a_graph():
    assert ranks.run(captured, 2, timeout=180) == [True, True]


def row_against_dense(group, dtype, fused_matmul):
    """Largest error of a row linear's output and gradients, over the largest number of the dense one's in fp64."""
    name, p, rank = enabled(group, fused_matmul=fused_matmul), group.size(), group.rank()
    torch.manual_seed(0)
    dense = nn.Linear(64, 32).to(dtype)
    x, dy = torch.randn(16, 64).to(dtype), torch.randn(16, 32).to(dtype)
    sp = {"sequence_parallel": fused_matmul}
    layer = tp_ext.RowParallelLinear.from_linear(dense, group=name, **sp).cuda()
    reference, x_full = dense.double(), x.double().requires_grad_()
    y_full = reference(x_full)
    y_full.backward(dy.double())
    own_x = x.tensor_split(p, -1)[rank].cuda().requires_grad_()
    rows = slice(16 // p * rank, 16 // p * (rank + 1)) if fused_matmul else slice(None)
    y = layer(own_x)
    y.backward(dy[rows].cuda())
    pairs = [
        (y, y_full[rows]),
        (own_x.grad, x_full.grad.tensor_split(p, -1)[rank]),
        (layer.weight.grad, reference.weight.grad.tensor_split(p, -1)[rank]),
        (layer.bias.grad, reference.bias.grad),
    ]
    return max(((a.cpu().double() - b).abs().max() / b.abs().max()).item() for a, b in pairs)


# Products of 64 terms and sums of p of them in fp32 are good to 64 ulp; bf16 rounds the terms, their sum and the bias
BOUNDS = {torch.float32: 64 * 2**-24, torch.bfloat16: 4 * 2**-8}


@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize("fused_matmul", [False, True])
def test_row_linear_against_the_dense_one(fused_matmul, dtype):
    assert max(ranks.run(row_against_dense, 2, dtype, fused_matmul, timeout=180)) <= BOUNDS[dtype]


def column_against_dense(group):
    name, p, rank = enabled(group, fused_matmul=True), group.size(), group.rank()
    torch.manual_seed(0)
    dense, x = nn.Linear(64, 32), torch.randn(16, 64)
    layer = tp_ext.ColumnParallelLinear.from_linear(dense, group=name, sequence_parallel=True).cuda()
    with torch.no_grad():
        y = layer(x.tensor_split(p)[rank].cuda())
        expected = dense.double()(x.double()).tensor_split(p, -1)[rank]
    return ((y.cpu() - expected).abs().max() / expected.abs().max()).item()


def test_fused_column_linear_against_the_dense_one():
    assert max(ranks.run(column_against_dense, 2, timeout=180)) <= BOUNDS[torch.float32]
