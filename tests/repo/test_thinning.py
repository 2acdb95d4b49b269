"""Thinned grids keep every pair of values, and what they leave out can be run."""

import itertools
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT
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
def test_what_is_left_out_can_be_run(options, number):
    """The grid is :func:`test_grid`, which has 12 cases."""
    command = [sys.executable, "-m", "pytest", "-q", "--collect-only", "-p", "no:cacheprovider", *options]
    done = subprocess.run([*command, f"{__file__}::test_grid"], cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.count("::test_grid[") == number


@pytest.mark.thinned
@pytest.mark.parametrize("a", [False, True])
@pytest.mark.parametrize("b", [1, True, None])
@pytest.mark.parametrize("c", [[], []])
def test_grid(a, b, c):
    """True and 1 are two values, and so are two equal lists."""
    assert isinstance(a, bool) and b in (1, None) and c == []
