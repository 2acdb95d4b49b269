"""A function of each rank's shards as a function of full tensors: torch's counterpart of ``jax.shard_map``."""

import functools
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed import DeviceMesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from tp_ext._checks import check_bool, check_type
from tp_ext.group import ParallelGroup, parallel_group
from tp_ext.mesh_program import regions
from tp_ext.mesh_program.escapes import VaryingValueError
from tp_ext.mesh_program.keywords import by_position
from tp_ext.mesh_program.partition_spec import P
from tp_ext.mesh_program.scope import made_uneven, scope_of
from tp_ext.mesh_program.uneven import exchanged_tables, shape_line, shard_lengths
from tp_ext.mesh_program.varying import as_varying, axes_of, lengths_of, plain, typed, types_in_force

Specs = Any
"""A :class:`P` for a tensor, or for all tensors of a nested structure; or a structure of them, one level at a time."""


def spmd(
    mesh: DeviceMesh, *, in_specs: Specs, out_specs: Specs, check: bool = True
) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Maps a function over a mesh: each rank calls it with its shards of the arguments; the results are joined.

    ::

        @tp_ext.spmd(mesh, in_specs=(P(None, "x"), P("x", None)), out_specs=P())
        def matmul(a, b):  # a[:, shard] and b[shard, :]
            return tp_ext.lax.psum(a @ b, "x")

    Inside, tensors are local, and ranks communicate by :func:`tp_ext.lax.psum` and its kin, by the name of an axis. The
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
        in_specs: a :class:`tp_ext.P` for all arguments, or a tuple with an entry for each, in the order of the
            parameters: a call may name them. Keyword-only ones take tensors by the former alone. Arguments that are no
            tensors are passed as they are.
        out_specs: likewise, for the result or a tuple of results.
        check: False: tensors inside are plain, and the caller is responsible for :func:`tp_ext.lax.pvary` and for
            results that are the same on all ranks of axes that their spec does not name.

    Communicates: arguments nothing, backward an all-gather for each axis that shards a full one, and an all-reduce
    for each axis that does not shard one that is used with varying values; results an all-gather for each axis of a
    full one, and first, in eager mode, the shapes of all shards: one small all-gather for each of these axes. Axes of
    one rank are free.

    Raises:
        TypeError: arguments of the wrong type. ValueError: an axis that the mesh does not have; a spec with more dims
            than its tensor; another number of specs than arguments; shards of a result that do not fit together, or
            under ``torch.compile`` differ in length. VaryingValueError: a result varies along an axis
            that its spec does not name; a Python number is read from a value that varies.
    """
    check_type(DeviceMesh, "a DeviceMesh", mesh=mesh)
    if not mesh.mesh_dim_names:
        raise ValueError("mesh: its axes must have names, mesh_dim_names=")
    if mesh.get_coordinate() is None:
        raise ValueError("mesh: this rank must be a member of the mesh")
    check_bool(check=check)
    groups = {name: parallel_group(mesh.get_group(name)) for name in mesh.mesh_dim_names}
    for argument, specs in (("in_specs", in_specs), ("out_specs", out_specs)):
        _check_specs(specs, argument, groups)
    of_results = _axes_of_joined(out_specs)
    # In the order of the mesh and by the specs, so that all ranks exchange over the same axes
    joined_axes = [name for name, group in groups.items() if group.size > 1 and name in of_results]

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        if not callable(function):
            raise TypeError(f"spmd: {type(function).__name__} must be a function")

        @functools.wraps(function)
        def mapped(*args: Any, **keywords: Any) -> Any:
            if keywords:
                args, keywords = by_position(function, args, keywords, one_spec=isinstance(in_specs, P))
            made_uneven()  # what another map has made
            enter = _ArgumentMap(mesh, groups, check)
            local = _map_tensors(enter.tensor, args, in_specs, "in_specs")
            named = _map_tensors(enter.tensor, keywords, in_specs, "in_specs") if isinstance(in_specs, P) else keywords
            with scope_of(groups, check), types_in_force(check):
                result = function(*local, **named)
            leave = _ResultMap(mesh, groups, check, enter.uneven or made_uneven())
            failure, values = None, None
            try:
                _refuse_unknown_structures(result)
                values = _map_tensors(leave.check_axes, result, out_specs, "out_specs")
            except ValueError as error:  # perhaps of this rank's result alone
                failure = error
            leave.exchange_shapes(joined_axes, failure)
            return _map_tensors(leave.tensor, values, out_specs, "out_specs")

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
    for entry in entries:
        _check_specs(entry, argument, groups)


def _axes_of_joined(specs: Specs) -> set[str]:
    """Returns the axes of results that are joined, by the specs, which unlike the results are the same on all ranks."""
    if isinstance(specs, P):
        return set() if specs.form == "local" else set(specs.axes)
    entries = specs.values() if isinstance(specs, dict) else specs or ()
    return {axis for entry in entries for axis in _axes_of_joined(entry)}


def _map_tensors(each: Callable[[Tensor, P, str], Any], values: Any, specs: Specs, where: str) -> Any:
    """Returns the nested values with each tensor replaced by ``each(tensor, spec, where)``."""
    if isinstance(specs, P):
        leaves, structure = tree_flatten(values)
        return tree_unflatten(
            [each(leaf, specs, where) if isinstance(leaf, Tensor) else leaf for leaf in leaves], structure
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
    mapped = [_map_tensors(each, value, spec, f"{where}[{k}]") for k, (value, spec) in pairs]
    make: Callable[..., Any] = getattr(type(values), "_make", type(values))  # of named tuples
    return make(mapped)


def _refuse_unknown_structures(result: Any) -> None:
    """Raises a ValueError for an object that holds tensors, which would leave the map as this rank's shards."""
    for leaf in () if torch.compiler.is_compiling() else tree_leaves(result):
        inside = leaf if isinstance(leaf, set | frozenset) else getattr(leaf, "__dict__", {}).values()
        if not isinstance(leaf, Tensor) and any(isinstance(value, Tensor) for value in inside):
            raise ValueError(
                f"out_specs: a {type(leaf).__name__} with tensors must be a structure that torch.utils._pytree knows, "
                "as lists, dicts, and dataclasses after register_dataclass"
            )


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


