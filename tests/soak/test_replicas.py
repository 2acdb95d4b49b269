"""Short soak of replicas that come and go; the long form is tests/soak/replicas.py."""

import pytest

from tests.soak import replicas


@pytest.mark.exhaustive  # its bound of five seconds needs cores that are free; by default tests/elastic
@pytest.mark.timeout(400)
def test_replicas_that_are_killed_at_random_moments():
    longest, _ = replicas.soak(2, seed=3)
    assert longest < 5
