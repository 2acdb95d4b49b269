"""Dropout with the masks of the unsharded model, for every p and every sharded dim."""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tp_ext import _ops
from tp_ext._checks import check_int, refuse_group
from tp_ext.common_generator import begin_draw
from tp_ext.group import NOT_GIVEN, Group, layer_group, parallel_group
from tp_ext.model.layer_shares import meet_once
from tp_ext.model.module import ParallelModule
from tp_ext.random import draw_seed
from tp_ext.random_scope import draws_by_name, rows_are_listed, rows_seed
from tp_ext.sharding import split_sizes


def _check_p(p: float) -> None:
    if not isinstance(p, int | float) or not 0 <= p <= 1:
        refuse_group(p=p)
        raise ValueError(f"p: {p!r} must be a probability, in [0, 1]: that of dropping an element")


def dropout(
    x: Tensor,
    p: float = 0.5,
    training: bool = True,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    group: Group = NOT_GIVEN,
    dim: int | None = None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Computes y = residual + mask * (x + bias) / (1 - p) in one pass; the mask is a function of a fresh seed and of
    each element's index in the full tensor.

    Args:
        x: ``[.., n]``.
        p: the probability of dropping an element.
        training: if False, nothing is dropped, scaled or drawn from torch's generator; the same for ``p = 0``.
        bias: ``[n]``. residual: the shape of x.
        group: the ranks that hold the other slices.
        dim: the dim of the full tensor of which x is this rank's slice; None: x is replicated, and so is the mask.
        sizes: one length per rank along ``dim``; default all equal to x's.

    Communicates nothing. Saved for backward: the seed.

    Raises:
        ValueError: ``p`` is no probability, or ``sizes`` does not fit x. IndexError: no such ``dim``.
    """
    _check_p(p)
    follows = group is not NOT_GIVEN and not torch.compiler.is_compiling()
    return masked(x, p, training, bias=bias, residual=residual, group=group, dim=dim, sizes=sizes, follows=follows)


def masked(
    x: Tensor,
    p: float,
    training: bool = True,
    *,
    bias: Tensor | None = None,
    residual: Tensor | None = None,
    group: Group = NOT_GIVEN,
    dim: int | None = None,
    sizes: Sequence[int] | None = None,
    follows: bool = False,
) -> Tensor:
    """Computes :func:`dropout`, with the generator of this rank as it is unless ``follows``: then with rank 0's."""
    # Replicated: the slice is the full tensor
    index = (max(x.numel(), 1),) * 2 + (0,)
    if dim is not None:
        if not -x.dim() <= dim < x.dim():
            raise IndexError(f"dim: {dim} must be in [{-x.dim()}, {x.dim()}) for x of {x.dim()} dims")
        span = _span(x, layer_group(group, "dropout"), dim % x.dim(), sizes)
        inner = math.prod(x.shape[dim % x.dim() + 1 :])
        index = max(span.length * inner, 1), span.full * inner, span.start * inner
    if not training or p == 0:
        if bias is None and residual is None:
            return x
        no_seed = torch.zeros((), dtype=torch.int64, device=x.device)  # without a draw from torch's generator
        return _ops.bias_dropout_residual(x, bias, residual, no_seed, 0.0, *index)
    if follows:
        begin_draw((parallel_group(group),), x.device)
    return _ops.bias_dropout_residual(x, bias, residual, draw_seed(x.device), p, *index)


def dropout_slices(x: Tensor, p: float, dim: int, slices: Sequence[slice], full: int) -> Tensor:
    """Computes y = mask * x / (1 - p) of x that is, along ``dim``, the concatenation of slices of a full tensor of
    length ``full`` there, with the mask of :func:`dropout` of that tensor.

    Communicates nothing. Saved for backward: the seed.

    Raises:
        ValueError: ``p`` is no probability.
    """
    _check_p(p)
    seed, inner = draw_seed(x.device), math.prod(x.shape[dim + 1 :])
    shares = x.split([rows.stop - rows.start for rows in slices], dim)
    dropped = [
        _ops.bias_dropout_residual(
            share, None, None, seed, p, max(share.shape[dim] * inner, 1), full * inner, rows.start * inner
        )
        for share, rows in zip(shares, slices, strict=True)
    ]
    return dropped[0] if len(dropped) == 1 else torch.cat(dropped, dim)


class _DimSlice(NamedTuple):
    """This rank's slice of a dim, and the full length of the dim."""

    length: int
    start: int
    full: int


def _span(x: Tensor, group: tuple[str, int, int], dim: int, sizes: Sequence[int] | None) -> _DimSlice:
    _, p, rank = group
    lengths = [x.shape[dim]] * p if sizes is None else list(sizes)
    if len(lengths) != p or lengths[rank] != x.shape[dim]:
        raise ValueError(f"sizes: {lengths} must have one length per rank, {p}, and {x.shape[dim]} at rank {rank}")
    return _DimSlice(lengths[rank], sum(lengths[:rank]), sum(lengths))


def layer_dropout(
    module: ParallelModule,
    x: Tensor,
    p: float,
    *,
    residual: Tensor | None = None,
    dim: int | None = None,
    sizes: Sequence[int] | None = None,
) -> Tensor:
    """Computes :func:`dropout` of a layer's activations over its group, in training: by the layer's name, in
    :func:`tp_ext.random.at`. ``dim`` is 0, the last one, or None."""
    by_name = x.dim() > 0 and draws_by_name(module, x.device)
    if p > 0:
        if not torch.compiler.is_compiling():
            meet_once(module)
        begin_draw((module.tp_group,), torch.device("cpu") if by_name else x.device)
    if p == 0 or not by_name:
        return masked(x, p, residual=residual, group=module.tp_group.name or None, dim=dim, sizes=sizes)
    span = None if dim is None else _span(x, module.tp_group, dim, sizes)
    # Dim 0 counts tokens; else it counts sequences, of which dim 1 are the tokens
    tokens = x.dim() <= 2 or module.sequence_parallel
    per_sequence = rows_are_listed() and not tokens  # rows of tokens, of x [batch, seq, ..]
    if dim == -1 and span is not None:
        each, slices = math.prod(x.shape[1:-1]), _DimSlice(x.shape[0], 0, x.shape[0])
        index = (max(span.length, 1), max(span.full, 1), span.start)
    else:
        slices = span or _DimSlice(x.shape[0], 0, x.shape[0])
        each = x.shape[1] if per_sequence else 1
        inner = max(math.prod(x.shape[2 if per_sequence else 1 :]), 1)
        index = (inner, inner, 0)
    seed = rows_seed(module, x, each, slices.start, slices.full, tokens)
    return _ops.bias_dropout_residual(x, None, residual, seed, p, *index)


class Dropout(ParallelModule):
    """Dropout layer: ``torch.nn.Dropout`` with the unsharded model's masks.

    Args:
        p: the probability of dropping an element.
        group: the tensor-parallel group.
        sequence_parallel: x is ``[tokens_local, ..]``, sharded on dim 0.
        weight_group: accepted as by the other layers; there is no weight. Its ranks have different rows, whose masks
            :func:`tp_ext.random.at` makes those of the whole batch.
        activations: ``"replicated"``: so is the mask, unless ``sequence_parallel``; ``"hidden"``: x is sharded over
            ``group`` on its last dim.
        hidden_size: with ``"hidden"``, the full length of the last dim, if p does not divide it.

    Raises:
        ValueError: ``p`` is out of [0, 1]; ``hidden_size`` without ``activations="hidden"``; x has another share of it.
    """

    has_blocks = True
    _compiled_call_impl = None  # it meets the other ranks where it draws

    def __init__(
        self,
        p: float = 0.5,
        *,
        group: Group = NOT_GIVEN,
        sequence_parallel: bool = False,
        weight_group: Group = None,
        activations: str = "replicated",
        hidden_size: int | None = None,
    ) -> None:
        super().__init__(group, sequence_parallel=sequence_parallel, weight_group=weight_group, activations=activations)
        _check_p(p)
        if hidden_size is not None:
            check_int(least=1, hidden_size=hidden_size)
            if activations != "hidden":
                raise ValueError(f"hidden_size: {hidden_size} must come with activations='hidden'")
        self.p = p
        self.hidden_size = hidden_size

    def forward(self, x: Tensor, residual: Tensor | None = None, total_tokens: int | None = None) -> Tensor:
        """Applies dropout to x.

        Args:
            x: any shape.
            residual: of x's shape; added after dropping, in the same pass.
            total_tokens: under SP, the length of dim 0 over all ranks, if p does not divide it.
        """
        dim, sizes = None, self.token_sizes(total_tokens, x)
        if self.tp_group.size > 1 and self.activations == "hidden":
            dim, sizes = -1, None if self.hidden_size is None else split_sizes(self.hidden_size, self.tp_group.size)
        elif self.tp_group.size > 1 and self.sequence_parallel:
            dim = 0
        if self.training:
            return layer_dropout(self, x, self.p, residual=residual, dim=dim, sizes=sizes)
        group = self.tp_group.name or None
        return dropout(x, self.p, False, residual=residual, group=group, dim=dim, sizes=sizes)

    def extra_repr(self) -> str:
        return f"p={self.p}, {self.parallel_repr().replace('p=', 'ranks=', 1)}"
