"""ParallelMLP against the dense composition: every activation, uneven widths, sequence parallelism; collectives."""

import pytest
import torch
from torch import nn

import tp_ext
from tests.helpers import ranks
from tests.helpers.oracle import (
    ACTIVATIONS,
    GATED,
    count_collectives_of,
    full_gradients,
    gradients,
    own_tokens,
)
from tp_ext import ParallelMLP, load_full_state_dict

pytestmark = pytest.mark.core

HIDDEN, FFN = 6, 10  # ffn: uneven for p = 3 and 4


class DenseMLP(nn.Module):
    """The oracle; its state dict is that of the unsharded ParallelMLP."""

    def __init__(self, activation: str, bias: bool, dtype=torch.float64):
        super().__init__()
        self.up = nn.Linear(HIDDEN, FFN * (2 if activation in GATED else 1), bias, dtype=dtype)
        self.down = nn.Linear(FFN, HIDDEN, bias, dtype=dtype)
        self.activation = activation

    def forward(self, x):
        return self.down(ACTIVATIONS[self.activation](self.up(x)))


def make_mlp(group, dense, sp=False, **options):
    bias, dtype = dense.up.bias is not None, dense.up.weight.dtype
    options |= {"activation": dense.activation, "bias": bias, "sequence_parallel": sp, "dtype": dtype}
    layer = ParallelMLP(HIDDEN, FFN, group=group, **options)
    load_full_state_dict(layer, dense.state_dict(), group=group)
    return layer


def _first_order(group, dense, x, dy, sp, options):
    layer = make_mlp(group, dense, sp, **options)
    x, dy = (own_tokens(t, group) if sp else t.clone() for t in (x, dy))
    y = layer(x.requires_grad_(), 7 if sp else None)
    y.backward(dy)
    return y, x.grad, gradients(layer)


def assert_as_dense(p, dense, sp, close, leading=(7, 2), **options):
    x = torch.randn(*leading, HIDDEN, dtype=dense.up.weight.dtype, requires_grad=True)
    dy = torch.randn_like(x)
    y = dense(x)
    y.backward(dy)
    firsts = ranks.run(_first_order, p, dense, x.detach(), dy, sp, options)
    for i, want in enumerate((y.detach(), x.grad)):
        if sp:
            close(torch.cat([r[i] for r in firsts]), want)
        else:
            assert all(torch.equal(r[i], firsts[0][i]) for r in firsts), "replicated, and yet not the same"
            close(firsts[0][i], want)
    full = full_gradients([r[2] for r in firsts])
    assert full.keys() == dict(dense.named_parameters()).keys()
    for name, param in dense.named_parameters():
        close(full[name], param.grad)


@pytest.mark.thinned
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_forward_and_every_gradient(activation, bias, sp, p):
    """In fp64; 7 tokens, which no p > 1 divides, and a dim between tokens and features."""

    def close(got, want):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)

    assert_as_dense(p, DenseMLP(activation, bias), sp, close)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_fp32(activation):
    """Sums of fewer than 20 products in another order."""

    def close(got, want):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-6)

    for sp in (False, True):
        assert_as_dense(2, DenseMLP(activation, True, torch.float32), sp, close)


# Communication

FORWARD = {False: {"all_reduce": 1}, True: {"all_gather": 1, "reduce_scatter": 1}}
BACKWARD = {False: {"all_reduce": 1}, True: {"all_gather": 2, "reduce_scatter": 1}}  # one gather of x again


def _counts(group, dense, sp):
    layer = make_mlp(group, dense, sp)
    x, y = torch.randn(4, HIDDEN, dtype=torch.float64, requires_grad=True), []
    return count_collectives_of(lambda: y.append(layer(x))), count_collectives_of(lambda: y[0].sum().backward())


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "swiglu"])
def test_collectives(activation, sp):
    assert ranks.run(_counts, 2, DenseMLP(activation, False), sp) == [(FORWARD[sp], BACKWARD[sp])] * 2
    # the row's bias, under sequence parallelism, has its gradient summed
    backward = {**BACKWARD[sp], "all_reduce": 1}
    assert ranks.run(_counts, 2, DenseMLP(activation, True), sp) == [(FORWARD[sp], backward)] * 2
    assert ranks.run(_counts, 1, DenseMLP(activation, True), sp) == [({}, {})]


def test_names_and_modules_that_are_no_mlp():
    layer = ParallelMLP(4, 8, activation="swiglu")
    assert [n for n, _ in layer.named_parameters()] == ["up.weight", "up.bias", "down.weight", "down.bias"]
    assert isinstance(layer.up, tp_ext.ColumnParallelLinear) and isinstance(layer.down, tp_ext.RowParallelLinear)
    with pytest.raises(ValueError, match="activation: 'tanh' must be one of"):
        ParallelMLP(4, 8, activation="tanh")
    with pytest.raises(ValueError, match="ffn_hidden_size: 0"):
        ParallelMLP(4, 0)
