"""Thinned grids keep every pair of values, and what they leave out can be run."""

import contextlib
import io
import itertools
from unittest import mock

import pytest

from tests.helpers import ranks
from tests.helpers.thinning import covering

AXES = {"dtype": range(4), "p": range(3), "sp": range(2), "bias": range(2)}
GRID = [dict(zip(AXES, values, strict=True)) for values in itertools.product(*AXES.values())]


@pytest.mark.parametrize(("strength", "most"), [(1, 4), (2, 14), (3, 30)])
def test_every_combination_of_values_occurs(strength, most):
    chosen = [GRID[i] for i in covering(GRID, strength)]
    for names in itertools.combinations(AXES, strength):
        assert {tuple(case[n] for n in names) for case in chosen} == set(itertools.product(*(AXES[n] for n in names)))
    assert len(chosen) <= most


@pytest.mark.parametrize(("options", "number"), [([], 6), (["--exhaustive"], 12)])
def test_cases_that_are_left_out_can_be_run(options, number):
    """The grid is :func:`test_grid`, which has 12 cases. The pools of ranks are those of this run."""
    arguments = ["-q", "--collect-only", "--capture=no", *["-p", "no:cacheprovider", "-p", "no:faulthandler"], *options]
    with mock.patch.object(ranks, "close"), contextlib.redirect_stdout(io.StringIO()) as printed:
        pytest.main([*arguments, f"{__file__}::test_grid"])
    assert printed.getvalue().count("::test_grid[") == number


@pytest.mark.thinned
@pytest.mark.parametrize("a", [False, True])
@pytest.mark.parametrize("b", [1, True, None])
@pytest.mark.parametrize("c", [[], []])
def test_grid(a, b, c):
    """True and 1 are two values, and so are two equal lists."""
    assert isinstance(a, bool) and b in (1, None) and c == []
