"""Scaled dot-product attention over the heads of one rank: torch's fused function, or the formula step by step."""

import math
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from tp_ext import _ops


def visible(queries: Tensor, keys: Tensor, causal: bool, sliding_window: int | None) -> Tensor:
    """True where a query may attend to a key: j <= i if causal, and i - w < j < i + w with a sliding window w.

    Args:
        queries, keys: positions i and j, 1-D.

    Returns: ``[queries, keys]``, bool.
    """
    i, j = queries[:, None], keys
    if sliding_window is None:
        return j <= i if causal else torch.ones_like(j <= i)
    seen = j > i - sliding_window
    return seen & (j <= i if causal else j < i + sliding_window)


def restricted(mask: Tensor | None, seen: Tensor | None) -> Tensor | None:
    """``mask``, bool (True: may attend) or added to the scores, where ``seen`` is True; nothing elsewhere."""
    if mask is None or seen is None:
        return seen if mask is None else mask
    return mask & seen if mask.dtype == torch.bool else mask.masked_fill(seen.logical_not(), float("-inf"))


def fused_attention(
    q: Tensor, k: Tensor, v: Tensor, *, mask: Tensor | None, causal: bool, scale: float | None, dropout: float = 0.0
) -> Tensor:
    """``softmax(scale q k^T + mask) v`` by torch's ``scaled_dot_product_attention``.

    Args:
        q: ``[batch, heads, n, head_dim]``. k, v: ``[batch, kv_heads, m, head_dim]``.
        mask: broadcastable to ``[batch, heads, n, m]``, bool or of q's dtype; not together with ``causal``.
        scale: default ``head_dim ** -0.5``.
    """
    gqa = q.shape[1] != k.shape[1]
    return F.scaled_dot_product_attention(q, k, v, mask, dropout, causal, scale=scale, enable_gqa=gqa)


def explicit_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None,
    scale: float | None,
    softcap: float | None,
    blind: bool = False,
    drop: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """``drop(softmax(softcap tanh(scale q k^T / softcap) + mask)) v``; keeps ``[batch, heads, n, m]`` for backward.

    Shapes as in :func:`fused_attention`. ``blind``: some query may attend to no key; it gets 0, as from torch's.
    """
    batch, heads, n, head_dim = q.shape
    q, k, v = (t.contiguous() for t in (q, k, v))  # a view of q | k | v would keep all three until backward
    # The query heads of a KV head are rows of one product: no copy of k and v for each
    rows = (batch, k.shape[1], heads * n // k.shape[1])
    scores = (q.reshape(*rows, head_dim) @ k.transpose(-1, -2)).view(batch, heads, n, k.shape[2])
    scale = 1 / math.sqrt(head_dim) if scale is None else scale
    scores = scores * scale if softcap is None else softcap * torch.tanh(scores * (scale / softcap))
    if mask is not None:
        hidden = mask.dtype == torch.bool
        scores = scores.masked_fill(mask.logical_not(), float("-inf")) if hidden else scores + mask
    softmax = _ops.safe_softmax if blind else torch.softmax
    weights = softmax(scores, -1, dtype=q.dtype)  # computed in fp32, kept in q's dtype
    if drop is not None:
        weights = drop(weights)
    return (weights.view(*rows, k.shape[2]) @ v).view(q.shape)
