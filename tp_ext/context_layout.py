"""Context parallelism: how the tokens of sequences are cut over the ranks of a group."""

from collections.abc import Iterable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from tp_ext._checks import check_bool, check_int, check_tensor
from tp_ext.group import Group, parallel_group
from tp_ext.regions import gather_from_region, scatter_to_region


# [Note: each sequence is cut by itself, in 2 p chunks]
class ContextLayout:
    """The distribution of the tokens of each sequence over the p ranks of a context group.

    Each sequence is cut by itself, into 2 p chunks of equal length: rank r holds chunks r and 2 p - 1 - r, so that
    under a causal mask all ranks have equally much to do. The tokens that remain go, one each, to the ranks with the
    fewest tokens so far. A rank's tokens are ordered by sequence, and within a sequence by position. Every
    rank computes the whole layout from the same arguments; nothing is communicated.

    Args:
        lengths: of the packed sequences, one after the other: any lengths, also 0; integers or an integer tensor.
        batch, seq: instead of ``lengths``, ``batch`` sequences of ``seq`` tokens, which are all cut alike.
        group: the context group; None for p = 1.
        balance: False: p chunks, rank r holds chunk r, for attention that is not causal.

    Attributes:
        group: name, size p and rank.
        lengths: of the sequences, a tuple.
        batch: number of the sequences that are cut alike; None with ``lengths``.
        tokens: of all ranks.
        sizes: the tokens of each rank, a tuple of p; ``sizes[rank]`` is ``total_tokens`` of sequence parallelism.
        sequence_sizes: with ``batch``, the tokens of one sequence on each rank; otherwise ``sizes``.
        local_lengths: the tokens of each sequence on this rank, a tuple.
        positions: ``[tokens_local]``, int64, on the CPU: of this rank's tokens, each in its sequence.
        chunks: the lengths of the chunks of each sequence (of the first one, with ``batch``), a tuple of tuples.
        chunks_per_sequence: their number.

    Raises:
        ValueError: neither or both of ``lengths`` and ``batch=, seq=``; a negative length. TypeError: a length that is
            no integer, a ``balance`` that is no bool; see also :func:`tp_ext.group.group_name`.
    """

    def __init__(
        self,
        lengths: Sequence[int] | Tensor | None = None,
        *,
        batch: int | None = None,
        seq: int | None = None,
        group: Group,
        balance: bool = True,
    ) -> None:
        check_bool(balance=balance)
        self.group = parallel_group(group)
        p, rank = self.group.size, self.group.rank
        self.batch = batch
        self.lengths = _checked_lengths(lengths, batch, seq)
        self.tokens = sum(self.lengths)
        self.balance = balance
        unique = self.lengths if batch is None else self.lengths[:1] or (seq or 0,)
        self.chunks, rank_lengths = _cut(unique, p, self.balance)
        copies = 1 if batch is None else batch
        self.sizes = tuple(copies * n for n in rank_lengths)
        self.sequence_sizes = tuple(rank_lengths)
        owners = _owners(p, self.balance)
        self.chunks_per_sequence = len(owners)
        mine = [c for c, owner in enumerate(owners) if owner == rank]
        local = tuple(sum(chunks[c] for c in mine) for chunks in self.chunks)
        self.local_lengths = local if batch is None else local * copies
        self.positions = self._places(mine, within=True).repeat(copies)
        self._held = [self._places([c for c, owner in enumerate(owners) if owner == k], within=False) for k in range(p)]

    def shard(self, x: Tensor, dim: int = 0) -> Tensor:
        """Returns this rank's tokens of x, which is the same on all ranks.

        Args:
            x: ids, labels, masks, activations. Its ``dim`` holds all tokens, the sequences one after the other; or,
                with ``batch``, the tokens of one sequence, as in ``[batch, seq, ..]`` with dim 1.

        Communicates: backward, one all-gather, if x requires grad: dx is the gradient of all of x, on every rank.
        Conjugate: :meth:`unshard`.

        Raises:
            TypeError: no tensor. IndexError: no such ``dim``. ValueError: another length.
        """
        dim = _checked_dim(x, dim)
        n, seq = x.shape[dim], sum(self.chunks[0]) if self.batch is not None else None
        if n not in (self.tokens, seq):
            rule = f"the {self.tokens} tokens of all sequences" + ("" if seq is None else f", or the {seq} of one")
            raise ValueError(f"x: {n} elements in dim {dim} must be {rule}")
        if self.group.size == 1:
            return x
        order, sizes = self.order(n != self.tokens, x.device)
        return scatter_to_region(x.index_select(dim, order), self.group.name, dim, sizes)

    def unshard(self, x: Tensor, dim: int = 0) -> Tensor:
        """Puts the ranks' tokens together again, in the order of the sequences, for replicated work.

        Args:
            x: this rank's tokens. ``dim`` 0 has the tokens of all sequences; with ``batch`` another ``dim`` has one
                sequence, as in ``[batch, seq_local, ..]`` with dim 1.

        Communicates: forward, one all-gather; dx is this rank's slice of dy. Conjugate: :meth:`shard`.

        Raises:
            TypeError: no tensor. IndexError: no such ``dim``. ValueError: another length than this rank has.
        """
        dim = _checked_dim(x, dim)
        sequence = self.batch is not None and dim > 0
        sizes = self.sequence_sizes if sequence else self.sizes
        rank, n = self.group.rank, x.shape[dim]
        if n != sizes[rank]:
            rule = f"the {sizes[rank]} tokens of {'one sequence' if sequence else 'all sequences'} on this rank"
            raise ValueError(f"x: {n} elements in dim {dim} must be {rule}")
        if self.group.size == 1:
            return x
        order, sizes = self.order(sequence, x.device)
        return gather_from_region(x, self.group.name, dim, sizes).index_select(dim, inverse_order(order))

    def __repr__(self) -> str:
        of = f"batch={self.batch}, seq={self.lengths[0] if self.lengths else 0}"
        of = f"{len(self.lengths)} sequences" if self.batch is None else of
        p, rank = self.group.size, self.group.rank
        return f"ContextLayout({of}, tokens={self.tokens}, p={p}, rank={rank}, balance={self.balance})"

    def order(self, sequence: bool, device: torch.device) -> tuple[Tensor, tuple[int, ...]]:
        """Returns the place before the cut of each token of rank 0, 1, .., one after the other, and the tokens of each
        rank: of all sequences, or (``sequence``, with ``batch``) of one."""
        if self.batch is None or sequence:
            return torch.cat(self._held).to(device), self.sequence_sizes
        starts = torch.arange(self.batch)[:, None] * sum(self.chunks[0])
        return torch.cat([(starts + positions).flatten() for positions in self._held]).to(device), self.sizes

    def _places(self, chunks: list[int], within: bool) -> Tensor:
        """Returns the places of the tokens of these chunks of each sequence: in their sequence, or among all tokens."""
        starts, lengths, first = [], [], 0
        for sequence in self.chunks:
            ends = [0, *accumulate(sequence)]
            starts += [ends[c] + (0 if within else first) for c in chunks]
            lengths += [sequence[c] for c in chunks]
            first += ends[-1]
        counts = torch.tensor(lengths, dtype=torch.int64)
        before = torch.tensor(starts, dtype=torch.int64) - (counts.cumsum(0) - counts)
        return torch.arange(sum(lengths)) + before.repeat_interleave(counts)


