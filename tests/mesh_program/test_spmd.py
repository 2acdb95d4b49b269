"""spmd: forms of arguments and results, gradients, nesting, recomputation, and what a checked map refuses."""

import functools
from unittest import mock

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.utils.checkpoint import checkpoint

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import xy_mesh
from tests.helpers.on_ranks import on_ranks
from tp_ext import P, lax
from tp_ext.mesh_program import scope
from tp_ext.mesh_program.varying import VaryingValueError, axes_of

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def _random(*shape):
    return torch.randn(*shape, dtype=torch.float64, requires_grad=True)


def _close(found, want, inputs):
    """Results, gradients and gradients of the gradients."""
    torch.testing.assert_close(found, want, **CLOSE)
    grads = [torch.autograd.grad(y.sin().sum(), inputs, create_graph=True) for y in (found, want)]
    torch.testing.assert_close(*grads, **CLOSE)
    again = [torch.autograd.grad(sum(g.square().sum() for g in each), inputs) for each in grads]
    torch.testing.assert_close(*again, **CLOSE)


def _mlp(w1, w2, x):
    return lax.psum((x @ w1).tanh() @ w2, "x")


def _dense(w1, w2, x):
    return (x @ w1).tanh() @ w2


SPECS = (P(None, "x"), P("x"), P("y"))


def _double_backward(group, x, y, features):
    torch.manual_seed(0)
    inputs = _random(4, features), _random(features, 3), _random(5, 4)
    mapped = tp_ext.spmd(xy_mesh(x, y), in_specs=SPECS, out_specs=P("y"))(_mlp)
    _close(mapped(*inputs), _dense(*inputs), inputs)


@pytest.mark.parametrize(("x", "y", "features"), [(1, 1, 6), (2, 2, 6), (3, 1, 7)])
def test_values_gradients_and_double_backward(x, y, features):
    """Also of shards of different lengths: 5 rows over 2 ranks, 7 features over 3."""
    ranks.run(_double_backward, x * y, x, y, features)


@on_ranks(2, backend="gloo")
def test_checkpointing_inside_and_outside(group):
    torch.manual_seed(0)
    inputs = _random(4, 6), _random(6, 3), _random(4, 4)
    mesh = xy_mesh(2, 1)

    def part(w1, w2, x):
        scale = lax.psum(lax.axis_index("x") + 1.0, "x")  # finds its axis when it is computed again, too
        return _mlp(w1, w2, x) * scale

    def unchecked(w1, w2, x):
        scale = 3 + 0 * int(lax.axis_index("x"))  # a number, in the recomputation too
        w1, w2, x = lax.pvary(w1, "y"), lax.pvary(w2, "y"), lax.pvary(x, "x")
        return _mlp(w1, w2, x) * scale

    def mapped(part, levels=1, **options):
        for _ in range(levels):
            part = functools.partial(checkpoint, part, use_reentrant=False)
        return tp_ext.spmd(mesh, in_specs=SPECS, out_specs=P("y"), **options)(lambda *v: part(*v))

    inside, twice, without_types = mapped(part), mapped(part, 2), mapped(unchecked, check=False)
    outside = tp_ext.spmd(mesh, in_specs=SPECS, out_specs=P("y"))(part)
    want = torch.autograd.grad((3 * _dense(*inputs)).sin().sum(), inputs)
    for call in inside, twice, without_types, functools.partial(checkpoint, outside, use_reentrant=False):
        found = call(*inputs)
        tp_ext.spmd(xy_mesh(1, 2), in_specs=P("y"), out_specs=P("y"))(torch.sin)(inputs[0])  # other axes of these names
        torch.testing.assert_close(torch.autograd.grad(found.sin().sum(), inputs), want, **CLOSE)
    found = inside(*inputs)
    with mock.patch.dict(scope._runs, clear=True):
        tp_ext.spmd(xy_mesh(1, 2), in_specs=P("y"), out_specs=P("y"))(torch.sin)(inputs[0])
        tp_ext.spmd(xy_mesh(2, 1), in_specs=P("x"), out_specs=P("x"))(torch.sin)(inputs[0])
        with pytest.raises(ValueError, match=r"axis 'x' is one of several maps, .* checkpoint the map"):
            found.sum().backward()


