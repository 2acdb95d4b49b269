"""The benchmarks run, write down what they say, and time nothing that is wrong. Of their figures nothing is asked."""

import contextlib
import csv
import importlib
import os
import runpy
import subprocess
import sys
import time
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import distributed as dist

from benchmarks.kernels import bench_rope
from benchmarks.layers import (
    bench_collectives,
    bench_exported,
    bench_latent_attention,
    bench_matmul_2d,
    bench_mlp,
    bench_train,
)
from benchmarks.lib import harness, interleave
from tests.helpers import ranks
from tests.helpers.paths import ROOT
from tp_ext import _ops

TP = {"megatron-core, gloo", *(f"{name}, {over}" for name in ("DTensor", "ours") for over in interleave.BACKENDS)}


@pytest.fixture(scope="module", autouse=True)
def _left_as_found():
    """Restores the state that a script changes: threads and allocator of this process; pins and Megatron's state in the
    ranks, which are closed. They are new at the start too: a pool closes when it has made too many groups."""
    ranks.close()
    threads = torch.get_num_threads()
    with mock.patch.object(harness, "keep_memory"):
        yield
    torch.set_num_threads(threads)
    ranks.close()


def _rows(folder, script):
    """Rows of the CSV that belongs to a plot."""
    assert (folder / f"{script}.png").read_bytes().startswith(b"\x89PNG")
    with (folder / f"{script}.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert rows and all(row[key] for row in rows for key in ("commit", "device", "torch", "date"))
    return rows


def _run(main, script, folder, *options):
    with mock.patch.object(sys, "argv", [script, "--quick", "--csv", str(folder), *options]):
        main()
    return _rows(folder, script)


@pytest.mark.filterwarnings("ignore:.*found in sys.modules after import")
@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["", "cold"])
def test_a_script_starts_its_ranks(cold, tmp_path):
    """In this process, or as a user starts it: the ranks import the script that is __main__ there."""
    words = [bench_collectives.__name__, "--quick", "--csv", str(tmp_path), "--op", "all_reduce"]
    if cold:
        command, environment = [sys.executable, "-m", *words], os.environ | {"PYTHONPATH": str(ROOT)}
        environment["OMP_NUM_THREADS"] = "1"
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=200, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    else:
        with mock.patch.object(sys, "argv", words), contextlib.closing(ranks):  # of another __main__, before and after
            ranks.close()
            runpy.run_module(words[0], run_name="__main__", alter_sys=True)
    rows = _rows(tmp_path, "bench_collectives")
    ways = {f"{path}, {over}" for path in ("dist", "region") for over in interleave.BACKENDS}
    assert {row["way"] for row in rows} == ways | {"clone", "copy"}
    assert {row["bytes"] for row in rows} == {"256", "65536"}
    assert all(float(row["min_us"]) <= float(row["median_us"]) for row in rows)


def test_rows_of_a_kernel(tmp_path):
    rows = _run(lambda: harness.main(bench_rope.cases), "bench_rope", tmp_path, "--size", "1")
    assert {row["case"] for row in rows} >= {"half fwd", "interleaved fwd+bwd", "packed bwd"}
    more = _run(lambda: harness.main(bench_rope.cases), "bench_rope", tmp_path, "--size", "1")
    assert len(more) == 2 * len(rows) and {row["dtype"] for row in more} == {"float32"}  # appended, one header


SCRIPTS = sorted(path.stem for path in (ROOT / "benchmarks" / "kernels").glob("bench_*.py"))
SLOW = ("bench_add_weight_grad", "bfloat16")  # GEMMs in bf16 take ten times as long on some CPUs


@pytest.mark.parametrize(
    ("script", "dtype"),
    [(script, "bfloat16") for script in SCRIPTS if script != SLOW[0]]
    + [(SLOW[0], "float32"), pytest.param(*SLOW, marks=pytest.mark.exhaustive)],
)
def test_every_kernel_has_rows(tmp_path, script, dtype):
    cases = importlib.import_module(f"benchmarks.kernels.{script}").cases
    argv = [script, "--quick", "--size", "1", "--dtype", dtype, "--csv", str(tmp_path)]
    with mock.patch.object(sys, "argv", argv):
        harness.main(cases)
    assert all(float(row["ratio"]) > 0 for row in _rows(tmp_path, script))


