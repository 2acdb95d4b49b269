"""Layouts of unequal shares and devices: times and memory by hand, equal ones as without, and the choice of shares."""

import dataclasses

import pytest

from tp_ext import planner
from tp_ext.planner import Block, Cluster, Device, EfficiencyCurve, Layout, Link, Op, Workload, predict, search

GIB = 2**30
EXACT = EfficiencyCurve(share={"bf16": 1.0}, tile=(1, 1), half_k=0)
FREE = [Link(0, 1e30)]  # collectives take no time
TRANSFORMER = planner.transformer(layers=4, hidden=768, heads=12, kv_heads=6, ffn=3072, vocab=6000, seq=512)


def device(flops, memory=80.0, name="d"):
    """A device whose only time is that of its products."""
    return Device(name, peak={"bf16": flops}, memory_bandwidth=1e30, memory=memory * GIB, launch=0, gemm=EXACT)


FAST, SLOW = device(2e12, name="fast"), device(1e12, name="slow")


def two_linears(layers=4):
    """Blocks of a column and a row linear of 96 x 960, cut in 960 units, and nothing else."""
    ops = (Op("column", 96, 960, units=960), Op("row", 960, 96, units=960))
    sizes = {"hidden": 96, "seq": 100, "heads": 12, "kv_heads": 12, "vocab": 1}
    return Workload(name="two", first=(), last=(), blocks=(Block(layers, ops),), experts=0, tied=False, **sizes)


FLOPS = 6 * 2 * 96 * 960 * 100 * 4  # of a sequence: two linears of four blocks


@pytest.mark.parametrize(
    "shares, features",
    [(None, (480, 480)), ((1, 1), (480, 480)), ((2, 1), (640, 320)), ((3, 1), (720, 240)), ((1, 0), (960, 0))],
    ids=str,
)
def test_the_slowest_rank_counts_and_each_has_its_memory(shares, features):
    layout = Layout(tp=2, shares=shares, sequence_parallel=False, param_dtype="bf16")
    got = predict(two_linears(), Cluster(count=2, links=FREE, devices=[FAST, SLOW]), layout, 3)
    slowest = max(n / 960 * 3 * FLOPS / each.peak["bf16"] for n, each in zip(features, (FAST, SLOW), strict=True))
    assert got.step_time == pytest.approx(slowest, rel=1e-9)
    (memory,) = got.memory
    assert [rank.parameters for rank in memory] == [2 * 2 * 96 * n * 4 for n in features]
    assert [rank.states for rank in memory] == [12 * 2 * 96 * n * 4 for n in features]
    assert got.mfu == pytest.approx(3 * FLOPS / (slowest * 3e12))


def test_the_slowest_rank_of_each_layer_counts():
    """A rank that has more of one layer, on devices that are alike: 3 units by [2, 1] are 2 and 1."""
    ops = Op("column", 96, 960, units=3), Op("row", 960, 96, units=3)
    model = dataclasses.replace(two_linears(), blocks=(Block(4, ops),))
    machine = Cluster(FAST, 2, FREE)
    layout = Layout(tp=2, shares=(3, 2), sequence_parallel=False)
    got = predict(model, machine, layout, 1)
    assert got.step_time == pytest.approx(2 / 3 * FLOPS / 2e12, rel=1e-9)
    assert [rank.parameters for rank in got.memory[0]] == [4 * 8 * 96 * n for n in (640, 320)]


@pytest.mark.parametrize("options", [{}, {"pp": 2, "zero": 1}, {"zero": 3, "recompute": "full"}], ids=str)
def test_equal_shares_and_devices_are_as_without(options):
    h100 = planner.device("h100-sxm")
    links = planner.cluster("h100-sxm", 8).links
    want = predict(TRANSFORMER, planner.cluster("h100-sxm", 8), Layout(tp=2, **options), 16)
    for devices, shares in ((None, (3, 3)), ([h100] * 2, None), ([h100] * 2, (0.5, 0.5))):
        machine = Cluster(h100 if devices is None else None, 8, links, devices=devices)
        got = predict(TRANSFORMER, machine, Layout(tp=2, shares=shares, **options), 16)
        for name in ("step_time", "breakdown", "collectives", "memory", "stages"):
            assert getattr(got, name) == getattr(want, name), name


