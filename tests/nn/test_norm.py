"""RMSNorm and LayerNorm modules against torch's. The formulas themselves are tested in kernels/test_norm.py."""

import pytest
import torch
from torch import nn

import tp_ext
from tests.helpers import ranks
from tests.helpers.oracle import count_collectives_of, full_gradients, gradients, own_tokens

pytestmark = pytest.mark.core

RMS, LAYER = "RMSNorm", "LayerNorm"
CASES = [
    (RMS, (8,), {}),
    (RMS, (8,), {"eps": 1e-3}),
    (RMS, (3, 4), {}),
    (RMS, (2, 3, 2), {"elementwise_affine": False}),
    (LAYER, (8,), {}),
    (LAYER, (8,), {"eps": 1e-2}),
    (LAYER, (3, 4), {}),
    (LAYER, (3, 4), {"bias": False}),
    (LAYER, (8,), {"elementwise_affine": False}),
]
IDS = [f"{name}-{shape}-{options}" for name, shape, options in CASES]
# fp32 and fp64: sums of at most 12 numbers in another order. bf16: ours and torch's differ by one rounding
BOUNDS = {torch.float64: 1e-12, torch.float32: 2e-6, torch.bfloat16: 2**-6}


def _pair(name, shape, options, dtype, group=None, sp=False):
    """torch's module and ours, with the same random weights."""
    torch.manual_seed(4)
    dense = getattr(nn, name)(shape, dtype=dtype, **options)
    for param in dense.parameters():
        nn.init.normal_(param, 1.0)
    ours = getattr(tp_ext, name)(shape, dtype=dtype, group=group, sequence_parallel=sp, **options)
    tp_ext.load_full_state_dict(ours, dense.state_dict(), group=group)
    return dense, ours


def _assert_close(got, want, dtype):
    assert got.dtype == want.dtype
    torch.testing.assert_close(
        got, want, rtol=BOUNDS[dtype], atol=BOUNDS[dtype] * max([1.0, *want.abs().flatten().tolist()])
    )


@pytest.mark.thinned
@pytest.mark.parametrize("dtype", BOUNDS, ids=str)
@pytest.mark.parametrize(("name", "shape", "options"), CASES, ids=IDS)
@pytest.mark.parametrize("leading", [(), (5,), (2, 3), (0,)], ids=str)
def test_torchs_module(name, shape, options, dtype, leading):
    dense, ours = _pair(name, shape, options, dtype)
    assert {n: p.shape for n, p in ours.named_parameters()} == {n: p.shape for n, p in dense.named_parameters()}
    assert (ours.weight is None) == (dense.weight is None)
    x = torch.randn(*leading, *shape, dtype=dtype)
    dy = torch.randn_like(x)
    got = []
    for module in (dense, ours):
        leaf = x.clone().requires_grad_()
        y = module(leaf)
        assert y.shape == x.shape
        y.backward(dy)
        got.append([y.detach(), leaf.grad, *(p.grad for p in module.parameters())])
    for a, b in zip(got[1], got[0], strict=True):
        _assert_close(a, b, dtype)


@pytest.mark.parametrize("dtype", [*BOUNDS, torch.float16], ids=str)
@pytest.mark.parametrize("scale", [torch.float64, torch.float32, torch.bfloat16], ids=str)
def test_eps_none_is_torchs(scale, dtype):
    """Seen at an x so small that an epsilon of one of the dtypes decides."""
    x = torch.full((2, 4), float(torch.finfo(scale).eps) ** 0.5, dtype=dtype)
    torch.testing.assert_close(tp_ext.RMSNorm(4, dtype=dtype)(x), nn.RMSNorm(4, dtype=dtype)(x))


def test_fresh_weights_are_ones_and_zeros():
    before = torch.random.get_rng_state()
    for name in (RMS, LAYER):
        ours, dense = getattr(tp_ext, name)((3, 2)), getattr(nn, name)((3, 2))
        assert ours.state_dict().keys() == dense.state_dict().keys()
        assert all(torch.equal(v, dense.state_dict()[k]) for k, v in ours.state_dict().items())
    assert torch.equal(torch.random.get_rng_state(), before)


# Sequence parallel


def _sharded(group, name, shape, options, x, dy, sp):
    _, ours = _pair(name, shape, options, torch.float64, group, sp)
    x, dy = (own_tokens(t, group) if sp else t.clone() for t in (x, dy))
    y = ours(x.requires_grad_())
    y.backward(dy)
    return y, x.grad, gradients(ours)


@pytest.mark.thinned
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize(("name", "shape", "options"), CASES, ids=IDS)
def test_weights_have_their_whole_gradient_when_backward_returns(name, shape, options, sp, p):
    """And the same bits of it on all ranks (full_gradients asserts that). 7 tokens, which no p > 1 divides."""
    dense, _ = _pair(name, shape, options, torch.float64)
    x = torch.randn(7, 2, *shape, dtype=torch.float64, requires_grad=True)
    dy = torch.randn_like(x)
    y = dense(x)
    y.backward(dy)
    results = ranks.run(_sharded, p, name, shape, options, x.detach(), dy, sp)
    for i, want in enumerate((y.detach(), x.grad)):
        for rank, result in enumerate(results):
            _assert_close(result[i], want.tensor_split(p)[rank] if sp else want, torch.float64)
    full = full_gradients([r[2] for r in results])
    assert full.keys() == dict(dense.named_parameters()).keys()
    for key, param in dense.named_parameters():
        _assert_close(full[key], param.grad, torch.float64)


def _counts(group, name, sp):
    _, ours = _pair(name, (8,), {}, torch.float32, group, sp)
    y = []
    forward = count_collectives_of(lambda: y.append(ours(torch.randn(3, 8))))
    return forward, count_collectives_of(lambda: y[0].sum().backward())


@pytest.mark.parametrize(("name", "sums"), [(RMS, 1), (LAYER, 2)])
def test_collectives(name, sums):
    assert ranks.run(_counts, 2, name, True) == [({}, {"all_reduce": sums})] * 2
    assert ranks.run(_counts, 2, name, False) == [({}, {})] * 2
    assert ranks.run(_counts, 1, name, True) == [({}, {})]


@pytest.mark.filterwarnings("ignore:Mismatch dtype")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [RMS, LAYER])
def test_autocast_as_torch(name, dtype):
    """On CPU torch's autocast leaves norms in the dtype of x, with statistics in fp32 all the same."""
    dense, ours = _pair(name, (8,), {}, torch.float32)
    x = torch.randn(3, 8, dtype=dtype)
    with torch.autocast("cpu", torch.bfloat16):
        want, got = dense(x), ours(x)
    _assert_close(got, want, dtype)


# Errors


@pytest.mark.parametrize("name", [RMS, LAYER])
def test_shapes_that_do_not_fit(name):
    for shape in ((), 0, (3, -1), (2.0,)):
        with pytest.raises(ValueError, match="normalized_shape"):
            getattr(tp_ext, name)(shape)
    for shape in ((4,), (4, 3), (3, 4, 1), ()):
        with pytest.raises(ValueError, match=r"x: shape \(.*\) must end in normalized_shape = \(3, 4\)"):
            getattr(tp_ext, name)((3, 4))(torch.ones(shape))
