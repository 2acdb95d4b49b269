"""Cross-entropy over logits whose vocabulary is sharded over the ranks."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tp_ext import _ops
from tp_ext._checks import check_choice, check_int, check_number
from tp_ext.group import NOT_GIVEN, Group, ParallelGroup, check_place, layer_group, parallel_group
from tp_ext.invariance import (
    blocks_in_shares,
    blocks_of_ranks,
    check_ranks,
    current_blocks,
    refuse_in_blocks,
    units_of_rank,
    using_blocks,
)
from tp_ext.mesh import GRADIENT_REDUCTIONS, DataAxes, data_axes
from tp_ext.model.layer_shares import FirstCall, layer_shares, need_not_meet
from tp_ext.model.same_input import DebugMode, check_same_input
from tp_ext.sharding import split_sizes

REDUCTIONS = ("none", "mean", "sum")


def vocab_parallel_cross_entropy(
    logits_local: Tensor,
    target: Tensor,
    group: Group,
    *,
    vocab_size: int | None = None,
    sizes: Sequence[int] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    inplace_backward: bool = False,
    mean_over: Group | list[Group] = None,
    gradient_reduction: str = "mean",
) -> Tensor:
    """Computes ``F.cross_entropy`` over the full vocabulary, plus ``z_loss * logsumexp(logits)^2``, per row.

    With x the logits of a row, V the vocabulary, t the target, e the smoothing:
    ``(1 - e) (logsumexp(x) - x[t]) + e (logsumexp(x) - sum(x) / V) + z_loss logsumexp(x)^2``.

    :meth:`VocabParallelLMHead.loss` takes group and vocabulary from the head.

    Args:
        logits_local: ``[.., vocab_local]``, this rank's columns: either ``torch.tensor_split`` of ``vocab_size``, or of
            equal width w with p w >= ``vocab_size``, the columns from ``vocab_size`` on being padding; or ``sizes``.
        target: ``[..]``, int64, ids in the full vocabulary, the same on all ranks.
        group: the ranks that hold the other columns.
        vocab_size: V; default p w. It is required if the ranks' widths differ, that is if p does not divide V.
        sizes: the number of columns of each rank, their sum V, where they are others (:func:`tp_ext.shares`).
        ignore_index: rows with this target have no loss and no gradient.
        label_smoothing: e, over the *full* vocabulary.
        z_loss: weight of that term (Chowdhery et al., "PaLM", arXiv:2204.02311); 0 at ignored rows too.
        reduction: ``none`` (the shape of target), ``mean`` over the rows that are not ignored (0 if all are), ``sum``.
        inplace_backward: the gradient overwrites the logits; a second backward is then refused.
        mean_over: the ranks that have other tokens of the same step: a group, several groups that are axes of one mesh,
            or a mesh (:func:`tp_ext.init_mesh`), for its axes ``dp``, ``ep``, ``cp``. The loss is then the mean over
            the rows of all of them that are not ignored, however many each has, and the same number on every rank. It
            is that of one call: microbatches with different numbers of such rows need ``reduction="sum"`` and the count
            of the step.
        gradient_reduction: how data parallelism combines the gradients of these ranks: ``mean`` (DDP, FSDP2) or
            ``sum``. In either case the combined gradient is that of the loss.

    A row that is -inf in every column has no softmax: its loss and its gradient are NaN, as in torch; so are those of a
    row with a NaN or +inf in it. Ignored rows are 0 for any logits.

    Communicates: forward, one all-gather of four numbers per row, and of four more by which the ranks compare their
    widths and vocabularies; with ``mean_over``, one all-reduce of two numbers over each of its axes; backward, nothing.
    Saved for backward: logits and two numbers per row, no softmax.

    Raises:
        ValueError: full logits at p > 1, shapes that do not match, an unknown reduction, a smoothing outside [0, 1];
            ``mean_over`` with another reduction than ``mean``, or a mesh with other axes than :func:`tp_ext.init_mesh`.
            On every rank, after the exchange: widths or ``vocab_size`` that do not form one vocabulary (CPU; a device
            assert on CUDA).
        IndexError: a target outside the vocabulary (CPU; a device assert on CUDA); without ``vocab_size`` after the
            exchange, when all ranks' widths are known.
    """
    resolved = parallel_group(group)
    if logits_local.dim() < 1:
        raise ValueError("logits_local: a 0-d tensor must have a last dim, the vocabulary")
    axes = data_axes(mean_over)
    check_reductions(reduction, axes, gradient_reduction)
    check_loss_numbers(ignore_index, label_smoothing, z_loss)
    blocks = current_blocks()
    refuse_in_blocks(blocks, mean_over=axes.axes or None)
    if DebugMode.on:
        check_same_input("target", target, resolved)
    start, local, full = vocab_columns(logits_local.shape[-1], vocab_size, resolved, sizes=sizes)
    loss = _ops.vocab_parallel_cross_entropy(
        logits_local,
        target,
        resolved.name,
        start,
        local,
        full,
        ignore_index,
        label_smoothing,
        z_loss,
        "sum" if axes.axes else reduction,
        inplace_backward,
        vocab_size is not None or sizes is not None,
        [] if blocks is None else blocks_of_ranks(blocks, resolved.size),
        sizes,
    )
    if not axes.axes:
        return loss
    return global_mean(loss, (target != ignore_index).sum(), axes, gradient_reduction)


def check_loss_numbers(ignore_index: int, label_smoothing: float, z_loss: float) -> None:
    """Raises TypeError unless the arguments are an integer and two numbers; their operator checks the ranges."""
    check_int(ignore_index=ignore_index)
    for name, value in (("label_smoothing", label_smoothing), ("z_loss", z_loss)):
        if not isinstance(value, float):
            check_number(**{name: value})


def check_reductions(reduction: str, axes: DataAxes, gradient_reduction: str) -> None:
    """Raises ValueError unless the three arguments, of which ``mean_over`` gives the axes, fit one another."""
    check_choice(REDUCTIONS, reduction=reduction)
    check_choice(GRADIENT_REDUCTIONS, gradient_reduction=gradient_reduction)
    if axes.axes and reduction != "mean":
        raise ValueError(f"mean_over: must not be given with reduction={reduction!r}, which is no mean")


def global_mean(loss: Tensor, rows: Tensor, data: DataAxes, gradient_reduction: str) -> Tensor:
    """Returns the mean loss per row over the ranks of the axes, from each rank's sum and number of rows."""
    sums = torch.stack([loss.detach().double(), rows.double()])
    for axis in data.axes:
        sums = _ops.reduce_from_region(sums, axis.name)
    count = sums[1].clamp(min=1)
    ranks = data.size if gradient_reduction == "mean" else 1
    # Data parallelism takes the mean of these gradients over its ranks: times their number it is the sum
    weighted = loss * (ranks / count).to(loss.dtype)
    # The value of the mean, the gradient of this rank's terms
    return (sums[0] / count).to(loss.dtype) + (weighted - weighted.detach())


