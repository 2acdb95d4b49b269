"""Collectives by the name of an axis, for functions that :func:`tp_ext.spmd` maps over a mesh.

================  ==============================  ======================  ===========================================
function          forward                         backward                the result
================  ==============================  ======================  ===========================================
psum              all-reduce                      identity                does not vary along the axis
pmean             all-reduce                      identity, / p           does not vary along the axis
pmax              all-reduce (maximum)            to the largest ones     does not vary along the axis
psum_scatter      reduce-scatter                  all-gather              varies
all_gather        all-gather                      reduce-scatter          varies, see ``invariant``
all_to_all        all-to-all                      all-to-all              varies
ppermute          all-to-all of whole tensors     the inverse             varies
pvary             identity                        all-reduce              varies
================  ==============================  ======================  ===========================================

Those of several axes take a tuple of names. A value that does not vary along an axis is made to vary first (``pvary``),
so ``psum`` of it is p times the value, as in JAX. Axes of one rank are free. Each has the name of its counterpart in
``jax.lax``.
"""

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
import torch.distributed._functional_collectives as funcol
import torch.nn.functional as F
from torch import Tensor

from tp_ext import _ops
from tp_ext.group import ParallelGroup
from tp_ext.mesh_program.partition_spec import Names
from tp_ext.mesh_program.scope import checked, groups_of
from tp_ext.mesh_program.varying import as_varying, axes_of, plain, typed


def axis_size(axis: Names) -> int:
    """Returns the number of ranks of an axis, or the product of several."""
    size = 1
    for group in groups_of(axis, "axis_size").values():
        size *= group.size
    return size


def axis_index(axis: Names, device: torch.device | str | None = None) -> Tensor:
    """Returns this rank's index along an axis, an integer tensor of no dims; of several axes, the first is outermost.

    With ``spmd(check=False)`` and ``int()`` it is a number.
    """
    index, groups = 0, groups_of(axis, "axis_index")
    for group in groups.values():
        index = index * group.size + group.rank
    found = torch.tensor(index, device=device)
    return typed(found, {name: group.name for name, group in groups.items()}) if checked() else found


def pvary(x: Tensor, axis: Names) -> Tensor:
    """Returns x as a value that varies along the axes: y = x; dx = sum over the ranks of dy.

    A checked map does so by itself. Communicates: backward, one all-reduce for each axis, along which x did not vary.
    """
    groups = groups_of(axis, "pvary")
    if checked():
        return as_varying(_tensor(x, "pvary"), {name: group.name for name, group in groups.items()})
    for group in groups.values():
        x = _ops.copy_to_region(x, group.name)
    return x


def psum(x: Any, axis: Names) -> Any:
    """Sums x over the ranks of the axes: y = sum of x; dx = dy.

    x is a tensor, a number, which counts once for each rank, or a nested structure. Communicates: one all-reduce for
    each axis of several ranks.
    """
    if isinstance(x, list | tuple):
        return type(x)(psum(one, axis) for one in x)
    if isinstance(x, dict):
        return {key: psum(one, axis) for key, one in x.items()}
    if isinstance(x, int | float):
        return x * axis_size(axis)
    return _over(x, axis, "psum", _sum, varies=False)


def pmean(x: Tensor, axis: Names) -> Tensor:
    """Returns the mean of x over the ranks of the axes: y = sum of x / p; dx = dy / p.

    Communicates: as :func:`psum`.
    """
    y: Tensor = psum(x, axis) / axis_size(axis)
    return y


def pmax(x: Tensor, axis: Names) -> Tensor:
    """Returns the largest x of the ranks of the axes, element by element. dx is dy where x is the largest; several
    equal ones share it, as in ``torch.amax``.

    Communicates: one all-reduce for each axis of several ranks; backward, one more.
    """
    return _over(x, axis, "pmax", _maximum, varies=False)


def psum_scatter(x: Tensor, axis: Names, dim: int = 0, sizes: Sequence[int] | None = None) -> Tensor:
    """Sums x over the ranks; y is this rank's slice of ``dim`` of the sum; dx = the ranks' dy, concatenated.

    Args:
        sizes: the length of each rank's slice, of one axis; default as ``torch.tensor_split``.

    Communicates: one reduce-scatter for each axis; backward, one all-gather.
    """
    sizes = _sizes(sizes, axis, "psum_scatter")
    return _over(x, axis, "psum_scatter", lambda t, g: _ops.reduce_scatter_region(t, g.name, dim, sizes), varies=True)


def all_gather(
    x: Tensor, axis: Names, dim: int = 0, sizes: Sequence[int] | None = None, *, invariant: bool = False
) -> Tensor:
    """Concatenates the ranks' x along ``dim``.

    Args:
        sizes: the length of each rank's x, of one axis; default all equal to this rank's.
        invariant: False: the result counts as varying, for work that differs between the ranks; dx = this rank's slice
            of the sum of dy. True: it does not vary, for work that is the same on all ranks; dx = this rank's slice of
            dy (``all_gather_invariant`` in JAX).

    Communicates: one all-gather for each axis; backward, one reduce-scatter, or nothing if ``invariant``.
    """
    sizes = _sizes(sizes, axis, "all_gather")
    region = _ops.gather_from_region if invariant else _ops.all_gather_region
    return _over(
        x,
        axis,
        "all_gather",
        lambda t, group: region(t, group.name, dim, sizes),
        varies=not invariant,
        inner_first=True,
    )


