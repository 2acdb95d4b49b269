"""Who has how much: the one rule by which the units of a dim are shared among ranks, and :func:`shares`, its context.

[Note: who has how much is one fact]
"""

import math
from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from functools import cache, lru_cache
from numbers import Real
from typing import Any, NamedTuple

from tp_ext._checks import check_bool

Weights = tuple[float, ...]


class Shares(NamedTuple):
    """What a context says: the weights of the ranks, and whether tokens are cut by them, too."""

    weights: Weights
    tokens: bool


_shares: ContextVar[Shares | None] = ContextVar("shares", default=None)


def shares(weights: Iterable[float] | None, *, tokens: bool = True) -> AbstractContextManager[None]:
    """Builds layers of which rank r of the tensor-parallel group holds ``weights[r] / sum(weights)``: for ranks that
    are not alike.

    ::

        with tp_ext.shares([2, 1, 1]):
            mlp = tp_ext.ParallelMLP(1024, 4096, group=group)  # 2048, 1024 and 1024 features

    The units of a part of a sharded dim (features, groups of heads, words, blocks of :func:`tp_ext.tp_invariant`) are
    shared by the largest remainders of ``units * weights[r] / sum(weights)``, of equal ones those of the lower ranks,
    computed exactly on the rational values of the numbers. So each rank is within one unit of its share, and equal
    weights give the sizes of ``torch.tensor_split``. A rank of weight 0 holds nothing, and takes part in all that the
    ranks communicate.

    Modules built inside keep their shares (``layer.shares``, the numbers as given; None outside of a context, and over
    a group of one rank). Over other groups (``weight_group``, experts, context, data) nothing changes. Functions of
    tensors know no context; they take ``sizes=``. Contexts nest, and the inner one holds.

    Args:
        weights: one integer or finite float of at least 0 for each rank, one of them above 0; None ends the context.
        tokens: under sequence parallelism tokens are shared alike, and layers whose input are this rank's tokens need
            ``total_tokens=``; False: equally.

    Communicates nothing. A layer over a group of several ranks compares the weights of the ranks when it is built;
    one that is built outside of a context at its first draw or call.

    Raises:
        TypeError: a weight is no number, or a boolean. ValueError: it is negative or not finite, or all are 0; in a
            layer, another number of weights than ranks of its group, other weights on another rank, or an option that
            has no such form, by name.
    """
    check_bool(tokens=tokens)
    return _entered(None if weights is None else Shares(checked_weights(weights), tokens))


@contextmanager
def _entered(value: Shares | None) -> Iterator[None]:
    token = _shares.set(value)
    try:
        yield
    finally:
        _shares.reset(token)


def using_shares(value: Shares | None) -> AbstractContextManager[None]:
    """Returns the context of a layer that builds others like it; see :func:`tp_ext.model.layer_shares.shares_of`."""
    return _entered(value)


def current_shares() -> Shares | None:
    """Returns what the context says; None outside of one."""
    return _shares.get()


def refuse_in_shares(**options: object) -> None:
    """Raises a ValueError for the first option that is given, of a layer whose ranks have shares."""
    for name, value in options.items():
        if value is not None and value is not False:
            raise ValueError(f"{name}: {value!r} must not be given in tp_ext.shares: it needs equal shares")


def checked_weights(weights: Any) -> Weights:
    """Returns the weights as Python's numbers, or raises as :func:`shares`."""
    if isinstance(weights, str | bytes | dict | set | frozenset) or not isinstance(weights, Iterable):
        raise TypeError(f"weights: {weights!r} must be a list of numbers, one for each rank, or None")
    numbers = []
    for weight in weights:
        if not isinstance(weight, Real) or isinstance(weight, bool):
            raise TypeError(f"weights: {weight!r} must be a number, the share of a rank")
        number: Any = weight.item() if hasattr(weight, "item") else weight  # of numpy
        if not number >= 0 or number == math.inf:
            raise ValueError(f"weights: {number!r:.100} must be a finite number of at least 0")
        numbers.append(number)
    if not any(numbers):
        raise ValueError(f"weights: {numbers} must have at least one above 0")
    return tuple(numbers)


def ratios(weights: Iterable[Any]) -> tuple[tuple[int, int], ...]:
    """Returns the exact values of weights, which two ranks can compare."""
    return tuple(weight.as_integer_ratio() for weight in weights)


@cache
def _integers(weights: Weights) -> tuple[int, ...]:
    """Returns integers in the proportion of the weights."""
    if all(type(weight) is int for weight in weights):
        return tuple(int(weight) for weight in weights)
    exact = ratios(weights)
    common = math.lcm(*(denominator for _, denominator in exact))
    return tuple(numerator * (common // denominator) for numerator, denominator in exact)


def split_sizes(n: int, p: int, weights: Weights | None = None) -> list[int]:
    """Returns how many of n units each of p ranks has: those of ``torch.tensor_split``, or by the rule of
    :func:`shares`."""
    if weights is None or p == 1:
        return [n // p + (rank < n % p) for rank in range(p)]
    if len(weights) != p:
        raise ValueError(f"shares: {list(weights)} must be one weight for each rank, p = {p}")
    return list(_largest_remainders(n, _integers(weights)))


@lru_cache(4096)
def _largest_remainders(n: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    total = sum(weights)
    sizes = [n * weight // total for weight in weights]
    remainders = [n * weight % total for weight in weights]
    missing = n - sum(sizes)
    for rank in sorted(range(len(weights)), key=lambda rank: -remainders[rank])[:missing]:
        sizes[rank] += 1
    return tuple(sizes)
