"""Predictions: sums, published activation and parameter bytes, monotonicity, collectives by formula, bad input."""

import csv
import dataclasses
import json
import random
import time

import pytest

from tp_ext import planner
from tp_ext.debug.timeline import Timeline as Measured
from tp_ext.parallel.pipeline.split import split_blocks
from tp_ext.planner import Cluster, Layout, Link, predict
from tp_ext.planner.actions import library_schedule
from tp_ext.planner.core import load
from tp_ext.planner.machine import Device

GIB = 2**30
LLAMA_8B = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256}
SMALL = {"layers": 8, "hidden": 1024, "heads": 16, "kv_heads": 4, "ffn": 2816, "vocab": 32000, "seq": 2048}
MIXTURE = {"experts": 8, "top_k": 2, "expert_ffn": 1024, "shared": 1, "dense_layers": 1}


def drawn(seed):
    """A layout of 16 devices, of those that are legal for the small model."""
    r = random.Random(seed)
    while True:
        pp, ep, cp, tp = (r.choice((1, 1, 2, 4)) for _ in range(4))
        if 16 % (pp * ep * cp * tp):
            continue
        name, virtual = r.choice([("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)])
        splits = name == "ZBVZeroBubble" and pp > 1
        return Layout(
            pp=pp,
            ep=ep,
            cp=cp,
            tp=tp,
            virtual=virtual if pp > 1 else 1,
            schedule=name if pp > 1 else "1F1B",
            micro_batch=r.choice((1, 2)),
            zero=r.choice((0, 2, 3) if ep > 1 else (0, 1, 2, 3)),
            sequence_parallel=r.random() < 0.5,
            recompute=None if splits else r.choice((None, "selective", "full", "attention", "half")),
            overlap_tp=r.random() < 0.3,
            dtype=r.choice(("bf16", "fp32", "fp8")),
        )


def cluster(**changes):
    cluster = planner.cluster("h100-sxm", 16)
    return dataclasses.replace(cluster, **changes)


@pytest.mark.parametrize("seed", range(40))
def test_parts_add_up(seed):
    """The breakdown is the step, the peak at most its parts, no exposed time longer than the collective."""
    model = planner.transformer(**SMALL, **(MIXTURE if seed % 2 else {"gated": False, "bias": True}))
    layout = drawn(seed)
    if not seed % 2:
        layout = dataclasses.replace(layout, ep=1)
    got = predict(model, cluster(), layout, 64)
    assert sum(got.breakdown.values()) == pytest.approx(got.step_time, rel=1e-9)
    assert all(seconds >= -1e-12 for seconds in got.breakdown.values())
    for memory in got.memory:
        assert 0 < memory.peak <= sum(memory[:-1]) * (1 + 1e-12)
    for row in (row for rows in got.collectives for row in rows):
        assert -1e-12 <= row.exposed <= row.time * (1 + 1e-9) and row.size > 1
        assert row.payload_bytes == pytest.approx(row.number * row.payload)
    assert got.tokens_per_second * got.step_time == pytest.approx(64 * model.seq)
    assert 0 < got.mfu < 1
    if layout.pp > 1:
        line = got.timeline()
        assert line.time <= got.step_time * 1.003
    again = predict(model, cluster(), got.layout, 64)
    assert again.step_time == got.step_time and again.collectives == got.collectives


@pytest.mark.parametrize("seed", range(30))
def test_faster_parts_never_slow_a_step(seed):
    model, layout = planner.transformer(**SMALL), drawn(1000 + seed)
    layout = dataclasses.replace(layout, ep=1)
    base = cluster()
    step = predict(model, base, layout, 64).step_time
    device = base.device
    faster = [
        dataclasses.replace(base, device=dataclasses.replace(device, memory_bandwidth=2 * device.memory_bandwidth))
    ]
    peak = {name: 2 * value for name, value in device.peak.items()}
    faster.append(dataclasses.replace(base, device=dataclasses.replace(device, peak=peak)))
    for i, link in enumerate(base.links):
        for change in ({"bandwidth": 2 * link.bandwidth}, {"latency": link.latency / 2}):
            links = [dataclasses.replace(link, **change) if i == j else other for j, other in enumerate(base.links)]
            faster.append(dataclasses.replace(base, links=links))
    for better in faster:
        assert predict(model, better, layout, 64).step_time <= step * (1 + 1e-9)


PUBLISHED = """22B,6144,48,64,8,1,1,4,4,45.56,59.25,9.56
175B,12288,96,96,8,8,3,1,64,45.56,66.84,12.35
530B,20480,105,128,8,35,3,1,280,31.64,114.02,23.08
1T,25600,128,160,8,64,1,1,512,32.96,131.3,26.56"""


@pytest.mark.parametrize("row", [*csv.reader(PUBLISHED.splitlines())], ids=lambda row: row[0])
def test_memory_is_that_of_korthikanti(row):
    """arXiv:2205.05198, figures 1 and 7: GiB of the first stage within 1 %, 18 bytes a parameter of the layers."""
    hidden, layers, heads, tp, pp, virtual, micro_batch, batch = map(int, row[1:9])
    states, none, selective = map(float, row[9:])
    sizes = {"hidden": hidden, "layers": layers, "heads": heads, "vocab": 51200, "seq": 2048}
    model = planner.transformer(**sizes, gated=False, bias=True, fused_attention=False)
    machine = planner.cluster("a100-80", tp * pp)
    layout = Layout(pp=pp, tp=tp, virtual=virtual, micro_batch=micro_batch, param_dtype="bf16", sequence_parallel=False)
    first = predict(model, machine, layout, batch).memory[0]
    assert first.activations / GIB == pytest.approx(none, rel=0.01)
    sharded = dataclasses.replace(layout, sequence_parallel=True, recompute="attention")
    got = predict(model, machine, sharded, batch)
    block = model.blocks[0].ops
    assert got.memory[0].activations / GIB == pytest.approx(selective, rel=0.01)
    elements = sum(op.parameters for op in block) * layers / (pp * tp)
    assert 18 * elements / GIB == pytest.approx(states, rel=0.01)
    middle = got.memory[len(got.memory) // 2]
    if pp > 1:  # without embedding and head, and what is replicated
        kept = middle.parameters + middle.gradients + middle.states
        assert kept / GIB == pytest.approx(states * -(-layers // (pp * virtual)) * pp * virtual / layers, rel=0.01)


def test_bytes_by_zero():
    """16 N in fp32 and 18 N in bf16 with fp32 gradients, each divided from its stage of ZeRO on."""
    model, n = planner.transformer(**SMALL), planner.transformer(**SMALL).parameters
    for dtype, sizes in (("fp32", (4, 4, 8)), ("bf16", (2, 4, 12))):
        for zero in range(4):
            got = predict(model, cluster(), Layout(zero=zero, param_dtype=dtype), 64).memory[0]
            shared = [size * n / (16 if zero >= stage else 1) for size, stage in zip(sizes, (3, 2, 1), strict=True)]
            assert got[:3] == pytest.approx(shared)
    for zero in range(4):  # the states go to the host; gradients follow, and parameters come back, over its link
        on_device, offloaded = (predict(model, cluster(), Layout(zero=zero, offload=o), 64) for o in (False, True))
        want = on_device.memory[0]._replace(states=0.0, peak=on_device.memory[0].peak - on_device.memory[0].states)
        assert offloaded.memory[0] == pytest.approx(want)
        moved = 4 * n * (1 / (16 if zero >= 1 else 1) + 1 / (16 if zero >= 1 else 1))
        assert offloaded.breakdown["optimizer"] == pytest.approx(moved / 32e9)


def test_collectives_of_a_block_are_those_of_the_page():
    """docs/reference/communication.md: TP 4 AR S; SP 6 AG + 4 RS; recomputed 6 AR S, and 8 AG + 6 RS."""
    model = planner.transformer(**SMALL)
    s = 2 * 2048 * 1024 * 2  # a microbatch of two sequences
    want = {
        (False, None): {"all_reduce": 4},
        (False, "full"): {"all_reduce": 6},
        (True, None): {"all_gather": 6, "reduce_scatter": 4},
        (True, "full"): {"all_gather": 8, "reduce_scatter": 6},
        (True, "selective"): {"all_gather": 6, "reduce_scatter": 4},
    }
    ends = {False: {"all_reduce": 2}, True: {"all_gather": 3, "reduce_scatter": 2}}  # embedding and head
    for (sp, recompute), kinds in want.items():
        layout = Layout(tp=4, sequence_parallel=sp, recompute=recompute, micro_batch=2)
        rows = predict(model, cluster(), layout, 64).collectives[0]
        numbers = {row.kind: row.number for row in rows if row.axis == "tp" and row.payload == s}
        assert numbers == {kind: 8 * (8 * n + ends[sp].get(kind, 0)) for kind, n in kinds.items()}
        for row in rows:
            others = (row.size - 1) / row.size
            wire = {"all_reduce": 2 * others, "all_gather": others, "reduce_scatter": others}[row.kind]
            assert row.wire_bytes == pytest.approx(wire * row.payload_bytes)


@pytest.mark.parametrize("name, virtual", [("1F1B", 1), ("GPipe", 1), ("Interleaved1F1B", 2), ("ZBVZeroBubble", 2)])
def test_long_pipelines_are_extrapolated(name, virtual):
    """Against the simulation of all microbatches, of which the prediction simulates a few rounds."""
    model, machine = planner.transformer(**SMALL), cluster()
    got = predict(model, machine, Layout(pp=4, virtual=virtual, schedule=name), 512)
    line = got.timeline()
    after = got.breakdown["dp"] + got.breakdown["optimizer"]
    assert got.step_time - after == pytest.approx(line.time, rel=6e-3)  # the last stage takes twice as long
    activations = [memory.activations for memory in got.memory]
    whole = predict(model, machine, Layout(pp=4, virtual=virtual, schedule=name), 4 * 16)
    if name != "GPipe":  # full: more microbatches hold no more
        assert activations == [memory.activations for memory in whole.memory]
    else:
        assert activations[1] / whole.memory[1].activations == pytest.approx(512 / 64, rel=1e-9)


def test_collective_times_by_level():
    """Alpha-beta: a ring of p steps in a node; over nodes each sends over the links of all its members."""
    device = Device("d", peak={"bf16": 1e18, "fp32": 1e18}, memory_bandwidth=1e18, memory=1e15, launch=0)
    links = [Link(1e-6, 100e9, 8), Link(1e-5, 5e9)]
    model = planner.transformer(**SMALL)
    for tp, latency, seconds in ((8, 7e-6, 7 / 8 / 100e9), (16, 7e-6 + 1e-5, 1 / 2 / 8 / 5e9)):
        rows = predict(model, Cluster(device, 16, links), Layout(tp=tp), 64).collectives[0]
        row = next(row for row in rows if row.kind == "all_gather" and row.payload == 2048 * 1024 * 2)
        assert row.time / row.number == pytest.approx(latency + row.payload * seconds)


@pytest.mark.parametrize("blocks", [1, 2, 7, 12, 33])
def test_stages_have_the_blocks_of_pipeline_stages(blocks):
    for stages in range(1, blocks + 1):
        assert load().planner.split_blocks(blocks, stages) == split_blocks(None, blocks, stages, [])


def test_equal_predictions_have_one_hash():
    model = planner.transformer(**SMALL)
    first, again, other = (predict(model, cluster(), Layout(tp=tp), 16) for tp in (2, 2, 4))
    assert len({first, again, other}) == 2 and first == again


def test_what_does_not_fit_is_predicted_with_the_reason():
    model = planner.transformer(**LLAMA_8B, seq=8192)
    got = predict(model, planner.cluster("a100-40", 1), Layout(), 8)
    assert not got.fits and got.shortfall == max(stage.peak for stage in got.memory) - 38 * GIB
    assert got.why().startswith(f"short by {got.shortfall / GIB:.1f} GiB on stage 0: ")
    assert "short by" in str(got) and "states 59.8" in got.why()
    assert predict(model, planner.cluster("h200", 64), Layout(zero=3), 64).fits


def test_pictures_and_traces(tmp_path, monkeypatch):
    got = predict(planner.transformer(**SMALL), cluster(), Layout(pp=4), 64)
    got.trace(tmp_path / "step.json")
    events = [event for event in json.loads((tmp_path / "step.json").read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(events) == 2 * 4 * 16 and max(event["ts"] + event["dur"] for event in events) / 1e6 <= got.step_time
    drawn_rows = []
    monkeypatch.setattr(Measured, "save", lambda self, path, title="": drawn_rows.append(self.ranks))
    got.draw(tmp_path / "step.png")
    assert [len(rows) for rows in drawn_rows[0]] == [32] * 4


@pytest.mark.parametrize(
    "change, error, says",
    [
        ({"layout": {"tp": 32}}, ValueError, "must multiply to count, 16"),
        ({"layout": {"tp": 16}, "heads": 8}, ValueError, "tp: 16 must be at most heads, 8"),
        ({"layout": {"pp": 16}}, ValueError, "pp virtual: 16 must be at most layers \\+ 2, 10"),
        ({"layout": {"ep": 2}}, ValueError, "ep: 2 must be at most experts, 1"),
        ({"global_batch": 8}, ValueError, "dp ep: 16 must be at most global_batch, 8"),
        ({"global_batch": 0}, ValueError, "global_batch: 0 must be an integer of at least 1"),
        ({"layout": {"dtype": "nvfp4"}}, ValueError, "dtype: 'nvfp4' needs the peak of 'fp4', and h100-sxm has"),
        ({"layout": {"tp": 2}, "kv_heads": 16, "heads": 16}, None, ""),
        ({"layout": {"tp": 16}, "kv_heads": 3, "heads": 24, "hidden": 768}, ValueError, "tp: 16 must be a multiple of"),
        ({"layout": {"pp": 4}, "global_batch": 8}, ValueError, "microbatches: 2 must be at least the number of stages"),
        (
            {"layout": {"pp": 2, "virtual": 2, "schedule": "ZBVZeroBubble", "recompute": "full"}},
            ValueError,
            "recompute: 'full' must be None with ZBVZeroBubble",
        ),
        ({"layout": None}, TypeError, "layout: NoneType must be a Layout"),
        ({"cluster": 8}, TypeError, "cluster: int must be a Cluster"),
    ],
)
def test_bad_input(change, error, says):
    sizes = {**SMALL, **{name: value for name, value in change.items() if name in SMALL}}
    options = change.get("layout", {})
    layout = None if options is None else Layout(**options)
    call = planner.transformer(**sizes), change.get("cluster", cluster()), layout, change.get("global_batch", 64)
    if error is None:
        assert predict(*call).step_time > 0
        return
    with pytest.raises(error, match=says):
        predict(*call)


def test_a_prediction_takes_a_millisecond():
    """As a user calls it, of a large pipeline; three times the limit, for loaded machines."""
    model = planner.transformer(layers=126, hidden=16384, heads=128, kv_heads=8, ffn=53248, vocab=128256, seq=8192)
    machine, layout = planner.cluster("h100-sxm", 16384), Layout(pp=16, tp=8, virtual=4)
    predict(model, machine, layout, 2048)  # lists of actions are made once
    assert library_schedule.cache_info().currsize > 0
    best = min(_seconds(lambda: predict(model, machine, layout, 2048)) for _ in range(20))
    assert best < 3e-3


def _seconds(call):
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin
