"""Multi-head self-attention with its heads sharded over the ranks."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from tp_ext import _ops
from tp_ext._checks import check_flag, check_int
from tp_ext.context_layout import ContextLayout
from tp_ext.group import NOT_GIVEN, Group, parallel_group
from tp_ext.invariance import check_rows_of_cache, refuse_in_blocks
from tp_ext.nn.attention.context_attention import AttentionOptions, check_context, check_layout, context_attention
from tp_ext.nn.attention.kv_cache import KVCache
from tp_ext.nn.attention.rotary import RotaryEmbedding
from tp_ext.nn.attention.self_attention import KVHeadsInBlocks, SelfAttention
from tp_ext.nn.float8 import Float8
from tp_ext.nn.linear import ColumnParallelLinear, RowParallelLinear, into_norm
from tp_ext.nn.norm import LayerNorm, RMSNorm
from tp_ext.random import Init
from tp_ext.sharding import head_parts
from tp_ext.share_sizes import refuse_in_shares

Attend = Callable[[Tensor, Tensor, Tensor, ContextLayout], Tensor]
"""Attention of q, k, v ``[batch, seq_local, heads_local, head_dim]`` over a context group -> q's shape."""


class ParallelAttention(SelfAttention):
    """Attention: softmax(cap(scale q k^T) + mask) v per head, between a column linear (q | k | v) and a row linear.

    ``cap(s) = softcap tanh(s / softcap)``, or s. Query i attends to key j where ``attn_mask`` allows it, and j <= i if
    ``causal``, and ``i - w < j < i + w`` with ``sliding_window=w``.

    Shapes: x ``[batch, seq, hidden]``, or ``[tokens, hidden]`` with ``batch_size=`` or ``cu_seqlens=`` (SP:
    ``[tokens_local, hidden]``, always with one of them) -> y of x's shape. ``qkv.weight`` holds this rank's rows of q,
    then k, then v; ``out.weight`` ``[hidden, q_local]``.

    Communicates: one all-reduce forward, one backward; SP: an all-gather and a reduce-scatter each way. With fewer KV
    heads than ranks, backward, one all-reduce of the gradient of k's and v's weights, and of their bias; with
    ``qk_norm``, backward, one for each of the two norm weights; for an ``attn_mask`` that requires grad, one of its
    gradient. Over the context group: see :func:`tp_ext.nn.attention.context_attention.context_attention`.

    Args:
        hidden_size, num_heads: of the full block.
        num_kv_heads: fewer make grouped-query (GQA) or, one, multi-query attention; default ``num_heads``.
        head_dim: default ``hidden_size / num_heads``.
        bias: in both linears; ``qkv_bias``, ``out_bias`` override it for one.
        causal: a token attends to itself and the tokens before it.
        scale: factor of the scores q k^T; default ``head_dim ** -0.5``.
        sliding_window: w. If causal a token attends to itself and the w - 1 tokens before it, otherwise also to the
            w - 1 after it.
        softcap: bound of the scores, by tanh; needs the explicit attention of ``exact_dropout``.
        rope: a :class:`RotaryEmbedding`, or its base.
        qk_norm: RMSNorm (separate weights ``[head_dim]``, eps 1e-6) of each head of q and k, before RoPE.
        dropout: probability of dropping an attention weight.
        exact_dropout: uses the masks of the unsharded model, by an explicit attention that keeps the weights
            (``seq^2`` numbers per head). False: torch's fused attention, with different masks on each rank (with
            ``softcap`` the explicit attention nevertheless).
        context_group: the ranks over which the tokens of each sequence are cut, by the ``layout`` of ``forward``. They
            hold the same parameters; each has the gradient of its own tokens, see
            :func:`tp_ext.parallel.sum_gradients`.
        context: how keys and values reach the queries of other ranks: ``"ring"``, from rank to rank during the
            attention to those at hand; ``"all_gather"``, at once, for short sequences; ``"ulysses"``, by all-to-alls
            that give each rank all tokens of some heads, for which it needs at least as many heads as ranks.
        attend: computes attention over the context group instead: a callable on q, k, v ``[batch, seq_local,
            heads_local, head_dim]`` (normalised, rotated; packed sequences have batch 1) and the layout. All options
            of the scores are its own affair.
        group, sequence_parallel, weight_group, activations, grad_accumulation_fusion, overlap_chunks,
            reshard_after_forward, float8, init: as :class:`ColumnParallelLinear`; with ``"hidden"`` y is sharded as x.

    Raises:
        ValueError: see :func:`tp_ext.sharding.head_parts`; sizes that do not fit.
    """

    has_blocks = True

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        *,
        num_kv_heads: int | None = None,
        head_dim: int | None = None,
        bias: bool = True,
        qkv_bias: bool | None = None,
        out_bias: bool | None = None,
        causal: bool = True,
        rope: RotaryEmbedding | float | None = None,
        qk_norm: bool = False,
        dropout: float = 0.0,
        exact_dropout: bool = True,
        scale: float | None = None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        context_group: Group = None,
        context: str = "ring",
        attend: Attend | None = None,
        group: Group = NOT_GIVEN,
        sequence_parallel: bool = False,
        weight_group: Group = None,
        activations: str = "replicated",
        grad_accumulation_fusion: bool = False,
        overlap_chunks: int = 1,
        reshard_after_forward: bool = True,
        float8: Float8 | None = None,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        num_kv_heads = num_heads if num_kv_heads is None else num_kv_heads
        check_int(least=1, hidden_size=hidden_size, num_heads=num_heads, num_kv_heads=num_kv_heads)
        if head_dim is None:
            if hidden_size % num_heads:
                raise ValueError(
                    f"hidden_size: {hidden_size} must be a multiple of num_heads = {num_heads}, or head_dim be given"
                )
            head_dim = hidden_size // num_heads
        check_int(least=1, head_dim=head_dim)
        check_flag(qk_norm=qk_norm)
        if isinstance(rope, int | float) and not isinstance(rope, bool):
            rope = RotaryEmbedding(head_dim, base=rope)
        if rope is not None and (not isinstance(rope, RotaryEmbedding) or rope.head_dim != head_dim):
            raise ValueError(f"rope: {rope!r} must be a base or a RotaryEmbedding of {head_dim}")
        super().__init__(
            group,
            causal=causal,
            rope=rope,
            scale=scale,
            sliding_window=sliding_window,
            softcap=softcap,
            dropout=dropout,
            exact_dropout=exact_dropout,
            sequence_parallel=sequence_parallel,
            weight_group=weight_group,
            activations=activations,
        )
        _, p, rank = self.tp_group
        blocks, context_ranks = self.invariant_blocks, parallel_group(context_group)
        refuse_in_blocks(
            blocks,
            exact_dropout=not exact_dropout and "False",
            context_group=context_ranks.size > 1 and context_ranks.torch_name,
            attend=attend,
        )
        if self.shares is not None:
            refuse_in_shares(context_group=context_ranks.size > 1 and f"{context_ranks.size} ranks")
        # [Note: padding and groups of a part]: query heads are cut within the group of their KV head
        q, kv = head_parts(num_heads, num_kv_heads, head_dim, p, blocks or 0, self.shares)
        self._kv_heads = None if blocks is None else KVHeadsInBlocks(num_heads, num_kv_heads, blocks, self.tp_group)
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        (first, last), (first_kv, last_kv) = (part.span(rank, p) for part in (q, kv))
        self.first_head_local, self.num_heads_local = first // head_dim, (last - first) // head_dim
        self.num_kv_heads_local = (last_kv - first_kv) // head_dim
        self.context_group, self.context, self.attend = parallel_group(context_group), context, attend
        # Heads cut over the same ranks would see other tokens than their own
        if self.context_group.size > 1 and self.context_group == self.tp_group:
            raise ValueError(f"context_group: {self.context_group.torch_name!r} must be another group than group")
        self._check_context_options()
        options: dict[str, Any] = {"group": group, "weight_group": weight_group, "device": device, "dtype": dtype}
        linear = {"init": init, "sequence_parallel": sequence_parallel, "overlap_chunks": overlap_chunks, **options}
        linear |= {"activations": activations, "grad_accumulation_fusion": grad_accumulation_fusion}
        linear |= {"reshard_after_forward": reshard_after_forward, "float8": float8}
        # Qwen's models have a bias of q, k and v alone
        qkv_bias, out_bias = (bias if option is None else option for option in (qkv_bias, out_bias))
        self.qkv = ColumnParallelLinear(hidden_size, q.size + 2 * kv.size, qkv_bias, parts=(q, kv, kv), **linear)
        self.out = RowParallelLinear(q.size, hidden_size, out_bias, parts=(q,), **linear)
        # Each rank normalises different heads: the norm weights are replicated parameters of sharded work, as under SP
        options["sequence_parallel"] = True
        self.q_norm = RMSNorm(head_dim, eps=1e-6, **options) if qk_norm else None
        self.k_norm = RMSNorm(head_dim, eps=1e-6, **options) if qk_norm else None

    def forward(
        self,
        x: Tensor,
        *,
        batch_size: int | None = None,
        cu_seqlens: Tensor | Sequence[int] | None = None,
        total_tokens: int | None = None,
        cache: KVCache | None = None,
        cos_sin: tuple[Tensor, Tensor] | None = None,
        attn_mask: Tensor | None = None,
        layout: ContextLayout | None = None,
        residual: Tensor | None = None,
        norm: RMSNorm | LayerNorm | None = None,
    ) -> Any:
        """Computes y from x; returns y, or with ``residual`` and ``norm`` ``norm(y, residual)``.

        Args:
            x: see the class.
            batch_size: x consists of this many sequences of equal length, one after the other.
            cu_seqlens: x consists of packed sequences; sequence i is tokens ``cu_seqlens[i]`` to
                ``cu_seqlens[i + 1]``. A list, or an integer tensor (one on a GPU is copied to the host).
            total_tokens: under SP, the number of tokens of all ranks, if p does not divide it.
            cache: this layer's cache, from :meth:`new_cache`: x follows the tokens in it and is appended. Not with
                ``cu_seqlens``, not where gradients are recorded; see :class:`KVCache` for its errors.
            cos_sin: the tables ``rope.cos_sin(positions, dtype)``, ``[seq, rotary_dim / 2]`` if all sequences have the
                same positions, else ``[tokens, ..]``. Tables shared by all layers are computed once and, for backward,
                saved once; default: computed here.
            attn_mask: bool (True: may attend) or floating (added to the scores), the same on all ranks, broadcastable
                to ``[batch, num_heads, seq, seq]``: all heads or 1. With ``cache`` the last dim is the keys, those in
                the cache and the new ones, or all ``max_seq`` slots of a static one. Not with ``cu_seqlens``. A query
                that may attend to no key gets 0. Its gradient is complete on every rank.
            layout: how the tokens of each sequence are cut over ``context_group``: x has this rank's tokens, ``[batch,
                seq_local, hidden]`` or ``[tokens_local, hidden]`` in its order, under SP of these the shard on dim 0.
                It replaces ``batch_size``, ``cu_seqlens`` and ``total_tokens``; not with ``attn_mask``. An empty
                ``cache`` gets the keys of all ranks, so that each of them can go on alone, without a layout.
            residual, norm: as :meth:`RowParallelLinear.forward`.
        """
        if layout is not None:
            layout_options = {"batch_size": batch_size, "cu_seqlens": cu_seqlens, "total_tokens": total_tokens}
            check_layout(layout, self.context_group, layout_options)
            if attn_mask is not None:
                raise ValueError("attn_mask: must not be combined with layout")
            return self._forward_over_context(x, layout, cache, cos_sin, residual, norm)
        if cache is not None:
            check_rows_of_cache(self.invariant_blocks, x)
        # With a cache each rank continues alone, from the keys of all ranks that the prompt left there
        if self.context_group.size > 1 and cache is None:
            raise ValueError(f"layout: must be given with a context_group of {self.context_group.size} ranks")
        # Before the first collective, so that no rank waits for one that has raised
        batch, seq, lengths = self._sequences(x, batch_size, cu_seqlens, total_tokens, cos_sin)
        if cache is not None:
            self._check_cache(cache, batch, seq, lengths)
        if attn_mask is not None:
            self._check_mask(attn_mask, batch, seq, lengths, seq if cache is None else cache.keys_after(seq))
        qkv = self.qkv(x, total_tokens)
        rows = qkv.flatten(0, -2)
        tables = None
        if self.rope is not None:
            tables = self._tables(self.rope, rows, seq, lengths, cache) if cos_sin is None else (*cos_sin, None)
        same = lengths is None and (tables is None or tables[0].shape[0] == seq)  # positions of all sequences
        q, k, v = self._heads(rows, (batch, seq) if same else (rows.shape[0],), tables)
        if self._kv_heads is not None and cache is None:  # a cache keeps each KV head once
            k, v = self._kv_heads.expanded(k), self._kv_heads.expanded(v)
        if lengths is None:
            if not same:
                q, k, v = (t.view(batch, seq, t.shape[-2], t.shape[-1]) for t in (q, k, v))
            mask = None if attn_mask is None else self._mask_local(attn_mask, q.dtype)
            if cache is None:
                attended = self._attend(q, k, v, mask, self._mask_seeds(q, None)[0])
            else:
                window = self.sliding_window
                options: dict[str, Any] = {"sliding_window": window, "softcap": self.softcap}
                if self._kv_heads is not None:
                    options["kv_heads"] = self._kv_heads.of_queries
                attended = cache.attend(q, k, v, mask=mask, scale=self.scale, **options)
        else:
            attended = self._attend_packed(q, k, v, lengths)
        features = self.num_heads_local * self.head_dim
        attended = attended.reshape(*qkv.shape[:-1], features)
        return into_norm(self.out, attended, total_tokens, residual, norm)

    def _forward_over_context(
        self,
        x: Tensor,
        layout: ContextLayout,
        cache: KVCache | None,
        cos_sin: tuple[Tensor, Tensor] | None,
        residual: Tensor | None,
        norm: RMSNorm | LayerNorm | None,
    ) -> Any:
        batch, tokens = layout.batch or 1, layout.sizes[self.context_group.rank]
        seq = tokens // batch
        self._check_context_input(x, layout, tokens)
        if cos_sin is not None:
            self._check_tables(cos_sin[0], seq, tokens)
        if cache is not None:
            self._check_prefill(cache, layout)
        # SP cuts this rank's tokens over group: p need not divide them
        total_tokens = tokens if self.sequence_parallel else None
        qkv = self.qkv(x, total_tokens)
        rows = qkv.flatten(0, -2)
        if cos_sin is None and self.rope is not None:
            positions = layout.positions[:seq].to(rows.device)  # of one sequence of a batch; of all packed ones
            cos_sin = self.rope.cos_sin(positions, rows.dtype, length=max(layout.lengths, default=0))
        tables = None if cos_sin is None else (*cos_sin, None)
        same = tables is None or tables[0].shape[0] == seq
        heads = self._heads(rows, (batch, seq) if same else (tokens,), tables)
        q, k, v = (t.reshape(batch, seq, t.shape[-2], t.shape[-1]) for t in heads)
        if cache is not None:
            # k and v as one tensor: one all-gather
            k_full, v_full = layout.unshard(torch.cat([k, v], 2), 1).chunk(2, 2)
            cache.append(k_full, v_full)
        if self.attend is not None:
            attended = self.attend(q, k, v, layout)
        else:
            dropout = self.dropout if self.training else 0.0
            scores = (self.causal, self.scale, self.sliding_window, self.softcap, dropout)
            options = AttentionOptions(*scores, num_heads=self.num_heads, first_head=self.first_head_local)
            # Rows of the weights are queries, or with whole sequences on each rank those of a sequence
            unit = 1 if self.context == "ulysses" else self.num_heads * max(layout.lengths, default=0)
            # exact: masks by index are the only ones that are the same for every cut of the tokens
            seeds = self._mask_seeds(q, layout.lengths if layout.batch is None else None, unit, layout.group)
            seeds = seeds if isinstance(seeds, Tensor) else None
            attended = context_attention(q, k, v, layout, self.context, options, seeds)
        features = self.num_heads_local * self.head_dim
        attended = attended.reshape(*qkv.shape[:-1], features)
        return into_norm(self.out, attended, total_tokens, residual, norm)

    def _check_context_options(self) -> None:
        check_context(self.context)
        if self.attend is not None and not callable(self.attend):
            raise TypeError(f"attend: {self.attend!r} must be a callable on q, k, v and a ContextLayout, or None")
        p = self.context_group.size
        if p > 1 and self.attend is None:
            if self.context == "ulysses":
                head_parts(self.num_heads_local, self.num_kv_heads_local, 1, p)  # raises if they cannot be cut
            if self.dropout and not self.exact_dropout:
                raise ValueError("exact_dropout: False must not be combined with dropout over a context_group")

    def _check_context_input(self, x: Tensor, layout: ContextLayout, tokens: int) -> None:
        shapes: list[tuple[int, ...]] = [(tokens,)]
        if self.sequence_parallel:
            sizes = self.token_sizes(tokens)
            shapes = [(tokens if sizes is None else sizes[self.tp_group.rank],)]
        elif layout.batch:
            shapes.append((layout.batch, tokens // layout.batch))
        elif layout.batch is None:
            shapes.append((1, tokens))
        if tuple(x.shape[:-1]) not in shapes:
            allowed = " or ".join(str([*shape, "hidden"]) for shape in shapes).replace("'", "")
            raise ValueError(f"x: shape {tuple(x.shape)} must be {allowed}, by the layout")

    def _check_prefill(self, cache: KVCache, layout: ContextLayout) -> None:
        if layout.batch is None:
            raise ValueError("cache: must come with a layout of batch= and seq=, not of packed lengths")
        self._check_cache(cache, layout.batch, max(layout.lengths, default=0), None)
        cache.check_empty()

    def new_cache(
        self, batch_size: int, max_seq: int, *, static: bool = False, dtype: torch.dtype | None = None
    ) -> KVCache:
        """Returns an empty cache for this layer, on its device; ``dtype`` defaults to its weights' dtype."""
        options = self.qkv.weight_options if dtype is None else {**self.qkv.weight_options, "dtype": dtype}
        return KVCache(batch_size, max_seq, self.num_kv_heads_local, self.head_dim, static=static, **options)

    def _check_cache(self, cache: KVCache, batch: int, seq: int, lengths: list[int] | None) -> None:
        self._check_cached_call(lengths)
        heads = (cache.k.shape[1], cache.k.shape[3])
        if heads != (self.num_kv_heads_local, self.head_dim):
            raise ValueError(
                f"cache: {heads[0]} heads of {heads[1]} must be this layer's {self.num_kv_heads_local} of "
                f"{self.head_dim}: new_cache() makes it"
            )
        cache.check(batch, seq)

    def _heads(
        self, rows: Tensor, lead: tuple[int, ...], tables: tuple[Tensor, Tensor, Tensor | None] | None
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Returns q, k, v ``[*lead, heads_local, head_dim]``, normalised, rotated; lead: (batch, seq) or (tokens,)."""
        nq, nkv = self.num_heads_local, self.num_kv_heads_local
        heads = rows.view(*lead, nq + 2 * nkv, self.head_dim)
        # [Note: q and k are rotated as one tensor]
        together = self.rope is not None and self.q_norm is None  # q and k adjacent: one kernel rotates both
        # Not `split`, a function of Python that calls this one
        *rotating, v = heads.split_with_sizes((nq + nkv, nkv) if together else (nq, nkv, nkv), -2)
        # Before the rotation, as in the models that have such norms
        if self.q_norm is not None and self.k_norm is not None:
            if self._kv_heads is None:
                rotating = [self.q_norm(rotating[0]), self.k_norm(rotating[1])]
            else:
                norms, segments = (self.q_norm, self.k_norm), self._kv_heads.segments
                rotating = [
                    norm.over_segments(x, None, x.dim() - 2, heads_of, over_ranks=True)[0]
                    for norm, x, heads_of in zip(norms, rotating, segments, strict=True)
                ]
        if self.rope is not None and tables is not None:
            if rows.requires_grad and self.q_norm is None:
                v = v.contiguous()  # as a view it would keep the q and k that are rotated here until backward
            cos, sin, positions = tables
            rotating = [_ops.rope(t, cos, sin, self.rope.interleaved, positions) for t in rotating]
        q, k = rotating[0].split_with_sizes((nq, nkv), -2) if together else rotating
        return q, k, v

    def extra_repr(self) -> str:
        return (
            f"num_heads={self.num_heads}, num_kv_heads={self.num_kv_heads}, "
            f"head_dim={self.head_dim}, causal={self.causal}, dropout={self.dropout}"
            + "".join(
                f", {name}={value}"
                for name in ("scale", "sliding_window", "softcap")
                if (value := getattr(self, name)) is not None
            )
        )
