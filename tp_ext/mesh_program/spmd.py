"""A function of each rank's shards as a function of full tensors: torch's counterpart of ``jax.shard_map``."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_unflatten

from tp_ext import _ops
from tp_ext._arguments import check_bools
from tp_ext.group import ParallelGroup, parallel_group, process_group
from tp_ext.mesh_program.partition_spec import P
from tp_ext.mesh_program.scope import scope_of
from tp_ext.mesh_program.varying import VaryingValueError, as_varying, axes_of, plain, typed

Specs = Any
"""A :class:`P` for a tensor, or for all tensors of a nested structure; or a structure of them, one level at a time."""


def spmd(
    mesh: DeviceMesh, *, in_specs: Specs, out_specs: Specs, check: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Maps a function over a mesh: each rank calls it with its shards of the arguments; the results are joined.

    ::

        @tp_ext.spmd(mesh, in_specs=(P(None, "x"), P("x", None)), out_specs=P())
        def matmul(a, b):  # a[:, shard] and b[shard, :]
            return tp_ext.psum(a @ b, "x")

    Inside, tensors are local, and ranks communicate by :func:`tp_ext.psum` and its kin, by the name of an axis. The
    map and all collectives are differentiable: gradients of full arguments are full.

    With ``check`` each value is known to vary along an axis or not: a sharded argument varies along its axes, the
    result of an operator along those of its inputs, of ``psum`` no more along its axis. A value that does not vary and
    meets one that does is made to vary first, so its gradient is summed over the axis; a result must name the axes
    along which it varies. So no collective can be forgotten and no gradient counted twice. Tensors from outside that
    are no arguments count as the same on all ranks. A ``torch.autograd.Function`` of your own must ``pvary`` its
    inputs alike. The types that carry this (:mod:`tp_ext.mesh_program.varying`) cost some 40 us for each operator,
    nothing under ``torch.compile``.

    Args:
        mesh: its axes have names. In a map inside of a map, a slice with other axes.
        in_specs: a :class:`tp_ext.P` for all positional arguments, or a tuple with an entry for each. Arguments that
            are no tensors are passed as they are.
        out_specs: likewise, for the result or a tuple of results.
        check: False: tensors inside are plain, and the caller is responsible for :func:`tp_ext.pvary` and for results
            that are the same on all ranks of axes that their spec does not name.

    Communicates: arguments nothing, backward an all-gather for each axis that shards a full one, and an all-reduce
    for each axis that does not shard one that is used with varying values; results an all-gather for each axis of a
    full one, and first the lengths of the shards if an argument was sharded unevenly. Axes of one rank are free.

    Raises:
        TypeError: arguments of the wrong type. ValueError: an axis that the mesh does not have; a spec with more dims
            than its tensor; another number of specs than arguments. VaryingValueError: a result varies along an axis
            that its spec does not name; a Python number is read from a value that varies.
    """
    if not isinstance(mesh, DeviceMesh):
        raise TypeError(f"mesh: {type(mesh).__name__} must be a DeviceMesh")
    if not mesh.mesh_dim_names:
        raise ValueError("mesh: its axes must have names, mesh_dim_names=")
    if mesh.get_coordinate() is None:
        raise ValueError("mesh: this rank must be a member of the mesh")
    check_bools(check=check)
    groups = {name: parallel_group(mesh.get_group(name)) for name in mesh.mesh_dim_names}
    for argument, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
        _check_specs(specs, argument, groups)

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(function):
            raise TypeError(f"spmd: {type(function).__name__} must be a function")

        @functools.wraps(function)
        def mapped(*args: Any) -> Any:
            enter = _Enter(mesh, groups, check)
            local = _map_tensors(enter.tensor, args, in_specs, "in_specs")
            with scope_of(groups, check):
                result = function(*local)
            return _map_tensors(_Leave(mesh, groups, check, enter.uneven).tensor, result, out_specs, "out_specs")

        return mapped

    return decorate


def _check_specs(specs: Specs, argument: str, groups: Mapping[str, ParallelGroup]) -> None:
    if isinstance(specs, P):
        for axis in specs.axes:
            if axis not in groups:
                raise ValueError(
                    f"{argument}: axis {axis!r} of {specs} must be one of the axes of mesh, {tuple(groups)}"
                )
        return
    if specs is None:
        return
    entries = specs.values() if isinstance(specs, dict) else specs if isinstance(specs, list | tuple) else None
    if entries is None:
        raise TypeError(f"{argument}: {specs!r} must be a tp_ext.P, or a tuple, list or dict of them")
    for one in entries:
        _check_specs(one, argument, groups)


def _map_tensors(each: Callable[[Tensor, P, str], Any], values: Any, specs: Specs, where: str) -> Any:
    """Returns the nested values with each tensor replaced by ``each(tensor, spec, where)``."""
    if isinstance(specs, P):
        leaves, structure = tree_flatten(values)
        return tree_unflatten(
            [each(one, specs, where) if isinstance(one, Tensor) else one for one in leaves], structure
        )
    if specs is None:
        if isinstance(values, Tensor):
            raise ValueError(f"{where}: None must be a tp_ext.P for a tensor of shape {tuple(values.shape)}")
        return values
    if isinstance(specs, dict):
        if not isinstance(values, dict) or values.keys() != specs.keys():
            keys = tuple(values) if isinstance(values, dict) else type(values).__name__
            raise ValueError(f"{where}: the keys {tuple(specs)} must be those of the value, {keys}")
        return {key: _map_tensors(each, values[key], specs[key], f"{where}[{key!r}]") for key in values}
    if not isinstance(values, list | tuple) or len(values) != len(specs):
        count = len(values) if isinstance(values, list | tuple) else f"a {type(values).__name__}"
        raise ValueError(f"{where}: {len(specs)} specs must be as many as the values, {count}")
    pairs = enumerate(zip(values, specs, strict=True))
    return type(values)(_map_tensors(each, value, spec, f"{where}[{k}]") for k, (value, spec) in pairs)