def _checked_lengths(lengths: Sequence[int] | Tensor | None, batch: int | None, seq: int | None) -> tuple[int, ...]:
    if (lengths is None) == (batch is None and seq is None) or (batch is None) != (seq is None):
        raise ValueError(
            f"lengths: {lengths} must be given, or batch = {batch} and seq = {seq} must be, and not both of them"
        )
    if lengths is not None:
        if not isinstance(lengths, Iterable) or (isinstance(lengths, Tensor) and lengths.dim() != 1):
            raise TypeError(f"lengths: {lengths!r} must be a sequence of integers, or a tensor of one dim")
        values = lengths.tolist() if isinstance(lengths, Tensor) else list(lengths)
        names = ["lengths"] * len(values)
    else:
        values, names = [batch, seq], ["batch", "seq"]
    for name, value in zip(names, values, strict=True):
        check_int(**{name: value})
        if value < 0:
            raise ValueError(f"{name}: {value} must not be negative")
    return tuple(values) if lengths is not None else (values[1],) * values[0]


def _checked_dim(x: Tensor, dim: int) -> int:
    check_tensor(x=x)
    check_int(dim=dim)
    dims = x.dim()
    if not -dims <= dim < dims:
        raise IndexError(f"dim: {dim} must be in [{-dims}, {dims}) for a tensor of {dims} dims")
    return dim % dims


def _owners(p: int, balance: bool) -> list[int]:
    """Returns the rank of each chunk of a sequence: 0, 1, .. p - 1, and if balanced p - 1, .. 0 (but one for p = 1)."""
    return [*range(p), *(reversed(range(p)) if balance and p > 1 else ())]


def _cut(lengths: Sequence[int], p: int, balance: bool) -> tuple[tuple[tuple[int, ...], ...], list[int]]:
    """Returns the lengths of the chunks of each sequence, and the tokens of each rank."""
    owners = _owners(p, balance)
    rank_lengths, cut = [0] * p, []
    for length in lengths:
        each, rest = divmod(length, len(owners))
        chunks = [each] * len(owners)
        by_load = sorted(range(p), key=rank_lengths.__getitem__)
        for i in range(rest):  # a second one only after each rank has got one
            rank = by_load[i % p]
            chunks[rank if i < p else len(owners) - 1 - rank] += 1
        for chunk, owner in zip(chunks, owners, strict=True):
            rank_lengths[owner] += chunk
        cut.append(tuple(chunks))
    return tuple(cut), rank_lengths


def inverse_order(order: Tensor) -> Tensor:
    """Returns the permutation that undoes ``order``."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse
