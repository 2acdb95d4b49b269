"""Comparison of the ranks' tensors with the full one of a single process, whose placement follows from the shapes."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from tp_ext.sharding import Part, Sharding
from tp_ext.simulation.comparison import difference

PartsOfDim = tuple[tuple[Part, ...], tuple[Part, ...]]
"""The parts of one sharded dim, at one rank and at p ranks; they differ where padding or copies depend on p."""


class Placement(NamedTuple):
    """The distribution of a full activation over the ranks.

    Attributes:
        p: the number of ranks.
        dim: the sharded dim; None: replicated.
        lengths: the ranks' lengths of it, concatenated.
        parts: in place of ``lengths``: those of a parameter's dim, which the activation has, too (q | k | v).
    """

    p: int
    dim: int | None = None
    lengths: tuple[int, ...] = ()
    parts: PartsOfDim | None = None

    def expected(self, full: Tensor) -> list[Tensor]:
        """Returns the ranks' local tensors of a full one, which may have the padding of one rank."""
        if self.dim is None:
            return [full] * self.p
        if self.parts is None:
            return list(full.split(self.lengths, self.dim))
        here, there = (Sharding(self.dim, parts) for parts in self.parts)
        whole = here.unshard([full])
        return [there.shard(whole, rank, self.p) for rank in range(self.p)]


def placements(full: Sequence[int], locals_: Sequence[Sequence[int]], tables: Iterable[PartsOfDim]) -> list[Placement]:
    """Returns the placements that give these shapes; the likeliest one first, none if there is none."""
    p, shapes = len(locals_), [tuple(shape) for shape in locals_]
    fitting = []
    if any(len(shape) != len(full) for shape in shapes):
        return []
    differing = [dim for dim, size in enumerate(full) if any(shape[dim] != size for shape in shapes)]
    if not differing:
        fitting.append(Placement(p))
    # Padding of one rank: the shapes are equal, and the last elements of the dim are none of the unsharded model
    for dim in differing if len(differing) == 1 else range(len(full)) if p == 1 else ():
        lengths = tuple(shape[dim] for shape in shapes)
        for parts in tables:
            here, there = (Sharding(dim, some) for some in parts)
            if here.local_size(0, 1) == full[dim] and tuple(there.local_sizes(p)) == lengths:
                fitting.append(Placement(p, dim, parts=parts))
        if differing and sum(lengths) == full[dim]:
            fitting.append(Placement(p, dim, lengths))
    return fitting


class Comparison(NamedTuple):
    """A full tensor compared with the ranks' tensors.

    Attributes:
        error: the largest difference relative to the largest element; None: the shapes fit no placement; infinite: a
            rank has no tensor, or one of another dtype or with NaN.
        full, locals: the tensors, without None.
        placement: the one that fits best.
    """

    error: float | None
    full: Tensor | None
    locals: list[Tensor]
    placement: Placement | None = None

    @property
    def known_error(self) -> float:
        """The error, infinite if the shapes fit no placement."""
        return float("inf") if self.error is None else self.error

    def wrong(self, bound: float) -> bool:
        """Returns whether the values are known to be wrong."""
        return self.error is not None and self.error > bound

    @property
    def expected(self) -> list[Tensor]:
        """The local tensors that would be right; none if the shapes fit no placement."""
        return [] if self.placement is None or self.full is None else self.placement.expected(self.full)


def compare(
    full: Tensor | None, locals_: Sequence[Tensor | None], tables: Sequence[PartsOfDim] = (), floor: float = 0.0
) -> Comparison:
    """Compares a full activation or its gradient with what the ranks hold; ``floor`` is the least magnitude to which
    differences are relative."""
    present = [local for local in locals_ if local is not None]
    if full is None or len(present) < len(locals_):
        return Comparison(0.0 if full is None and not present else float("inf"), full, present)
    best = Comparison(None, full, present)
    # Shapes may fit several placements: the values decide
    for placement in placements(full.shape, [local.shape for local in present], tables):
        error = difference(present, placement.expected(full), floor)
        if best.error is None or error < best.error:
            best = Comparison(error, full, present, placement)
    return best


def is_partial(comparison: Comparison, bound: float) -> bool:
    """Returns whether the ranks hold tensors of the full shape whose sum is the right one."""
    full, placement = comparison.full, comparison.placement
    if full is None or placement is None or placement.dim is not None or not full.is_floating_point():
        return False
    return difference([torch.stack(comparison.locals).sum(0)], [full]) <= bound


def copies_summed(comparison: Comparison, floor: float = 0.0) -> Comparison:
    """Returns the comparison of a gradient whose copies on several ranks are partial, if they are: by their sum."""
    if (
        comparison.placement is None
        or comparison.placement.parts is None
        or comparison.full is None
        or not comparison.error
    ):
        return comparison
    here, there = (Sharding(comparison.placement.dim or 0, parts) for parts in comparison.placement.parts)
    if all(not part.has_copies for part in there.parts):
        return comparison
    full = here.unshard([comparison.full])
    total = torch.zeros_like(full)
    for rank, local in enumerate(comparison.locals):
        for share in there.local_parts(rank, comparison.placement.p):
            chunk = local.narrow(there.dim, share.local_start, share.length)
            total.narrow(there.dim, share.full_start, share.length).add_(chunk)
    return comparison._replace(error=min(comparison.error, difference([total], [full], floor)))
