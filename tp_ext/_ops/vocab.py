"""Embedding and cross entropy over a sharded vocabulary: this rank holds the rows (embedding) or columns (logits)
``[vocab_start, vocab_start + vocab_local)`` of ``vocab_size``; the tensors may have padding after them.

C++: vocab_embedding, vocab_cross_entropy; formulas of the loss: csrc/kernels/vocab_cross_entropy.h.
"""

from collections.abc import Sequence

from torch import Tensor

from tp_ext._ops.binding import Sizes, direct_operator, operator, primitive
from tp_ext._ops.fake_tensors import acc_dtype, like


@direct_operator
def vocab_parallel_embedding(
    ids: Tensor,
    weight: Tensor,
    group: str,
    vocab_start: int,
    vocab_local: int,
    vocab_size: int,
    sequence_parallel: bool = False,
    sizes: Sizes = None,
) -> Tensor:
    """Returns the rows of the full weight, ``[*ids.shape, h]``; under SP this rank's slice of ``[tokens, h]``.

    Args:
        ids: the same on all ranks.
        weight: ``[rows, h]``, rows >= vocab_local.
        sizes: under SP, the ranks' numbers of tokens; default as ``torch.tensor_split``.

    Communicates: forward, one all-reduce of the result, under SP a reduce-scatter; backward, under SP an all-gather.
    """


@primitive("_vocab_embedding_fwd")
def vocab_embedding_fwd(weight: Tensor, ids: Tensor, vocab_start: int, vocab_local: int, vocab_size: int) -> Tensor:
    """Returns this rank's rows, ``[*ids.shape, h]``, zeros for ids of other ranks."""
    return weight.new_empty([*ids.shape, weight.shape[1]])


@primitive("_vocab_embedding_bwd")
def vocab_embedding_bwd(grad: Tensor, ids: Tensor, num_rows: int, vocab_start: int, vocab_local: int) -> Tensor:
    """Returns the gradient of weight, ``[num_rows, h]``: the rows of grad of each id, summed in a fixed order."""
    return grad.new_empty([num_rows, grad.shape[-1]])


@operator
def vocab_parallel_cross_entropy(
    logits: Tensor,
    target: Tensor,
    group: str,
    vocab_start: int,
    vocab_local: int,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    inplace_backward: bool,
    vocab_size_given: bool = True,
    blocks: Sequence[int] = (),
    sizes: Sizes = None,
) -> Tensor:
    """Returns the cross entropy of the full logits, ``target``'s shape or reduced; arguments as
    :func:`tp_ext.vocab_parallel_cross_entropy`.

    Args:
        logits: ``[.., columns]``, columns >= vocab_local.
        vocab_size_given: whether the user gave it; errors of ranks that disagree name it then.
        blocks: how many of :func:`tp_ext.tp_invariant` each rank has, with statistics of their own; empty: one part
            per rank.
        sizes: the number of columns of each rank, where they are others than ``torch.tensor_split`` gives, or equal.

    Communicates: forward, one all-gather of four numbers a row, with ``blocks`` of each block.
    """


@direct_operator
def vocab_parallel_argmax(
    logits: Tensor, group: str, vocab_start: int, vocab_local: int, vocab_size: int, sizes: Sizes = None
) -> Tensor:
    """Returns :func:`tp_ext.vocab_parallel_argmax` of ``[.., columns]``, columns >= vocab_local."""


@direct_operator
def vocab_parallel_sample(
    logits: Tensor,
    group: str,
    vocab_start: int,
    vocab_local: int,
    vocab_size: int,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
    sizes: Sizes = None,
) -> Tensor:
    """Returns :func:`tp_ext.vocab_parallel_sample` of ``[.., columns]``, columns >= vocab_local."""


@operator
def linear_cross_entropy(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    target: Tensor,
    group: str,
    vocab_start: int,
    vocab_local: int,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
    reduction: str,
    sequence_parallel: bool = False,
    sizes: Sizes = None,
    main_grad: Tensor | None = None,
    entropy: bool = False,
    chunk_tokens: int | None = None,
    vocab_size_given: bool = True,
) -> tuple[Tensor, Tensor]:
    """Returns :func:`vocab_parallel_cross_entropy` of ``x weight^T + bias`` and, if ``entropy``, that of each row.

    Args:
        x: ``[.., in]``; under SP this rank's shard of dim 0, and ``target`` has all of it.
        weight, bias: ``[rows, in]`` and ``[rows]``, rows >= vocab_local.
        sizes, main_grad: as in :func:`column_parallel_linear`.
        chunk_tokens: the most rows whose logits exist at a time; default a 24th of them, at least 64.

    Communicates: forward, an all-gather of four numbers a row, and with mean and sum an all-reduce of x (SP: an
    all-gather of x and a reduce-scatter), in chunks; backward, without a reduction, the latter.
    """


@primitive("_vocab_ce_stats")
def vocab_ce_stats(
    logits: Tensor,
    target: Tensor,
    vocab_start: int,
    vocab_local: int,
    vocab_size: int,
    ignore_index: int,
    shard_row: bool = False,
    vocab_size_given: bool = True,
) -> Tensor:
    """Returns four statistics of each row over the local columns, ``[rows, 4]``: maximum, sum of exponentials, logit of
    the target, sum; with ``shard_row`` one row more, which holds this rank's width and vocabulary.
    """
    return logits.new_empty([target.numel() + int(shard_row), 4], dtype=acc_dtype(logits.dtype))


@primitive("_vocab_ce_loss")
def vocab_ce_loss(
    stats: Tensor, target: Tensor, vocab_size: int, ignore_index: int, label_smoothing: float, z_loss: float
) -> tuple[Tensor, Tensor]:
    """Returns loss, ``[rows]``, and lse as a pair of numbers, ``[rows, 2]``, of the ranks' gathered statistics."""
    return stats.new_empty(target.numel()), stats.new_empty([target.numel(), 2])


@primitive("_vocab_ce_bwd")
def vocab_ce_bwd(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    vocab_start: int,
    vocab_local: int,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> Tensor:
    """Returns the gradient of the local logits; grad: that of each row's loss."""
    return like(logits)


@primitive("_vocab_ce_bwd_")
def vocab_ce_bwd_(
    grad: Tensor,
    logits: Tensor,
    target: Tensor,
    lse: Tensor,
    vocab_start: int,
    vocab_local: int,
    vocab_size: int,
    ignore_index: int,
    label_smoothing: float,
    z_loss: float,
) -> None:
    """Overwrites the local logits with their gradient."""


@primitive("_vocab_chunk_logits_")
def vocab_chunk_logits_(logits: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    """Overwrites logits with ``x weight^T + bias``; x: a chunk of tokens, weight: the rows of a vocabulary."""


@primitive("_vocab_chunk_input_grad")
def vocab_chunk_input_grad(dlogits: Tensor, weight: Tensor) -> Tensor:
    """Returns ``dlogits weight``."""
    return dlogits.new_empty(dlogits.shape[0], weight.shape[1])


@primitive("_vocab_chunk_weight_grad_")
def vocab_chunk_weight_grad_(dw: Tensor, dlogits: Tensor, x: Tensor, add: bool) -> None:
    """Overwrites dw with ``dlogits^T x``, or adds it."""
