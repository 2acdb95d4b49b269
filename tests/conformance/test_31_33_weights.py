"""Conformance cases 31 to 33: the weights that ranks draw and hold, and how bf16 rounds.

The table: docs/reference/correctness.md.
"""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tp_ext
from tests.conformance.test_25_26_linears import EVERY, FP64, SP, slices
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tests.nn.test_mlp import GATED, DenseMLP, assert_as_dense, make_mlp
from tests.test_random import comparable, full_state, one_of_each
from tp_ext import ColumnParallelLinear, RowParallelLinear, Sharding, full_state_dict, shardings
from tp_ext.random import Normal, TruncatedNormal, Uniform

pytestmark = pytest.mark.core


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@EVERY
def test_case_31_initial_weights_are_the_same_bits_for_every_p(p, dtype):
    want, draw = full_state(None, 7, dtype=dtype)
    assert len(want) == 24
    for state, next_draw in ranks.run(full_state, p, 7, dtype=dtype):
        assert state.keys() == want.keys()
        for name, value in comparable(state, p).items():
            assert torch.equal(value, want[name]), f"{name} at p = {p}"
        assert next_draw == draw, f"at p = {p} the model takes other draws"


def _shards(group):
    torch.manual_seed(7)
    model = one_of_each(group)
    return {name: param.detach() for name, param in model.named_parameters()}, dict(shardings(model))


@pytest.mark.parametrize("p", [2, 4])
def test_case_31_shards_are_cut_from_the_weights_of_one_rank(p):
    """Without any gather, so that copies and padding are looked at on every rank."""
    want, _ = full_state(None, 7)
    for rank, (state, cuts) in enumerate(ranks.run(_shards, p)):
        for name, local in state.items():
            full, sharding = want[name], cuts[name]
            assert torch.equal(local, full if sharding is None else sharding.shard(full, rank, p)), name


@pytest.mark.cuda
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_case_31_initial_weights_are_those_of_the_cpu(dtype):
    """The seeds are drawn on the weights' device, whose generator is another one: so each tensor from one seed."""
    for init in (Uniform(-0.1, 0.3), Normal(std=0.02), TruncatedNormal(0.0, 0.02, -0.04, 0.03)):
        for sharding, rank, p in ((None, 0, 1), (Sharding(0, (5, 8)), 1, 2), (Sharding(1, (7,)), 2, 3)):
            shape = torch.Size((13, 7))
            local = shape if sharding is None else sharding.local_shape(shape, rank, p)
            drawn = []
            for device in ("cpu", "cuda"):
                with pytest.MonkeyPatch.context() as patch:
                    patch.setattr(tp_ext.random, "draw_seed", lambda d: torch.tensor(11, device=d))
                    t = torch.empty(local, dtype=dtype, device=device)
                    tp_ext.random.initialise_(t, init, sharding, shape, rank, p)
                    drawn.append(t.cpu())
            assert torch.equal(*drawn)


@EVERY
@pytest.mark.parametrize("activation", GATED)
@on_ranks()
def test_case_32_a_shard_is_its_gate_then_its_up(group, activation, p):
    dense = DenseMLP(activation, True)
    gates, ups = (slices(t, p, 0) for t in dense.up.weight.detach().chunk(2))
    gate_biases, up_biases = (slices(t, p, 0) for t in dense.up.bias.detach().chunk(2))
    downs = slices(dense.down.weight.detach(), p, 1)
    layer = make_mlp(group, dense)
    rank, state = group.rank(), full_state_dict(layer, group=group)
    assert torch.equal(layer.up.weight, torch.cat([gates[rank], ups[rank]]))
    assert torch.equal(layer.up.bias, torch.cat([gate_biases[rank], up_biases[rank]]))
    assert torch.equal(layer.down.weight, downs[rank])
    assert all(torch.equal(state[name], value) for name, value in dense.state_dict().items())


@EVERY
@SP
@pytest.mark.parametrize("activation", GATED)
def test_case_32_gated_mlp_is_the_dense_one(activation, sp, p):
    assert_as_dense(p, DenseMLP(activation, True), sp, lambda a, b: torch.testing.assert_close(a, b, **FP64))


def _run(group, kind, dense, xs, dys, options, tokens=None):
    rank = group.rank()
    layer = kind.from_linear(dense, group=group, **options)
    x = xs[rank].clone().requires_grad_()
    y = layer(x, tokens)
    y.backward(dys[rank])
    return y, x.grad, layer.weight.grad, layer.bias.grad


@EVERY
@SP
def test_case_33_bf16_of_whole_numbers(sp, p):
    """Sums of a column's products in fp32 are exact, so its result is the fp32 one rounded once. A row's partial sums
    are rounded before they are summed: exact for sums of fewer than 256 ones."""
    for kind, k, high in ((ColumnParallelLinear, 512, 8), (RowParallelLinear, 128, 1)):
        dense = nn.Linear(k, 16, dtype=torch.bfloat16)
        with torch.no_grad():
            for param in dense.parameters():
                param.copy_(torch.randint(-high, high + 1, param.shape))
        x, dy = (torch.randint(-high, high + 1, (8, n)).bfloat16() for n in (k, 16))
        y = F.linear(x.float(), dense.weight.float(), dense.bias.float()).bfloat16()
        dx, dw = (dy.float() @ dense.weight.float()).bfloat16(), (dy.float().t() @ x.float()).bfloat16()
        column = kind is ColumnParallelLinear
        outside = [lambda t: [t] * p, lambda t: slices(t, p, 0)][sp]
        xs, dxs = ((outside(t) if column else slices(t, p, -1)) for t in (x, dx))
        ys, dys = ((slices(t, p, -1) if column else outside(t)) for t in (y, dy))
        for rank, got in enumerate(ranks.run(_run, p, kind, dense, xs, dys, {"sequence_parallel": sp}, 8)):
            assert all(t.dtype == torch.bfloat16 for t in got)
            assert torch.equal(got[0], ys[rank])
            assert torch.equal(got[2], slices(dw, p, 0 if column else 1)[rank])
            if not column or p == 1:  # a column's dx is a sum of rounded terms of at most 16 * 64 / p
                assert torch.equal(got[1], dxs[rank])
            else:
                torch.testing.assert_close(got[1], dxs[rank], rtol=2**-8, atol=p * 2**-8 * 1024)
