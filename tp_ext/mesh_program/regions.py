"""The regions of :mod:`tp_ext._ops` under the transforms of ``torch.func``.

``torch.func.grad`` and its kin refuse Functions in C++. Where one of them is running, a region is a Function in Python
whose backward is the transposed region, a region again, so transforms nest. ``torch.vmap`` and ``torch.func.jvp``
alone, and everything else, call the operator.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._C._functorch import TransformType, get_interpreter_stack

from tp_ext import _ops
from tp_ext.conversions import CONVERSIONS
from tp_ext.group import ParallelGroup

_TRANSPOSED = {region.name: region.conjugate.name for region in CONVERSIONS.values()}
_TRANSPOSED["all_to_all_region"] = "all_to_all_region"


def copy_to(x: Tensor, group: str) -> Tensor:
    """The region ``copy_to_region``."""
    return _region("copy_to_region", x, group)


def reduce_from(x: Tensor, group: str) -> Tensor:
    """The region ``reduce_from_region``."""
    return _region("reduce_from_region", x, group)


def scatter_to(x: Tensor, group: ParallelGroup, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """The region ``scatter_to_region``."""
    return _region("scatter_to_region", x, group.name, (dim,), (sizes or split(x, dim, group),))


def gather_from(x: Tensor, group: ParallelGroup, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """The region ``gather_from_region``."""
    return _region("gather_from_region", x, group.name, (dim,), (sizes or [x.shape[dim]] * group.size,))


def all_gather(x: Tensor, group: ParallelGroup, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """The region ``all_gather_region``."""
    return _region("all_gather_region", x, group.name, (dim,), (sizes or [x.shape[dim]] * group.size,))


def reduce_scatter(x: Tensor, group: ParallelGroup, dim: int, sizes: Sequence[int] | None = None) -> Tensor:
    """The region ``reduce_scatter_region``."""
    return _region("reduce_scatter_region", x, group.name, (dim,), (sizes or split(x, dim, group),))


def all_to_all(
    x: Tensor, group: ParallelGroup, dims: tuple[int, int], sent: Sequence[int] | None, received: Sequence[int] | None
) -> Tensor:
    """The region ``all_to_all_region``; ``dims``: which dim is split, and which is concatenated."""
    sent = sent or split(x, dims[0], group)
    # All ranks have x of one shape, so each sends this one the same length
    if received is None:
        length = sent[group.rank] if dims[0] == dims[1] else x.shape[dims[1]]
        received = [length] * group.size
    return _region("all_to_all_region", x, group.name, dims, (sent, received))


def split(x: Tensor, dim: int, group: ParallelGroup) -> list[int]:
    """Returns the lengths that ``torch.tensor_split`` gives each rank."""
    each, rest = divmod(x.shape[dim], group.size)
    return [each + (rank < rest) for rank in range(group.size)]


def _region(
    name: str, x: Tensor, group: str, dims: tuple[int, ...] = (), sizes: tuple[Sequence[int], ...] = ()
) -> Tensor:
    if x.is_complex():  # backends refuse complex numbers, and all that communicates them in a map comes here
        real = torch.view_as_real(x.resolve_conj())
        return torch.view_as_complex(
            _region(name, real, group, tuple(dim % x.dim() for dim in dims), sizes).contiguous()
        )
    # torch.compile traces the operator itself
    if not torch.compiler.is_compiling() and differentiated():
        y: Tensor = _RegionFunction.apply(x, name, group, dims, sizes)
        return y
    return _call(name, x, group, dims, sizes)


def _call(name: str, x: Tensor, group: str, dims: tuple[int, ...], sizes: tuple[Sequence[int], ...]) -> Tensor:
    y: Tensor = getattr(_ops, name)(x, group, *dims, *sizes)
    return y


def differentiated() -> bool:
    """Returns whether a transform takes gradients. Then ``requires_grad`` speaks of the innermost transform alone."""
    return any(level.key() == TransformType.Grad for level in get_interpreter_stack() or ())


class _RegionFunction(torch.autograd.Function):
    """A region. dx = the transposed region of dy."""

    @staticmethod
    def forward(x: Tensor, name: str, group: str, dims: tuple[int, ...], sizes: tuple[Sequence[int], ...]) -> Tensor:
        y = _region(name, x, group, dims, sizes)
        return y.view_as(y)  # a Function must not return its input

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
        _, *ctx.called = inputs

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None, None, None, None]:
        name, group, dims, sizes = ctx.called
        if name == "all_to_all_region":
            # It is its own transposed with split and concatenated, sent and received exchanged
            dims, sizes = dims[::-1], sizes[::-1]
        return _region(_TRANSPOSED[name], dy, group, dims, sizes), None, None, None, None

    @staticmethod
    def jvp(ctx: Any, dx: Tensor, *_: None) -> Tensor:
        name, group, dims, sizes = ctx.called
        return _region(name, dx, group, dims, sizes)

    @staticmethod
    def vmap(info: Any, in_dims: tuple[Any, ...], x: Tensor, *called: Any) -> tuple[Tensor, int]:
        name, group, dims, sizes = called
        # The batch first, so that all dims of a region are one further
        moved = x.movedim(in_dims[0], 0)
        return _region(name, moved, group, tuple(dim + 1 for dim in dims), sizes), 0
