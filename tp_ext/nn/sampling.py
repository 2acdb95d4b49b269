"""Choice of the next token from logits with a vocabulary sharded over the ranks, without gathering them.

Every rank gets the same tokens, which do not depend on the number of ranks p, given the same logits, up to ties within
the last bit of fp64: the noise of each candidate is a function of the seed and of its index in the full vocabulary.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from tp_ext import _ops
from tp_ext._checks import check_int, check_number
from tp_ext.common_generator import follow_first
from tp_ext.group import Group, ParallelGroup, parallel_group
from tp_ext.invariance import block_sizes, current_blocks
from tp_ext.nn.loss import vocab_columns
from tp_ext.nn.loss_of_sizes import check_same_sizes, number_of_sizes
from tp_ext.random import draw_seed
from tp_ext.regions import all_gather_region, gather_from_region
from tp_ext.sharding import split_sizes


@torch.no_grad()
def vocab_parallel_argmax(
    logits_local: Tensor, group: Group, *, vocab_size: int | None = None, sizes: Sequence[int] | None = None
) -> Tensor:
    """Returns ``argmax(-1)`` of the full logits: ids ``[..]``, int64, the same on all ranks.

    As torch's: of equal logits the lowest id, and NaN is the largest. Padding columns are never chosen.

    Args:
        logits_local: ``[.., vocab_local]``, this rank's columns, as :func:`vocab_parallel_cross_entropy` takes them.
        group: the ranks that hold the other columns.
        vocab_size: size of the full vocabulary; default p times the local width. It is required if p does not divide
            it.
        sizes: the number of columns of each rank, where they are others.

    Communicates: one all-gather of two numbers (maximum and id) per row, and of two more by which the ranks compare
    their widths and vocabularies.

    Raises:
        ValueError: full logits at p > 1; on every rank, after the exchange, widths or ``vocab_size`` of the ranks that
            do not form one vocabulary (CPU; a device assert on CUDA).
    """
    resolved = parallel_group(group)
    real, shard, resolved = _real_columns(logits_local, vocab_size, resolved, sizes)
    return _argmax(real, shard, resolved)


@torch.no_grad()
def vocab_parallel_sample(
    logits_local: Tensor,
    group: Group,
    *,
    vocab_size: int | None = None,
    sizes: Sequence[int] | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float | None = None,
) -> Tensor:
    """Draws ids ``[..]`` from ``softmax(logits / temperature)``, int64, the same on all ranks and for every p.

    It uses the Gumbel trick: argmax of ``logits / temperature - log(-log(u))``, with u uniform and a function of
    (seed, row, id) alone, where the seed is one draw of torch's default generator. Arithmetic is in fp64. An id less
    likely than 1e-10 times the rest may never be drawn, since u has 32 random bits.

    Args:
        logits_local, group, vocab_size, sizes: as :func:`vocab_parallel_argmax`.
        temperature: 0 is the argmax, and draws nothing.
        top_k: only ids whose logit is at least the k-th largest; ties with the k-th are included.
        top_p: only the fewest most likely ids (after ``temperature`` and ``top_k``) whose probabilities add up to it,
            and those as likely as the last of them (Holtzman et al., arXiv:1904.09751).

    Communicates as :func:`vocab_parallel_argmax`. With ``top_k`` another all-gather of min(top_k, vocab_local) + 1
    numbers per row; with ``top_p`` and no ``top_k`` another of the logits themselves, since no rank knows how many
    reach the sum, and before it one of two numbers, by which the ranks compare their widths: prefer to pass both.

    Raises:
        ValueError: as :func:`vocab_parallel_argmax`; a temperature that is negative or not finite, ``top_k`` below 1,
            ``top_p`` outside (0, 1].
    """
    resolved = parallel_group(group)
    real, shard, resolved = _real_columns(logits_local, vocab_size, resolved, sizes)
    check_number(least=0, temperature=temperature)
    check_int(least=1, or_none=True, top_k=top_k)
    if top_p is not None and (not isinstance(top_p, int | float) or isinstance(top_p, bool) or not 0 < top_p <= 1):
        raise ValueError(f"top_p: {top_p!r} must be in (0, 1]")
    if temperature == 0:
        return _argmax(real, shard, resolved)
    # Before the columns are joined: with other widths on a rank they would not belong together
    if resolved.size > 1 and top_k is None and top_p is not None and top_p < 1:  # gathers the columns themselves
        numbers = real.new_empty((1, 2), dtype=torch.float64)
        numbers[:, 0].fill_(shard.number)
        numbers[:, 1].fill_(shard.full)
        _checked_vocabulary(numbers, all_gather_region(numbers, resolved.name), shard)
    if resolved.size == 1:  # else the ranks choose one id together, whatever they draw
        follow_first((parallel_group(group),), real.device)
    least = _least_logit(real, shard, resolved, temperature, top_k, top_p)
    noise = torch.empty(real.shape, dtype=torch.float64, device=real.device)
    if noise.numel():
        _ops.philox_uniform_(noise, draw_seed(real.device), 0.0, 1.0, real.shape[-1], shard.full, shard.start)
        # Gumbel noise: the argmax of the sums is a draw from the softmax, which no rank has to normalise
        noise.log_().neg_().log_().neg_()
    else:
        draw_seed(real.device)  # keeps the ranks' generators in step
    scores = noise.add_(real.double() / temperature)
    return _argmax(scores if least is None else scores.masked_fill_(real < least, float("-inf")), shard, resolved)


class _Shard(NamedTuple):
    """The columns of this rank, as known locally: their number with padding, the id of the first, the size of the
    full vocabulary, and the numbers of all ranks if they were given."""

    width: int
    start: int
    full: int
    sizes: Sequence[int] | None = None
    rank: int = 0

    @property
    def number(self) -> int:
        """The width as the others get it, or what stands for the sizes that this rank was given."""
        return self.width if self.sizes is None else number_of_sizes(self.sizes, self.rank, self.width)


def _real_columns(
    logits_local: Tensor, vocab_size: int | None, group: ParallelGroup, sizes: Sequence[int] | None
) -> tuple[Tensor, _Shard, ParallelGroup]:
    """Returns this rank's logits without padding, its columns, and the group that holds the others. In
    :func:`tp_ext.tp_invariant` the ranks gather the logits, and each holds all."""
    if not logits_local.is_floating_point():
        raise TypeError(f"logits_local: dtype {logits_local.dtype} must be a floating point type")
    if logits_local.dim() < 1:
        raise ValueError("logits_local: a 0-d tensor must have a last dim, the vocabulary")
    width = logits_local.shape[-1]
    start, local, full = vocab_columns(width, vocab_size, group, sizes=sizes)
    blocks = current_blocks()
    if blocks is not None and group.size > 1:
        logits = gather_from_region(logits_local, group.name, -1, block_sizes(full, blocks, group.size))
        return logits, _Shard(full, 0, full), parallel_group(None)
    return logits_local[..., :local], _Shard(width, start, full, sizes, group.rank), group


def _argmax(scores: Tensor, shard: _Shard, group: ParallelGroup) -> Tensor:
    """Returns the id of the largest score over all ranks. fp64 holds every id and every score exactly."""
    if group.size == 1 and scores.shape[-1]:
        return scores.argmax(-1)
    shape = scores.shape[:-1]
    rows = math.prod(shape)
    best = scores.new_empty((2, rows + 1), dtype=torch.float64)  # last column: local view of width and vocabulary size
    best[0, rows:].fill_(shard.number)
    best[1, rows:].fill_(shard.full)
    if scores.shape[-1]:
        index = scores.argmax(-1, keepdim=True)
        best[0, :rows] = scores.gather(-1, index).flatten()
        best[1, :rows] = index.flatten() + shard.start
    else:  # nothing but padding here
        best[0, :rows] = float("-inf")
        best[1, :rows] = shard.start
    if group.size == 1:
        return best[1, :rows].long().view(shape)
    everyone = all_gather_region(best[None], group.name)
    values, ids = everyone[:, 0, :rows], everyone[:, 1, :rows]
    winner = values.argmax(0)  # among equal scores the first rank, whose ids are lower
    return _checked_vocabulary(ids.gather(0, winner[None])[0].long().view(shape), everyone[..., rows], shard)


def _checked_vocabulary(ids: Tensor, shards: Tensor, shard: _Shard) -> Tensor:
    """Returns ``ids`` if the ranks' widths and vocabularies, ``[p, 2]``, form one vocabulary.

    The operator that compares them for the loss is called with no rows: it raises on every rank, and waits for no GPU.
    In compiled code the result must depend on it.
    """
    if shard.sizes is not None:
        check_same_sizes(shards[:, 0], shard.sizes)
        return ids
    numbers = shards.new_zeros((shards.shape[0], 1, 4))
    numbers[:, 0, 1::2] = shards
    no_target = torch.empty(0, dtype=torch.int64, device=shards.device)
    loss, _ = _ops.vocab_ce_loss(numbers, no_target, shard.full, -100, 0.0, 0.0)
    return ids + loss.sum().long() if torch.compiler.is_compiling() else ids


def _least_logit(
    real: Tensor,
    shard: _Shard,
    group: ParallelGroup,
    temperature: float,
    top_k: int | None,
    top_p: float | None,
) -> Tensor | None:
    """Returns the smallest logit ``[.., 1]`` that may be drawn; None if all may.

    A threshold, unlike a set of ids, needs no agreement about ties.
    """
    full = shard.full
    top_k = full if top_k is None else min(top_k, full)
    top_p = None if top_p == 1 else top_p
    if top_k == full and top_p is None:
        return None
    # The same on all ranks for any sharding
    widest = max(shard.width, split_sizes(full, group.size)[0]) if shard.sizes is None else max(shard.sizes)
    ties: Tensor | float = 0.0
    if top_k == full:
        equal = F.pad(real, (0, widest - real.shape[-1]), value=float("-inf"))
        ordered = gather_from_region(equal, group.name).sort(-1, descending=True).values[..., :full]
    else:
        ordered, ties = _candidates(real, min(top_k, widest), top_k, group)
    if top_p is None:
        return ordered[..., -1:]
    # Probabilities in descending order over all ranks: the same sums for every p
    mass = ((ordered.double() - ordered[..., :1].double()) / temperature).exp()
    sums = mass.cumsum(-1)
    # All ids that top_k lets pass: those that tie with the k-th, too
    total = sums[..., -1:] + ties * mass[..., -1:]
    # The first id at which the sum reaches top_p
    enough = (sums < top_p * total).sum(-1, keepdim=True).clamp_max(ordered.shape[-1] - 1)
    return ordered.gather(-1, enough)


def _candidates(real: Tensor, count: int, top_k: int, group: ParallelGroup) -> tuple[Tensor, Tensor]:
    """Returns the ``top_k`` largest logits, descending, ``[.., top_k]``, and the number of others equal to the last.

    Each rank sends its ``count`` largest logits, and the number of its other columns equal to the smallest of those: if
    that value is the last of all, these are ties that no rank has received. The number is ``[.., 1]``.
    """
    wide = real.to(torch.float64 if real.dtype == torch.float64 else torch.float32)  # for the counts
    largest = wide.topk(min(count, wide.shape[-1]), -1).values
    largest = F.pad(largest, (0, count - largest.shape[-1]), value=float("-inf"))
    last = largest[..., -1:]
    unsent = (wide == last).sum(-1, keepdim=True) - (largest == last).sum(-1, keepdim=True)
    everyone = all_gather_region(torch.cat([largest, unsent.to(wide.dtype)], -1)[None], group.name)
    values, unsent = everyone[..., :-1], everyone[..., -1:]
    ordered = values.movedim(0, -2).flatten(-2).sort(-1, descending=True).values
    least = ordered[..., top_k - 1 : top_k]
    hidden = (unsent * (values[..., -1:] == least)).sum(0)
    return ordered[..., :top_k], hidden + (ordered[..., top_k:] == least).sum(-1, keepdim=True)
