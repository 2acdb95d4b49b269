"""Attention over a context group: the tokens of each sequence are cut over the ranks by a :class:`ContextLayout`."""

import math
from collections.abc import Mapping
from functools import partial

import torch
from torch import Tensor

from tp_ext import _ops
from tp_ext._checks import check_choice
from tp_ext.context_layout import ContextLayout, inverse_order
from tp_ext.group import ParallelGroup
from tp_ext.nn.attention.scaled_dot_product import AttentionOptions, attention, dropout_by_index, of_no_heads
from tp_ext.random import draw_seed
from tp_ext.sharding import Part, head_parts

CONTEXTS = ("ring", "all_gather", "ulysses")


def context_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    layout: ContextLayout,
    context: str = "ring",
    options: AttentionOptions = AttentionOptions(),  # noqa: B008, immutable
    seeds: Tensor | None = None,
) -> Tensor:
    """Returns the attention of this rank's tokens to the tokens of all ranks, exactly as over whole sequences.

    Args:
        q: ``[batch, seq_local, heads_local, head_dim]`` or ``[tokens_local, heads_local, head_dim]``, the tokens as in
            ``layout``. k, v: the same with ``kv_heads_local``, which divide ``heads_local``.
        context: ``"ring"``: blocks of k and v travel from rank to rank, each exchange under the attention to the block
            before. ``"all_gather"``: they are gathered. ``"ulysses"``: all-to-alls give each rank all tokens of some
            heads.
        options: with dropout each sequence has its masks, by the index (batch, head, query, key), from a seed that is
            drawn here, unless ``seeds`` has it, and must be the same on all ranks.
        seeds: ``[sequences]``, or with the first row of each ``[sequences, 2]``; one for a whole batch.

    Returns: of q's shape.

    Communicates, with n the bytes of this rank's k and v: ``ring`` forward p - 1 exchanges of a block, n each on
    average, backward twice that. ``all_gather`` forward one all-gather, backward one and a reduce-scatter (blocks of
    unequal length padded). ``ulysses`` two all-to-alls each way, of q, k and v and of the result; KV heads that several
    ranks need are sent to each.

    Raises:
        ValueError: shapes that are not the layout's, an unknown ``context``; ``ulysses``: heads that cannot be cut over
            the ranks, see :func:`tp_ext.sharding.head_parts`. NotImplementedError (not ``ulysses``): forward mode, and
            second derivatives.
    """
    check_context(context)
    batch = layout.batch or 1
    shapes = (q.shape[:-2], k.shape[:-2], v.shape[:-2])
    tokens = layout.sizes[layout.group.rank]
    allowed = ((batch, tokens // batch), (tokens,))
    if layout.batch == 0 or any(tuple(shape) not in allowed or shape != shapes[0] for shape in shapes):
        raise ValueError(
            f"q, k, v: leading dims {[tuple(shape) for shape in shapes]} must be those of this rank's tokens by the "
            f"layout, {' or '.join(map(str, allowed))}"
        )
    device = q.device.type
    # As autocast does for torch's attention
    if torch.is_autocast_enabled(device) and q.dtype != torch.float64:
        q, k, v = (t.to(torch.get_autocast_dtype(device)) for t in (q, k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if options.scale is None else float(options.scale)
    options = options._replace(scale=scale, num_heads=options.num_heads or q.shape[-2])
    shape = q.shape
    # Packed sequences are one batch of all tokens
    q, k, v = (t.view(batch, tokens // batch, t.shape[-2], t.shape[-1]) for t in (q, k, v))
    # One seed for each sequence, whose masks then do not depend on how the batch is packed
    if options.dropout and seeds is None:
        seeds = torch.stack([draw_seed(q.device) for _ in range(len(layout.chunks))]) if layout.chunks else None
    if not shape[-2]:
        return of_no_heads(q, k, v).view(shape)
    if context == "ulysses":
        return _ulysses(q, k, v, layout, options, seeds).view(shape)
    window = options.sliding_window
    y = _ops.context_attention(
        q,
        k,
        v,
        seeds,
        layout.group.name,
        context == "ring",
        [n for sequence in layout.chunks for n in sequence],
        layout.chunks_per_sequence,
        options.causal,
        scale,
        # A window that reaches all keys restricts nothing
        None if window is None or window >= max(layout.lengths, default=0) else window,
        None if options.softcap is None else float(options.softcap),
        float(options.dropout) if seeds is not None else 0.0,
        options.num_heads or 0,
        options.first_head,
    )
    return y.view(shape)


def check_context(context: str) -> None:
    """Raises ValueError: ``context`` is no way to attend over a context group."""
    check_choice(CONTEXTS, context=context)


def check_layout(layout: ContextLayout, group: ParallelGroup, options: Mapping[str, object]) -> None:
    """Raises unless ``layout`` is one of the context group, and nothing else is given that says the same."""
    if not isinstance(layout, ContextLayout):
        raise TypeError(f"layout: {layout!r} must be a ContextLayout")
    # Groups of one rank are alike, whatever their names
    alone = layout.group.size == group.size == 1
    if not alone and layout.group != group:
        raise ValueError(f"layout: its group {layout.group.name!r} must be the context_group, {group.name!r}")
    for name, value in options.items():
        if value is not None:
            raise ValueError(f"{name}: {value} must not be combined with layout, which says the same")


def _ulysses(
    q: Tensor, k: Tensor, v: Tensor, layout: ContextLayout, options: AttentionOptions, seeds: Tensor | None
) -> Tensor:
    """Computes :func:`context_attention` of q, k, v ``[batch, seq_local, heads, head_dim]`` by all-to-alls over heads.

    The heads of q, k and v that a rank needs are neighbours in one tensor, so that one all-to-all moves all three."""
    _, p, rank = layout.group
    heads, kv_heads = q.shape[2], k.shape[2]
    q_part, kv_part = head_parts(heads, kv_heads, 1, p)
    needed, sizes = [], []
    for r in range(p):
        q_heads, shared = range(*q_part.span(r, p)), range(*kv_part.span(r, p))
        here = [*q_heads, *(heads + h for h in shared), *(heads + kv_heads + h for h in shared)]
        # A KV head that two ranks need is in both of their blocks
        needed += here
        sizes.append(len(here))
    qkv = torch.cat([q, k, v], 2)
    order, inverse = _token_order(layout, q.device)
    if p > 1:
        # An all-to-all sends consecutive blocks: the heads of rank 0, then those of rank 1, ..
        qkv = qkv.index_select(2, torch.tensor(needed, device=q.device))
        qkv = _ops.all_to_all_region(qkv, layout.group.name, 2, 1, sizes, layout.sequence_sizes)
        qkv = qkv.index_select(1, inverse)  # the tokens in the order of the sequences
    counts = [_count(part, rank, p) for part in (q_part, kv_part, kv_part)]
    first_head = options.first_head + q_part.span(rank, p)[0]
    attended, row = [], 0
    # Sequence by sequence: of packed ones in one call the fused kernels would need a mask
    for i, chunks in enumerate(layout.chunks):
        n = sum(chunks)
        a, b, c = qkv.narrow(1, row, n).split(counts, 2)
        attended.append(_attend(a, b, c, options, first_head, None if seeds is None else seeds[i]))
        row += n
    # Without sequences: no tokens, but the all-to-all below is a collective all the same
    y = torch.cat(attended, 1) if attended else qkv.narrow(2, 0, counts[0])
    if p == 1:
        return y
    y = y.index_select(1, order)
    q_sizes = [_count(q_part, r, p) for r in range(p)]
    return _ops.all_to_all_region(y, layout.group.name, 1, 2, layout.sequence_sizes, q_sizes)


def _token_order(layout: ContextLayout, device: torch.device) -> tuple[Tensor, Tensor]:
    """Returns the order of the ranks' tokens among those of the sequences (of one, with ``batch``), and its inverse."""
    order, _ = layout.order(True, device)
    return order, inverse_order(order)


def _count(part: Part, rank: int, p: int) -> int:
    first, last = part.span(rank, p)
    return last - first


def _attend(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, first_head: int, seed: Tensor | None) -> Tensor:
    """Computes attention of whole sequences, ``[batch, seq, heads, head_dim]``."""
    drop = None
    if seed is not None:
        heads = options.num_heads or 0
        drop = partial(dropout_by_index, seed=seed, p=options.dropout, num_heads=heads, first_head=first_head)
    q, k, v = (t.transpose(1, 2) for t in (q, k, v))
    return attention(q, k, v, None, options, drop=drop).transpose(1, 2)
