"""Shards of different lengths on the ranks: over two axes, and what the collectives of a program do with them."""

import functools
import itertools

import pytest
import torch
import torch.distributed as dist

from tests.helpers import ranks, simulated
from tests.helpers.meshes import xy_mesh
from tests.helpers.on_ranks import on_ranks
from tp_ext import P, lax, spmd

CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def _over(mesh, function, in_spec, out_spec):
    return spmd(mesh, in_specs=in_spec, out_specs=out_spec)(function)


def _two_axes_uneven(group):
    x = torch.arange(35.0).view(7, 5)
    for spec in P("x", "y"), P(("x", "y")), P(("y", "x")), P(None, ("y", "x")), P("y", "x"):
        assert torch.equal(_over(xy_mesh(2, 2), lambda a: a * 2, spec, spec)(x), 2 * x)
    for axes in ("x", "y"), ("y", "x"), ("x",):
        for dim in 0, 1:
            gathered = functools.partial(lax.all_gather, axis=axes, dim=dim, invariant=True)
            assert torch.equal(_over(xy_mesh(2, 2), gathered, P(*[None] * dim, axes), P())(x), x)


UNEVEN_GATHERS = {  # by what they compute of all rows
    "shards": (lambda a: a, lambda x: x),
    "computed": (lambda a: (a * 2).flatten(1), lambda x: x * 2),
    "chosen rows": (lambda a: a[a[:, 0] > 5], lambda x: x[x[:, 0] > 5]),
    "no row": (lambda a: a[a[:, 0] > 100], lambda x: x[:0]),
    "slices of a sum": (lambda a: lax.psum_scatter(a.sum(0).expand(5, 2), "x"), lambda x: x.sum(0).expand(5, 2)),
}


@pytest.mark.parametrize("p", [2, 3])
@on_ranks()
def test_gathers_of_uneven_shards(group):
    mesh = xy_mesh(group.size())
    for rows, (name, (program, want)), invariant in itertools.product((1, 7), UNEVEN_GATHERS.items(), (True, False)):
        x = torch.arange(2.0 * rows, dtype=torch.float64).view(rows, 2).requires_grad_()

        def gathered(a, program=program, invariant=invariant):
            y = lax.all_gather({"a": program(a)}, "x", 0, invariant=invariant)["a"]
            return y if invariant else lax.pmean(y, "x")

        found, expected = _over(mesh, gathered, P("x"), P())(x), want(x)
        torch.testing.assert_close(found, expected, msg=lambda m, n=name: f"{n}: {m}", **CLOSE)
        grads = [torch.autograd.grad(y.square().sum(), x)[0] for y in (found, expected)]
        torch.testing.assert_close(*grads, msg=lambda m, n=name: f"{n}: {m}", **CLOSE)


@pytest.mark.parametrize("p", [2, 3])
@on_ranks()
def test_other_collectives_of_uneven_shards(group):
    mesh, x = xy_mesh(group.size()), torch.ones(7, 6)
    for name, function in {
        "psum": lambda a: lax.psum(a, "x"),
        "pmean": lambda a: lax.pmean(a, "x"),
        "pmax": lambda a: lax.pmax(a * 2, "x"),
        "pmin": lambda a: lax.pmin(a, ("x",)),
        "psum_scatter": lambda a: lax.psum_scatter(a, "x", 1),
        "ppermute": lambda a: lax.ppermute(a, "x", [(0, 1)]),
        "all_to_all": lambda a: lax.all_to_all(a, "x", 1, 0),
        "all_gather": lambda a: lax.all_gather(a, "x", 1),
    }.items():
        match = f"{name}: x, whose lengths come from uneven shards of in_specs: dim 0 of the ranks' shards must"
        with pytest.raises(ValueError, match=match):
            _over(mesh, function, P("x"), P().local())(x)
    # of one shape on all ranks, though of uneven shards
    assert torch.equal(_over(mesh, lambda a: lax.psum(a.sum(0), "x"), P("x"), P())(x), x.sum(0))
    dist.barrier()


@pytest.mark.parametrize("run", [ranks.run, simulated.run])
def test_uneven_shards_of_two_axes(run):
    run(_two_axes_uneven, 4)
