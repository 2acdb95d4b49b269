"""Scaled dot-product attention over the heads of one rank: torch's fused function, or the formula step by step."""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tp_ext import _ops


class AttentionOptions(NamedTuple):
    """Options of the attention scores, as of :class:`tp_ext.ParallelAttention`.

    Attributes:
        dropout: the probability in this call, 0 in evaluation.
        num_heads: of the full layer, for the masks of dropout; default: the heads of q.
        first_head: the index of q's first head in the full layer.
    """

    causal: bool = True
    scale: float | None = None
    sliding_window: int | None = None
    softcap: float | None = None
    dropout: float = 0.0
    num_heads: int | None = None
    first_head: int = 0


def visible(queries: Tensor, keys: Tensor, causal: bool, sliding_window: int | None) -> Tensor:
    """Returns a mask, True where a query may attend to a key: j <= i if causal, i - w < j < i + w with a window w.

    Args:
        queries, keys: positions i and j, 1-D.

    Returns: ``[queries, keys]``, bool.
    """
    i, j = queries[:, None], keys
    if sliding_window is None:
        return j <= i if causal else torch.ones_like(j <= i)
    seen = j > i - sliding_window
    return seen & (j <= i if causal else j < i + sliding_window)


def restricted(mask: Tensor | None, seen: Tensor) -> Tensor:
    """Returns ``mask``, bool (True: may attend) or added to the scores, restricted to where ``seen`` is True."""
    if mask is None:
        return seen
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(seen.logical_not(), float("-inf"))


def dropout_by_index(weights: Tensor, seed: Tensor, p: float, num_heads: int, first_head: int) -> Tensor:
    """Applies dropout to attention weights, with masks by the index (batch, head of the full layer, query, key).

    Args:
        weights: ``[batch, heads_local, n, n]``.
        seed: 0-d, int64. p: the probability.
        num_heads, first_head: the heads of the full layer, and the index of the first one here.
    """
    per_head = weights.shape[2] * weights.shape[3]
    # At least 1: there may be no weights
    local, full = max(weights.shape[1] * per_head, 1), num_heads * per_head
    return _ops.bias_dropout_residual(weights, None, None, seed, p, local, full, first_head * per_head)


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    options: AttentionOptions,
    *,
    drop: Callable[[Tensor], Tensor] | None = None,
    by_head: bool = False,
) -> Tensor:
    """Computes ``softmax(cap(scale q k^T) + mask) v``, ``cap(s) = softcap tanh(s / softcap)``, of whole sequences.

    Uses torch's fused function where possible; :func:`explicit_attention` with ``softcap`` or ``drop``.

    Args:
        q: ``[batch, heads, n, head_dim]``. k: ``[batch, kv_heads, n, head_dim]``. v: the same, or other features.
        mask: 4-D, broadcastable to ``[batch, heads, n, n]``, bool or of q's dtype. A query without a key gets 0.
        options: ``scale`` is by default ``head_dim ** -0.5``; ``causal`` and ``sliding_window`` are as of
            :func:`visible`; ``dropout`` has torch's masks.
        drop: in place of that, dropout of the weights ``[batch, heads, n, n]``.
        by_head: each row depends on its own query and keys alone, as layers of :func:`tp_ext.tp_invariant` need it.
    """
    causal, scale, sliding_window, softcap, dropout = options[:5]
    _, heads, n, _ = q.shape
    if not heads:
        return of_no_heads(q, k, v, mask)
    # torch's functions would round a row in another way with more queries, keys or threads; dropout keeps the weights
    if by_head and drop is None and q.is_cpu:
        return _ops.block_attention(q, k, v, mask, None, [], causal, scale, sliding_window, softcap)
    gqa = heads != k.shape[1]
    # [Note: a sliding window is computed in blocks of queries]
    window = sliding_window if sliding_window is not None and sliding_window < n else None
    explicit = softcap is not None or drop is not None
    # torch's flash kernels take no mask: causal is given as a flag wherever there is nothing else
    if not explicit and mask is None and window is None:
        if not dropout:
            return _ops.attention(q, k, v, scale, causal)
        return F.scaled_dot_product_attention(q, k, v, None, dropout, causal, scale=scale, enable_gqa=gqa)
    if explicit:
        attend = partial(
            explicit_attention, scale=scale, softcap=softcap, blind=mask is not None, drop=drop, by_head=by_head
        )
    else:
        attend = partial(F.scaled_dot_product_attention, dropout_p=dropout, scale=scale, enable_gqa=gqa)
    # Masks by index need the place in the whole [n, n], which blocks do not have
    if window is not None and drop is None:
        return _by_query_groups(attend, q, k, v, mask, causal, window)
    if causal or window is not None:
        places = torch.arange(n, device=q.device)
        mask = restricted(mask, visible(places, places, causal, window))
    return attend(q, k, v, attn_mask=mask)


