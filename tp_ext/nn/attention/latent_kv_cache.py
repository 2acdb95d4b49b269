"""Cache of the latents of multi-head latent attention: one narrow row for each token, whatever the number of heads."""

import torch
from torch import Tensor

from tp_ext.model.module import check_positive
from tp_ext.nn.attention.token_cache import TokenCache


class LatentKVCache(TokenCache):
    """Latents and rotated RoPE keys of one :class:`ParallelLatentAttention`, made by ``layer.new_cache(..)``.

    ``latent`` is ``[batch_size, 1, max_seq, kv_lora_rank + qk_rope_head_dim]``: the normalised latent of a token, from
    which the keys and values of all heads are computed, and the key that all heads share. A token takes as many numbers
    as a KV head of that width; every rank of a tensor-parallel group holds the same ones. Prefill, decoding, ``static``
    caches, left padding, :meth:`reset`, :meth:`truncate` and :meth:`reorder` are as with :class:`KVCache`.

    Communicates nothing. A cache holds no gradients: forward with a cache is refused where they are recorded. Its
    buffers are in no state dict.

    Args:
        batch_size, max_seq: number and maximal length of the sequences, prompt and padding included.
        kv_lora_rank, qk_rope_head_dim: of the layer.
        static: see :class:`KVCache`.
        device, dtype: of the layer's latents (under autocast the low precision).

    Raises:
        ValueError: a size that is not positive.
    """

    contents = ("latent",)
    latent: Tensor

    def __init__(
        self,
        batch_size: int,
        max_seq: int,
        kv_lora_rank: int,
        qk_rope_head_dim: int,
        *,
        static: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_positive(kv_lora_rank=kv_lora_rank, qk_rope_head_dim=qk_rope_head_dim)
        sizes = [(1, kv_lora_rank + qk_rope_head_dim)]
        super().__init__(batch_size, max_seq, sizes, static=static, device=device, dtype=dtype)
