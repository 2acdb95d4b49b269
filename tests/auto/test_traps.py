"""Models that look easy to shard and are not: each is right on 2 ranks, or whole with a reason, never wrong.

One process of `simulate` runs them in groups, so that a failure names its traps; `python -m tests.auto.traps.run NAME`
prints one.
"""

import pytest

from tests.auto.traps.run import TRAPS, result_of

CASES = [(name, p) for name, trap in TRAPS.items() for p in trap.p]


@pytest.mark.parametrize(("name", "p"), CASES, ids=lambda value: str(value))
def test_trap(name: str, p: int) -> None:
    result = result_of(name, p)
    assert result.passes(), f"{result.verdict}, {result.share:.0%} sharded: {result.text}"