class _ArgumentMap(_Map):
    """Shards arguments. ``uneven``: the lengths of shards of an argument are different."""

    uneven = False

    def tensor(self, value: Tensor, spec: P, where: str) -> Any:
        self.check_dims(value, spec, where)
        before, self.uneven, lengths = self.uneven, False, lengths_of([value])
        if isinstance(value, DTensor):
            # Its backward redistributes the gradient, so no region is needed
            placements = self.placements(spec, where)
            sharded = zip(placements, self.groups.values(), strict=True)
            self.uneven = any(isinstance(p, Shard) and value.shape[p.dim] % group.size for p, group in sharded)
            value = value.redistribute(self.mesh, placements).to_local()
            outer: dict[str, str] = {}
        elif spec.form == "dtensor":
            raise TypeError(f"{where}: a {type(value).__name__} must be a DTensor, by {spec}")
        else:
            outer = axes_of(value)
            # Types of this map name its axes: those of maps around it are put back below
            value = plain(value) if self.check else value
            if spec.form == "full":
                value = self._shard(value, spec)
        if self.uneven:
            lengths = f"uneven shards of {where}"
        self.uneven = self.uneven or before
        return typed(value, {**outer, **self.axes(spec)}, lengths) if self.check else value

    def _shard(self, value: Tensor, spec: P) -> Tensor:
        for dim, axes in enumerate(spec.dims):
            for axis in axes:
                group = self.groups[axis]
                if group.size > 1:
                    # Under torch.compile lengths cannot be exchanged, so exchange_shapes refuses results of such shards
                    if value.shape[dim] % group.size:
                        self.uneven = True
                    value = regions.scatter_to(value, group, dim)
        return value


_WIDTH = 18  # entries for each tensor: its dtype, number of dims, and shape
_LINES = 4  # the table of shapes has a multiple of these lines


