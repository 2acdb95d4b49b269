"""Selection of cases from a grid: the product of a test's parameters proves little more than all pairs of their values.

A test marked ``@pytest.mark.thinned`` runs by default in the fewest cases, found greedily, in which every pair of
values of two parameters occurs; with ``thinned(1)``, every value. The others are marked ``exhaustive``, and run with
``--exhaustive`` (``make test-all``), or if they are named on the command line. CUDA cases are a grid of their own.
"""

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import pytest


def covering(cases: Sequence[dict[str, Hashable]], strength: int) -> list[int]:
    """Returns the indices of cases in which each combination of ``strength`` values that occurs in any case occurs."""
    wanted = [set(itertools.combinations(case.items(), min(strength, len(case)))) for case in cases]
    missing = set().union(*wanted)
    chosen = []
    while missing:
        best = max(range(len(cases)), key=lambda i: len(wanted[i] & missing))  # the first of equally good ones
        chosen.append(best)
        missing -= wanted[best]
    return sorted(chosen)


def _values(params: dict[str, Any]) -> dict[str, Hashable]:
    """Returns keys that distinguish the values of parameters: True and 1 are two, and a list has only its identity."""
    plain = (bool, int, float, str, type(None))
    return {name: (type(v), v) if isinstance(v, plain) else (type(v), id(v)) for name, v in params.items()}


def mark_exhaustive(items: Sequence[Any]) -> None:
    """Marks the cases of thinned tests that do not run by default."""
    grids: dict[tuple[str, bool], list[Any]] = {}
    for item in items:
        if item.get_closest_marker("thinned") and hasattr(item, "callspec"):
            key = item.nodeid.partition("[")[0], item.get_closest_marker("cuda") is not None
            grids.setdefault(key, []).append(item)
    for grid in grids.values():
        mark = grid[0].get_closest_marker("thinned")
        kept = set(covering([_values(item.callspec.params) for item in grid], *mark.args or (2,)))
        for number, item in enumerate(grid):
            if number not in kept:
                item.add_marker(pytest.mark.exhaustive)
