"""Collectives of each module and function, forward and backward, to the byte.

The table: docs/reference/communication.md, section "Modules and functions". The rows are in tests/helpers/registry.
"""

from fractions import Fraction

import pytest

from tests.helpers import registry
from tests.helpers.paths import ROOT
from tests.helpers.ranks import run
from tests.helpers.registry.bytes import AR
from tp_ext.debug import count_collectives

pytestmark = pytest.mark.core


def _sent(group, name):
    call, passes = registry.SENT[name].make(group), []
    with count_collectives() as forward:
        y = call()
    with count_collectives() as backward:
        if y.requires_grad:
            y.sum().backward()
    for counts in (forward, backward):
        sizes = sorted((row.kind, row.payload) for row in counts.rows for _ in range(row.number))
        passes.append((sizes, counts.wire_bytes))
    return passes


@pytest.mark.thinned(1)
@pytest.mark.parametrize("name", registry.SENT)
@pytest.mark.parametrize("p", [3, 2, 4, 1])
def test_communicated_bytes(p, name):
    row = registry.SENT[name]
    for found in run(_sent, p, name):
        for (sent, on_wire), want in zip(found, (row.forward, row.backward), strict=True):
            want = sorted(want(p) if callable(want) else want) if p > 1 else []
            assert sent == want
            wire = sum(n * (2 if kind == AR else 1) for kind, n in want) * Fraction(p - 1, p)
            assert on_wire == float(wire)


def test_the_page_names_every_layer_and_function_that_sends():
    page = (ROOT / "docs" / "reference" / "communication.md").read_text()
    sending = {row.name for row in registry.SENT.values() if row.forward or row.backward}
    assert not {name for name in sending if f"`{name}`" not in page}
