"""Models that look easy to shard and are not: each is right, or whole with a reason, never wrong.

`python -m tests.auto.traps.run NAME` prints the verdict of one.
"""

import itertools

import pytest

from tests.auto.traps.run import TRAPS, result_of


def _cases() -> list:
    """At 2 ranks every second trap of a published family and every fourth of one of our own; the rest is exhaustive.

    A family is a file, or the traps of a file whose names begin alike; neighbours are variants of an idea."""
    cases, numbers = [], {}
    for name, trap in TRAPS.items():
        family = trap.file, name.partition("_")[0] if name[0].islower() else ""
        number = next(numbers.setdefault(family, itertools.count()))
        for p in trap.p:
            rare = p != 2 or number % (2 if trap.published else 4)
            cases.append(pytest.param(name, p, marks=[pytest.mark.exhaustive] if rare else [], id=f"{name}-{p}"))
    return cases


@pytest.mark.parametrize(("name", "p"), _cases())
def test_trap(name: str, p: int) -> None:
    result = result_of(name, p)
    assert result.passes(), f"{result.verdict}, {result.share:.0%} sharded: {result.text}"
