"""Attention over a context group, and of one process. C++: csrc/autograd/context_attention.cpp, attention.cpp."""

from collections.abc import Sequence

from torch import Tensor

from tp_ext._ops.binding import direct_operator, operator


@operator
def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    seeds: Tensor | None,
    group: str,
    ring: bool,
    chunks: Sequence[int],
    chunks_per_sequence: int,
    causal: bool,
    scale: float,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    num_heads: int = 0,
    first_head: int = 0,
) -> Tensor:
    """Returns the attention of this rank's queries to the keys of all ranks, of q's shape.

    Args:
        q: ``[batch, tokens_local, heads_local, head_dim]``. k, v: ``[batch, tokens_local, kv_heads_local, head_dim]``.
        seeds: ``[sequences]``, int64, of the dropout masks, or with a first row ``[sequences, 2]``; needed with
            ``dropout``.
        ring: keys and values travel from rank to rank; False: they are gathered.
        chunks: lengths of the chunks of all sequences, one sequence after the other.
        chunks_per_sequence: p, or 2 p; chunk c belongs to rank c, or 2 p - 1 - c for c >= p.
        num_heads, first_head: for the masks: heads of the full layer, and the first one of q.

    Communicates: forward, for each of p - 1 steps one exchange of k and v with the neighbours; backward, two such (of
    k and v, of their gradients). Gathered: an all-gather each way, and in backward a reduce-scatter.
    """


@direct_operator
def attention(q: Tensor, k: Tensor, v: Tensor, scale: float | None = None, causal: bool = False) -> Tensor:
    """Returns ``softmax(scale q k^T) v``: each row of q attends to all keys, or if ``causal`` to those up to its own.

    By ``scaled_dot_product_attention``, except on the CPU where another kernel is faster: for at most 8 rows of fp32,
    fp64 or bf16 where nothing is recorded one that reads keys and values once, and for half types with at most 512 keys
    torch's of fp32, whose result is rounded.

    Args:
        q: ``[batch, heads, rows, width]``; k: ``[batch, kv_heads, keys, width]``; v: ``[batch, kv_heads, keys,
            v_width]``. A KV head serves ``heads / kv_heads`` heads.
        scale: default ``width ** -0.5``.
    """