def of_no_heads(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
    """Returns the attention of a rank without a share of the heads. It is in the graph, so that its backward meets the
    others in the sums of norms and masks."""
    seen = mask.sum() if mask is not None and mask.requires_grad else 0
    return v + (q.sum() + k.sum() + seen)


def _by_query_groups(
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    causal: bool,
    window: int,
    least: int = 512,
) -> Tensor:
    """Calls ``attend`` for groups of at least ``least`` queries, each with the keys within its window: time and memory
    grow with n (window + group), not with n^2."""
    n, length, outputs = q.shape[2], max(window, least), []
    places = torch.arange(n, device=q.device)
    shared: dict[tuple[int, int, int], Tensor] = {}  # masks of groups with the same relative position
    for start in range(0, n, length):
        stop = min(start + length, n)
        first, last = max(0, start - window + 1), stop if causal else min(n, stop + window - 1)
        # What a mask depends on: the offset of its first query, and its sizes
        alike = (start - first, stop - start, last - first)
        if alike not in shared:
            seen = visible(places[start:stop], places[first:last], causal, window)
            # A mask to be added to the scores, which torch would otherwise make anew in each call
            shared[alike] = seen if mask is not None else q.new_zeros(seen.shape).masked_fill_(~seen, float("-inf"))
        mask_of_block = shared[alike]
        if mask is not None:
            # A dim of length 1 broadcasts and is not cut
            rows = mask if mask.shape[2] == 1 else mask[:, :, start:stop]
            mask_of_block = restricted(rows if mask.shape[3] == 1 else rows[..., first:last], mask_of_block)
        outputs.append(attend(q[:, :, start:stop], k[:, :, first:last], v[:, :, first:last], attn_mask=mask_of_block))
    return outputs[0] if len(outputs) == 1 else torch.cat(outputs, 2)


def explicit_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    attn_mask: Tensor | None,
    *,
    scale: float | None,
    softcap: float | None,
    blind: bool,
    drop: Callable[[Tensor], Tensor] | None = None,
    by_head: bool = False,
) -> Tensor:
    """Computes :func:`attention` step by step; keeps ``[batch, heads, n, m]`` weights for backward.

    Args:
        q: ``[batch, heads, n, head_dim]``. k: ``[batch, kv_heads, m, head_dim]``. v: the same, or other features.
        attn_mask: the complete mask, broadcastable to ``[batch, heads, n, m]``.
        blind: whether some query may attend to no key; it gets 0.
        by_head: computes each head's products on one thread: their bits do not depend on the other heads.
    """
    batch, heads, n, head_dim = q.shape
    if not heads:
        return q.new_empty(batch, 0, n, v.shape[3])
    q, k, v = (t.contiguous() for t in (q, k, v))  # a view of q | k | v would keep all three until backward
    # The query heads of a KV head are rows of one product: no copy of k and v for each
    rows = (batch, k.shape[1], heads * n // k.shape[1])
    multiply = _bmm_by_head if by_head else torch.matmul
    scores = multiply(q.reshape(*rows, head_dim), k.transpose(-1, -2)).view(batch, heads, n, k.shape[2])
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    scores = scores * scale if softcap is None else softcap * torch.tanh(scores * (scale / softcap))
    if attn_mask is not None and attn_mask.dtype == torch.bool:
        scores = scores.masked_fill(attn_mask.logical_not(), float("-inf"))
    elif attn_mask is not None:
        scores = scores + attn_mask
    # torch's softmax of a row without a key is NaN
    if by_head:
        weights = _ops.block_softmax(scores.flatten(0, 1), blind).unflatten(0, scores.shape[:2])
    else:
        softmax = _ops.safe_softmax if blind else torch.softmax
        weights = softmax(scores, -1, dtype=q.dtype)  # computed in fp32, kept in q's dtype
    if drop is not None:
        weights = drop(weights)
    return multiply(weights.view(*rows, k.shape[2]), v).view(batch, heads, n, v.shape[3])


def _bmm_by_head(a: Tensor, b: Tensor) -> Tensor:
    return _ops.block_bmm(a.flatten(0, 1), b.flatten(0, 1)).unflatten(0, a.shape[:2])


def attention_by_kv_head(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float | None) -> Tensor:
    """Computes ``softmax(scale q k^T + mask) v``, the query heads of a KV head as rows of one head: no copy of k and v
    for each, on any backend.

    Args:
        q: ``[batch, heads, n, head_dim]``. k: ``[batch, kv_heads, m, head_dim]``. v: ``[batch, kv_heads, m, v_dim]``.
        mask: the complete one, 4-D, broadcastable to ``[batch, heads, n, m]``, bool or of q's dtype.

    Returns: ``[batch, heads, n, v_dim]``.
    """
    batch, heads, n, head_dim = q.shape
    kv_heads = k.shape[1]
    if not heads:
        return q.new_empty(batch, 0, n, v.shape[3])
    share = heads // kv_heads
    rows = q.reshape(batch, kv_heads, share * n, head_dim)
    # Rows are [share, n], query heads outermost: a mask per head is laid out alike
    if mask is not None and mask.shape[1] > 1:
        mask = mask.expand(-1, -1, n, -1).reshape(mask.shape[0], kv_heads, share * n, mask.shape[3])
    elif mask is not None and mask.shape[2] > 1:
        mask = mask.repeat(1, 1, share, 1)
    if mask is None:
        y = _ops.attention(rows, k, v, scale, False)
    else:
        y = F.scaled_dot_product_attention(rows, k, v, mask, scale=scale)
    return y.reshape(batch, heads, n, v.shape[3])
