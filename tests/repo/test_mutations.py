"""The lists of tests/mutations fit the sources and the tests: they cannot rot unnoticed."""

import re

import pytest

from tests.helpers.paths import ROOT
from tests.mutations.run import MUTATIONS


def test_names_are_unique():
    assert len({mutation.name for mutation in MUTATIONS}) == len(MUTATIONS) >= 40


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.name)
def test_its_text_and_tests_exist(mutation):
    assert (ROOT / mutation.file).read_text().count(mutation.old) == 1
    assert mutation.new != mutation.old and mutation.bug.endswith(".")
    for test in mutation.tests:
        file, _, name = test.partition("::")
        text = (ROOT / "tests" / file).read_text()
        assert not name or re.search(rf"^def {re.escape(name.partition('[')[0])}\(", text, re.M), test
