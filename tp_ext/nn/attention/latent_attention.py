"""Multi-head latent attention (MLA) with its heads sharded over the ranks.

DeepSeek-AI, "DeepSeek-V2" (arXiv:2405.04434), section 2.1; "DeepSeek-V3" (arXiv:2412.19437), section 2.1.1.
"""

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from tp_ext import _ops
from tp_ext._checks import check_int, check_number
from tp_ext.group import NOT_GIVEN, Group
from tp_ext.invariance import check_rows_of_cache, refuse_in_blocks
from tp_ext.nn.attention.kv_cache import LatentKVCache
from tp_ext.nn.attention.rotary import RotaryEmbedding
from tp_ext.nn.attention.scaled_dot_product import attention_by_kv_head
from tp_ext.nn.attention.self_attention import KVHeadsInBlocks, SelfAttention
from tp_ext.nn.float8 import Float8
from tp_ext.nn.forms import Dense, local_linear
from tp_ext.nn.linear import ColumnParallelLinear, RowParallelLinear, into_norm
from tp_ext.nn.norm import LayerNorm, RMSNorm
from tp_ext.nn.replicated_linear import ReplicatedLinear
from tp_ext.random import Init
from tp_ext.sharding import head_parts


class ParallelLatentAttention(SelfAttention):
    """Multi-head latent attention: keys and values of all heads are linear in a narrow latent of each token.

    With the latent c of a token, of width ``kv_lora_rank``, and the query's latent of width ``q_lora_rank``::

        c | k_rope = x W_kv_a^T                              c = RMSNorm(c)
        k_nope | v = c W_kv_b^T  per head                    k = k_nope | RoPE(k_rope), the same k_rope for all heads
        q_nope | q_rope = RMSNorm(x W_q_a^T) W_q_b^T         q = q_nope | RoPE(q_rope)
        y = concatenation over the heads of softmax(scale q k^T + mask) v, times W_o^T

    The projections to the latents and the norms are replicated, those from the latents are column linears of whole
    heads, and W_o is a row linear. A latent enters the sharded heads through a region, as does the RoPE key, whose
    gradient is summed over the heads of all ranks. So the gradient of every parameter is complete when ``backward()``
    returns.

    Shapes: x ``[batch, seq, hidden]``, or ``[tokens, hidden]`` with ``batch_size=`` or ``cu_seqlens=`` (SP:
    ``[tokens_local, hidden]``, always with one of them) -> y of x's shape. The parameters have the names, and in
    ``full_state_dict`` the shapes and rows, of DeepSeek's checkpoints and of ``transformers``:

    ==========================================  =================================================  ===================
    name                                        full shape                                         sharded by heads
    ==========================================  =================================================  ===================
    ``q_a_proj``, ``q_a_layernorm``             ``[q_lora_rank, hidden]``, ``[q_lora_rank]``       replicated
    ``q_b_proj``; without q_lora_rank           ``[heads (nope + rope), q_lora_rank]``; with       dim 0
    ``q_proj``                                  ``hidden`` columns
    ``kv_a_proj_with_mqa``                      ``[kv_lora_rank + rope, hidden]``                  replicated
    ``kv_a_layernorm``                          ``[kv_lora_rank]``                                 replicated
    ``kv_b_proj``                               ``[heads (nope + v), kv_lora_rank]``               dim 0
    ``o_proj``                                  ``[hidden, heads v]``                              dim 1
    ==========================================  =================================================  ===================

    Communicates: forward, one all-reduce of y; backward, one of the gradients of each: the query's latent (x without
    ``q_lora_rank``), the latent, the RoPE key. Per token these are q_lora_rank + kv_lora_rank + rope numbers, instead
    of ``hidden``. SP: the latents of this rank's tokens are computed here, and they are all-gathered, not x: forward,
    an all-gather of each of the three and the reduce-scatter of y; backward, the all-gather of dy, a reduce-scatter
    of each of the three, an all-gather of both latents, and an all-reduce of the gradient of each replicated parameter
    (``hidden (q_lora_rank + kv_lora_rank + rope)`` numbers and the norms).

    Args:
        hidden_size, num_heads: of the full block; any number of heads of at least p.
        kv_lora_rank, q_lora_rank: widths of the latents; without ``q_lora_rank`` q is one column linear of x
            (DeepSeek-V2-Lite).
        qk_nope_head_dim, qk_rope_head_dim: features of a head of q and k without and with positions.
        v_head_dim: features of a head of v.
        bias: in ``q_a_proj``, ``kv_a_proj_with_mqa`` and ``o_proj``, as ``attention_bias`` of ``transformers``.
        norm_eps: of both norms.
        causal: a token attends to itself and the tokens before it.
        rope: a :class:`RotaryEmbedding` of ``qk_rope_head_dim`` features, or its base, then interleaved as DeepSeek's;
            None: no positions, k_rope is one more part of the key.
        scale: factor of the scores; default ``(nope + rope) ** -0.5``, times ``(0.1 m ln(factor) + 1)^2`` if the
            scaling of ``rope`` has m = ``mscale_all_dim``, as DeepSeek's.
        dropout: probability of dropping an attention weight.
        exact_dropout: as :class:`ParallelAttention`.
        group, sequence_parallel, grad_accumulation_fusion, overlap_chunks, float8, init: as
            :class:`ColumnParallelLinear`; ``float8`` is of the sharded linears.

    Raises:
        ValueError: fewer heads than ranks; sizes that are not positive, or do not fit ``rope``.
    """

    has_blocks = True

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        kv_lora_rank: int,
        q_lora_rank: int | None = None,
        qk_nope_head_dim: int,
        qk_rope_head_dim: int,
        v_head_dim: int,
        bias: bool = False,
        norm_eps: float = 1e-6,
        causal: bool = True,
        rope: RotaryEmbedding | float | None = 10000.0,
        scale: float | None = None,
        dropout: float = 0.0,
        exact_dropout: bool = True,
        group: Group = NOT_GIVEN,
        sequence_parallel: bool = False,
        grad_accumulation_fusion: bool = False,
        overlap_chunks: int = 1,
        float8: Float8 | None = None,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_int(least=1, hidden_size=hidden_size, num_heads=num_heads, kv_lora_rank=kv_lora_rank)
        check_int(least=1, v_head_dim=v_head_dim, qk_nope_head_dim=qk_nope_head_dim, qk_rope_head_dim=qk_rope_head_dim)
        check_int(least=1, or_none=True, q_lora_rank=q_lora_rank)
        check_number(norm_eps=norm_eps)
        if norm_eps < 0:
            raise ValueError(f"norm_eps: {norm_eps!r} must be at least 0")
        if isinstance(rope, int | float) and not isinstance(rope, bool):
            # DeepSeek's weights are laid out for neighbouring pairs
            rope = RotaryEmbedding(qk_rope_head_dim, base=rope, interleaved=True)
        if rope is not None and (not isinstance(rope, RotaryEmbedding) or rope.head_dim != qk_rope_head_dim):
            raise ValueError(f"rope: {rope!r} must be a base or a RotaryEmbedding of {qk_rope_head_dim}, or None")
        qk_head_dim = qk_nope_head_dim + qk_rope_head_dim
        scaling = None if rope is None else rope.scaling
        super().__init__(
            group,
            causal=causal,
            rope=rope,
            scale=scale,
            dropout=dropout,
            exact_dropout=exact_dropout,
            sequence_parallel=sequence_parallel,
        )
        if self.scale is None:
            self.scale = qk_head_dim**-0.5 * (1.0 if scaling is None else scaling.score_factor)
        _, p, rank = self.tp_group
        blocks = self.invariant_blocks
        refuse_in_blocks(blocks, exact_dropout=not exact_dropout and "False")
        heads, _ = head_parts(num_heads, num_heads, 1, p, blocks or 0, self.shares)
        # The one rotated key serves the query heads of all blocks
        self._shared_key = None if blocks is None else KVHeadsInBlocks(num_heads, 1, blocks, self.tp_group, True)
        self.num_heads = num_heads
        self.first_head_local, last = heads.span(rank, p)
        self.num_heads_local = last - self.first_head_local
        self.q_lora_rank, self.kv_lora_rank = q_lora_rank, kv_lora_rank
        self.qk_nope_head_dim, self.qk_rope_head_dim, self.v_head_dim = qk_nope_head_dim, qk_rope_head_dim, v_head_dim

        # In blocks every rank computes the latents of all tokens
        place: dict[str, Any] = {"group": group, "sequence_parallel": sequence_parallel and blocks is None}
        place |= {"device": device, "dtype": dtype}
        linear = place | {"init": init, "grad_accumulation_fusion": grad_accumulation_fusion}
        sharded = linear | {"overlap_chunks": overlap_chunks, "float8": float8}
        q_size = num_heads * qk_head_dim
        if q_lora_rank is None:
            self.q_proj = ColumnParallelLinear(hidden_size, q_size, False, unit=qk_head_dim, **sharded)
        else:
            # Replicated: the norm that follows is over all features of the latent
            self.q_a_proj = ReplicatedLinear(hidden_size, q_lora_rank, bias, **linear)
            self.q_a_layernorm = RMSNorm(q_lora_rank, eps=norm_eps, **place)
            self.q_b_proj = ColumnParallelLinear(q_lora_rank, q_size, False, unit=qk_head_dim, **sharded)
        self.kv_a_proj_with_mqa = ReplicatedLinear(hidden_size, kv_lora_rank + qk_rope_head_dim, bias, **linear)
        self.kv_a_layernorm = RMSNorm(kv_lora_rank, eps=norm_eps, **place)
        kv_head_dim = qk_nope_head_dim + v_head_dim
        self.kv_b_proj = ColumnParallelLinear(kv_lora_rank, num_heads * kv_head_dim, False, unit=kv_head_dim, **sharded)
        out = sharded | {"sequence_parallel": sequence_parallel}
        self.o_proj = RowParallelLinear(num_heads * v_head_dim, hidden_size, bias, unit=v_head_dim, **out)

    def forward(
        self,
        x: Tensor,
        *,
        batch_size: int | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        total_tokens: int | None = None,
        cache: LatentKVCache | None = None,
        cos_sin: tuple[Tensor, Tensor] | None = None,
        attn_mask: Tensor | None = None,
        residual: Tensor | None = None,
        norm: RMSNorm | LayerNorm | None = None,
    ) -> Any:
        """Computes y from x; returns y, or with ``residual`` and ``norm`` ``norm(y, residual)``.

        Args:
            x: see the class.
            batch_size, cu_seqlens, total_tokens, attn_mask: as :meth:`ParallelAttention.forward`.
            residual, norm: as :meth:`RowParallelLinear.forward`.
            cache: this layer's cache, from :meth:`new_cache`: x follows the tokens in it and is appended. Up to about
                ``kv_lora_rank (nope + v) / (2 kv_lora_rank - nope - v)`` new tokens per sequence attend to the latents
                themselves, with W_kv_b absorbed into q and into the result; more of them, as in a prefill, and all of
                them in :func:`tp_ext.tp_invariant`, to keys and values that are computed from all latents. Not with
                ``cu_seqlens``, gradients, or dropout.
            cos_sin: the tables of ``rope``, from its :meth:`RotaryEmbedding.cos_sin`, made once for all layers.
        """
        # Before the first collective, so that no rank waits for one that has raised
        batch, seq, lengths = self._sequences(x, batch_size, cu_seqlens, total_tokens, cos_sin)
        if cache is not None:
            check_rows_of_cache(self.invariant_blocks, x)
            self._check_cache(cache, batch, seq, lengths)
        if attn_mask is not None:
            self._check_mask(attn_mask, batch, seq, lengths, seq if cache is None else cache.keys_after(seq))
        if self._shared_key is not None and (of_ranks := self.token_sizes(total_tokens, x)) is not None:
            x = _ops.gather_from_region(x, self.tp_group.name, 0, of_ranks)
        if torch.is_autocast_enabled(x.device.type) and x.dtype != torch.float64:
            x = x.to(torch.get_autocast_dtype(x.device.type))  # once: each of two linears would cast and keep its own
        compressed = self.kv_a_proj_with_mqa(x)
        if self.q_lora_rank is None:
            q = self.q_proj(x, total_tokens)
        else:
            q = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x)), total_tokens)
        latent, k_rope = compressed.split((self.kv_lora_rank, self.qk_rope_head_dim), -1)
        latent, leading = self.kv_a_layernorm(latent), q.shape[:-1]
        tokens = leading.numel()
        tables = None
        if self.rope is not None:
            tables = self._tables(self.rope, q, seq, lengths, cache) if cos_sin is None else (*cos_sin, None)
        shared_positions = lengths is None and (
            tables is None or tables[0].shape[0] == seq
        )  # positions of all sequences
        shape = (batch, seq) if shared_positions else (tokens,)
        q = self._query(q.reshape(*shape, self.num_heads_local, self.qk_nope_head_dim + self.qk_rope_head_dim), tables)
        sizes = self.token_sizes(total_tokens)
        if cache is not None:
            latent_and_key = torch.cat([latent.to(k_rope.dtype), k_rope], -1)
            if self._shared_key is None:
                latent_and_key = self._entered(latent_and_key, sizes)  # one collective for both
            latent, k_rope = latent_and_key.reshape(*shape, latent_and_key.shape[-1]).split(
                (self.kv_lora_rank, self.qk_rope_head_dim), -1
            )
            latent_and_key = torch.cat([latent, self._rotated(k_rope.unsqueeze(-2), tables).squeeze(-2)], -1)
            mask = None if attn_mask is None else self._mask_local(attn_mask, q.dtype)
            attended = self._attend_cached(
                q.view(batch, seq, *q.shape[-2:]),
                latent_and_key.view(batch, seq, 1, latent_and_key.shape[-1]),
                cache,
                mask,
            )
        else:
            # All heads of all ranks use this one key, so its gradient is a sum over them
            k_rope = k_rope if self._shared_key else self._entered(k_rope, sizes)
            k_rope = k_rope.reshape(*shape, 1, self.qk_rope_head_dim)
            kv = self.kv_b_proj(latent, total_tokens)
            kv = kv.reshape(*shape, self.num_heads_local, self.qk_nope_head_dim + self.v_head_dim)
            k_rope = self._rotated(k_rope, tables)
            k, v = self._keys_values(kv, self._shared_key.expanded(k_rope) if self._shared_key else k_rope)
            if lengths is not None:
                attended = self._attend_packed(q, k, v, lengths)
            else:
                q, k, v = (t.view(batch, seq, *t.shape[-2:]) for t in (q, k, v))
                mask = None if attn_mask is None else self._mask_local(attn_mask, q.dtype)
                attended = self._attend(q, k, v, mask, self._mask_seeds(q, None)[0])
        # v may have been padded
        attended = attended[..., : self.v_head_dim]
        attended = attended.reshape(*leading, self.num_heads_local * self.v_head_dim)
        return into_norm(self.o_proj, attended, total_tokens, residual, norm)

    def _entered(self, x: Tensor, sizes: list[int] | None) -> Tensor:
        """Returns a replicated tensor, under SP one of this rank's tokens, as the sharded heads use it."""
        group = self.tp_group.name
        if self.sequence_parallel:
            return _ops.all_gather_region(x, group, 0, sizes)
        return _ops.copy_to_region(x, group)

    def _rotated(self, x: Tensor, tables: tuple[Tensor, Tensor, Tensor | None] | None) -> Tensor:
        if self.rope is None or tables is None:
            return x
        cos, sin, positions = tables
        return _ops.rope(x, cos, sin, self.rope.interleaved, positions)

    def _query(self, q: Tensor, tables: tuple[Tensor, Tensor, Tensor | None] | None) -> Tensor:
        """Returns q ``[.., heads_local, nope + rope]`` with its last part rotated."""
        if tables is None:
            return q
        nope, rope = q.split((self.qk_nope_head_dim, self.qk_rope_head_dim), -1)
        return torch.cat([nope, self._rotated(rope, tables)], -1)

    def _keys_values(self, kv: Tensor, k_rope: Tensor) -> tuple[Tensor, Tensor]:
        """Returns k and v of k_nope | v ``[.., heads_local, nope + v]`` and the rotated key ``[.., 1, rope]``.

        On a CPU v is padded to k's features, since torch fuses attention only where they are equal: the result has as
        many, of which the first ``v_head_dim`` count.
        """
        k_nope, v = kv.split((self.qk_nope_head_dim, self.v_head_dim), -1)
        k = torch.cat([k_nope, k_rope.expand(*k_nope.shape[:-1], -1)], -1)
        more = k.shape[-1] - v.shape[-1]
        if more > 0 and not v.is_cuda and not (self.training and self.dropout):
            return k, F.pad(v, (0, more))
        return k, v.contiguous()  # as a view it would keep k_nope until backward

    def _attend_cached(self, q: Tensor, latent: Tensor, cache: LatentKVCache, mask: Tensor | None) -> Tensor:
        """Appends latents and rotated keys ``[batch, n, 1, kv_lora_rank + rope]`` of n tokens, and returns their
        attention ``[batch, n, heads_local, v]`` for q ``[batch, n, heads_local, nope + rope]``."""
        nope, v_dim, rank, n = self.qk_nope_head_dim, self.v_head_dim, self.kv_lora_rank, q.shape[1]
        if self._shared_key is not None:
            # By the products of training: absorbed ones would round otherwise
            (kept,), mask, padding = cache.append_filled([latent], mask)
            latents, k_rope = kept.transpose(1, 2).split((rank, self.qk_rope_head_dim), -1)
            kv = self.kv_b_proj(latents.squeeze(2)).unflatten(-1, (self.num_heads_local, nope + v_dim))
            q, k, v = (t.transpose(1, 2) for t in (q, *self._keys_values(kv, k_rope)))
            return _ops.block_attention(q, k, v, mask, padding, [], True, self.scale, None, None).transpose(1, 2)
        (kept,), seen, first = cache.extend([latent], mask)
        # Multiplications per head and key: n (2 rank + rope) absorbed, against rank (nope + v) + n (nope + rope + v)
        if first or n * (2 * rank - nope - v_dim) > rank * (nope + v_dim):
            rows, k_rope = kept.transpose(1, 2).split((rank, self.qk_rope_head_dim), -1)
            kv = self._expanded(rows.squeeze(2)).unflatten(-1, (self.num_heads_local, nope + v_dim))
            k, v = self._keys_values(kv, k_rope)
            if first:
                return self._attend(q, k, v, mask)
            y = attention_by_kv_head(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), seen, self.scale)
            return y.transpose(1, 2)
        # q_nope k_nope^T = (q_nope W_k) c^T, and weights v = (weights c) W_v^T: one KV head, that of the cache
        to_key, to_value = self._kv_b_weight().view(self.num_heads_local, nope + v_dim, rank).split((nope, v_dim), 1)
        absorbed = torch.einsum("bnhd,hdc->bhnc", q[..., :nope], to_key)
        q = torch.cat([absorbed, q[..., nope:].transpose(1, 2)], -1)
        y = attention_by_kv_head(q, kept, kept[..., :rank], seen, self.scale)
        return torch.einsum("bhnc,hdc->bnhd", y, to_value)

    def _expanded(self, latents: Tensor) -> Tensor:
        """Returns this rank's shard of W_kv_b c for the latents c of all tokens."""
        if getattr(self.kv_b_proj, "form", Dense).has_matrix:
            return local_linear(latents, self._kv_b_weight())
        rows = latents.flatten(0, -2)
        own = rows
        if self.sequence_parallel:
            own = _ops.scatter_to_region(rows, self.tp_group.name, 0, self.token_sizes(len(rows)))
        kv: Tensor = self.kv_b_proj(own, len(rows))
        return kv.unflatten(0, latents.shape[:-1])

    def _kv_b_weight(self) -> Tensor:
        """Returns this rank's shard of W_kv_b; of a layer that was replaced or has hooks (LoRA, FSDP2, a quantised
        one), its result for an identity matrix."""
        layer: nn.Module = self.kv_b_proj
        hooks = (layer._forward_hooks, layer._forward_pre_hooks)
        hooked = any(hooks) or _has_any_global_hook()
        if type(layer) is ColumnParallelLinear and layer.form.uses_weight and not hooked:
            weight: Tensor = layer.parameter("weight")
            return weight
        like = self.kv_a_proj_with_mqa.weight
        # A layer's result is known by calling it alone; for the identity it is its matrix
        identity = torch.eye(self.kv_lora_rank, device=like.device, dtype=like.dtype)
        if self.sequence_parallel:
            # Under SP its input is sharded along the rows
            identity = _ops.scatter_to_region(identity, self.tp_group.name, 0, self.token_sizes(len(identity)))
        transposed: Tensor = layer(identity, self.kv_lora_rank)
        return transposed.T

    def new_cache(
        self, batch_size: int, max_seq: int, *, static: bool = False, dtype: torch.dtype | None = None
    ) -> LatentKVCache:
        """Returns an empty cache for this layer, on its device; ``dtype`` defaults to its weights' dtype."""
        weight = self.kv_a_proj_with_mqa.weight
        return LatentKVCache(
            batch_size,
            max_seq,
            self.kv_lora_rank,
            self.qk_rope_head_dim,
            static=static,
            device=weight.device,
            dtype=weight.dtype if dtype is None else dtype,
        )

    def _check_cache(self, cache: LatentKVCache, batch: int, seq: int, lengths: list[int] | None) -> None:
        self._check_cached_call(lengths)
        width = self.kv_lora_rank + self.qk_rope_head_dim
        if not isinstance(cache, LatentKVCache) or cache.latent.shape[3] != width:
            raise ValueError(
                f"cache: {cache!r} must be a LatentKVCache of {width} numbers a token: new_cache() makes it"
            )
        cache.check(batch, seq)

    def extra_repr(self) -> str:
        ranks = f"q_lora_rank={self.q_lora_rank}, kv_lora_rank={self.kv_lora_rank}"
        heads = f"{self.qk_nope_head_dim} + {self.qk_rope_head_dim}, {self.v_head_dim}"
        return f"num_heads={self.num_heads}, head_dims=({heads}), {ranks}, causal={self.causal}, dropout={self.dropout}"
