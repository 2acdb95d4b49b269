"""Cache of the keys and values of an attention layer, so that the next token costs one row instead of all."""

import torch
from torch import Tensor

from tp_ext.model.module import check_positive
from tp_ext.nn.attention.scaled_dot_product import attention, attention_by_kv_head, explicit_attention
from tp_ext.nn.attention.token_cache import TokenCache


class KVCache(TokenCache):
    """Keys and values of this rank's heads of one :class:`ParallelAttention`, made by ``layer.new_cache(..)``.

    ``k`` and ``v`` are ``[batch_size, kv_heads_local, max_seq, head_dim]``, contiguous and allocated once: with the
    tokens next to each other, ``scaled_dot_product_attention`` streams through them. A slot holds one token; a forward
    of n tokens fills the next n slots and attends to all before them. Prefill (any n) and decoding (n = 1, or more in
    speculative decoding) are the same call. Communicates nothing; every rank keeps the same length.

    ``static=False``: the length is an int, attention reads only the filled slots. ``static=True``: it is the 0-d int64
    tensor ``position``, and all slots are read under a mask, so shapes and code are the same at every step: CUDA graphs
    can replay it and ``torch.compile`` compiles it once. ``cache.static = True`` switches, for instance after prefill.

    Prompts of different lengths are padded on the *left*: ``reset(padding=counts)``. Padding is never attended to, and
    positions (RoPE) count from its end, so every sequence gives the same result as alone.

    A sliding window bounds the slots that are read (all of a static cache, under a mask), not those that are kept.

    A cache holds no gradients: forward with a cache is refused where they are recorded. Its buffers are in no state
    dict.

    Args:
        batch_size, max_seq: number and maximal length of the sequences, prompt and padding included.
        num_kv_heads_local, head_dim: of the layer on this rank.
        static: see above.
        device, dtype: of the layer's keys (under autocast the low precision).

    Raises:
        ValueError: a size that is not positive.
    """

    contents = ("k", "v")
    k: Tensor
    v: Tensor

    def __init__(
        self,
        batch_size: int,
        max_seq: int,
        num_kv_heads_local: int,
        head_dim: int,
        *,
        static: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_positive(batch_size=batch_size, max_seq=max_seq, num_kv_heads_local=num_kv_heads_local, head_dim=head_dim)
        sizes = [(num_kv_heads_local, head_dim)] * 2
        super().__init__(batch_size, max_seq, sizes, static=static, device=device, dtype=dtype)

    def append(self, k: Tensor, v: Tensor, slots: Tensor | None = None) -> None:
        """Appends the keys and values of the next n tokens, ``[batch, n, kv_heads_local, head_dim]``.

        ``slots``, of a static cache: where they go, if the caller has computed it.

        Raises:
            TypeError: keys of another dtype than the cache.
        """
        self.write((k, v), slots)

    def attend(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: Tensor | None = None,
        scale: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
    ) -> Tensor:
        """Appends the next n tokens; each attends to itself and the tokens before it, within the window if any.

        Args:
            q: ``[batch, n, heads_local, head_dim]``. k, v: ``[batch, n, kv_heads_local, head_dim]``.
            mask: bool or of q's dtype, 4-D, broadcastable to ``[batch, heads_local, n, keys_after(n)]``.
            scale, sliding_window, softcap: as :class:`ParallelAttention`.

        Returns: ``[batch, n, heads_local, head_dim]``.

        Raises:
            TypeError: keys of another dtype than the cache.
        """
        (keys, values), seen, first = self.extend((k, v), mask, sliding_window)
        q = q.transpose(1, 2)
        if first:
            y = attention(q, keys, values, mask, True, scale, sliding_window, softcap)
        elif softcap is not None:
            blind = mask is not None
            y = explicit_attention(q, keys, values, seen, scale=scale, softcap=softcap, blind=blind)
        else:
            y = attention_by_kv_head(q, keys, values, seen, scale)
        return y.transpose(1, 2)
