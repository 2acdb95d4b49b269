"""Base class of the self-attention layers: their input, its sequences and positions, masks, and attention of one rank's
heads; and the key-value heads of those in :func:`tp_ext.tp_invariant`."""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from tp_ext import _ops
from tp_ext._checks import check_flag, check_int, check_number, check_probability, check_tensor
from tp_ext.common_generator import begin_draw
from tp_ext.group import Group, ParallelGroup
from tp_ext.invariance import block_of, block_start, blocks_of_rank, blocks_of_ranks, refuse_in_blocks, shares_of_blocks
from tp_ext.model.module import ParallelModule
from tp_ext.nn.attention.kv_cache import TokenCache
from tp_ext.nn.attention.rotary import RotaryEmbedding, packed_positions, sequence_lengths
from tp_ext.nn.attention.scaled_dot_product import AttentionOptions, attention, dropout_by_index
from tp_ext.random import OwnRandomNumbers, draw_seed
from tp_ext.random_scope import draws_by_name, sequence_seeds
from tp_ext.sharding import head_parts


class SelfAttention(ParallelModule):
    """Self-attention with sharded heads. A subclass computes q, k and v of its heads, and sets ``num_heads``,
    ``first_head_local`` and ``num_heads_local``.

    Args:
        causal, rope, scale, sliding_window, softcap, dropout, exact_dropout: as :class:`tp_ext.ParallelAttention`.
        options: of :class:`ParallelModule`.

    Raises:
        ValueError: ``dropout`` is no probability below 1; ``scale`` or ``softcap`` is not positive.
    """

    num_heads: int
    first_head_local: int
    num_heads_local: int

    def __init__(
        self,
        group: Group,
        *,
        causal: bool,
        rope: RotaryEmbedding | None,
        scale: float | None,
        sliding_window: int | None = None,
        softcap: float | None = None,
        dropout: float,
        exact_dropout: bool,
        **options: Any,
    ) -> None:
        super().__init__(group, **options)
        check_flag(causal=causal, exact_dropout=exact_dropout)
        check_probability(dropout=dropout)
        check_number(above=0, or_none=True, scale=scale, softcap=softcap)
        check_int(least=1, or_none=True, sliding_window=sliding_window)
        self.causal, self.rope = causal, rope
        self.scale, self.sliding_window, self.softcap = scale, sliding_window, softcap
        self.dropout, self.exact_dropout = dropout, exact_dropout

    def _sequences(
        self,
        x: Tensor,
        batch_size: int | None,
        cu_seqlens: Tensor | Sequence[int] | None,
        total_tokens: int | None,
        cos_sin: tuple[Tensor, Tensor] | None,
    ) -> tuple[int, int, list[int] | None]:
        """Returns the number of sequences and their length, and for packed ones the lengths: all checks of the input
        that need no cache."""
        self._check_layout(x, batch_size, cu_seqlens)
        tokens = self._tokens(x, total_tokens)
        lengths = None if cu_seqlens is None else sequence_lengths(cu_seqlens, tokens)
        if batch_size is not None and tokens % batch_size:
            raise ValueError(f"batch_size: {batch_size} must divide the number of tokens, {tokens}")
        batch, seq = x.shape[:2] if x.dim() == 3 else (batch_size or 1, tokens // (batch_size or 1))
        if cos_sin is not None:
            self._check_tables(cos_sin[0], tokens if lengths is not None else seq, tokens)
        return batch, seq, lengths

    def _tokens(self, x: Tensor, total_tokens: int | None) -> int:
        """Returns the number of tokens of all ranks together."""
        if not self.sequence_parallel:
            return x.shape[0] if x.dim() == 2 else x.shape[0] * x.shape[1]
        sizes = self.token_sizes(total_tokens, x)
        return x.shape[0] * self.tp_group.size if sizes is None else sum(sizes)

    def _check_layout(self, x: Tensor, batch_size: int | None, cu_seqlens: Tensor | Sequence[int] | None) -> None:
        check_tensor(x=x)
        number = (batch_size is not None) + (cu_seqlens is not None)
        if x.dim() == 3 and number == 0 and not self.sequence_parallel:
            return
        if x.dim() != 2 or number != 1:
            local, whole = "[tokens_local, hidden] under sequence_parallel", "[batch, seq, hidden], or [tokens, hidden]"
            allowed = local if self.sequence_parallel else whole
            raise ValueError(
                f"x: shape {tuple(x.shape)} must be {allowed}, the 2-D one with exactly one of batch_size = "
                f"{batch_size} and cu_seqlens = {cu_seqlens}"
            )
        if batch_size is not None:
            check_int(least=1, batch_size=batch_size)

    def _check_tables(self, cos: Tensor, seq: int, tokens: int) -> None:
        if self.rope is None:
            raise ValueError("cos_sin: must not be given to a layer without rope")
        if cos.shape[0] not in (seq, tokens):
            raise ValueError(f"cos_sin: {cos.shape[0]} rows must be one for each of {seq} positions or {tokens} tokens")

    def _check_mask(self, mask: Tensor, batch: int, seq: int, lengths: list[int] | None, keys: int) -> None:
        if lengths is not None:
            raise ValueError("attn_mask: must not be combined with cu_seqlens; pad the sequences, and mask the padding")
        if not isinstance(mask, Tensor) or not (mask.dtype == torch.bool or mask.is_floating_point()):
            what = f"dtype {mask.dtype}" if isinstance(mask, Tensor) else repr(mask)
            raise TypeError(
                f"attn_mask: {what} must be a tensor, bool (True: may attend) or floating (added to scores)"
            )
        full = (batch, self.num_heads, seq, keys)
        if mask.dim() > 4 or any(n not in (1, m) for n, m in zip(mask.shape[::-1], full[::-1], strict=False)):
            raise ValueError(
                f"attn_mask: shape {tuple(mask.shape)} must be broadcastable to [batch, num_heads (of all ranks), "
                f"queries, keys] = {list(full)}"
            )

    def _mask_local(self, mask: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns the mask of this rank's heads, 4-D, bool or of ``dtype``."""
        if mask.requires_grad:
            refuse_in_blocks(self.invariant_blocks, attn_mask="a mask that requires grad")
            # Each rank has the gradient of its own heads: of the mask it is the sum of all
            mask = _ops.copy_to_region(mask, self.tp_group.name)
        mask = mask[(None,) * (4 - mask.dim())]
        if mask.shape[1] > 1:
            mask = mask.narrow(1, self.first_head_local, self.num_heads_local)
        return mask if mask.dtype == torch.bool else mask.to(dtype)

    def _check_cached_call(self, lengths: list[int] | None) -> None:
        """Raises a ValueError if this layer must not attend to a cache."""
        if lengths is not None:
            raise ValueError("cache: must not be combined with cu_seqlens; pad prompts on the left: reset(padding=)")
        if not self.causal:
            raise ValueError("cache: causal=False must not be combined with it: what is cached would see later tokens")
        if self.rope is not None and self.rope.scaling is not None and self.rope.scaling.dynamic:
            raise ValueError(
                "cache: must not be combined with dynamic RoPE scaling, which rotates earlier keys anew when the text "
                "grows; use rope_type 'ntk' with the factor of the longest text"
            )
        if self.training and self.dropout:
            raise ValueError(f"cache: must not be combined with dropout = {self.dropout} in training mode; call eval()")

    @staticmethod
    def _tables(
        rope: RotaryEmbedding, rows: Tensor, seq: int, lengths: list[int] | None, cache: TokenCache | None
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """Returns cosine and sine, a row per position, and each token's row if positions differ between sequences."""
        positions = None
        if lengths is not None:
            seq, positions = max(lengths), packed_positions(lengths, rows.device)
        places = torch.arange(seq, device=rows.device) if cache is None else cache.positions(seq).flatten()
        return *rope.cos_sin(places, rows.dtype, length=seq), positions

    def _mask_seeds(
        self, q: Tensor, lengths: Sequence[int] | None, unit: int = 1, context: ParallelGroup | None = None
    ) -> Any:
        """Returns the seed of each mask by name, of packed sequences or one batch (``lengths`` is None), or None.
        Over the group of a context masks are always exact."""
        count = 1 if lengths is None else len(lengths)
        if not (self.dropout and self.training and count):
            return [None] * count
        exact = context is not None or self.exact_dropout or self.softcap is not None
        # torch's own masks, of dropout that is not exact, have no seed of ours
        by_name = exact and draws_by_name(self, q.device)
        groups = (self.tp_group,) if context is None else (self.tp_group, context)
        begin_draw(groups, q.device if exact and not by_name else torch.device("cpu"))
        if not by_name:
            return [None] * count
        starts = [0] if lengths is None else [0, *accumulate(lengths)][:-1]
        return sequence_seeds(self, q, starts, unit if lengths is None else 0)

    def _attend_packed(self, q: Tensor, k: Tensor, v: Tensor, lengths: list[int]) -> Tensor:
        """Computes attention within each packed sequence: q, k, v ``[tokens, heads_local, ..]`` -> ``[tokens, ..]``."""
        seeds = self._mask_seeds(q, lengths)
        sequences = zip(q.split(lengths), k.split(lengths), v.split(lengths), seeds, strict=True)
        return torch.cat([self._attend(a[None], b[None], c[None], None, seed)[0] for a, b, c, seed in sequences])

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None, seed: Any = None) -> Tensor:
        """Computes attention of q, k, v ``[batch, seq, heads_local, head_dim]`` -> ``[.., heads_local, v_dim]``."""
        q, k, v = (t.transpose(1, 2) for t in (q, k, v))
        dropout = self.dropout if self.training else 0.0
        options = AttentionOptions(self.causal, self.scale, self.sliding_window, self.softcap, dropout)
        if dropout and (self.exact_dropout or self.softcap is not None):
            heads = self.num_heads, self.first_head_local
            # All ranks draw the same seed; the index of the head makes masks differ
            seed = draw_seed(q.device) if seed is None else seed
            drop = partial(dropout_by_index, seed=seed, p=dropout, num_heads=heads[0], first_head=heads[1])
            y = attention(q, k, v, mask, options, drop=drop, by_head=self.invariant_blocks is not None)
        elif dropout:
            # Ranks have other heads: with one generator state their masks would be equal
            with OwnRandomNumbers(self.tp_group.rank, q.device):
                y = attention(q, k, v, mask, options)
        else:
            y = attention(q, k, v, mask, options, by_head=self.invariant_blocks is not None)
        return y.transpose(1, 2)


class KVHeadsInBlocks:
    """Key-value heads of a layer built in :func:`tp_ext.tp_invariant`: those that the query heads of a rank's blocks
    use, and their copies for each query head.

    A KV head may serve query heads of several blocks, on several ranks. Each block of query heads has a copy of it, and
    its gradient is the tree over those of the blocks; within a block it is the sum over the query heads in their order.

    Args:
        num_heads, num_kv_heads: of the full layer.
        blocks: of :func:`tp_ext.tp_invariant`.
        group: the ranks that hold the other heads.
        replicated: all ranks have the key-value heads, also those without a query head that uses them.

    Attributes:
        segments: for q, and for k and v: block and number of heads of each segment that is computed by itself.
        of_queries: the KV head on this rank of each query head of this rank.
    """

    def __init__(
        self, num_heads: int, num_kv_heads: int, blocks: int, group: ParallelGroup, replicated: bool = False
    ) -> None:
        _, p, rank = group
        self.num_heads, self.num_kv_heads, self.blocks = num_heads, num_kv_heads, blocks
        self.share = num_heads // num_kv_heads
        parts = head_parts(num_heads, num_kv_heads, 1, p, blocks, shares_of_blocks(blocks))
        self.segments = [list(part.segments(rank, p)) for part in parts]
        self.first, self.stop = parts[1].span(rank, p)
        self.held, self.of_ranks = blocks_of_rank(blocks, rank, p), blocks_of_ranks(blocks, p)
        self.of_queries = [head // self.share - self.first for head in range(*parts[0].span(rank, p))]
        # Where every KV head serves the query heads of one block, its gradient is a sum within the block
        self.within_blocks = all(
            block_of(head * self.share, num_heads, blocks) == block_of((head + 1) * self.share - 1, num_heads, blocks)
            for head in range(num_kv_heads)
        )
        # On all ranks alike: whether some rank holds heads that another one counts
        self.group = group.name if replicated or any(parts[1].copied(other, p) for other in range(p)) else ""

    def expanded(self, x: Tensor) -> Tensor:
        """Returns the KV head of each query head of this rank.

        Args:
            x: ``[.., kv_heads_local, head_dim]``.

        Returns: ``[.., heads_local, head_dim]``.

        Communicates: backward, if ranks share KV heads, an all-to-all and an all-gather of the gradient of all of them.
        """
        if self.share == 1 and not self.group:
            return x
        base, held = self.first, self.held
        if self.group:
            base, after = 0, self.num_kv_heads - self.first - x.shape[-2]
            copies = _ops.block_copies(F.pad(x, (0, 0, self.first, after)), self.group, self.of_ranks)
        elif self.within_blocks:
            copies = [x] * len(held)
        else:
            # The blocks of other ranks use other heads: their leaves are zeros
            copies = _ops.block_copies(x, "", [int(self.blocks)])[held.start : held.stop]
        heads = [
            copy.narrow(-2, head // self.share - base, 1)
            for copy, block in zip(copies[: len(held)], held, strict=True)
            for head in range(
                block_start(self.num_heads, block, self.blocks), block_start(self.num_heads, block + 1, self.blocks)
            )
        ]
        if not heads:  # no block, or none with a head
            return (copies[0] if self.group else x).narrow(-2, 0, 0)
        return torch.cat(heads, -2)
