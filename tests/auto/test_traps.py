"""Models that look easy to shard and are not: each is right, or whole with a reason, never wrong.

`python -m tests.auto.traps.run NAME` prints the verdict of one.
"""

import pytest

from tests.auto.traps.run import TRAPS, result_of


def _cases() -> list:
    """All published traps and every second of our own at 2 ranks; the rest is exhaustive."""
    cases = []
    for number, (name, trap) in enumerate(TRAPS.items()):
        for p in trap.p:
            rare = p != 2 or (number % 2 and not trap.published)
            cases.append(pytest.param(name, p, marks=[pytest.mark.exhaustive] if rare else [], id=f"{name}-{p}"))
    return cases


@pytest.mark.parametrize(("name", "p"), _cases())
def test_trap(name: str, p: int) -> None:
    result = result_of(name, p)
    assert result.passes(), f"{result.verdict}, {result.share:.0%} sharded: {result.text}"
