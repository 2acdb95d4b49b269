"""Linears of a few rows without gradients, as in decoding, by kernels that read the weight once; others are torch's."""

import pytest
import torch
import torch.nn.functional as F

import tp_ext
from tests.helpers import ranks
from tp_ext import _ops
from tp_ext.nn.replicated_linear import ReplicatedLinear

# Rows, inputs and outputs: one to the most rows; blocks of 6 and 2 rows of the weight with and without a rest
SHAPES = [(1, 64, 1024), (2, 512, 131), (3, 1408, 128), (4, 256, 260), (5, 48, 1369), (7, 128, 515), (8, 96, 769)]


def product(x, weight, bias=None):
    return _ops.column_parallel_linear(x, weight, bias, "")


def operands(shape, dtype, bias=True):
    torch.manual_seed(0)
    rows, inputs, outputs = shape
    tensors = torch.randn(rows, inputs), torch.randn(outputs, inputs), torch.randn(outputs)
    x, weight, b = (t.to(dtype) for t in tensors)
    return x, weight, b if bias else None


def assert_near(got, x, weight, bias):
    """Within the rounding of the result and of an fp32 sum of its terms in any order, against fp64."""
    exact = F.linear(x.double(), weight.double(), None if bias is None else bias.double())
    terms = F.linear(x.double().abs(), weight.double().abs()).max()
    bound = torch.finfo(x.dtype).eps * exact.abs().max() + 8 * torch.finfo(torch.float32).eps * terms
    assert got.dtype == x.dtype and (got - exact).abs().max() <= bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@torch.no_grad()
def test_values(shape, dtype):
    """Against fp64; exactly those of each row alone, in any shape, by any number of threads."""
    x, weight, bias = operands(shape, dtype)
    for b in (None, bias):
        got = product(x, weight, b)
        assert_near(got, x, weight, b)
        assert torch.equal(got, torch.cat([product(row, weight, b) for row in x.split(1)]))
        assert torch.equal(got, product(x[None, :, None].contiguous(), weight, b)[0, :, 0])
        assert torch.equal(got[0], product(x[0], weight, b))
        threads = torch.get_num_threads()
        torch.set_num_threads(3)
        assert torch.equal(got, product(x, weight, b))
        torch.set_num_threads(threads)


def test_numbers_that_are_not_finite():
    x, weight, _ = operands((2, 64, 1024), torch.float32)
    weight[5, 3], weight[1023, 63] = float("inf"), float("nan")
    with torch.no_grad():
        y = product(x, weight)
    assert y[:, 5].isinf().all() and y[:, 1023].isnan().all() and y.isfinite().sum() == 2 * 1022


@pytest.mark.parametrize(
    ("shape", "change"),
    [
        ((9, 64, 1024), None),  # more rows
        ((2, 64, 1023), None),  # a weight that stays in a cache
        ((2, 72, 1024), None),  # no whole vectors
        ((2, 64, 1024), lambda w: w.t().contiguous().t()),
        ((2, 64, 1024), torch.Tensor.double),
        ((2, 64, 1024), torch.Tensor.half),
    ],
)
@torch.no_grad()
def test_other_products_are_torchs(shape, change):
    x, weight, bias = operands(shape, torch.float32)
    if change is not None:
        weight = change(weight)
        x, bias = x.to(weight.dtype), bias.to(weight.dtype)
    assert torch.equal(product(x, weight, bias), F.linear(x, weight, bias))


def test_gradients_are_torchs():
    """Each operand alone may need one; also in forward mode, under vmap and compiled."""
    x, weight, bias = operands((2, 64, 1024), torch.float32)
    for i in range(3):
        leaves = [t.clone().requires_grad_(i == k) for k, t in enumerate((x, weight, bias))]
        y, want = product(*leaves), F.linear(*leaves)
        assert torch.equal(y, want)
        assert torch.equal(*(torch.autograd.grad(r.square().sum(), leaves[i])[0] for r in (y, want)))
    _, tangent = torch.func.jvp(lambda t: product(t, weight), (x,), (x,))
    assert torch.equal(tangent, F.linear(x, weight))
    with torch.no_grad():
        torch.testing.assert_close(torch.vmap(product, (0, None))(x[None], weight)[0], product(x, weight))
        compiled = torch.compile(product, fullgraph=True, backend="aot_eager")
        torch.testing.assert_close(compiled(x, weight), product(x, weight))
        with torch.autocast("cpu", torch.bfloat16):
            y = product(x, weight, bias)
        assert torch.equal(y, product(x.bfloat16(), weight.bfloat16(), bias.bfloat16()))


def _layers(group, full):
    x, weight, bias = full
    column = tp_ext.ColumnParallelLinear(256, 1024, group=group)
    row = tp_ext.RowParallelLinear(1024, 256, group=group)
    replicated = ReplicatedLinear(256, 1024, group=group)
    with torch.no_grad():
        for layer, dim, w, b in ((column, 0, weight, bias), (row, 1, weight.t(), bias[:256])):
            layer.weight.copy_(w.tensor_split(group.size(), dim)[group.rank()])
            layer.bias.copy_(b if dim else b.tensor_split(group.size())[group.rank()])
        replicated.weight.copy_(weight)
        replicated.bias.copy_(bias)
        y = column(x)
        return y, replicated(x), row(y)


@pytest.mark.parametrize("p", [1, 2, 3])
@torch.no_grad()
def test_layers(p):
    """The columns of a column linear of any number of ranks, and a replicated linear, have the bits of one process."""
    _, weight, bias = full = operands((3, 256, 1024), torch.float32)
    whole = product(*full)
    outputs = ranks.run(_layers, p, full)
    assert torch.equal(torch.cat([column for column, _, _ in outputs], -1), whole)
    for _, replicated, row in outputs:
        assert torch.equal(replicated, whole)
        assert_near(row, whole, weight.t(), bias[:256])


@torch.no_grad()
def test_experts():
    """A grouped linear of few rows of each expert, of more, and of none."""
    torch.manual_seed(0)
    counts, weight = [1, 0, 9, 8], torch.randn(4, 1024, 64)
    x = torch.randn(sum(counts), 64)
    want = [
        rows @ w.t() if len(rows) > 8 else product(rows, w) for rows, w in zip(x.split(counts), weight, strict=True)
    ]
    assert torch.equal(_ops.grouped_linear(x, weight, counts), torch.cat(want))