class _Map:
    """The mesh of a map."""

    def __init__(self, mesh: DeviceMesh, groups: Mapping[str, ParallelGroup], check: bool) -> None:
        self.mesh, self.groups, self.check = mesh, groups, check

    def check_dims(self, value: Tensor, spec: P, where: str) -> None:
        if len(spec.dims) > value.dim():
            raise ValueError(
                f"{where}: {spec} has {len(spec.dims)} dims and must have at most {value.dim()}, for a tensor of shape "
                f"{tuple(value.shape)}"
            )

    def axes(self, spec: P) -> dict[str, str]:
        return {name: self.groups[name].name for name in spec.axes}

    def placements(self, spec: P, where: str) -> list[Placement]:
        names = self.mesh.mesh_dim_names or ()
        for dim in spec.dims:
            if list(dim) != sorted(dim, key=names.index):
                raise ValueError(f"{where}: the axes {dim} of a DTensor must be in the order of the mesh, {names}")
        at = {axis: dim for dim, axes in enumerate(spec.dims) for axis in axes}
        return [Shard(at[name]) if name in at else Replicate() for name in names]


class _Enter(_Map):
    """Shards arguments. ``uneven``: the lengths of shards of an argument are different."""

    uneven = False

    def tensor(self, value: Tensor, spec: P, where: str) -> Any:
        self.check_dims(value, spec, where)
        if isinstance(value, DTensor):
            value = value.redistribute(self.mesh, self.placements(spec, where)).to_local()
            outer: dict[str, str] = {}
        elif spec.form == "dtensor":
            raise TypeError(f"{where}: a {type(value).__name__} must be a DTensor, by {spec}")
        else:
            outer = axes_of(value)
            value = plain(value) if self.check else value
            if spec.form == "full":
                value = self._shard(value, spec)
        return typed(value, {**outer, **self.axes(spec)}) if self.check else value

    def _shard(self, value: Tensor, spec: P) -> Tensor:
        for dim, axes in enumerate(spec.dims):
            for axis in axes:
                group = self.groups[axis]
                if group.size > 1:
                    if value.shape[dim] % group.size:
                        self.uneven = True
                    value = _ops.scatter_to_region(value, group.name, dim, None)
        return value


class _Leave(_Map):
    """Joins results."""

    def __init__(self, mesh: DeviceMesh, groups: Mapping[str, ParallelGroup], check: bool, uneven: bool) -> None:
        super().__init__(mesh, groups, check)
        self.uneven = uneven

    def tensor(self, value: Tensor, spec: P, where: str) -> Any:
        self.check_dims(value, spec, where)
        outer: dict[str, str] = {}
        if self.check:
            for axis in axes_of(value):
                if axis in self.groups and axis not in spec.axes:
                    line = f" of {value.line}" if hasattr(value, "line") else ""
                    raise VaryingValueError(
                        f"{where}: {spec} must name axis {axis!r}, along which the result{line} varies; or psum, pmean "
                        f"or all_gather(invariant=True) it over {axis!r} first"
                    )
            value = as_varying(value, self.axes(spec))
            outer = {name: group for name, group in axes_of(value).items() if name not in self.groups}
            value = plain(value)
        if spec.form == "dtensor":
            return self._dtensor(value, spec, where)
        if spec.form == "full":
            value = self._join(value, spec)
        return typed(value, outer)

    def _join(self, value: Tensor, spec: P) -> Tensor:
        for dim, axes in enumerate(spec.dims):
            for axis in reversed(axes):
                group = self.groups[axis]
                if group.size > 1:
                    value = _ops.gather_from_region(value, group.name, dim, self._lengths(value, dim, group))
        return value

    def _lengths(self, value: Tensor, dim: int, group: ParallelGroup) -> list[int] | None:
        if not self.uneven:
            return None
        if torch.compiler.is_compiling():
            raise ValueError("spmd: arguments must be sharded evenly under torch.compile; pad them, or take local ones")
        own = torch.tensor([value.shape[dim]], device=value.device)
        found = [torch.empty_like(own) for _ in range(group.size)]
        dist.all_gather(found, own, group=process_group(group.name))
        return [int(length) for length in found]

    def _dtensor(self, value: Tensor, spec: P, where: str) -> DTensor:
        shape = list(value.shape)
        placements = self.placements(spec, where)
        for dim, axes in enumerate(spec.dims):
            for axis in reversed(axes):
                group = self.groups[axis]
                lengths = self._lengths(value, dim, group) if group.size > 1 else None
                shape[dim] = sum(lengths) if lengths else shape[dim] * group.size
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            value.contiguous(), self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
        )
