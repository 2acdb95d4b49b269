"""examples/mesh_programs.py: every program has the value and the gradients of the computation in one process."""

import functools
import runpy
from unittest import mock

import pytest
import torch

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tests.helpers.paths import ROOT
from tp_ext.mesh_program.varying import VaryingValueError


@functools.cache
def example():
    return runpy.run_path(str(ROOT / "examples" / "mesh_programs.py"))


def _differences(group, x, y):
    mesh, found = mesh_of(x, y, names=("x", "y")), example()
    programs = found["examples"](x, y)
    return {name: found["largest_difference"](one, mesh) for name, one in programs.items()}


@pytest.mark.parametrize(
    ("x", "y"),
    [
        (1, 1),
        (2, 1),
        (1, 2),
        (2, 2),
        (1, 3),
        *(pytest.param(x, y, marks=pytest.mark.exhaustive) for x, y in ((4, 1), (4, 2))),
    ],
)
def test_every_program_is_that_of_one_process(x, y):
    for found in ranks.run(_differences, x * y, x, y, timeout=120):
        assert len(found) == 10
        assert {name: difference for name, difference in found.items() if not difference < 1e-12} == {}


def _without(group, name):
    with mock.patch.object(tp_ext.lax, name, lambda value, axis: value):
        _differences(group, 2, 1)


@pytest.mark.parametrize("name", ["psum", "pmean"])
def test_a_program_without_its_collective_is_refused(name):
    ranks.run_raises(_without, 2, VaryingValueError, "must name axis 'x'", name, in_turns=False)


def _bytes_sent(group, x, y, tokens, hidden, ffn):
    program = example()["network_on_two_axes"](mesh_of(x, y, names=("x", "y")), tp_ext.P("x", "y").local())
    shapes = [(tokens, hidden), (hidden, ffn), (ffn, hidden)]
    arguments = [torch.ones(rows // x, columns // y, requires_grad=True) for rows, columns in shapes]
    with tp_ext.debug.count_collectives() as counts:
        program(*arguments).sum().backward()
    return counts.wire_bytes


@pytest.mark.parametrize(("x", "y"), [(2, 2), (1, 3)])
def test_the_bytes_of_the_network_on_two_axes_are_those_of_the_guide(x, y):
    """docs/guide/mesh.md, "Which bytes move"."""
    t, h, f = 12, 24, 48
    elements = 2 * ((y - 1) * t * (h + f) + (x - 1) * 2 * h * f) / (x * y)
    assert ranks.run(_bytes_sent, x * y, x, y, t, h, f) == [4 * elements] * (x * y)
