"""Likely causes of wrong values, by tests of hypotheses on the numbers: their sum over the ranks is right, they are a
multiple of the right ones, another rank's, zero in other places."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from tp_ext.sharding import Layout
from tp_ext.simulation.comparison import difference
from tp_ext.verify.compare import Comparison

_LOOSE = 1e-3
"""Relative difference up to which numbers fit a hypothesis: the right sums of numbers that carry another, smaller error
fit, and of random numbers others do not."""

_LAST_BITS = 1e-2
"""Relative difference up to which bits of tp_invariant differ by rounding, in bf16, too."""
_ROUNDING = (
    "bits differ by rounding: a sum over the ranks in their order, or a function of shards that rounds an element by "
    "its place"
)


def of_activation(wrong: Comparison, bound: float, in_train_only: bool = False) -> str:
    """Returns the likely cause of an output whose inputs are right.

    Args:
        in_train_only: the same module is right in eval mode.
    """
    # Hypotheses from the most to the least specific: the first that fits is reported
    if wrong.full is None or wrong.placement is None:
        shapes = [tuple(local.shape) for local in wrong.locals]
        full = None if wrong.full is None else tuple(wrong.full.shape)
        return (
            f"shapes {shapes} on the ranks are no shards of {full}: a local size is used as a number, or shards leave"
        )
    if any(local.dtype != wrong.full.dtype for local in wrong.locals):
        dtypes = [str(local.dtype) for local in wrong.locals]
        return f"dtypes {dtypes} on the ranks and {wrong.full.dtype} on one: a cast in a local branch"
    p, replicated = len(wrong.locals), wrong.placement.dim is None
    if any(local.isnan().any() for local in wrong.locals):
        return "NaN on a rank: a local size of zero, or a local part that may be empty, is used as a number"
    if bound == 0 and difference(wrong.locals, wrong.expected) < _LAST_BITS:
        return _ROUNDING
    if replicated and not in_train_only:
        if _same(wrong.full, sum_of(wrong.locals), bound):
            return "a partial sum is used as a whole: the sum of the ranks' values is the right one"
        # A bias that each rank adds is in the sum p times, the same on all rows
        rest = sum_of(wrong.locals) - wrong.full
        if not _equal(wrong.locals) and _constant_over_rows(rest):
            return "a partial sum is used as a whole: the sum of the ranks' values is the right one but for a bias"
    # A multiple of the right numbers is a sum that is taken too often, or a mean over the wrong count
    factors = [_factor(local, right) for local, right in zip(wrong.locals, wrong.expected, strict=True)]
    if (text := _of_factors(factors, p, "value", replicated)) is not None:
        return text
    # After the multiples, since a mask scales, too
    if in_train_only or _masked(wrong):
        return "values are zero, or scaled, in other places in train mode alone: the mask is that of a rank"
    if (text := _of_slices(wrong)) is not None:
        return text
    if replicated and not _equal(wrong.locals):
        return (
            "the ranks' values differ and fit no sum: each uses a local slice, or a local size as a number, where "
            "all need the same"
        )
    if replicated:
        differences = [local - right for local, right in zip(wrong.locals, wrong.expected, strict=True)]
        if p > 1 and wrong.full.dim() and all(map(_constant_over_rows, differences)):
            return "the same vector is too much on all tokens: a bias is added on every rank, and summed twice or more"
        return (
            "the ranks agree on a wrong value: one of their terms is summed twice or lacks, or has a local size in it"
        )
    return "the shards are wrong: a local size is used as a number, or a wrong local slice"


def of_gradient(full: Tensor | None, locals_: Sequence[Tensor | None], layouts: Sequence[Layout], bound: float) -> str:
    """Returns the likely cause of a wrong gradient of a parameter with these layouts on the ranks."""
    present = [local for local in locals_ if local is not None]
    if full is None:
        return "there is a gradient and should be none: the graph has a local path that one process does not have"
    if len(present) < len(locals_):
        ranks = [rank for rank, local in enumerate(locals_) if local is None]
        return f"ranks {ranks} have no gradient: no local work of theirs uses the parameter, and no sum follows"
    expected = [layout.shard(full) for layout in layouts]
    if any(local.shape != right.shape for local, right in zip(present, expected, strict=True)):
        return f"shapes {[tuple(local.shape) for local in present]} are not those of the layout: a local size is wrong"
    # Elements that several ranks hold, copies and replicated parameters, have gradients that are sums
    copied = any(part.has_copies for layout in layouts for entry, _ in layout for part in entry.parts)
    parts = [_spread(local, layout, full) for local, layout in zip(present, layouts, strict=True)]
    return _of_sums(full, present, expected, parts if copied or not any(layouts) else [], bound, "gradient")


def of_gradient_within(wrong: Comparison, bound: float, what: str) -> str:
    """Returns the likely cause of a wrong gradient of an activation: of ``what``, "its input" for instance."""
    named = f"gradient of {what}"
    if wrong.full is None or wrong.placement is None or len(wrong.locals) != len(wrong.expected):
        return f"the {named} is missing on a rank, or has the shape of no shard: a local path of the graph is cut"
    parts = wrong.locals if wrong.placement.dim is None else []
    return _of_sums(wrong.full, wrong.locals, wrong.expected, parts, bound, named)


def _of_sums(
    full: Tensor,
    locals_: Sequence[Tensor],
    expected: Sequence[Tensor],
    parts: Sequence[Tensor],
    bound: float,
    what: str,
) -> str:
    """Returns the cause of a wrong gradient; ``parts`` have the full shape where several ranks hold an element."""
    if bound == 0 and difference(locals_, expected) < _LAST_BITS:
        return f"the {what}: {_ROUNDING}"
    if parts and _same(full, sum_of(parts), bound):
        return f"the {what} is missing a sum over the ranks: each has a part, and the sum of the parts is right"
    factors = [_factor(local, right) for local, right in zip(locals_, expected, strict=True)]
    if (text := _of_factors(factors, len(locals_), what, bool(parts))) is not None:
        return text
    if parts and not _equal(parts):
        return f"the ranks' values of the {what} differ: a sum over the ranks is missing, or a part of it is"
    if parts:
        return f"the {what} is the same wrong one on all ranks: a part of it is summed twice, or misses its sum"
    return f"the shards of the {what} are wrong: a sum that they need is missing, or one of its terms is summed twice"


def of_weight(full: Tensor, locals_: Sequence[Tensor], expected: Sequence[Tensor]) -> str:
    """Returns the likely cause of a wrong initial or trained parameter or buffer, whose shapes are right."""
    wrong = [rank for rank in range(len(locals_)) if not torch.equal(locals_[rank], expected[rank])]
    for rank in wrong:
        for other, right in enumerate(expected):
            if other != rank and locals_[rank].shape == right.shape and torch.equal(locals_[rank], right):
                return f"rank {rank} holds the local slice of rank {other}"
    if all(_permuted(locals_[rank], full) for rank in wrong):
        return f"ranks {wrong} hold a wrong local slice: values of the full tensor, at other places"
    if all(torch.equal(right, expected[0]) for right in expected) and not _equal(locals_):
        return f"replicated, and ranks {wrong} hold other values than one rank: local ones, as of a seed by rank"
    factors = [_factor(local, right) for local, right in zip(locals_, expected, strict=True)]
    if all(factor is not None for factor in factors):
        return f"the values are {_shown(factors)} times the right ones: a local size is used as a number"
    return f"ranks {wrong} hold other numbers: drawn for the local shape, or from a local seed"


def of_loss(full: Tensor, locals_: Sequence[Tensor], bound: float) -> str:
    """Returns the likely cause of a wrong loss of a model whose modules are right."""
    p, total = len(locals_), sum_of(locals_)
    if _same(full, total, bound):
        return "the loss is a partial sum used as a whole: the sum of the ranks' losses is the right one"
    if (text := _of_factors([_factor(local, full) for local in locals_], p, "loss", True)) is not None:
        return text
    if not _equal(locals_):
        return "the ranks' losses differ: each is that of local tokens, features or words, without a sum over the ranks"
    return "the ranks agree on a wrong loss: a local size is used as a number, or a term is summed twice"


def sum_of(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the sum of equal shapes."""
    return torch.stack(list(tensors)).sum(0)


