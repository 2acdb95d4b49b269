"""Dropout with the masks of the unsharded model, for every p and every sharded dim."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tp_ext import _ops
from tp_ext.group import NOT_GIVEN, Group, layer_group
from tp_ext.nn.module import ParallelModule, refuse_group
from tp_ext.random import draw_seed


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
    index = (max(x.numel(), 1),) * 2 + (0,)
    if dim is not None:
        if not -x.dim() <= dim < x.dim():
            raise IndexError(f"dim: {dim} must be in [{-x.dim()}, {x.dim()}) for x of {x.dim()} dims")
        index = _index(x, layer_group(group, "dropout"), dim % x.dim(), sizes)
    if not training or p == 0:
        if bias is None and residual is None:
            return x
        no_seed = torch.zeros((), dtype=torch.int64, device=x.device)  # without a draw from torch's generator
        return _ops.bias_dropout_residual(x, bias, residual, no_seed, 0.0, *index)
    return _ops.bias_dropout_residual(x, bias, residual, draw_seed(x.device), p, *index)


def _index(x: Tensor, group: tuple[str, int, int], dim: int, sizes: Sequence[int] | None) -> tuple[int, int, int]:
    """Returns the index of x in the full tensor: local_inner, full_inner and offset of csrc/kernels/philox.h."""
    _, p, rank = group
    lengths = [x.shape[dim]] * p if sizes is None else list(sizes)
    if len(lengths) != p or lengths[rank] != x.shape[dim]:
        raise ValueError(f"sizes: {lengths} must have one length per rank, {p}, and {x.shape[dim]} at rank {rank}")
    inner = math.prod(x.shape[dim + 1 :])
    return max(lengths[rank] * inner, 1), sum(lengths) * inner, sum(lengths[:rank]) * inner


class Dropout(ParallelModule):
    """Dropout layer: ``torch.nn.Dropout`` with the unsharded model's masks.

    Args:
        p: the probability of dropping an element.
        group: the tensor-parallel group.
        sequence_parallel: x is ``[tokens_local, ..]``, sharded on dim 0; else replicated, and so is the mask.

    Raises:
        ValueError: ``p`` is no probability.
    """

    def __init__(self, p: float = 0.5, *, group: Group = NOT_GIVEN, sequence_parallel: bool = False) -> None:
        super().__init__(group, sequence_parallel=sequence_parallel)
        _check_p(p)
        self.p = p

    def forward(self, x: Tensor, residual: Tensor | None = None, total_tokens: int | None = None) -> Tensor:
        """Applies dropout to x.

        Args:
            x: any shape.
            residual: of x's shape; added after dropping, in the same pass.
            total_tokens: under SP, the length of dim 0 over all ranks, if p does not divide it.
        """
        name, size, _ = self.tp_group
        sharded = self.sequence_parallel and size > 1
        return dropout(
            x,
            self.p,
            self.training,
            residual=residual,
            group=name or None,
            dim=0 if sharded else None,
            sizes=self.token_sizes(total_tokens),
        )

    def extra_repr(self) -> str:
        return f"p={self.p}, {self.parallel_repr().replace('p=', 'ranks=', 1)}"
