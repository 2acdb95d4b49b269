"""Bounds of the walks through the package (:mod:`tests.helpers.walks`)."""

import textwrap

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.walks import WALKS, Function, Package, walk_of


@pytest.fixture(scope="module")
def package():
    return Package(ROOT)


@pytest.mark.parametrize("call, stays", [("save_checkpoint", 12), ("parallelize", 30), ("_decided", 60)])
def test_walks_are_short(package, call, stays):
    walk = walk_of(call, package)
    assert len(walk.stays) <= stays, "\n".join(walk.stays)


@pytest.mark.parametrize("call", WALKS)
def test_every_walk_begins_at_a_function(package, call):
    assert walk_of(call, package).entered


def test_a_walk_follows_the_argument(tmp_path):
    """In the order of evaluation, into each body once, and not where another value goes."""
    sources = {
        "first": """
            from tp_ext.second import Thing, inner, other

            def start(model, size):
                other(size)
                parts = [part for part in model]
                Thing(inner(parts), size=size)
                return inner(model)
            """,
        "second": """
            def inner(model):
                return _own(model)

            def other(size):
                return _own(size)

            def _own(x):
                return x

            class Thing:
                def __init__(self, parts, size):
                    self._read(parts)

                def _read(self, parts):
                    return start_of(parts)
            """,
    }
    (tmp_path / "tp_ext").mkdir()
    for name, source in sources.items():
        (tmp_path / "tp_ext" / f"{name}.py").write_text(textwrap.dedent(source))
    walk = Package(tmp_path).walk(Function("tp_ext.first", "", "start"), "model")
    assert [function.name for function in walk.entered] == ["start", "inner", "_own", "__init__", "_read", "inner"]
    assert walk.lengths == (2, 2, 0, 5)