def _same(full: Tensor, other: Tensor, bound: float) -> bool:
    return full.is_floating_point() and difference([other], [full]) <= max(bound, _LOOSE)


def _equal(tensors: Sequence[Tensor]) -> bool:
    return all(torch.equal(tensor, tensors[0]) for tensor in tensors)


def _factor(local: Tensor, right: Tensor) -> float | None:
    """Returns the number that the right values are multiplied by; None if it is not one number."""
    if not right.is_floating_point() or local.shape != right.shape:
        return None
    a, b = local.double().flatten(), right.double().flatten()
    square = b.dot(b).item()
    if not square or not math.isfinite(square):
        return None
    factor = a.dot(b).item() / square
    # Zeros are a multiple of anything
    return factor if difference([local.double()], [right.double() * factor]) <= _LOOSE and abs(factor) > 1e-6 else None


def _of_factors(factors: Sequence[float | None], p: int, what: str, replicated: bool) -> str | None:
    """Returns the cause of values that are a multiple of the right ones on each rank; None if they are not."""
    if any(factor is None for factor in factors) or all(abs(factor - 1) < _LOOSE for factor in factors if factor):
        return None
    numbers = [factor for factor in factors if factor is not None]
    if all(abs(number - p) < _LOOSE * p for number in numbers):
        other = "" if replicated else ", or divided by a local size"
        return f"the {what} is p = {p} times the right one on every rank: it is summed twice{other}"
    if all(abs(number * p - 1) < _LOOSE for number in numbers):
        return f"the {what} is 1/{p} of the right one on every rank: a mean over the ranks in place of a sum"
    return f"the {what} is {_shown(numbers)} times the right one on the ranks: a local size is used as a number"


