"""A short soak of tests/soak/malformed.py, and that it finds a loader that is not strict enough."""

import pytest

from tests.helpers import ranks
from tests.soak import malformed
from tp_ext.checkpoint.files import metadata

pytestmark = pytest.mark.core


def _soak(rounds, lenient):
    if lenient:
        metadata.overlapping = lambda chunks: None
    return malformed.soak(0, rounds)


def test_every_load_of_a_damaged_directory_ends_in_an_error_or_a_whole_state():
    counts, failures = ranks.run_fresh(_soak, 160, False)
    assert not failures, failures
    assert sum(counts.values()) == 160 and len(counts) > 8, counts


def test_it_finds_a_loader_that_takes_chunks_that_overlap():
    _, failures = ranks.run_fresh(_soak, 80, True)
    assert any("overlap in .metadata" in failure and "is not loaded" in failure for failure in failures), failures
