"""Short soak of refit; the long form is tests/soak/refit.py."""

import pytest

from tests.soak import refit


@pytest.mark.exhaustive  # by default tests/refit/test_lost.py
def test_a_rank_is_killed_at_random_moments():
    assert sum(refit.soak(2, seed=3)) == 2
