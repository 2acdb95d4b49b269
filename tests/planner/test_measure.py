"""The profile of this machine: plausible numbers, alike on all ranks, that predict."""

import pytest
import torch

from tests.helpers import ranks
from tp_ext import _ops, planner
from tp_ext.planner import Layout, measure, predict

MODEL = planner.transformer(layers=2, hidden=64, heads=4, vocab=256, seq=32)


def _measured(group):
    return measure("cpu", group, minutes=0.02).to_json()


def test_a_profile_of_this_process_predicts():
    got = measure("cpu", minutes=0.02)
    assert got.count == 1 and type(got).from_json(got.to_json()) == got
    assert 1e9 < got.device.peak["fp32"] < 1e13 and 1e8 < got.device.memory_bandwidth < 1e12
    assert max(row[4] for row in got.device.gemm.table if row[3] == "fp32") == 1.0
    assert not got.device.asynchronous and 0.001 < got.device.gemm.attention < 1 and got.device.gemm.optimizer > 0.01
    assert predict(MODEL, got, Layout(dtype="fp32"), 4).step_time > 0


def test_gemms_are_the_products_of_layers(monkeypatch):
    """All three of a linear: by the library that layers take, at whose rate a plan is predicted."""
    calls, product = set(), _ops.column_parallel_linear

    def counted(x, w, *rest):
        calls.add((x.dtype, x.is_contiguous(), w.is_contiguous()))
        return product(x, w, *rest)

    monkeypatch.setattr(_ops, "column_parallel_linear", counted)
    measure("cpu", minutes=0.01)
    layouts = (True, True), (True, False), (False, False)  # forward, dx, dw
    assert calls == {(dtype, *of) for dtype in (torch.float32, torch.bfloat16) for of in layouts}


def test_ranks_agree_on_their_profile():
    first, second = (planner.Cluster.from_json(text) for text in ranks.run(_measured, 2))
    assert first == second and first.count == 2
    assert 0 <= first.links[0].latency < 1 and first.links[0].bandwidth > 1e6
    assert 0.05 < first.factor("gather") < 20
    assert predict(MODEL, first, Layout(tp=2, dtype="fp32"), 4).step_time > 0


@pytest.mark.parametrize(
    "arguments, error, says",
    [
        ({"minutes": 0}, ValueError, "minutes: 0 must be a finite number above 0"),
        ({"device": "tpu"}, ValueError, "device: 'tpu' must be 'cpu', or 'cuda' with a GPU"),
        ({"device": "meta"}, ValueError, "device: 'meta' must be 'cpu', or 'cuda' with a GPU"),
        ({"device": "cuda:64"}, ValueError, "device: 'cuda:64' must be 'cpu', or 'cuda' with a GPU"),
        ({"device": 3}, TypeError, "device: 3 must be a torch.device, its name or None"),
    ],
)
def test_bad_input(arguments, error, says):
    with pytest.raises(error, match=says):
        measure(**arguments)
