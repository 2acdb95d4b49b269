"""The number of blocks of each stage of a pipeline: balanced over equal blocks, over parameters or over given costs."""

import itertools
from collections.abc import Callable, Collection, Sequence

Split = None | str | Sequence[float]
"""Type of ``split``: None, ``"parameters"``, numbers of blocks of the stages, or costs of the parts."""

_END = 1e-3  # of a block: with equal blocks a remainder goes to inner stages, since the ends also have other parts


def split_blocks(split: Split, blocks: int, stages: int, sizes: Sequence[float]) -> list[int]:
    """Returns the number of blocks of each stage, at least one.

    Args:
        split: see :func:`tp_ext.parallel.pipeline_stages`.
        sizes: the numbers of parameters of what precedes the blocks, of each block, and of what follows them.

    Raises:
        ValueError: fewer blocks than stages, or a split of another form. TypeError: it is of another type.
    """
    if blocks < stages:
        raise ValueError(f"model: {blocks} blocks must be at least the number of stages, {stages}")
    if split is None:
        return balanced([_END, *[1.0] * blocks, _END], stages)
    if split == "parameters":
        return balanced(sizes, stages)
    if not isinstance(split, Collection):
        raise TypeError(f"split: {split!r} must be None, 'parameters', or a list of numbers of blocks or of costs")
    if not isinstance(split, str) and _are_counts(split, blocks, stages):
        return [int(number) for number in split]
    if isinstance(split, str) or len(split) not in (blocks, blocks + 2) or any(cost < 0 for cost in split):
        raise ValueError(
            f"split: {split!r} must be None, 'parameters', {stages} positive numbers of blocks with the sum {blocks}, "
            f"or the costs of the {blocks} blocks, with or without those of the first and last part around them"
        )
    return balanced(split if len(split) == blocks + 2 else [0.0, *split, 0.0], stages)


def _are_counts(split: Sequence[float], blocks: int, stages: int) -> bool:
    positive = all(isinstance(number, int) and number > 0 for number in split)
    return positive and len(split) == stages and sum(split) == blocks


def balanced(costs: Sequence[float], stages: int) -> list[int]:
    """Returns the number of blocks per stage that minimises the cost of the most expensive stage; ties go to the most
    even split.

    Args:
        costs: of what precedes the blocks, of each block, and of what follows them.
    """
    blocks = [float(cost) for cost in costs[1:-1]]
    blocks[0] += costs[0]
    blocks[-1] += costs[-1]
    until = [0.0, *itertools.accumulate(blocks)]
    best = _best(until, stages, float("inf"), max)
    limit = max(until[end] - until[begin] for begin, end in itertools.pairwise(best))
    ends = _best(until, stages, limit * (1 + 1e-9), lambda total, cost: total + cost * cost)
    return [end - begin for begin, end in itertools.pairwise(ends)]


def _best(until: list[float], stages: int, limit: float, add: Callable[[float, float], float]) -> list[int]:
    """Returns the boundaries of the stages that minimise the total cost, none above the limit, by dynamic programming.

    Args:
        until: the cost of the blocks before each boundary.
        add: the total cost with one more stage, from that without and from the cost of the stage.
    """
    blocks = len(until) - 1
    totals: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]  # per stage: its end -> the total, its begin
    for stage in range(1, stages + 1):
        best: dict[int, tuple[float, int]] = {}
        # One block at least for each stage before and after this boundary
        for end in range(stage, blocks - (stages - stage) + 1):
            for begin, (total, _) in totals[-1].items():
                cost = until[end] - until[begin]
                if begin < end and cost <= limit:
                    new = add(total, cost)
                    if end not in best or new < best[end][0]:
                        best[end] = new, begin
        totals.append(best)
    ends = [blocks]
    for best in reversed(totals[1:]):
        ends.append(best[ends[-1]][1])
    return ends[::-1]
