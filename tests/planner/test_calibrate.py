"""Calibration: constants of a machine are found again from its steps; published steps, with constants of few rows."""

import dataclasses
import itertools
import statistics

import pytest

from tests.planner import published
from tp_ext import planner
from tp_ext.planner import Layout, calibrate, predict

MODEL = planner.transformer(layers=16, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=32000, seq=4096)
MACHINE = planner.cluster("h100-sxm", 16)
LAYOUTS = [
    Layout(tp=8),
    Layout(zero=3),
    Layout(tp=4, pp=2, dtype="fp8"),
    Layout(zero=3, micro_batch=2, recompute="full"),
    Layout(tp=16, dtype="fp8"),
]


def steps(machine):
    return [(MODEL, layout, 64, predict(MODEL, machine, layout, 64).step_time) for layout in LAYOUTS]


def test_constants_of_a_machine_are_found_from_its_steps():
    """The same steps, and nearly the same constants: priors pull them to 1."""
    truth = {"gemm_bf16": 0.8, "gemm_fp8": 0.7, "memory": 0.9, "gather": 0.2}
    got = calibrate(MACHINE, steps(MACHINE.with_constants(truth)))
    assert got.fit_error < 0.01 and len(got.constants) <= 5
    for name in ("gemm_bf16", "gemm_fp8", "gather"):
        assert got.constants[name] == pytest.approx(truth[name], rel=0.1)
    assert type(got).from_json(got.to_json()) == got
    other = Layout(tp=2, pp=4, micro_batch=2)
    want = predict(MODEL, MACHINE.with_constants(truth), other, 64).step_time
    assert predict(MODEL, got, other, 64).step_time == pytest.approx(want, rel=0.03)


def test_one_row_is_enough_and_what_no_row_shows_stays():
    row = (MODEL, Layout(tp=8), 64, 1.2 * predict(MODEL, MACHINE, Layout(tp=8), 64).step_time)
    got = calibrate(MACHINE, [row])
    assert got.cross_error is None and got.fit_error < 0.01
    assert "gather" not in got.constants and "gemm_fp8" not in got.constants
    assert predict(MODEL, got, Layout(tp=8), 64).step_time == pytest.approx(row[3], rel=0.01)


def test_a_row_that_lost_time_elsewhere_does_not_spoil_the_others():
    """Squares would move the others by several percent: the fit is near four rows, not between all five."""
    rows = steps(MACHINE)
    rows[0] = (*rows[0][:3], 1.3 * rows[0][3])
    got = calibrate(MACHINE, rows)
    for model, layout, batch, seconds in rows[1:]:
        assert predict(model, got, layout, batch).step_time == pytest.approx(seconds, rel=0.02), layout


def test_rows_of_another_number_of_devices():
    small = dataclasses.replace(MACHINE, count=8)
    seconds = 1.1 * predict(MODEL, small, Layout(tp=8), 64).step_time
    got = calibrate(MACHINE, [(MODEL, Layout(tp=8), 64, seconds, 8)])
    assert predict(MODEL, dataclasses.replace(got, count=8), Layout(tp=8), 64).step_time == pytest.approx(
        seconds, rel=0.01
    )


@pytest.mark.parametrize(
    "rows, error, says",
    [
        ([], ValueError, r"rows: \[\] must be at least one tuple"),
        ([(MODEL, Layout(), 64)], ValueError, "must be a tuple"),
        ([(MODEL, Layout(), 64, 0)], ValueError, "seconds: 0 must be a finite number above 0"),
        ([(MODEL, Layout(tp=3), 64, 1.0)], ValueError, "must multiply to count, 16"),
        ([(None, Layout(), 64, 1.0)], TypeError, "workload: NoneType must be a Workload"),
    ],
)
def test_bad_input(rows, error, says):
    with pytest.raises(error, match=says):
        calibrate(MACHINE, rows)


@pytest.fixture(scope="module")
def compared():
    return list(published.compared())


def test_published_rows_are_all_compared(compared):
    """At most three rows of a machine and release calibrate it, and by at most five constants."""
    assert len(compared) > 80
    for _, _, cluster in compared:
        assert len(cluster.constants) <= 5
    for group in published.groups():
        assert sum(row.use == "fit" for row in group) <= 3


@pytest.mark.parametrize(
    "table, median, most", [("A", 0.08, 0.25), ("C", 0.03, 0.08), ("D", 0.10, 0.25), ("E", 0.04, 0.08)]
)
def test_errors_of_published_steps(compared, table, median, most):
    """The median and the ninth decile of the errors of test rows; docs/reference/planner.md has all of them."""
    rows = [(row, got) for row, got, _ in compared if (row.table, row.use) == (table, "test")]
    errors = sorted(abs(got.step_time / row.seconds - 1) for row, got in rows)
    assert statistics.median(errors) <= median
    assert errors[int(0.9 * len(errors) + 0.999) - 1] <= most


def test_layouts_of_one_model_are_ranked_as_measured(compared):
    """In nine of ten pairs of one model, machine, precision and batch that differ by more than 5 %."""
    right = pairs = 0
    groups = {}
    for row, got, _ in compared:
        if row.use != "reported":
            key = (
                row.table,
                row.machine,
                row.release,
                row.model,
                row.layout.dtype,
                row.batch,
                row.devices,
                row.columns["seq"],
            )
            groups.setdefault(key, []).append((row.seconds, got.step_time))
    for times in groups.values():
        for (measured, predicted), (measured_other, predicted_other) in itertools.combinations(times, 2):
            if abs(measured / measured_other - 1) > 0.05:
                pairs += 1
                right += (measured < measured_other) == (predicted < predicted_other)
    assert pairs >= 5 and right >= 0.9 * pairs


def test_memory_of_torchtitan(compared):
    """Compares the peak with the memory that the allocator reserved for 8B, compiled, on 8 to 128 devices."""
    peaks = {
        (row.devices, row.layout.dtype): (
            max(stage.peak for stage in got.memory) / 2**30,
            float(row.columns["peak_gib"]),
        )
        for row, got, _ in compared
        if (row.table, row.model, row.release) == ("D", "8B", "2024-12")
        and row.columns["recompute"] == "sac"
        and row.use != "reported"
    }
    assert len(peaks) == 4
    for predicted, published_peak in peaks.values():
        assert 0.85 <= predicted / published_peak <= 1.02
    assert peaks[8, "bf16"][0] - peaks[128, "bf16"][0] == pytest.approx(15.0, rel=0.08)
