"""gpu-check without a GPU: a stage that fails, crashes or hangs loses nothing else, the dry run writes every field, and
the goals say what was met."""

import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from benchmarks.gpu import check as gpu_check
from benchmarks.gpu import results as gpu_results
from benchmarks.gpu.check import ROOT, Command, Run
from benchmarks.lib import report, timing


def python(name, code, **options):
    return Command("stage", name, [sys.executable, "-c", code], **options)


def saved(folder):
    return json.loads((folder / "results.json").read_text())


def statuses(folder):
    return {command["name"]: command["status"] for command in saved(folder)["commands"]}


# Commands


def test_a_failure_or_hang_loses_no_other_result(tmp_path):
    run, marker = Run(tmp_path, {"commit": "abc"}), tmp_path / "grandchild"
    assert saved(tmp_path)["commands"] == []
    sleeper = f"import time; time.sleep(2); open({str(marker)!r}, 'w')"
    hangs = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {sleeper!r}]); time.sleep(60)"
    began = time.monotonic()
    run.run([python("hangs", hangs)], 1.5)
    commands = [
        python("good", "print('fine')"),
        python("crashes", "import os; print('so far', flush=True); os.abort()"),
        python("fails", "raise SystemExit(3)"),
        python("without tool", "print('Device not supported'); raise SystemExit(1)", cannot="not supp"),
        python("left out", "", note="needs a GPU"),
    ]
    run.run(commands, 60, cores=4)
    assert time.monotonic() - began < 55  # less than what hangs would take, however busy the machine
    want = {"hangs": "timed out", "good": "passed", "crashes": "failed", "fails": "failed"}
    assert statuses(tmp_path) == {**want, "without tool": "unavailable", "left out": "not run"}
    assert run.failed() == ["stage"] and not list(tmp_path.glob("*.new"))
    results = {command["name"]: command for command in saved(tmp_path)["commands"]}
    assert results["crashes"]["exit_code"] < 0 and results["crashes"]["output"] == ["so far"]
    assert results["fails"]["exit_code"] == 3 and results["good"]["output"] == []
    log = (tmp_path / "log.txt").read_text()
    assert "=== stage, good: passed" in log and "fine" in log
    time.sleep(max(0.0, began + 4 - time.monotonic()))
    assert not marker.exists()  # what a hanging command had started is ended with it


def test_a_command_that_hangs_leaves_time_to_the_next(tmp_path):
    """As ranks of NCCL that wait for each other."""
    hangs = python("hangs", "import time; time.sleep(60)")
    Run(tmp_path, {}).run([hangs, python("next", "pass")], 50, 1.5)
    assert statuses(tmp_path) == {"hangs": "timed out", "next": "passed"}


def test_an_interrupted_run_ends_its_commands(tmp_path, monkeypatch):
    """And keeps the results of those that had ended."""
    run, marker = Run(tmp_path, {}), tmp_path / "late"
    run.run([python("first", "pass")], 60)
    monkeypatch.setattr(run, "_finish", lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        run.run([python("second", f"import time; time.sleep(1); open({str(marker)!r}, 'w')")], 60)
    time.sleep(2)
    assert not marker.exists() and statuses(tmp_path) == {"first": "passed"}


def test_commands_in_turn_wait_for_the_previous_one(tmp_path):
    """One that hangs takes its own limit, the others have theirs; one that is gone before its turn is no obstacle."""
    said = "import sys, time; sys.stdin.readline(); print(time.time(), flush=True); {}; print(time.time())"
    names = {"one": "time.sleep(0.3)", "hangs": "time.sleep(60)", "gone": "", "two": "time.sleep(0.3)"}
    commands = [python(name, said.format(code) if code else "raise SystemExit(1)") for name, code in names.items()]
    Run(tmp_path, {}).run(commands, 60, 3, begun=True)
    assert statuses(tmp_path) == {"one": "passed", "hangs": "timed out", "gone": "failed", "two": "passed"}
    times = [
        float(word) for word in (tmp_path / "log.txt").read_text().split() if word.count(".") == 1 and len(word) > 12
    ]
    assert times == sorted(times) and len(times) == 5


def test_tests_are_counted(tmp_path):
    file = tmp_path / "test_x.py"
    file.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip('why')\ndef test_c(): pass\n"
        "def test_d(missing): pass\n"
    )
    for quiet in ([], ["-q"]):
        argv = [sys.executable, "-m", "pytest", *quiet, "-c", os.devnull, str(file)]
        output = subprocess.run(argv, capture_output=True, text=True).stdout
        assert gpu_check.counted(output) == {"passed": 1, "failed": 1, "error": 1, "skipped": 1}
    assert gpu_check.counted("no tests here") == {}