def _check_sizes(sizes: Sequence[int], p: int, vocab_size: int | None) -> None:
    """Raises unless sizes are one number of columns for each of p ranks, which make up the vocabulary."""
    if isinstance(sizes, str) or not isinstance(sizes, Sequence):
        raise TypeError(f"sizes: {sizes!r} must be a list of integers, one for each rank")
    for size in sizes:
        check_int(least=0, sizes=size)
    if len(sizes) != p:
        raise ValueError(f"sizes: {list(sizes)} must have one length per rank, p = {p}")
    if not any(sizes) or vocab_size not in (None, sum(sizes)):
        raise ValueError(f"sizes: {list(sizes)} must sum to vocab_size = {vocab_size}, at least 1")


def vocab_columns(
    width: int,
    vocab_size: int | None,
    group: ParallelGroup,
    name: str = "logits_local",
    dim: str = "columns",
    sizes: Sequence[int] | None = None,
) -> tuple[int, int, int]:
    """Returns the first column, the number of columns without padding and the full vocabulary size, as known locally.

    ``name`` and ``dim`` are those of the tensor that has ``width`` of them, for errors.

    Widths that are wrong on every rank are refused here, on all ranks alike. Widths that may be right on another rank
    are not: the ranks compare widths and sizes when they communicate.
    """
    _, p, rank = group
    blocks = current_blocks()
    if sizes is not None:
        refuse_in_blocks(blocks, sizes=list(sizes))
        _check_sizes(sizes, p, vocab_size)
        if p == 1 and width != sizes[0]:
            raise ValueError(f"{name}: {width} {dim} must be those of sizes, {list(sizes)}")
        return sum(sizes[:rank]), min(width, sizes[rank]), sum(sizes)
    if blocks is not None:
        check_ranks(blocks, p)
        size = width if vocab_size is None and p == 1 else vocab_size
        spans = [] if size is None else [units_of_rank(size, blocks, r, p) for r in range(p)]
        if size is None or spans[rank][1] - spans[rank][0] != width or size < blocks:
            raise ValueError(
                f"{name}: {width} {dim} on rank {rank} must be this rank's blocks of vocab_size = {size} in "
                f"tp_invariant(blocks={blocks}), at p = {p}"
            )
        return spans[rank][0], width, size
    if vocab_size is None:
        return rank * width, width, p * width
    check_int(least=1, vocab_size=vocab_size)
    if vocab_size < p:
        raise ValueError(f"vocab_size: {vocab_size} must be at least the number of ranks, p = {p}")
    sizes = split_sizes(vocab_size, p)
    # Either torch.tensor_split, or below equal widths with padding
    if width == sizes[rank]:
        return sum(sizes[:rank]), width, vocab_size
    if p > 1 and width >= vocab_size:
        raise ValueError(
            f"{name}: {width} {dim} must be this rank's shard of vocab_size = {vocab_size}, "
            f"not the gathered {'logits' if dim == 'columns' else 'rows'}, at p = {p}"
        )
    if p * (width + (p > 1)) < vocab_size:  # widths of one tensor differ by one at most
        raise ValueError(
            f"{name}: {width} {dim} on rank {rank} must be {sizes[rank]}, its share of "
            f"vocab_size = {vocab_size} at p = {p}, or equally many, at least {sizes[0]}, on all ranks"
        )
    start = min(rank * width, vocab_size)
    return start, min(width, vocab_size - start), vocab_size