SMALL = {"HIDDEN": 64, "FFN": 256, "TOKENS": 64}


def _make_small(group):
    vars(bench_mlp).update(SMALL)


@pytest.fixture(scope="module")
def small_mlp(_left_as_found):
    """bench_mlp with other sizes, here and in the ranks; before either makes the weights."""
    ranks.run(_make_small, bench_mlp.RANKS)
    with mock.patch.multiple(bench_mlp, **SMALL):
        yield


def test_rows_of_the_mlp(tmp_path, small_mlp):
    rows = {row["case"]: row for row in _run(bench_mlp.main, "bench_mlp", tmp_path)}
    python = {"python, gloo", "python, tp_shm"}
    assert set(rows) == {"dense, 1 thread", "dense, 2 threads", "half, sends nothing"} | python | TP
    assert float(rows["dense, 1 thread"]["speedup"]) == float(rows["half, sends nothing"]["share_of_ceiling"]) == 1


def test_rows_of_training(tmp_path):
    rows = {row["case"]: row for row in _run(bench_train.main, "bench_train", tmp_path)}
    assert set(rows) == {"dense, 1 thread", "dense, 2 threads", "ours, 1 thread"} | TP
    assert all(float(row["loss_difference"]) <= bench_train.TOLERANCE for row in rows.values())
    assert all(float(row["tokens_per_s"]) > 0 for row in rows.values())


@pytest.mark.exhaustive
def test_rows_of_latent_attention(tmp_path):
    pytest.importorskip("transformers")
    rows = _run(bench_latent_attention.main, "bench_latent_attention", tmp_path)
    assert {row["task"] for row in rows} == {"training", "decoding"} and len(rows) == 12
    assert all(float(row["speedup"]) > 0 for row in rows)


@pytest.mark.exhaustive
def test_rows_of_products(tmp_path):
    rows = {row["case"]: row for row in _run(bench_matmul_2d.main, "bench_matmul_2d", tmp_path)}
    ours = {f"{algorithm}, {backend}" for algorithm in ("gather", "summa") for backend in ("gloo", "tp_shm")}
    assert set(rows) == {"dense, 1 thread", "DTensor, gloo"} | ours
    assert all(float(row["times_dtensor"]) > 0 for row in rows.values())


@pytest.mark.exhaustive
def test_rows_of_an_export(tmp_path):
    pytest.importorskip("transformers")
    rows = {row["case"]: row for row in _run(bench_exported.main, "bench_exported", tmp_path)}
    assert set(rows) == {"C++", "Python", "products"} and float(rows["Python"]["times_python"]) == 1
    assert float(rows["C++"]["tokens_per_s"]) > 0 and float(rows["C++"]["start_s"]) > 0


# What is wrong is not timed


def test_a_wrong_kernel_is_not_timed():
    x = torch.ones(3)
    with pytest.raises(AssertionError, match=r"case: result 0 differs from peer by 1\.0\de-01"):
        harness.run([harness.Case("case", lambda: x * 1.1, {"peer": lambda: x})], "cpu", 0.0)


def test_a_wrong_case_loses_no_other(tmp_path):
    """Its neighbours have rows, written before what follows is run; the script fails."""
    x, script = torch.ones(3), "bench_made_up"
    rows = tmp_path / f"{Path(__file__).stem}.csv"

    def cases(device, dtype):
        yield harness.Case("before", lambda: x, {"peer": lambda: x})
        assert "before" in rows.read_text()
        yield harness.Case("wrong", lambda: x * 1.1, {"peer": lambda: x})
        yield harness.Case("after", lambda: x, {"peer": lambda: x})

    argv = [script, "--quick", "--csv", str(tmp_path)]
    with mock.patch.object(sys, "argv", argv), pytest.raises(SystemExit, match="FAILED: wrong"):
        harness.main(cases)
    assert [row["case"] for row in _rows(tmp_path, rows.stem)] == ["before", "after"]