def test_a_pipeline_has_the_memory_of_each_stage_and_rank():
    machine = Cluster(count=4, links=FREE, devices=[FAST, SLOW])
    layout = Layout(pp=2, tp=2, shares=(2, 1), param_dtype="bf16", sequence_parallel=False)
    got = predict(TRANSFORMER, machine, layout, 8)
    assert [len(ranks) for ranks in got.memory] == [2, 2]
    # 6 groups of two heads and 3072 features by [2, 1]; the norms are whole
    for (first, second), words in zip(got.memory, (6000, 6000), strict=True):
        assert first.parameters - second.parameters == pytest.approx(second.parameters, rel=0.01)
        assert first.parameters > 2 * words / 3 * 768 * 2
    assert "0.1 " in str(got) and "fast / slow" in str(got)
    again = type(layout).from_json(layout.to_json()), Cluster.from_json(machine.to_json())
    assert again == (layout, machine)


def test_the_search_evens_out_the_speeds():
    machine = Cluster(count=2, links=FREE, devices=[FAST, SLOW])
    best = search(two_linears(), machine, 4, fixed={"zero": 0, "recompute": None, "sequence_parallel": False})
    assert best[0].layout.shares == pytest.approx((2 / 3, 1 / 3), abs=1e-3)
    assert best[0].step_time == pytest.approx(4 * FLOPS / 3e12, rel=0.01)
    assert all(prediction.layout.tp == 2 for prediction in best)
    assert best.count == len(list(best.space()))


def test_the_search_fits_every_device():
    """The faster device is the smaller one: shares by speed need more memory than it has."""
    layout = {"zero": 0, "recompute": None, "sequence_parallel": False, "micro_batch": 1, "param_dtype": "fp32"}
    whole = 16 * 2 * 96 * 960 * 4 / GIB  # parameters, gradients and states
    small, large = device(2e12, memory=0.7 * whole, name="small"), device(1e12, memory=4 * whole, name="large")
    machine = Cluster(count=2, links=FREE, devices=[small, large])
    by_speed = predict(two_linears(), machine, Layout(tp=2, shares=(2, 1), sequence_parallel=False), 1)
    assert not by_speed.fits and "on stage 0, rank 0" in by_speed.why()
    found = search(two_linears(), machine, 1, fixed=layout)
    assert found and all(prediction.fits for prediction in found)
    assert found[0].step_time < search(two_linears(), machine, 1, fixed=layout | {"shares": [(1, 3)]})[0].step_time
    assert any(reason.endswith("on rank 0") for reason in found.rejected.values())


def test_a_device_without_work_is_left_out():
    """A device a hundred times slower only costs units that cannot be smaller."""
    model = dataclasses.replace(two_linears(), blocks=(Block(4, (Op("column", 96, 960, units=2),)),))
    machine = Cluster(count=2, links=FREE, devices=[FAST, device(1e10, name="slowest")])
    best = search(model, machine, 1, fixed={"sequence_parallel": False})[0]
    memory = best.memory[0]
    assert memory[1].parameters == 0 < memory[0].parameters


@pytest.mark.parametrize(
    "make, error, says",
    [
        (lambda: Layout(tp=2, shares=[1]), ValueError, r"shares: \[1\] must be one weight for each rank, tp = 2"),
        (lambda: Layout(tp=2, shares=[1, -1]), ValueError, "shares: -1 must be a finite number of at least 0"),
        (lambda: Layout(tp=2, shares=[1, True]), TypeError, "shares: True must be a number"),
        (lambda: Cluster(FAST, 2, FREE, devices=[SLOW, FAST]), ValueError, "device: .* must not be given with devices"),
        (lambda: Cluster(count=2, links=FREE, devices=[]), TypeError, r"devices: \[\] must be a list of at least one"),
        (lambda: Cluster(count=2, links=FREE, devices=[3]), TypeError, r"devices: \[3\] must be a list of at least"),
        (lambda: Cluster(count=3, links=FREE, devices=[FAST, SLOW]), ValueError, "count: 3 must be a multiple of"),
        (lambda: predicted(tp=1), ValueError, "tp: 1 must be the number of devices of the cluster, 2"),
        (lambda: predicted(tp=2, cp=2, shares=(2, 1)), ValueError, "cp: 2 must be 1 with unequal shares"),
        (lambda: predicted(tp=2, dtype="fp8"), ValueError, "dtype: 'fp8' needs the peak of 'fp8'"),
        (lambda: found(fixed={"tp": 1}), ValueError, "fixed: tp 1 must be the number of devices of the cluster, 2"),
        (lambda: found(fixed={"shares": [1, -1]}), ValueError, "shares: -1 must be a finite number"),
    ],
)
def test_bad_input(make, error, says):
    with pytest.raises(error, match=says):
        make()


def predicted(**options):
    return predict(two_linears(), Cluster(count=4, links=FREE, devices=[FAST, SLOW]), Layout(**options), 4)


def found(**options):
    return search(two_linears(), Cluster(count=4, links=FREE, devices=[FAST, SLOW]), 4, **options)
