"""The table of conversions says what the regions do, and the pages say what the table says."""

import re
from typing import Any

import pytest
import torch

import tp_ext
from tests.helpers.paths import ROOT
from tp_ext import debug, regions
from tp_ext.conversions import CONVERSIONS, I, P, R, Region, S, Type

P_RANKS = 2
WORDS = {
    "": "identity|slice",
    "all_reduce": "all-reduce",
    "all_gather": "all-gather",
    "reduce_scatter": "reduce-scatter",
}


def _value(of: Type, whole: torch.Tensor, rank: int) -> torch.Tensor:
    """A rank's tensor of a type that stands for a whole one."""
    if of is S:
        return whole.chunk(P_RANKS)[rank].clone()
    return whole * (1 + 2 * rank) / 4 if of is P else whole.clone()  # terms of different sizes


def _kinds(counts: Any) -> str:
    return " ".join(kind for kind, number in counts.by_kind().items() if number)


def _converted(rank: int, group: Any, region: Region) -> None:
    whole = torch.arange(1.0, 9.0, dtype=torch.float64).view(4, 2)
    x = _value(region.before, whole, rank).requires_grad_()
    options = {"dim": 0} if S in (region.before, region.after) else {}
    with debug.count_collectives() as forward:
        y = getattr(tp_ext, region.name)(x, group, **options)
    if region.after is not P:
        torch.testing.assert_close(y.detach(), _value(region.after, whole, rank))
    gradient = 10 * whole
    with debug.count_collectives() as backward:
        y.backward(_value(region.after.gradient, gradient, rank))
    torch.testing.assert_close(x.grad, _value(region.before.gradient, gradient, rank))
    assert (_kinds(forward), _kinds(backward)) == (region.forward, region.backward)


@pytest.mark.parametrize("region", CONVERSIONS.values(), ids=lambda region: region.name)
def test_a_region_converts_the_value_and_its_gradient(region: Region) -> None:
    debug.simulate(lambda rank, group: _converted(rank, group, region), P_RANKS)


def test_a_conjugate_of_a_conjugate_is_the_region() -> None:
    assert {region.conjugate.conjugate is region for region in CONVERSIONS.values()} == {True}
    assert {of: of.gradient for of in Type} == {I: I, R: P, S: S, P: R}


@pytest.mark.parametrize(
    "text", [regions.__doc__, (ROOT / "docs/reference/regions.md").read_text()], ids=["doc", "page"]
)
def test_the_pages_have_the_collectives_of_the_table(text: str) -> None:
    for region in CONVERSIONS.values():
        row = re.search(rf"^\|? ?`?{region.name}(?:\(.*?\)` \||  +)(.*)$", text, re.MULTILINE)
        assert row is not None, region.name
        for cell, collective in zip(re.split(r"\||  +", row[1]), (region.forward, region.backward), strict=False):
            assert re.search(WORDS[collective], cell), (region.name, cell)