def all_to_all(
    x: Tensor,
    axis: str,
    split_dim: int,
    concat_dim: int,
    split_sizes: Sequence[int] | None = None,
    concat_sizes: Sequence[int] | None = None,
) -> Tensor:
    """Sends slice k of ``split_dim`` to rank k; y = the slices from ranks 0, 1, .. concatenated along ``concat_dim``.

    Arguments as :func:`tp_ext.all_to_all_region`. Communicates: one all-to-all; backward, one.
    """
    _one(axis, "all_to_all")
    return _over(
        x,
        axis,
        "all_to_all",
        lambda t, g: _ops.all_to_all_region(t, g.name, split_dim, concat_dim, split_sizes, concat_sizes),
        varies=True,
    )


def ppermute(x: Tensor, axis: str, perm: Sequence[tuple[int, int]]) -> Tensor:
    """Sends x from rank to rank: y is the x of the source; zeros on a rank that is no destination.

    Args:
        x: of one shape on all ranks of the axis.
        perm: pairs of source and destination; no source and no destination twice.

    Communicates: one all-to-all, in which each source sends x once; backward, the inverse.

    Raises:
        ValueError: a rank twice, or one that the axis does not have.
    """
    _one(axis, "ppermute")
    group = groups_of(axis, "ppermute")[axis]
    for k, role in enumerate(("source", "destination")):
        ranks = [pair[k] for pair in perm]
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < group.size for rank in ranks):
            raise ValueError(f"ppermute: perm {list(perm)} must name each {role} once, in 0 .. {group.size - 1}")
    to, source = dict(perm).get(group.rank), {b: a for a, b in perm}.get(group.rank)

    def send(t: Tensor, group: ParallelGroup) -> Tensor:
        # The same operators on all ranks: compilers order collectives by the graph
        n, ranks = t.numel(), range(group.size)
        sent = t.reshape(-1).narrow(0, 0, n if to is not None else 0)
        sizes = [n if rank == to else 0 for rank in ranks], [n if rank == source else 0 for rank in ranks]
        received = _ops.all_to_all_region(sent, group.name, 0, 0, *sizes)
        return F.pad(received, (0, n if source is None else 0)).reshape(t.shape)

    return _over(x, axis, "ppermute", send, varies=True)


def _over(
    x: Tensor,
    axis: Names,
    function: str,
    collective: Callable[[Tensor, ParallelGroup], Tensor],
    *,
    varies: bool,
    inner_first: bool = False,
) -> Tensor:
    """Applies a collective for each axis, the outermost first or last; the result varies along them or not."""
    groups = groups_of(axis, function)
    own = {name: group.name for name, group in groups.items()}
    x = as_varying(_tensor(x, function), own) if checked() else _tensor(x, function)
    axes = {name: group for name, group in axes_of(x).items() if varies or name not in own}
    with torch._C.DisableTorchFunctionSubclass():
        y = plain(x) if checked() else x
        for group in reversed(groups.values()) if inner_first else groups.values():
            if group.size > 1:
                y = collective(y, group)
    return typed(y, axes) if checked() else y


def _tensor(x: object, function: str) -> Tensor:
    if not isinstance(x, Tensor):
        raise TypeError(f"{function}: x, a {type(x).__name__}, must be a tensor")
    return x


def _one(axis: Names, function: str) -> None:
    if not isinstance(axis, str):
        raise TypeError(f"{function}: axis {axis!r} must be the name of one axis")


def _sizes(sizes: Sequence[int] | None, axis: Names, function: str) -> Sequence[int] | None:
    if sizes is not None:
        _one(axis, f"{function} with sizes")
    return sizes


def _sum(x: Tensor, group: ParallelGroup) -> Tensor:
    if x.is_floating_point():
        return _ops.reduce_from_region(x, group.name)
    return _all_reduce(x, "sum", group)


def _all_reduce(x: Tensor, op: str, group: ParallelGroup) -> Tensor:
    name = cast(Any, group.torch_name)  # torch.compile does not follow the group itself
    found: Tensor = funcol.wait_tensor(funcol.all_reduce(x.contiguous(), op, name))
    return found


def _maximum(x: Tensor, group: ParallelGroup) -> Tensor:
    if not torch.compiler.is_compiling():
        y: Tensor = _Maximum.apply(x, group)
        return y
    # torch.compile takes no Function with a jvp: the same derivative by a term that is 0
    y = _all_reduce(x.detach(), "max", group)
    largest = x == y
    share = largest / _all_reduce(largest.to(x.dtype), "sum", group)
    return y + torch.where(x.isfinite(), x - x.detach(), 0) * share


class _Maximum(torch.autograd.Function):
    """The maximum over the ranks. dx = dy / number of the largest, where x is one of them, else 0."""

    @staticmethod
    def forward(x: Tensor, group: ParallelGroup) -> Tensor:
        return _all_reduce(x, "max", group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.group = inputs
        largest = x == output
        ctx.save_for_backward(largest)
        ctx.save_for_forward(largest)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        (largest,) = ctx.saved_tensors
        return dy * (largest / _all_reduce(largest.to(dy.dtype), "sum", ctx.group)), None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, _: None) -> Tensor:
        (largest,) = ctx.saved_tensors
        share = largest / _all_reduce(largest.to(dx.dtype), "sum", ctx.group)
        return _all_reduce(dx * share, "sum", ctx.group)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None], x: Tensor, group: ParallelGroup) -> tuple[Tensor, int | None]:
        return _Maximum.apply(x, group), in_dims[0]