class VocabParallelCrossEntropy(nn.Module):
    """The module of :func:`vocab_parallel_cross_entropy`: logits ``[.., vocab_local]``, target ``[..]`` -> loss.

    Built in :func:`tp_ext.shares` it takes logits whose columns are shared so, and needs ``vocab_size``.
    """

    _compiled_call_impl: Any = FirstCall()

    def __init__(
        self,
        *,
        group: Group = NOT_GIVEN,
        vocab_size: int | None = None,
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        z_loss: float = 0.0,
        reduction: str = "mean",
        inplace_backward: bool = False,
        mean_over: Group | list[Group] = None,
        gradient_reduction: str = "mean",
    ) -> None:
        super().__init__()
        self.tp_group = layer_group(group, type(self).__name__)
        context = layer_shares(self.tp_group)
        self.shares = None if context is None else context.weights
        if self.shares is not None or self.tp_group.size == 1:
            need_not_meet(self)
        if self.shares is not None and vocab_size is None:
            raise ValueError("vocab_size: None must be the size of the vocabulary in tp_ext.shares")
        if vocab_size is not None:
            check_int(least=1, vocab_size=vocab_size)
        self.sizes = None
        if self.shares is not None and vocab_size is not None:
            self.sizes = split_sizes(vocab_size, self.tp_group.size, self.shares)
        self.vocab_size = vocab_size
        check_loss_numbers(ignore_index, label_smoothing, z_loss)
        self.ignore_index = ignore_index
        self.label_smoothing = label_smoothing
        self.z_loss = z_loss
        self.reduction = reduction
        self.inplace_backward = inplace_backward
        self.mean_over: list[Group] = [axis.name for axis in data_axes(mean_over).axes]
        self.gradient_reduction = gradient_reduction

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        check_place(self.tp_group)

    def forward(self, logits_local: Tensor, target: Tensor) -> Tensor:
        blocks = current_blocks()
        if blocks is None or self.shares is None:
            return self._loss(logits_local, target, self.sizes)
        with using_blocks(blocks_in_shares(blocks, self.shares)):
            return self._loss(logits_local, target, None)

    def _loss(self, logits_local: Tensor, target: Tensor, sizes: list[int] | None) -> Tensor:
        return vocab_parallel_cross_entropy(
            logits_local,
            target,
            self.tp_group.name or None,
            vocab_size=self.vocab_size,
            sizes=sizes,
            ignore_index=self.ignore_index,
            label_smoothing=self.label_smoothing,
            z_loss=self.z_loss,
            reduction=self.reduction,
            inplace_backward=self.inplace_backward,
            mean_over=self.mean_over,
            gradient_reduction=self.gradient_reduction,
        )

    def extra_repr(self) -> str:
        return f"vocab_size={self.vocab_size}, reduction={self.reduction!r}, p={self.tp_group.size}"
