"""Functions over a mesh for tests/repo/test_rules.py, each made for a group, or for None: the unsharded function."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh

import tp_ext
from tp_ext.group import group_name


def mapped(
    name: str, x: tp_ext.P, y: tp_ext.P, *arguments: Any, unsharded: Callable[[Tensor], Tensor] = lambda x: x
) -> Callable[[Any], Callable[[Tensor], Tensor]]:
    """A collective by the name of an axis, in a map of this rank's shards."""

    def make(group: Any) -> Callable[[Tensor], Tensor]:
        if group is None:
            return unsharded
        mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("x",))
        body = getattr(tp_ext, name)
        return tp_ext.spmd(mesh, in_specs=x.local(), out_specs=y.local())(lambda x: body(x, "x", *arguments))

    return make


def mapped_sum(group: Any) -> Callable[[Tensor], Tensor]:
    if group is None:
        return lambda x: x + x
    mesh = DeviceMesh.from_group(group, "cpu", mesh_dim_names=("x",))
    return tp_ext.spmd(mesh, in_specs=tp_ext.P("x"), out_specs=tp_ext.P("x"))(lambda x: x + x)


def product(group: Any, features: int = 8) -> Callable[[Tensor], Tensor]:
    """A matrix times a square one, whose columns are sharded."""
    full = torch.randn(features, features, generator=torch.Generator().manual_seed(0))
    own = full if group is None else full.chunk(group.size(), 1)[group.rank()]
    key = group_name(group)
    return lambda x: tp_ext.matmul_2d(x, own.to(x.dtype), None, key)