class _ResultMap(_Map):
    """Joins results, in three steps: :meth:`check_axes` of each, :meth:`exchange_shapes`, :meth:`tensor` of each."""

    def __init__(self, mesh: DeviceMesh, groups: Mapping[str, ParallelGroup], check: bool, uneven: bool) -> None:
        super().__init__(mesh, groups, check)
        self.uneven = uneven
        self.joined: list[tuple[Tensor, P, str]] = []
        self.lengths: deque[dict[str, list[int]] | None] = deque()

    def check_axes(self, value: Tensor, spec: P, where: str) -> Tensor:
        """Returns a result that varies along the axes of its spec and of maps around this one."""
        self.check_dims(value, spec, where)
        if self.check:
            for axis in axes_of(value):
                # Returned as it is, the result would differ between ranks that take it for the same
                if axis in self.groups and axis not in spec.axes:
                    line = f" of {value.line}" if hasattr(value, "line") else ""
                    raise VaryingValueError(
                        f"{where}: {spec} must name axis {axis!r}, along which the result{line} varies; or psum, pmean "
                        f"or all_gather(invariant=True) it over {axis!r} first"
                    )
            value = as_varying(value, self.axes(spec))
        if spec.form != "local" and any(self.groups[axis].size > 1 for axis in spec.axes):
            self.joined.append((value, spec, where))
        return value

    def exchange_shapes(self, axes: Sequence[str], failure: ValueError | None) -> None:
        """Notes the lengths of all shards that are joined. Without it, shards of other lengths on a rank would end the
        process, or join with what is next to them in memory.

        Args:
            axes: those along which the specs join results, if they have several ranks.
            failure: of :meth:`check_axes` on this rank. The others, who would wait for it, learn of it by the exchange.

        Raises:
            ValueError: the failure; shards or results that do not fit together; under torch.compile, shards of
                different lengths.
        """
        alone = torch.compiler.is_compiling() or (
            torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
        )
        # Without an exchange the others learn nothing: traced code and captured graphs cannot read what they exchange
        if failure is not None and (alone or not axes):
            raise failure
        if not axes:
            return
        if alone:
            if self.joined and self.uneven:
                raise ValueError(
                    "spmd: shards must have equal lengths under torch.compile; pad them, or use local ones"
                )
            return
        shapes = [shape_line(plain(value)) for value, _, _ in self.joined]  # whose lengths can be read
        lines = [(failure is not None, len(shapes)), *shapes]
        lines += [()] * (-len(lines) % _LINES)  # a rank with other results must exchange as much
        width = max(_WIDTH, *(len(line) for line in lines))  # the same on ranks with another number of dims
        # NCCL exchanges tensors of the GPU alone
        device = self.joined[0][0].device if self.joined else self.mesh.device_type
        rows = [(*line, *[0] * (width - len(line))) for line in lines]
        table = exchanged_tables(rows, device, [self.groups[name] for name in axes])
        if failure is not None:
            raise failure
        if failed := table[..., 0, 0].nonzero().tolist():
            place = ", ".join(f"{name} = {index}" for name, index in zip(axes, failed[0], strict=True))
            raise ValueError(f"out_specs: the result on the rank at {place} must fit; its own error says why not")
        if len(counts := sorted(set(table[..., 0, 1].flatten().tolist()))) > 1:
            raise ValueError(f"out_specs: the ranks' results must have equally many tensors, and have {counts}")
        self.lengths.extend(
            shard_lengths(table[..., k, :], axes, [self.groups[name].rank for name in axes], spec, where)
            for k, (_, spec, where) in enumerate(self.joined, start=1)
        )

    def tensor(self, value: Tensor, spec: P, where: str) -> Any:
        outer: dict[str, str] = {}
        found = ""
        if self.check:
            # Along the axes of maps around this one the result still varies
            outer = {name: group for name, group in axes_of(value).items() if name not in self.groups}
            found = lengths_of([value])
            value = plain(value)
        lengths = None
        if self.lengths and spec.form != "local" and any(self.groups[axis].size > 1 for axis in spec.axes):
            lengths = self.lengths.popleft()
        if spec.form == "dtensor":
            return self._dtensor(value, spec, where, lengths or {})
        if spec.form == "full":
            value = self._join(value, spec, lengths or {})
        return typed(value, outer, found)

    def _join(self, value: Tensor, spec: P, lengths: Mapping[str, list[int]]) -> Tensor:
        for dim, axes in enumerate(spec.dims):
            for axis in reversed(axes):
                group = self.groups[axis]
                if group.size > 1:
                    # The innermost axis first: its shards are neighbours in the dim
                    value = regions.gather_from(value, group, dim, lengths.get(axis))
        return value

    def _dtensor(self, value: Tensor, spec: P, where: str, lengths: Mapping[str, list[int]]) -> DTensor:
        shape = list(value.shape)
        placements = self.placements(spec, where)
        for dim, axes in enumerate(spec.dims):
            for axis in reversed(axes):
                group = self.groups[axis]
                shape[dim] = sum(lengths[axis]) if axis in lengths else shape[dim] * group.size
        # Given with the shape: from_local would take all shards for as long as this one
        strides = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(
            value.contiguous(), self.mesh, placements, run_check=False, shape=torch.Size(shape), stride=strides
        )
