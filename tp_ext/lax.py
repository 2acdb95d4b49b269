"""Collectives by the name of an axis, as ``jax.lax`` has, for functions that :func:`tp_ext.spmd` maps over a mesh.

================  ==============================  ======================  ===========================================
function          forward                         backward                the result
================  ==============================  ======================  ===========================================
psum              all-reduce                      identity                does not vary along the axis
pmean             all-reduce                      identity, / p           does not vary along the axis
pmax, pmin        all-reduce (maximum, minimum)   to the largest ones     does not vary along the axis
psum_scatter      reduce-scatter                  all-gather              varies
all_gather        all-gather                      reduce-scatter          varies, see ``invariant``
all_to_all        all-to-all                      all-to-all              varies
ppermute          all-to-all of whole tensors     the inverse             varies
pvary             identity                        all-reduce              varies
================  ==============================  ======================  ===========================================

``axis`` is a name or a tuple of names, whose ranks count with the first as the outermost. x is a tensor or a nested
structure of tensors. A value that does not vary along an axis is made to vary first (``pvary``), so ``psum`` of it is p
times the value, as in JAX. Axes of one rank are free. Each has the name of its counterpart in ``jax.lax``.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import numpy as np
import torch
import torch.distributed._functional_collectives as funcol
from torch import Tensor
from torch.utils._pytree import tree_map

from tp_ext._checks import check_int
from tp_ext.group import ParallelGroup
from tp_ext.invariance import refuse_call
from tp_ext.mesh_program import regions
from tp_ext.mesh_program.partition_spec import Names
from tp_ext.mesh_program.permutation import Pairs, check_permutation, exchanged, permuted
from tp_ext.mesh_program.scope import checked, groups_of, made_uneven, note_uneven
from tp_ext.mesh_program.uneven import lengths_by_group
from tp_ext.mesh_program.varying import as_varying, axes_of, lengths_of, plain, refuse_write, typed

__all__ = [
    "all_gather",
    "all_to_all",
    "axis_index",
    "axis_random",
    "axis_size",
    "pmax",
    "pmean",
    "pmin",
    "ppermute",
    "psum",
    "psum_scatter",
    "pvary",
]


def axis_size(axis: Names) -> int:
    """Returns the number of ranks of an axis, or the product of several."""
    return axis_size_of(axis, "axis_size")


def axis_size_of(axis: Names, function: str) -> int:
    """Returns the number of ranks of the axes, for a function that errors name."""
    return math.prod([group.size for group in groups_of(axis, function).values()])


def axis_index(axis: Names, device: torch.device | str | None = None) -> Tensor:
    """Returns this rank's index along an axis, an integer tensor of no dims; of several axes, the first is outermost.

    With ``spmd(check=False)`` and ``int()`` it is a number.
    """
    index, groups = 0, groups_of(axis, "axis_index")
    for group in groups.values():
        index = index * group.size + group.rank
    value = torch.tensor(index, device=device)
    return typed(value, {name: group.name for name, group in groups.items()}) if checked() else value


def pvary(x: Any, axis: Names) -> Any:
    """Returns a copy of x that varies along the axes: y = x; dx = sum over the ranks of dy.

    A checked map does so by itself where a value meets one that varies. Communicates: backward, one all-reduce for each
    axis, along which x did not vary.
    """
    groups = groups_of(axis, "pvary")
    groups_by_axis = {name: group.name for name, group in groups.items()}

    def varying(x: Tensor) -> Tensor:
        if checked():
            missing = any(name not in axes_of(x) for name in groups_by_axis)
            # a copy: what is written to it must not reach the value that does not vary
            return as_varying(x.clone() if missing else x, groups_by_axis)
        for group in groups.values():
            x = regions.copy_to(x, group.name)
        return x

    return _each(varying, x, "pvary")


def psum(x: Any, axis: Names) -> Any:
    """Sums x over the ranks of the axes: y = sum of x; dx = dy. Booleans are counted, in int64.

    A number counts once for each rank. Communicates: one all-reduce for each axis of several ranks.
    """
    refuse_call("psum", "leave the context for it")
    size = axis_size_of(axis, "psum")
    return _each(lambda t: _over(_counted(t), axis, "psum", _sum, varies=False), x, "psum", number=lambda n: n * size)


def pmean(x: Any, axis: Names) -> Any:
    """Returns the mean of x over the ranks of the axes: y = sum of x / p; dx = dy / p. Of booleans, the fraction that
    is True.

    Communicates: as :func:`psum`.
    """
    refuse_call("pmean", "leave the context for it")
    size = axis_size_of(axis, "pmean")
    return _each(
        lambda t: _over(_counted(t), axis, "pmean", _sum, varies=False) / size, x, "pmean", number=lambda n: n / 1
    )


def pmax(x: Any, axis: Names) -> Any:
    """Returns the largest x of the ranks of the axes, element by element. dx is dy where x is the largest; several
    equal ones share it, as in ``torch.amax``. A NaN is the largest over ``tp_shm``; gloo may lose it.

    Communicates: one all-reduce for each axis of several ranks; backward, one more.
    """
    return _each(
        lambda t: _over(_ordered(t, "pmax"), axis, "pmax", _maximum, varies=False), x, "pmax", number=lambda n: n
    )


def pmin(x: Any, axis: Names) -> Any:
    """Returns the smallest x of the ranks of the axes, element by element; gradients as :func:`pmax`.

    Communicates: as :func:`pmax`.
    """
    return _each(
        lambda t: _over(_ordered(t, "pmin"), axis, "pmin", _minimum, varies=False), x, "pmin", number=lambda n: n
    )


def psum_scatter(x: Any, axis: Names, dim: int = 0, sizes: Sequence[int] | None = None) -> Any:
    """Sums x over the ranks; y is this rank's slice of ``dim`` of the sum; dx = the ranks' dy, concatenated. Booleans
    are counted, in int64.

    Args:
        sizes: the length of each rank's slice, of one axis; default as ``torch.tensor_split``.

    Communicates: one reduce-scatter for each axis; backward, one all-gather.
    """
    refuse_call("psum_scatter", "leave the context for it")
    sizes = _sizes(sizes, axis, "psum_scatter")

    def scatter(t: Tensor, group: ParallelGroup, dim: int) -> Tensor:
        note_uneven(sizes or regions.split(t, dim, group))
        return regions.reduce_scatter(t, group, dim, sizes)

    return _each(
        lambda t: _over(_counted(t), axis, "psum_scatter", scatter, _dim(t, dim, "psum_scatter"), varies=True),
        x,
        "psum_scatter",
    )


def all_gather(
    x: Any, axis: Names, dim: int = 0, sizes: Sequence[int] | None = None, *, invariant: bool = False
) -> Any:
    """Concatenates the ranks' x along ``dim``.

    Args:
        sizes: the length of each rank's x, of one axis; default: all equal, or of uneven shards those that ranks tell.
        invariant: False: the result counts as varying, for work that differs between the ranks; dx = this rank's slice
            of the sum of dy. True: it does not vary, for work that is the same on all ranks; dx = this rank's slice of
            dy (``all_gather_invariant`` in JAX).

    Communicates: one all-gather for each axis; backward, one reduce-scatter, or nothing if ``invariant``.
    """
    sizes = _sizes(sizes, axis, "all_gather")
    region = regions.gather_from if invariant else regions.all_gather

    def each(t: Tensor) -> Tensor:
        joined = _dim(t, dim, "all_gather")
        lengths = {} if sizes else lengths_by_group(t, groups_of(axis, "all_gather"), "all_gather", joined)

        def gather(t: Tensor, group: ParallelGroup) -> Tensor:
            return region(t, group, joined, sizes or lengths.get(group.name))

        return _over(t, axis, "all_gather", gather, varies=not invariant, inner_first=True)

    return _each(each, x, "all_gather")


def all_to_all(
    x: Any,
    axis: Names,
    split_dim: int,
    concat_dim: int,
    split_sizes: Sequence[int] | None = None,
    concat_sizes: Sequence[int] | None = None,
) -> Any:
    """Sends slice k of ``split_dim`` to rank k; y = the slices from ranks 0, 1, .. concatenated along ``concat_dim``.

    Arguments as :func:`tp_ext.all_to_all_region`; over several axes the slices are of one length. Communicates: one
    all-to-all for each axis; backward, as many.

    Raises:
        ValueError: several axes, whose number of ranks does not divide ``split_dim``.
    """
    groups = list(groups_of(axis, "all_to_all").values())
    sizes = _sizes(split_sizes, axis, "all_to_all"), _sizes(concat_sizes, axis, "all_to_all")
    ranks = axis_size(axis)

    def exchange(t: Tensor, split_dim: int, concat_dim: int) -> Tensor:
        if len(groups) > 1:
            if t.shape[split_dim] % ranks:
                raise ValueError(
                    f"all_to_all: the {ranks} ranks of axes {axis!r} must divide dim {split_dim}, {t.shape[split_dim]}"
                )
            return exchanged(t, groups, split_dim, concat_dim)
        for lengths in (sizes[0] or regions.split(t, split_dim, groups[0]), *filter(None, sizes[1:])):
            note_uneven(lengths)
        return regions.all_to_all(t, groups[0], (split_dim, concat_dim), *sizes) if ranks > 1 else t

    def each(t: Tensor) -> Tensor:
        dims = _dim(t, split_dim, "all_to_all", "split_dim"), _dim(t, concat_dim, "all_to_all", "concat_dim")
        return _at_once(t, axis, "all_to_all", lambda t: exchange(t, *dims), alike=not sizes[1])

    return _each(each, x, "all_to_all")


def ppermute(x: Any, axis: Names, perm: Pairs) -> Any:
    """Sends x from rank to rank: y is the x of the source; zeros on a rank that is no destination.

    Args:
        x: of one shape on all ranks of the axes.
        perm: pairs of source and destination, ranks of the axis, or of several as :func:`axis_index` counts them; no
            source and no destination twice.

    Communicates: one all-to-all for each axis of several ranks, in which a rank sends a tensor once; backward, the
    inverse.

    Raises:
        TypeError: no pairs of integers. ValueError: a rank twice, or one that the axes do not have.
    """
    pairs = check_permutation(perm, axis_size_of(axis, "ppermute"))
    groups = list(groups_of(axis, "ppermute").values())
    return _each(lambda t: _at_once(t, axis, "ppermute", lambda t: permuted(t, groups, pairs)), x, "ppermute")


def _each(function: Callable[[Tensor], Tensor], x: Any, name: str, number: Callable[[Any], Any] | None = None) -> Any:
    """Applies a function to the tensors, and perhaps the numbers, of a nested structure."""

    def convert(leaf: object) -> Any:
        if isinstance(leaf, Tensor):
            return function(leaf)
        if number is not None and isinstance(leaf, int | float | complex):
            return number(leaf)
        raise TypeError(f"{name}: x, a {type(leaf).__name__}, must be a tensor")

    return tree_map(convert, x)


def _over(
    x: Tensor,
    axis: Names,
    function: str,
    collective: Callable[..., Tensor],
    *dims: int,
    varies: bool,
    inner_first: bool = False,
) -> Tensor:
    """Applies a collective for each axis, the outermost first or last; the result varies along them or not."""
    groups = list(groups_of(axis, function).values())

    def all_axes(y: Tensor) -> Tensor:
        for group in reversed(groups) if inner_first else groups:
            if group.size > 1:
                y = collective(y, group, *dims)
        return y

    return _at_once(x, axis, function, all_axes, varies=varies, alike=not inner_first)


def _at_once(
    x: Tensor,
    axis: Names,
    function: str,
    collective: Callable[[Tensor], Tensor],
    varies: bool = True,
    alike: bool = True,
) -> Tensor:
    """Applies a function that communicates over all axes to x, plain; ``alike``: of one shape on all ranks."""
    if alike:
        lengths_by_group(x, groups_of(axis, function), function, None)
    groups = {name: group.name for name, group in groups_of(axis, function).items()}
    x = as_varying(x, groups) if checked() else x
    axes = {name: group for name, group in axes_of(x).items() if varies or name not in groups}
    before = made_uneven()
    with torch._C.DisableTorchFunctionSubclass():
        y = collective(plain(x) if checked() else x)
    lengths = lengths_of([x])
    if made_uneven():
        lengths = lengths or f"uneven slices of {function}"
        before = True
    if before:
        note_uneven((0, 1))
    return typed(y, axes, lengths) if checked() else y


def _dim(x: Tensor, dim: int, function: str, name: str = "dim") -> int:
    check_int(**{f"{function}: {name}": cast(Any, dim)})
    if not -x.dim() <= dim < x.dim():
        raise IndexError(f"{function}: {name}: {dim} must be in [{-x.dim()}, {x.dim()}) for shape {tuple(x.shape)}")
    return dim % x.dim()


def _sizes(sizes: Sequence[int] | None, axis: Names, function: str) -> Sequence[int] | None:
    if sizes is not None and not isinstance(axis, str):
        raise TypeError(f"{function} with sizes: axis {axis!r} must be the name of one axis")
    if not isinstance(sizes, list | tuple | None):
        raise TypeError(f"{function}: sizes {sizes!r} must be a list of integers")
    for size in sizes or ():
        check_int(least=0, **{f"{function}: sizes": cast(Any, size)})
    return sizes


def _counted(x: Tensor) -> Tensor:
    return x.long() if x.dtype == torch.bool else x  # a sum of booleans on the wire is a logical or


def _ordered(x: Tensor, function: str) -> Tensor:
    if x.is_complex():
        raise TypeError(f"{function}: x, of dtype {x.dtype}, must have an order")
    return x


def _sum(x: Tensor, group: ParallelGroup) -> Tensor:
    if x.is_floating_point() or x.is_complex():
        return regions.reduce_from(x, group.name)
    return _all_reduce(x, "sum", group)


def _all_reduce(x: Tensor, op: str, group: ParallelGroup) -> Tensor:
    name = cast(Any, group.torch_name)  # torch.compile does not follow the group itself
    reduced: Tensor = funcol.wait_tensor(funcol.all_reduce(x.contiguous(), op, name))
    return reduced


def _minimum(x: Tensor, group: ParallelGroup) -> Tensor:
    if x.dtype == torch.bool:
        return ~_maximum(~x, group)
    if not x.is_floating_point():
        return _all_reduce(x, "min", group)  # the smallest integer has no negative
    return -_maximum(-x, group)


def _maximum(x: Tensor, group: ParallelGroup) -> Tensor:
    if x.dtype == torch.bool:
        return _all_reduce(x.byte(), "max", group).bool()
    if not torch.compiler.is_compiling():
        y: Tensor = _Maximum.apply(x, group)
        return y
    # torch.compile takes no Function with a jvp: the same derivative by a term that is 0
    y = _all_reduce(x.detach(), "max", group)
    return y + torch.where(x.isfinite(), x - x.detach(), 0) * _share(x.detach(), y, group)


def _share(x: Tensor, y: Tensor, group: ParallelGroup) -> Tensor:
    largest = (x == y).to(x.dtype)
    return largest / regions.reduce_from(largest, group.name)


class _Maximum(torch.autograd.Function):
    """The maximum over the ranks. dx = dy / number of the largest, where x is one of them, else 0."""

    @staticmethod
    def forward(x: Tensor, group: ParallelGroup) -> Tensor:
        return _all_reduce(x, "max", group)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        x, ctx.group = inputs
        ctx.save_for_backward(x, output)
        ctx.save_for_forward(x, output)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        # dy does not vary, the share does: a derivative of this is a sum over the ranks
        return regions.copy_to(dy, ctx.group.name) * _share_of_saved(ctx), None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, _: None) -> Tensor:
        return regions.reduce_from(dx * _share_of_saved(ctx), ctx.group.name)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[int | None, None], x: Tensor, group: ParallelGroup) -> tuple[Tensor, int | None]:
        return _Maximum.apply(x, group), in_dims[0]


def _share_of_saved(ctx: Any) -> Tensor:
    x, y = ctx.saved_tensors
    return _share(x.detach(), y.detach(), ctx.group)


def axis_random(axis: Names, seed: int | Sequence[int], device: torch.device | str | None = None) -> Callable[..., Any]:
    """Returns a function that draws random numbers of this rank's own along the axes.

    ::

        draw = tp_ext.lax.axis_random("x", seed=(0, step))
        noise = draw(torch.randn, 4, 3)
        kept = draw(torch.bernoulli, probabilities)

    ``draw(function, ..)`` calls a function of torch that takes a ``generator``; its seed is made from ``seed`` and the
    rank's :func:`axis_index` (``jax.random.fold_in``). The result varies along the axes. Along other axes the numbers
    are the same, and so they are for the same seed: vary it with the step and the layer.

    Args:
        seed: an integer from 0 on, or several: the same on all ranks.
        device: of the numbers.

    Communicates: nothing.

    Raises:
        TypeError, ValueError: seed is no integer from 0 on; no map has the axis.
    """
    seeds = (seed,) if isinstance(seed, int) else tuple(seed) if isinstance(seed, list | tuple) else (None,)
    if not all(isinstance(integer, int) and not isinstance(integer, bool) for integer in seeds):
        raise TypeError(f"axis_random: seed {seed!r} must be an integer or a sequence of them")
    if any(integer < 0 for integer in seeds):
        raise ValueError(f"axis_random: seed {seed!r} must not be negative")
    groups = groups_of(axis, "axis_random")
    index = 0
    for group in groups.values():
        index = index * group.size + group.rank
    words = np.random.SeedSequence([*seeds, index]).generate_state(2, np.uint32)
    generator = torch.Generator(device or torch.get_default_device())
    generator.manual_seed(int(words[0]) << 31 | int(words[1]) >> 1)
    axes = {name: group.name for name, group in groups.items()} if checked() else {}

    def draw(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if device is not None and not any(isinstance(leaf, torch.Tensor) for leaf in args):
            kwargs.setdefault("device", device)
        refuse_write(function, args, kwargs, axes)
        drawn = function(*args, generator=generator, **kwargs)
        return tree_map(lambda leaf: typed(leaf, {**axes_of(leaf), **axes}), drawn)

    return draw
