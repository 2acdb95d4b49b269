"""Permutations of whole tensors over the ranks of one axis or of several, and exchanges over several."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from tp_ext.group import ParallelGroup
from tp_ext.mesh_program import regions

Pairs = Sequence[tuple[int, int]]


def check_permutation(perm: object, size: int) -> list[tuple[int, int]]:
    """Returns the pairs of source and destination.

    Raises:
        TypeError: no pairs of integers. ValueError: a rank twice, or one that the axis does not have.
    """
    pairs = list(perm) if isinstance(perm, list | tuple) else None
    if pairs is None or not all(
        isinstance(pair, list | tuple)
        and len(pair) == 2
        and all(isinstance(rank, int) and not isinstance(rank, bool) for rank in pair)
        for pair in pairs
    ):
        raise TypeError(f"ppermute: perm {perm!r} must be a list of pairs of ranks, (source, destination)")
    for k, role in enumerate(("source", "destination")):
        ranks = [pair[k] for pair in pairs]
        if len(set(ranks)) != len(ranks) or not all(0 <= rank < size for rank in ranks):
            raise ValueError(f"ppermute: perm {pairs} must name each {role} once, in 0 .. {size - 1}")
    return [(source, to) for source, to in pairs]


def permuted(x: Tensor, groups: Sequence[ParallelGroup], perm: Pairs) -> Tensor:
    """Sends x from source to destination; zeros on a rank that is no destination.

    One axis after the other: each tensor goes to the coordinate of its destination along the axis. Between two of
    them, a rank may hold several tensors, or none.
    """
    # The same operators on all ranks: compilers order collectives by the graph
    sizes = [group.size for group in groups]
    at = [group.rank for group in groups]
    paths = [(_coordinates(source, sizes), _coordinates(to, sizes)) for source, to in perm]
    rows = x.reshape(1, x.numel()).narrow(0, 0, sum(source == at for source, _ in paths))
    for k, group in enumerate(groups):
        if group.size == 1:
            continue
        # of the ranks that differ from this one in this axis only
        here = [path for path in paths if _place(path, k)[:k] + _place(path, k)[k + 1 :] == at[:k] + at[k + 1 :]]
        mine = [path for path in here if _place(path, k)[k] == at[k]]
        # Received by source, but all-to-all needs them by destination; before the first axis there is one at most
        if k:
            goes_to = [to[k] for _, to in mine]
            order = sorted(range(len(mine)), key=goes_to.__getitem__)
            rows = rows.index_select(0, torch.tensor(order, dtype=torch.int64, device=x.device))
        sent = [sum(to[k] == rank for _, to in mine) for rank in range(group.size)]
        received = [
            sum(_place(path, k)[k] == rank and path[1][k] == at[k] for path in here) for rank in range(group.size)
        ]
        rows = regions.all_to_all(rows, group, (0, 0), sent, received)
        came_from = [_place(path, k)[k] for path in paths]  # as they arrive: by the rank that sent them
        paths = [paths[j] for j in sorted(range(len(paths)), key=came_from.__getitem__)]
    # No row has come: zeros, by an operator so that the graph has one form on all ranks
    return F.pad(rows, (0, 0, 0, 1 - rows.shape[0])).reshape(x.shape)


def exchanged(x: Tensor, groups: Sequence[ParallelGroup], split_dim: int, concat_dim: int) -> Tensor:
    """All-to-all over several axes, the first outermost, of equal slices."""
    y = x.unflatten(split_dim, (*(group.size for group in groups), -1))
    n = len(groups)
    # A dim for each axis in front: an exchange along an axis puts the source's coordinate for the destination's
    y = y.movedim(tuple(range(split_dim, split_dim + n)), tuple(range(n)))
    for k, group in enumerate(groups):
        if group.size > 1:
            y = regions.all_to_all(y, group, (k, k), None, None)
    return y.flatten(0, n - 1).movedim(0, concat_dim).flatten(concat_dim, concat_dim + 1)


def _coordinates(index: int, sizes: Sequence[int]) -> list[int]:
    coordinates = []
    for size in reversed(sizes):
        index, coordinate = divmod(index, size)
        coordinates.append(coordinate)
    return coordinates[::-1]


def _place(path: tuple[list[int], list[int]], k: int) -> list[int]:
    """Returns where a tensor is before it travels along axis k."""
    source, to = path
    return to[:k] + source[k:]
