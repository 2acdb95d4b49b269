"""bench_host runs, finds every layer's result right, and writes down times of both world sizes and both passes."""

import contextlib
import io
from unittest import mock

import pytest
import torch

from benchmarks.layers import bench_host
from tests.helpers import ranks
from tests.repo.test_benchmarks import _run


class _Forked:
    """A rank of bench_host, as bench_host.rank() starts it, but forked from the ranks' server: that has torch."""

    returncode = 0

    def __init__(self, world, what, seconds):
        self.printed = ranks.run_fresh(_printed, world, what, seconds, timeout=280)

    def communicate(self, timeout):
        return self.printed, ""

    def kill(self):
        pass


def _printed(world, what, seconds):
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        bench_host.in_a_rank(world, what, seconds)
    return printed.getvalue()


@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["", "cold"])
def test_its_cases_and_columns(cold, tmp_path, monkeypatch):
    if not cold:
        monkeypatch.setattr(bench_host, "rank", _Forked)
    rows = _run(bench_host.main, "bench_host", tmp_path)
    ours = {(r["layer"], r["world"], r["pass"]) for r in rows if r["case"] == "ours"}
    layers = {"column", "row", "copy_to", "reduce_from", "RMSNorm", "LayerNorm", "MLP", "attention"}
    assert ours == {(layer, world, which) for layer in layers for world in "18" for which in bench_host.PASSES}
    assert {"F.linear", "nn.Linear", "Python Function", "DTensor"} <= {r["case"] for r in rows}
    assert all(float(r["min_us"]) <= float(r["median_us"]) for r in rows)
    assert {float(r["own_us"]) for r in rows if r["case"] == "F.linear"} == {0.0}


def test_wrong_results_are_not_timed():
    x = torch.randn(2, 2, requires_grad=True)
    cases = [
        mock.Mock(family="f", base="base", call=call, inputs=(x,), grad=torch.ones(2, 2))
        for call in (lambda: x * 2, lambda: x * 2, lambda: x * 2.001)
    ]
    for case, name in zip(cases, ("base", "right", "wrong"), strict=True):
        case.name = name
    bench_host.check(cases[:2])
    with pytest.raises(AssertionError, match="f, wrong"):
        bench_host.check(cases)
