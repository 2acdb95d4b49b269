"""Choice of the next token from logits with a vocabulary sharded over the ranks, without gathering them.

Every rank gets the same tokens, which do not depend on the number of ranks p, given the same logits, up to ties within
the last bit of fp64: the noise of each candidate is a function of the seed and of its index in the full vocabulary.
C++: csrc/autograd/vocab_sampling.cpp.
"""

from collections.abc import Sequence

from torch import Tensor

from tp_ext import _ops
from tp_ext._checks import check_int, check_number
from tp_ext.common_generator import follow_first
from tp_ext.group import Group, ParallelGroup, parallel_group
from tp_ext.invariance import block_sizes, current_blocks
from tp_ext.nn.loss import vocab_columns
from tp_ext.regions import gather_from_region


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
    logits, columns = _columns(logits_local, parallel_group(group), vocab_size, sizes)
    return _ops.vocab_parallel_argmax(logits, *columns, sizes)


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
    logits, columns = _columns(logits_local, resolved, vocab_size, sizes)
    check_number(least=0, temperature=temperature)
    check_int(least=1, or_none=True, top_k=top_k)
    if top_p is not None and (not isinstance(top_p, int | float) or isinstance(top_p, bool) or not 0 < top_p <= 1):
        raise ValueError(f"top_p: {top_p!r} must be in (0, 1]")
    if temperature and not columns[0]:  # else the ranks choose one id together, whatever they draw
        follow_first((resolved,), logits.device)
    return _ops.vocab_parallel_sample(logits, *columns, temperature, top_k, top_p, sizes)


def _columns(
    logits_local: Tensor, group: ParallelGroup, vocab_size: int | None, sizes: Sequence[int] | None
) -> tuple[Tensor, tuple[str, int, int, int]]:
    """Returns the first arguments of the operators: the logits, the group that holds the other columns, the first
    column, their number without padding and the size of the vocabulary. In :func:`tp_ext.tp_invariant` the ranks gather
    the logits, and each holds all."""
    if not logits_local.is_floating_point():
        raise TypeError(f"logits_local: dtype {logits_local.dtype} must be a floating point type")
    if logits_local.dim() < 1:
        raise ValueError("logits_local: a 0-d tensor must have a last dim, the vocabulary")
    start, local, full = vocab_columns(logits_local.shape[-1], vocab_size, group, sizes=sizes)
    blocks = current_blocks()
    if blocks is not None and group.size > 1:
        sizes = block_sizes(full, blocks, group.size)
        return gather_from_region(logits_local.detach(), group.name, -1, sizes), ("", 0, full, full)
    return logits_local, (group.name, start, local, full)
