"""The minimum cut, next to all assignments of small graphs."""

import itertools
import random

import pytest
import torch

from tp_ext.auto.search.cut import CutBoundary, TypeGraph

TENSOR = torch.empty(0)


def _random_graph(seed: int) -> tuple[TypeGraph, list[CutBoundary], set[int], set[CutBoundary]]:
    """A graph of up to 9 nodes, node 0 being I, with its boundaries, sinks, and those boundaries that are closed."""
    draw = random.Random(seed)
    graph, boundaries = TypeGraph(), []
    nodes = [0] + [graph.node() for _ in range(draw.randint(4, 8))]
    for _ in range(draw.randint(0, 3)):
        graph.join(*draw.sample(nodes, 2))
    for _ in range(draw.randint(6, 16)):
        outer, inner = draw.sample(nodes, 2)
        boundaries.append(CutBoundary(outer, inner, draw.randint(1, 4), TENSOR))
        graph.add(boundaries[-1])
    return graph, boundaries, set(draw.sample(nodes[1:], 2)), set(draw.sample(boundaries, draw.randint(0, 2)))


def _best(
    graph: TypeGraph, boundaries: list[CutBoundary], sinks: set[int], closed: set[CutBoundary]
) -> set[int] | None:
    """The nodes that are R in the cheapest assignment, of several in the one with the fewest; None: there is none."""
    best: tuple[int, int] | None = None
    cheapest: set[int] | None = None
    others = [node for node in range(1, len(graph.joined)) if node not in sinks]
    for chosen in itertools.product([False, True], repeat=len(others)):
        inside = sinks | {node for node, is_inside in zip(others, chosen, strict=True) if is_inside}
        joined = ((one, other) for one, neighbours in enumerate(graph.joined) for other in neighbours)
        if any((one in inside) != (other in inside) for one, other in joined):
            continue
        # An R stays one on its way in, and at a closed boundary an I does, too
        if any(b.outer in inside and b.inner not in inside for b in boundaries):
            continue
        crossed = [b for b in boundaries if b.inner in inside and b.outer not in inside]
        if closed.isdisjoint(crossed):
            cost = sum(b.cost for b in crossed), len(inside)
            if best is None or cost < best:
                best, cheapest = cost, inside
    return cheapest


@pytest.mark.parametrize("seed", range(0, 400, 50))
def test_cut_is_the_cheapest_assignment(seed: int) -> None:
    feasible = 0
    for number in range(seed, seed + 50):
        graph, boundaries, sinks, closed = _random_graph(number)
        whole = graph.whole([0], lambda b, closed=closed: b not in closed)
        expected = _best(graph, boundaries, sinks, closed)
        assert (expected is None) == any(sink in whole for sink in sinks), number
        if expected is not None:
            assert graph.inside(whole, sorted(sinks), lambda b, closed=closed: b not in closed) == expected, number
            feasible += 1
    assert feasible > 5
