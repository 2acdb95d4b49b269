"""The search: against brute force on small spaces, complete over legal layouts, and fast."""

import contextlib
import dataclasses
import itertools
import time

import pytest

from tp_ext import planner
from tp_ext.planner import Layout, predict, search

SMALL = {"layers": 8, "hidden": 1024, "heads": 8, "kv_heads": 2, "ffn": 2816, "vocab": 32000, "seq": 2048}
DENSE = planner.transformer(**SMALL)
MIXTURE = planner.transformer(**SMALL, experts=4, top_k=2)
SCHEDULES = [("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 4), ("ZBVZeroBubble", 2)]
SIZES = range(1, 13)


def machine(count, memory=80):
    cluster = planner.cluster("h100-sxm", count)
    return dataclasses.replace(cluster, device=dataclasses.replace(cluster.device, memory=memory * 2**30))


def brute_force(workload, cluster, batch):
    """All layouts that ``predict`` takes, by trying them; but what ``parallelize`` refuses for experts."""
    for pp, ep, cp, tp in itertools.product(SIZES, repeat=4):
        if cluster.count % (pp * ep * cp * tp):
            continue
        for micro_batch, zero, recompute in itertools.product(SIZES, range(4), (None, "selective", "full")):
            if micro_batch & (micro_batch - 1) and batch % micro_batch:
                continue
            if ep > 1 and (zero == 1 or (zero > 1 and recompute == "selective")):
                continue
            for schedule, virtual in SCHEDULES if pp > 1 else SCHEDULES[:1]:
                layout = Layout(
                    pp=pp,
                    ep=ep,
                    cp=cp,
                    tp=tp,
                    virtual=virtual,
                    schedule=schedule,
                    micro_batch=micro_batch,
                    zero=zero,
                    recompute=recompute,
                )
                with contextlib.suppress(ValueError):
                    yield predict(workload, cluster, layout, batch)


CASES = {"dense": (DENSE, 8, 12, 3), "experts": (MIXTURE, 4, 8, 4), "uneven": (DENSE, 6, 7, 3)}


@pytest.mark.parametrize("objective", ["step_time", "memory"])
@pytest.mark.parametrize("case", CASES)
def test_it_finds_what_brute_force_finds(case, objective):
    workload, count, batch, memory = CASES[case]
    cluster = machine(count, memory)
    predictions = list(brute_force(workload, cluster, batch))
    fitting = [prediction for prediction in predictions if prediction.fits]
    assert 0 < len(fitting) < len(predictions)
    result = search(workload, cluster, batch, objective=objective, top=5)

    def key(prediction):
        peak, layout = max(stage.peak for stage in prediction.memory), prediction.layout
        first = (prediction.step_time, peak) if objective == "step_time" else (peak, prediction.step_time)
        return (*first, layout.tp, layout.pp, layout.cp)

    assert [key(prediction) for prediction in result] == [
        key(prediction) for prediction in sorted(fitting, key=key)[:5]
    ]
    assert result.count == len(predictions)
    assert set(result.space()) == {prediction.layout for prediction in predictions}
    rejected = {prediction.layout for prediction in predictions if not prediction.fits}
    assert set(result.rejected) <= rejected and len(result.rejected) == min(1000, len(rejected))
    assert all(reason.startswith("needs ") for reason in result.rejected.values())


def test_more_memory_never_fits_fewer_layouts():
    fits = []
    for memory in (2.7, 3, 3.5, 4, 5):
        result = search(DENSE, machine(8, memory), 16, top=10**6)
        fits.append({prediction.layout for prediction in result})
    assert all(few <= more for few, more in itertools.pairwise(fits))
    assert len(fits[0]) < len(fits[-1])


def test_fixed_values_and_lists():
    result = search(
        DENSE, machine(8), 16, fixed={"tp": [2, 4], "pp": 2, "virtual": 2, "zero": 1, "dtype": ["bf16", "fp8"]}
    )
    layouts = set(result.space())
    assert {layout.tp for layout in layouts} == {2, 4} and {layout.pp for layout in layouts} == {2}
    assert {layout.schedule for layout in layouts} == {"Interleaved1F1B", "ZBVZeroBubble"}
    assert {layout.dtype for layout in layouts} == {"bf16", "fp8"} and result.count == len(layouts)
    assert result[0].layout in layouts and [prediction.step_time for prediction in result] == sorted(
        prediction.step_time for prediction in result
    )
    assert {prediction.layout.dp for prediction in search(DENSE, machine(8), 16, fixed={"dp": 4})} == {4}


def test_a_405b_model_on_16384_devices_is_ranked_in_time():
    """The limit is 10 s for 100,000 layouts on one core; these are 66,000, on loaded machines."""
    model = planner.transformer(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256, seq=8192)
    begin = time.process_time()
    result = search(model, planner.cluster("h100-sxm", 16384), 4096)
    assert result.count > 60_000 and len(result) == 10
    assert time.process_time() - begin < 10


@pytest.mark.parametrize(
    "change, error, says",
    [
        ({"fixed": {"tensor": 8}}, ValueError, "fixed: 'tensor' must be one of cp, dp"),
        ({"fixed": {"tp": 0}}, ValueError, "tp: 0 must be an integer of at least 1"),
        ({"fixed": {"zero": []}}, ValueError, "fixed: 'zero' must have at least one value"),
        ({"fixed": [("tp", 8)]}, TypeError, "fixed: list must be a dict"),
        ({"fixed": {"dtype": "nvfp4"}}, ValueError, "dtype: 'nvfp4' needs the peak of 'fp4'"),
        ({"objective": "cost"}, ValueError, "objective: 'cost' must be one of step_time, memory"),
        ({"top": 0}, ValueError, "top: 0 must be an integer of at least 1"),
        ({"global_batch": 1.5}, ValueError, "global_batch: 1.5 must be an integer"),
        ({"cluster": None}, TypeError, "cluster: NoneType must be a Cluster"),
    ],
)
def test_bad_input(change, error, says):
    arguments = {"workload": DENSE, "cluster": machine(8), "global_batch": 16, **change}
    with pytest.raises(error, match=says):
        search(**arguments)
