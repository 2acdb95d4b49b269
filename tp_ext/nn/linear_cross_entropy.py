"""Cross entropy of a linear's logits over a sharded vocabulary, without the logits."""

from collections.abc import Sequence

from torch import Tensor

from tp_ext import _ops
from tp_ext._checks import check_int
from tp_ext.group import Group, parallel_group
from tp_ext.invariance import refuse_call
from tp_ext.mesh import data_axes
from tp_ext.model.same_input import DebugMode, check_same_input
from tp_ext.nn.loss import (
    check_loss_numbers,
    check_reductions,
    global_mean,
    vocab_columns,
    vocab_parallel_cross_entropy,
)
from tp_ext.sharding import split_sizes


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    target: Tensor,
    group: Group,
    *,
    bias: Tensor | None = None,
    vocab_size: int | None = None,
    sizes: Sequence[int] | None = None,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
    z_loss: float = 0.0,
    reduction: str = "mean",
    mean_over: Group | list[Group] = None,
    gradient_reduction: str = "mean",
    sequence_parallel: bool = False,
    total_tokens: int | None = None,
    token_sizes: Sequence[int] | None = None,
    return_entropy: bool = False,
    chunk_tokens: int | None = None,
    main_grad: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor]:
    """Computes :func:`vocab_parallel_cross_entropy` of the logits ``hidden weight^T + bias``, without keeping them.

    The logits exist for one chunk of tokens at a time. With ``mean`` and ``sum`` forward computes the gradients, too,
    while it has them, and backward scales these by the upstream gradient: three GEMMs, as with the logits. Without a
    reduction, or with entropies, backward computes the logits again: four GEMMs. Half-precision gradients of the weight
    are summed over the chunks in fp32. :meth:`VocabParallelLMHead.loss` passes the head's weight, bias, group and
    vocabulary.

    Args:
        hidden: ``[.., in]``, the same on all ranks; under SP this rank's shard of dim 0.
        weight, bias: this rank's rows of the vocabulary, ``[vocab_local, in]`` and ``[vocab_local]``: either
            ``torch.tensor_split`` of ``vocab_size``, or equally many, those from ``vocab_size`` on being padding.
        target: ``[..]``, int64, ids in the full vocabulary, of all tokens, the same on all ranks.
        group, vocab_size, sizes, ignore_index, label_smoothing, z_loss, reduction, mean_over, gradient_reduction: as
            :func:`vocab_parallel_cross_entropy`.
        sequence_parallel: whether ``hidden`` is sharded along dim 0.
        total_tokens: under SP, the length of dim 0 over all ranks, if p does not divide it.
        token_sizes: under SP, the number of tokens of each rank, if they are not those of ``torch.tensor_split``.
        return_entropy: also returns -sum p log p of each token over the full vocabulary, ``[..]``, in nats, with its
            gradient; 0 at ignored rows.
        chunk_tokens: the most tokens whose logits exist at a time; default: a 22nd of them (with entropies an 88th; in
            half precision on a CPU a 28th, and a 112th), at least 64 (16); in half precision on a CPU with a gradient
            of ``weight`` at least ``in``, up to 256 (64).
        main_grad: as the ``main_grad`` of :class:`ColumnParallelLinear` with ``grad_accumulation_fusion``: the gradient
            of ``weight`` is added to it.

    Range: of fp16, ``mean`` and ``sum`` scale a row's gradient of the sum by 256, in fp16: it overflows beyond
    255, also where the mean would not. ``reduction="none"`` and the loss of logits have the whole range of the type.

    Memory: a chunk's logits, x by chunks under SP, and the gradients; between forward and backward the gradients (of
    ``weight`` in fp32 for half types) with ``mean`` and ``sum``, else ``hidden`` and two numbers per row. A backward
    with ``retain_graph=True``, or with an upstream gradient that is not 1, returns scaled copies.

    Communicates, n tokens in c chunks: forward, all-gathers of four numbers per row, ``16 (n + c) p`` bytes (one of
    ``16 (n + 1) p`` without gradients or reduction), and, if the gradient of ``hidden`` is computed there, the
    all-reduces of its chunks, which overlap the GEMMs of the weight's gradient; under SP all-gathers of the chunks of
    ``hidden`` and reduce-scatters of their gradients. With entropies an all-reduce of one number per row. Backward with
    ``mean`` and ``sum``: nothing; else the all-reduces, under SP also the all-gathers.

    Raises:
        ValueError: shapes that do not match, all rows of the vocabulary at p > 1, and as
            :func:`vocab_parallel_cross_entropy`.
        IndexError: a target outside the vocabulary (CPU; a device assert on CUDA).

    Sources: chunks of tokens with gradients in forward: Hsu et al., "Liger Kernel", arXiv:2410.10989; the loss over a
    sharded vocabulary: Shoeybi et al., "Megatron-LM", arXiv:1909.08053.
    """
    resolved = parallel_group(group)
    axes = data_axes(mean_over)
    check_reductions(reduction, axes, gradient_reduction)
    if weight.dim() != 2:
        raise ValueError(f"weight: shape {tuple(weight.shape)} must have 2 dims, this rank's rows of the vocabulary")
    check_int(least=0, or_none=True, total_tokens=total_tokens)
    check_int(or_none=True, chunk_tokens=chunk_tokens)  # the operator checks its range
    check_loss_numbers(ignore_index, label_smoothing, z_loss)
    # Its chunks of tokens depend on the local vocabulary, too
    refuse_call("linear_cross_entropy", "use VocabParallelLMHead.loss, or vocab_parallel_cross_entropy of the logits")
    if DebugMode.on:
        check_same_input("target", target, resolved)
    start, local, full = vocab_columns(weight.shape[0], vocab_size, resolved, "weight", "rows", sizes)
    if sizes is not None and resolved.size > 1:
        # Of other sizes than the operator knows: by the logits of all tokens
        if return_entropy or chunk_tokens is not None:
            name = "return_entropy" if return_entropy else "chunk_tokens"
            raise ValueError(f"{name}: must not be given with sizes, with which the logits of all tokens are kept")
        if sequence_parallel and token_sizes is None and total_tokens is not None:
            token_sizes = split_sizes(total_tokens, resolved.size)
        where = resolved.name, sequence_parallel, token_sizes, main_grad
        loss: Tensor = vocab_parallel_cross_entropy(
            _ops.column_parallel_linear(hidden, weight, bias, *where),
            target,
            group,
            vocab_size=vocab_size,
            sizes=sizes,
            ignore_index=ignore_index,
            label_smoothing=label_smoothing,
            z_loss=z_loss,
            reduction=reduction,
            mean_over=mean_over,
            gradient_reduction=gradient_reduction,
        )
        return loss
    if sequence_parallel and token_sizes is None and total_tokens is not None and resolved.size > 1:
        token_sizes = split_sizes(total_tokens, resolved.size)
    loss, entropy = _ops.linear_cross_entropy(
        hidden,
        weight,
        bias,
        target,
        resolved.name,
        start,
        local,
        full,
        ignore_index,
        label_smoothing,
        z_loss,
        # The mean over the axes divides by the rows of all of them
        "sum" if axes.axes else reduction,
        sequence_parallel,
        token_sizes if resolved.size > 1 else None,
        main_grad,
        return_entropy,
        chunk_tokens,
        vocab_size is not None or sizes is not None,
    )
    if axes.axes:
        loss = global_mean(loss, (target != ignore_index).sum(), axes, gradient_reduction)
    return (loss, entropy) if return_entropy else loss