def _shown(numbers: Sequence[float | None]) -> str:
    texts = list(dict.fromkeys(f"{number:.4g}" for number in numbers if number is not None))
    return texts[0] if len(texts) == 1 else f"[{', '.join(texts)}]"


def _masked(wrong: Comparison) -> bool:
    """Returns whether the wrong elements are those that are zero on one side only, and all others agree."""
    for local, right in zip(wrong.locals, wrong.expected, strict=True):
        both = (local != 0) & (right != 0)
        if not both.any() or difference([local.where(both, 0)], [right.where(both, 0)]) > _LOOSE:
            return False
    return True


def _of_slices(wrong: Comparison) -> str | None:
    expected = wrong.expected
    for rank, local in enumerate(wrong.locals):
        for other, right in enumerate(expected):
            differ = local.shape == right.shape and not torch.equal(expected[rank], right)
            if differ and difference([local], [right]) <= _LOOSE:
                return f"rank {rank} holds the local slice of rank {other}"
    replicated = wrong.full is not None and wrong.placement is not None and wrong.placement.dim is None
    if replicated and all(_permuted(local, expected[0]) for local in wrong.locals):
        return "the right values are at other places: local slices are joined in the wrong order"
    return None


def _permuted(local: Tensor, full: Tensor) -> bool:
    """Returns whether most values of ``local`` occur in ``full``, to the bit."""
    # A constant is at all places, so being there shows nothing
    return local.numel() > 0 and bool(torch.isin(local, full).double().mean() > 0.99) and local.unique().numel() > 1


def _constant_over_rows(rest: Tensor) -> bool:
    rows = rest.flatten(0, -2) if rest.dim() > 1 else rest[None]
    return len(rows) > 1 and difference(list(rows), [rows[0]] * len(rows)) <= _LOOSE


def _spread(local: Tensor, layout: Layout, full: Tensor) -> Tensor:
    """Returns a full tensor with the rank's elements in their places, and zero elsewhere."""
    if not layout:
        return local
    spread = torch.zeros_like(full)
    for offsets, chunk, _ in layout.local_chunks(local)[1]:
        spread[tuple(slice(start, start + size) for start, size in zip(offsets, chunk.shape, strict=True))] = chunk
    return spread