# Timing


def test_a_call_is_timed_when_the_host_is_ahead(monkeypatch):
    """The pause before it grows until the whole call is queued while it lasts; what came before does not count."""
    pauses, clock = [], iter(range(100))

    class Event:
        def __init__(self, enable_timing):
            assert enable_timing

        def record(self):
            self.at = next(clock)

        def query(self):
            return pauses[-1] < 1 << 20  # already over, as long as the pause is shorter than the host needs

        def synchronize(self):
            pass

        def elapsed_time(self, end):
            return end.at - self.at

    zeros = torch.zeros
    monkeypatch.setattr(torch, "zeros", lambda n, device: zeros(8))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "_sleep", pauses.append)
    timed, order = timing.TimeOnCuda(), []
    call, before = (lambda: order.append("call")), (lambda: order.append("before"))
    assert timed(call, before) == 1.0
    assert pauses == [1 << 17, 1 << 18, 1 << 19, 1 << 20] and order == ["before", "call"] * 4
    timed(call, before)
    assert pauses[4:] == [1 << 20]  # known by now
    monkeypatch.setattr(Event, "query", lambda self: True)  # the call itself waits for the device
    timed(lambda: None, None)
    assert pauses[-1] == timing.LONGEST_PAUSE


# The plan


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_does_nothing(tmp_path, capsys):
    assert gpu_check.main(["--out", str(tmp_path / "out")]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().out and not (tmp_path / "out").exists()


def planned(part, **options):
    """The commands of a part, by stage."""
    args = SimpleNamespace(device="cuda", quick=False, size=256, built=False, stages="", part=part)
    vars(args).update(options)
    stages = {}
    for command in itertools.chain(*gpu_check.plan(args, 16, "9.0", Path("/scratch"), Path("/rows"))):
        stages.setdefault(command.stage, []).append(command)
    return stages


def test_the_plan_leaves_no_cuda_test_and_no_kernel_out():
    first, second = planned(1), planned(2)
    assert set(first) & set(second) == {"build"}
    stages = first | second
    words = [word for commands in stages.values() for command in commands for word in command.argv]
    assert all((ROOT / word).exists() for word in words if word.startswith("tests/"))
    modules = [word for word in words if word.startswith(("benchmarks.", "tests."))]
    assert len(modules) > 20 and all(importlib.util.find_spec(module) for module in modules)
    files = gpu_check.cuda_tests()
    assert "kernels/test_norm" in files and "test_sharding" not in files  # by the fixture alone; has none
    assert {f"tests/{file}.py" for file in files} == {word for word in words if word.startswith("tests/")}
    assert {c.environment["TP_EXT_SHARD"] for c in stages["kernels"]} == {f"{i}/8" for i in range(8)}
    assert all(c.environment["TP_EXT_REQUIRE_CUDA"] == "1" for c in stages["kernels"])
    names = [command.name for command in stages["benchmarks"]]
    assert {"bias_act", "norm", "vocab_cross_entropy"} <= set(names) and "train" not in names
    assert {command.name for command in stages["benchmarks, checked"]} == set(names)
    assert set(names[: len(gpu_check.NEW)]) == set(gpu_check.NEW)  # no GPU has run them: first
    assert first["build"][0].environment["TORCH_CUDA_ARCH_LIST"] == "9.0"
    assert set(planned(1, stages="graphs")) == {"build", "graphs"} and set(planned(2, stages="graphs")) == {"build"}


def test_the_parts_end_in_time():
    """Seven minutes each, the report and the end of what runs included."""
    ends = [gpu_check.BUILD, gpu_check.CORRECT[1], gpu_check.SHARED_BY_NCCL[1], gpu_check.TIMED]
    assert ends == sorted(ends) and max(*ends, *gpu_check.SHARED_BY_NCCL.values()) <= 415
    assert gpu_check.BUILD < gpu_check.CORRECT[2] < gpu_check.SHARED_BY_NCCL[2]


def test_ranks_of_nccl_share_the_gpu_with_deadlines():
    """Both of torch's NCCL backends."""
    stages = planned(1) | planned(2)
    shared = {name: stage for name, (stage, *_) in stages.items() if "TP_EXT_RANKS_BACKEND" in stage.environment}
    assert set(shared) == {"NCCL ranks", "NCCL ranks, other backend", "NCCL ranks, all modules"}
    for name, stage in shared.items():
        assert stage.environment["NCCL_MULTI_RANK_GPU_ENABLE"] == "1" and "--maxfail=3" in stage.argv
        assert float(stage.environment["TP_EXT_RANKS_SECONDS"]) < gpu_check.ONE_OF_NCCL
        assert stage.environment.get("TORCH_DIST_USE_NCCL2") == ("0" if "other" in name else None)


FIELDS = {"commit", "gpu", "driver", "arch", "cpu", "cuda", "torch", "python", "cores", "date", "seconds", "commands"}
ROW = {"kernel", "case", "pass", "shape", "dtype", "bytes", "ms", "gb_per_s", "copy_ms", "share_of_copy", "extra_bytes"}


def test_a_dry_run_writes_every_field(tmp_path, monkeypatch):
    """Each kind of stage; tests are collected."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    argv = [sys.executable, "-m", gpu_check.__name__, "--device", "cpu", "--quick", "--out", str(tmp_path)]
    argv += ["--stages", "^new|^NCCL|^benchmarks, rope|memcheck"]
    ended = subprocess.run(argv, timeout=280, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    results = saved(tmp_path)
    assert set(results) == FIELDS | {"rows", "goals"} and results["gpu"] is None and results["cpu"]
    status = {command["stage"]: command["status"] for command in results["commands"]}
    not_run = dict.fromkeys(["build", "memcheck"], "not run")
    assert status == not_run | dict.fromkeys(["new kernels", "NCCL ranks", "benchmarks"], "passed")
    rows = results["rows"]
    passes = ("fwd", "bwd", "fwd+bwd")
    assert {row["case"] for row in rows} == {
        f"{k} {w}" for k in ("half", "interleaved", "batch", "packed") for w in passes
    }
    assert all(set(row) == ROW | {"peers_ms"} and row["ms"] > 0 and row["bytes"] > 0 for row in rows)
    assert all("torch eager" in row["peers_ms"] for row in rows)
    assert "rope" in ended.stdout and "not measured" in ended.stdout


def test_rows_are_kept_whatever_ends_the_run(tmp_path):
    """A script that is killed in the middle of a line has left its earlier cases."""
    code = (
        "import os, sys; from benchmarks.lib.report import append; from pathlib import Path\n"
        "row = dict(case='x fwd', dtype='bfloat16', shape='8', bytes=8, ours_ms=1.0, gb_per_s=1.0, copy_ms=1.0,\n"
        "           share_of_copy=1.0, extra_bytes=0, peer='torch eager', peer_ms=2.0)\n"
        f"folder = Path({str(tmp_path / 'rows')!r}); append(folder, 'bench_norm', {{}}, [row])\n"
        "print('x bwd,bfloat16', end='', file=open(folder / 'bench_norm.csv', 'a')); os.abort()"
    )
    Run(tmp_path, {}).run([python("ends", code, environment={"PYTHONPATH": str(ROOT)})], 60)
    assert statuses(tmp_path) == {"ends": "failed"}
    (row,) = saved(tmp_path)["rows"]
    assert row["case"] == "x fwd" and row["peers_ms"] == {"torch eager": 2.0}


def test_the_commit_is_named_without_git(monkeypatch):
    monkeypatch.setenv("PATH", "")
    assert report.stamp("cpu")["commit"] == "unknown"
    monkeypatch.setenv("TP_EXT_COMMIT", "abc1234")
    assert report.stamp("cpu")["commit"] == "abc1234"


# What is made of the results


def row(kernel, case, share, ms=1.0, dtype="bfloat16", size=1 << 30, extra=0):
    shape, passed = "8x8", gpu_results.what(case)
    made = {"kernel": kernel, "case": case, "pass": passed, "shape": shape, "dtype": dtype, "bytes": size, "ms": ms}
    return made | {"gb_per_s": 1e3, "copy_ms": ms, "share_of_copy": share, "extra_bytes": extra, "peers_ms": {}}


def goal(rows, name):
    (found,) = [g for g in gpu_results.goals(rows) if g["goal"].startswith(name)]
    return found


def test_goals_are_met_by_the_worst_case_or_not():
    rows = [row("norm", "rms fwd", 0.97), row("norm", "layer fwd", 0.93), row("norm", "rms bwd", 0.91)]
    rows += [row("norm", "rms residual bwd", 0.82), row("rope", "half fwd", 0.96), row("rope", "half fwd+bwd", 0.1)]
    rows += [row("rope", "small fwd", 0.2, size=1 << 20)]  # says nothing
    want = {"goal": "norm: forward, share of a copy", "target": ">= 0.95", "value": 0.93, "case": "layer fwd"}
    assert goal(rows, "norm: forward") == want | {"met": False}
    assert goal(rows, "norm: backward")["met"] is True
    assert goal(rows, "norm + residual: backward")["value"] == 0.82 and goal(rows, "norm + residual: backward")["met"]
    assert goal(rows, "rope: forward")["met"] is True and goal(rows, "rope: backward")["met"] is None
    assert goal(rows, "gated_act: forward")["met"] is None  # its benchmark failed
    rows += [row("shard_pack", "pack fwd", 0.99), row("gemm", "linear fwd", None, size=0)]
    of_these = [g["met"] for g in gpu_results.goals(rows) if g["goal"].startswith(("shard_pack", "gemm"))]
    assert of_these == [True]
    large, logits = gpu_results.LARGE_LOSS, 8192 * 131072 * 2
    assert goal(rows, f"{large}: ms")["met"] is None
    rows.append(row("vocab_cross_entropy", large, 0.9, ms=1.7, extra=logits // 100))
    assert goal(rows, f"{large}: ms")["met"] is False
    peak = goal(rows, f"{large}: peak")
    assert peak["met"] is True and peak["value"] == pytest.approx(1.01)


def test_measured_figures_are_kept_and_drawn(tmp_path, capsys):
    rows = [row("norm", "rms fwd", 0.97) | {"peers_ms": {"torch eager": 2.0, "Liger": 3.0}}, row("norm", "bwd", 0.9)]
    stamp = {"gpu": "a GPU", "torch": "2.15", "commit": "abc", "date": "2026-01-02T03"}
    file, into = tmp_path / "results.json", tmp_path / "into"
    into.mkdir()
    gpu_results.write(file, stamp | {"rows": rows, "goals": gpu_results.goals(rows)})
    gpu_results.main([str(file), "--into", str(into)])
    printed = capsys.readouterr().out
    assert re.search(r"norm +rms fwd +bfloat16 +1\.000 .* 0\.970 +3\.000 +2\.000", printed)
    assert "met: norm: forward" in printed
    assert (into / "gpu_check.png").read_bytes().startswith(b"\x89PNG")
    assert (into / "gpu_check.json").read_text() == file.read_text()
    assert json.loads(file.read_text())["rows"] == rows
    file.write_text(json.dumps(stamp | {"gpu": None, "rows": rows}))
    with pytest.raises(SystemExit, match="dry run"):
        gpu_results.main([str(file), "--into", str(into)])