@on_ranks(4)
def test_maps_inside_of_maps(group):
    torch.manual_seed(0)
    mesh, (a, b) = xy_mesh(2, 2), (_random(4, 6), _random(6, 4))

    @tp_ext.spmd(mesh["y"], in_specs=(P(None, "y"), P("y")), out_specs=P())
    def contract(a, b):
        assert axes_of(a).keys() == {"x", "y"} and axes_of(b).keys() == {"y"}
        return lax.psum(a @ b, "y")

    @tp_ext.spmd(mesh["x"], in_specs=(P("x"), P()), out_specs=P("x"))
    def rows(a, b):
        return contract(a, b)

    _close(rows(a, b), a @ b, (a, b))
    with pytest.raises(ValueError, match=r"mesh: the axes \['x'\] are those of a map around this one"):
        tp_ext.spmd(mesh["x"], in_specs=P("x"), out_specs=P("x"))(lambda a: rows(a, b))(a)


@on_ranks(2)
def test_full_tensors_dtensors_local_ones_and_structures(group):
    torch.manual_seed(0)
    mesh, rank = xy_mesh(2, 1), group.rank()
    w, x = _random(5, 3), _random(4, 5)
    sharded = DTensor.from_local(x.detach().chunk(2)[rank], mesh, [Shard(0), Replicate()]).requires_grad_()
    local = w.detach().tensor_split(2)[rank].requires_grad_()

    @tp_ext.spmd(
        mesh,
        in_specs=({"x": P("x"), "scale": None}, [P("x").local(), P()]),
        out_specs={"y": P("x").dtensor(), "local": P("x").local(), "sum": P()},
    )
    def step(inputs, weights):
        part, w = weights
        y = inputs["x"] @ w * inputs["scale"]
        return {"y": y, "local": part * 2, "sum": lax.psum(y.sum(), "x")}

    found = step({"x": sharded, "scale": 2}, [local, w])
    want = 2 * x @ w
    assert isinstance(found["y"], DTensor) and found["y"].placements == (Shard(0), Replicate())
    torch.testing.assert_close(found["y"].full_tensor(), want, **CLOSE)
    assert type(found["local"]) is torch.Tensor and torch.equal(found["local"], 2 * local)
    got = torch.autograd.grad(found["sum"] + found["local"].sum(), (sharded, w, local))
    goal = torch.autograd.grad(want.sum(), (x, w))
    torch.testing.assert_close((got[0].full_tensor(), got[1]), goal, **CLOSE)
    assert torch.equal(got[2], torch.full_like(local, 2))


@on_ranks(2)
def test_gradients_inside_of_a_map(group):
    """Gradients that a program takes inside of a map vary as the inputs do."""
    torch.manual_seed(0)
    w, x = _random(3, 2), torch.randn(4, 3, dtype=torch.float64)

    @tp_ext.spmd(xy_mesh(2, 1), in_specs=(P(), P("x")), out_specs=(P(), P("x")))
    def gradient(w, x):
        x = x.requires_grad_()
        loss = (x @ w).square().sum()  # of this rank's rows
        dw, dx = torch.autograd.grad(loss, (w, x))
        assert not axes_of(dw) and axes_of(dx).keys() == {"x"}
        return dw, dx

    x_full = x.clone().requires_grad_()
    want = torch.autograd.grad((x_full @ w).square().sum(), (w, x_full))
    torch.testing.assert_close(gradient(w, x), want, **CLOSE)


