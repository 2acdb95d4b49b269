"""Values that vary, where torch asks no type of them, in compiled functions, and in results of other structures."""

import dataclasses
from typing import NamedTuple

import pytest
import torch
import torch.distributed as dist

import tp_ext
from tests.helpers.on_ranks import on_ranks
from tests.mesh_program.cases import FOLLOWED
from tp_ext import P, lax
from tp_ext.mesh_program.varying import VaryingValueError

X = P("x")


def _over(function, out_specs=X):
    mesh = dist.init_device_mesh("cpu", (2,), mesh_dim_names=("x",))
    return tp_ext.spmd(mesh, in_specs=X, out_specs=out_specs)(function)


@on_ranks(2, backend="gloo", timeout=300)
def test_values_that_vary_are_followed_where_torch_asks_no_type(group):
    x = torch.arange(24.0).view(8, 3)
    for name, function in FOLLOWED.items():
        found, want = _over(function)(x), torch.cat([function(block) for block in x.chunk(2)])
        torch.testing.assert_close(found, want, msg=lambda m, n=name: f"{n}: {m}")
        with pytest.raises(VaryingValueError, match="must name axis 'x'"):
            _over(function, out_specs=P())(x)
    w = torch.ones(3, requires_grad=True)
    weighted = torch.compile(lambda a: (a * w).sum(), backend="aot_eager")
    _over(lambda a: lax.psum(weighted(a), "x"), out_specs=P())(x).backward()
    assert torch.equal(w.grad, x.sum(0))


class Point(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclasses.dataclass
class Pair:
    x: torch.Tensor


@on_ranks(2)
def test_structures_of_results(group):
    x = torch.arange(4.0)
    point = _over(lambda a: Point(a, a + 1), out_specs=(X, X))(x)
    assert isinstance(point, Point) and torch.equal(point.y, x + 1)
    values, indices = _over(lambda a: torch.max(a.view(2, 1), 1), out_specs=(X, X))(x)
    assert torch.equal(values, x) and not indices.any()
    for pack in (lambda a: {a}), Pair:
        with pytest.raises(ValueError, match=r"out_specs: a (set|Pair) with tensors must be a structure that"):
            _over(pack)(x)