def _wrong_collective(group, op, path):
    """A collective that writes something else, or returns its input."""
    lazy = mock.patch.object(dist, op, lambda target, *args, **options: target.fill_(-1))
    if path == "region":
        lazy = mock.patch.object(_ops, op, lambda x, name: x)
    name = "all_reduce" if path == "region" else op
    with lazy, pytest.raises(AssertionError, match=rf"{name} of 256 bytes, {path} over gloo: wrong"):
        bench_collectives.checked(name, 256, path, "gloo")
    bench_collectives.checked(name, 256, path, "gloo")


def test_a_wrong_collective_is_not_timed():
    for op in bench_collectives.OPS:
        ranks.run(_wrong_collective, 2, op, "dist")
    ranks.run(_wrong_collective, 2, "reduce_from_region", "region")


def _wrong_mlp(group):
    results = bench_mlp.on_rank("ours", "gloo")()
    for i, name in enumerate(("y", "dx", "up.weight", "up.bias", "down.weight", "down.bias")):
        wrong = list(results)
        wrong[i] = wrong[i] * 1.001
        with pytest.raises(AssertionError, match=rf"^{name} is off by 1\.0e-03"):
            bench_mlp.check(wrong)


def test_a_wrong_mlp_is_not_timed(small_mlp):
    ranks.run(_wrong_mlp, 2)


def test_a_wrong_training_is_not_reported():
    sizes = bench_train.Sizes(layers=1, hidden=16, heads=2, ffn=16, seq=8, batch=1)
    cases = {"dense": ("dense", "", sizes), "ours": ("ours", "gloo", sizes)}
    interleave.on_ranks(2, bench_train.training, *cases["ours"])(2)
    interleave.here(bench_train.training(*cases["dense"]), 1, interleave.cores())(2)
    want = bench_train.training(*cases["dense"]).losses
    assert max(bench_train.check(cases, want).values()) <= bench_train.TOLERANCE
    with pytest.raises(AssertionError, match=r"dense: losses .* differ by 1\.0e-03"):
        bench_train.check(cases, [want[0], want[1] + 1e-3])
    with pytest.raises(AssertionError, match="dense: another number of steps"):
        bench_train.check(cases, want[:1])


# Turns


def test_subjects_take_turns():
    """Blocks of every subject, each turn in another order, and no call lost."""
    called = []

    def subject(name, seconds):
        return lambda count: called.append((name, count)) or [seconds] * count

    times = interleave.take({"a": subject("a", 0.01), "b": subject("b", 0.05)}, 0.0, block=0.1, turns=3)
    assert called[:2] == [("a", 3), ("b", 3)]  # warm
    assert called[2:] == [("a", 10), ("b", 2), ("b", 2), ("a", 10), ("a", 10), ("b", 2)]
    assert times == {"a": [0.01] * 30, "b": [0.05] * 6}


def _sleeper(seconds):
    return lambda: time.sleep(seconds * dist.get_rank())


def test_a_call_takes_as_long_as_on_the_slowest_rank():
    times = interleave.on_ranks(2, _sleeper, 0.02)(3)
    assert len(times) == 3 and all(seconds >= 0.02 for seconds in times)


def _affinity(group):
    return [sorted(os.sched_getaffinity(int(thread))) for thread in os.listdir("/proc/self/task")]


def test_pinned_ranks_have_a_core_each_for_all_their_threads():
    cores = interleave.cores()
    try:
        interleave.pin_ranks(2, cores, True)
        for rank, threads in enumerate(ranks.run(_affinity, 2)):
            assert len(threads) > 1 and all(on == [cores[rank % len(cores)]] for on in threads)
    finally:
        interleave.pin_ranks(2, cores, False)
    for threads in ranks.run(_affinity, 2):
        assert all(on == cores for on in threads)