@on_ranks(2)
def test_unchecked(group):
    torch.manual_seed(0)
    w, x = _random(3, 2), _random(4, 3)

    @tp_ext.spmd(xy_mesh(2, 1), in_specs=(P(), P("x")), out_specs=P(), check=False)
    def loss(w, x):
        assert type(w) is torch.Tensor
        assert int(lax.axis_index("x")) == group.rank()
        return lax.psum((x @ lax.pvary(w, "x")).square().sum(), "x")

    _close(loss(w, x), (x @ w).square().sum(), (w, x))


@on_ranks(2)
def test_collectives_are_those_of_the_megatron_mlp(group):
    """Forward one all-reduce; backward one for x, and the gathers of the gradients of the two full weights."""
    # Numbers of collectives and their bytes: none of what need not be sent.
    inputs = _random(4, 6), _random(6, 3), _random(4, 4)
    mapped = tp_ext.spmd(xy_mesh(2, 1), in_specs=SPECS, out_specs=P("y"))(_mlp)
    with tp_ext.debug.count_collectives() as counts:
        loss = mapped(*inputs).sum()
    forward = counts.by_kind()
    with tp_ext.debug.count_collectives() as counts:
        loss.backward()
    assert forward == {"all_reduce": 1}
    assert counts.by_kind() == {"all_reduce": 1, "all_gather": 2}


@on_ranks(2)
def test_a_result_falsely_claimed_replicated_is_named_with_its_line(group):
    with pytest.raises(VaryingValueError, match=r"the result of .*test_spmd\.py:\d+ varies"):
        tp_ext.spmd(xy_mesh(2, 1), in_specs=P("x"), out_specs=P())(lambda x: x + 1)(torch.ones(4))


@on_ranks(2)
def test_psum_of_a_value_that_does_not_vary_and_of_numbers(group):
    mesh, x = xy_mesh(2, 1), torch.ones(3, dtype=torch.float64, requires_grad=True)
    twice = tp_ext.spmd(mesh, in_specs=P(), out_specs=P())(lambda x: lax.psum(x, "x"))(x)
    assert torch.equal(twice, 2 * x) and torch.equal(torch.autograd.grad(twice.sum(), x)[0], torch.full((3,), 2.0))
    found = []
    tp_ext.spmd(mesh, in_specs=P(), out_specs=P())(
        lambda x: found.append(lax.psum({"a": 1, "b": [2.5, x]}, ("x", "y"))) or x
    )(x.detach())
    assert found[0]["a"] == 2 and found[0]["b"][0] == 5.0 and torch.equal(found[0]["b"][1], torch.full((3,), 2.0))
    assert repr(P("x", None, ("y", "z"))) == "P('x', None, ('y', 'z'))" and P("x") == P(("x",)) != P("x").local()


@on_ranks(4)
def test_several_axes(group):
    """Collectives over two axes: the first of the tuple is the outermost."""
    mesh, both = xy_mesh(2, 2), ("x", "y")
    x = torch.arange(8.0, dtype=torch.float64)

    def over(function, in_spec, out_spec):
        return tp_ext.spmd(mesh, in_specs=in_spec, out_specs=out_spec)(function)(x)

    for axes in both, both[::-1]:
        shards = P(axes)
        assert torch.equal(over(lambda a, axes=axes: lax.all_gather(a, axes, invariant=True), shards, P()), x)
        assert torch.equal(over(lambda a, axes=axes: lax.psum_scatter(a, axes), P(), shards), 4 * x)
        indices = over(lambda a, axes=axes: lax.axis_index(axes).expand(2) + 0 * a, shards, shards)
        assert indices.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    sizes = []
    over(lambda a: sizes.append(lax.axis_size(both)) or a, P(), P())
    assert sizes == [4] and float(over(lambda a: lax.pmean(lax.psum(a, both).sum(), both), P(both), P())) == 28


def test_collectives_have_their_old_names_too():
    assert len(lax.__all__) == 12
    assert all(getattr(tp_ext, name) is getattr(lax, name) for name in lax.__all__)
