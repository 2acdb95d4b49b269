"""gpu-check without a GPU: a stage that fails, crashes or hangs loses nothing else, the dry run writes every field, and
the goals say what was met."""

import importlib.util
import json
import os
import runpy
import subprocess
import sys
import time
from multiprocessing import connection, forkserver
from pathlib import Path
from types import SimpleNamespace
from unittest import mock

import pytest
import torch

from benchmarks.gpu import check as gpu_check
from benchmarks.gpu import results as gpu_results
from benchmarks.lib import jobs, report, timing
from benchmarks.lib.jobs import ROOT, Command, Run, Stage
from tests.helpers import ranks, torchrun


def python(name, code, **options):
    return Command(name, [sys.executable, "-c", code], **options)


def saved(folder):
    return json.loads((folder / "results.json").read_text())


# Stages


def test_a_failure_or_hang_loses_no_other_result(tmp_path):
    run = Run(tmp_path, {"commit": "abc"}, 4)
    marker = tmp_path / "grandchild"
    sleeper = f"import time; time.sleep(10); open({str(marker)!r}, 'w')"
    hangs = f"import subprocess, sys, time; subprocess.Popen([sys.executable, '-c', {sleeper!r}]); time.sleep(60)"
    stages = [
        Stage("good", [python("one", "print('fine')"), python("two", "pass")], 60),
        Stage("hangs", [python("h", hangs)], 1.5),
        Stage("crashes", [python("c", "import os; print('so far', flush=True); os.abort()"), python("d", "pass")], 60),
        Stage("fails", [python("f", "raise SystemExit(3)")], 60),
        Stage("missing", [Command("m", ["/no/such/command"])], 60),
        Stage(
            "without tool", [python("t", "print('Device not supported'); raise SystemExit(1)")], 60, cannot="not supp"
        ),
        Stage("left out", [], 60, note="needs a GPU"),
    ]
    began = time.monotonic()
    run.together(stages)
    assert time.monotonic() - began < 55  # less than what hangs would take, however busy the machine
    results = saved(tmp_path)
    status = {stage["name"]: stage["status"] for stage in results["stages"]}
    assert status == {
        "good": "passed",
        "hangs": "timed out",
        "crashes": "failed",
        "fails": "failed",
        "missing": "failed",
        "without tool": "unavailable",
        "left out": "not run",
    }
    assert sorted(run.failed()) == ["crashes", "fails", "hangs", "missing"]
    commands = {c["name"]: c for stage in results["stages"] for c in stage["commands"]}
    assert commands["c"]["exit_code"] < 0 and commands["c"]["output"] == ["so far"]
    assert commands["f"]["exit_code"] == 3 and commands["d"]["status"] == "passed"
    assert "/no/such/command" in commands["m"]["output"][0]
    log = (tmp_path / "log.txt").read_text()
    assert "=== good, one: passed" in log and "fine" in log
    time.sleep(max(0.0, began + 14.0 - time.monotonic()))
    assert not marker.exists()  # what a hanging command had started is ended with it


def test_results_are_there_after_every_stage_whatever_comes(tmp_path):
    run = Run(tmp_path, {"commit": "abc"}, 2)
    assert saved(tmp_path)["stages"] == []
    run.together([Stage("first", [python("a", "pass")], 60)])
    assert [stage["name"] for stage in saved(tmp_path)["stages"]] == ["first"]
    with pytest.raises(ZeroDivisionError):
        run.together([Stage("second", [python("b", "pass")], 60)], lambda results: 1 / 0)
    assert [stage["name"] for stage in saved(tmp_path)["stages"]] == ["first", "second"]
    assert not list(tmp_path.glob("*.new"))


def test_commands_in_turn_wait_for_the_previous_one(tmp_path):
    """One that hangs takes its own limit, the others have theirs; one that is gone before its turn is no obstacle."""
    said = "import sys, time; sys.stdin.readline(); print(time.time(), flush=True); {}; print(time.time())"
    commands = [
        python("one", said.format("time.sleep(0.3)"), seconds=20),
        python("hangs", said.format("time.sleep(60)"), seconds=1),
        python("gone", "raise SystemExit(1)", seconds=20),
        python("two", said.format("time.sleep(0.3)"), seconds=20),
    ]
    run = Run(tmp_path, {}, 4)
    run.together([Stage("timed", commands, 60, in_turn=True)])
    (stage,) = saved(tmp_path)["stages"]
    assert [c["status"] for c in stage["commands"]] == ["passed", "timed out", "failed", "passed"]
    times = [
        float(word) for word in (tmp_path / "log.txt").read_text().split() if word.count(".") == 1 and len(word) > 12
    ]
    assert times == sorted(times) and len(times) == 5


def test_tests_are_counted_and_named(tmp_path):
    file, junit = tmp_path / "test_x.py", tmp_path / "x.xml"
    file.write_text(
        "import pytest\ndef test_a(): pass\ndef test_b(): assert 0\n@pytest.mark.skip('why')\ndef test_c(): pass\n"
    )
    argv = [sys.executable, "-m", "pytest", "-q", f"--junitxml={junit}", "-c", os.devnull, str(file)]
    run = Run(tmp_path, {}, 2)
    run.together([Stage("tests", [Command("pytest", argv, junit=junit)], 60)])
    (stage,) = saved(tmp_path)["stages"]
    assert (stage["passed"], stage["failed"], stage["skipped"]) == (1, 1, 1) and stage["status"] == "failed"
    (command,) = stage["commands"]
    assert command["failures"] == ["test_x::test_b"] and command["skips"] == {"why": 1}


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


def planned(device="cuda", quick=False, cores=16):
    args = SimpleNamespace(device=device, quick=quick, size=256, benchmarks="", built=False)
    plan = gpu_check.Plan(args, cores, "9.0", Path("/scratch"))
    return [plan.build(), *plan.correctness(), plan.timed()]


def test_the_plan_leaves_no_cuda_test_and_no_kernel_out():
    stages = {stage.name: stage for stage in planned()}
    files = [word for stage in stages.values() for command in stage.commands for word in command.argv]
    assert all((ROOT / word).exists() for word in files if word.startswith("tests/"))
    modules = [word for word in files if word.startswith(("benchmarks.", "tests."))]
    assert len(modules) > 20 and all(importlib.util.find_spec(module) for module in modules)
    own = {file for each in gpu_check.OWN_STAGES.values() for file in each}
    shared = set(stages["kernels"].commands[0].argv)
    assert own <= set(gpu_check.cuda_tests()) <= own | shared
    shards = {command.environment["TP_EXT_SHARD"] for command in stages["kernels"].commands}
    assert shards == {f"{i}/8" for i in range(8)}
    assert all(c.environment["TP_EXT_REQUIRE_CUDA"] == "1" for c in stages["kernels"].commands)
    names = {command.name for command in stages["benchmarks"].commands}
    assert {"bias_act", "norm", "vocab_cross_entropy"} <= names and "train" not in names
    assert {command.name for command in stages["benchmarks, checked"].commands} == names
    assert stages["build"].commands[0].environment["TORCH_CUDA_ARCH_LIST"] == "9.0"
    assert max(stage.until for stage in stages.values()) <= 540


def test_cuda_tests_are_found_by_their_marks():
    files = gpu_check.cuda_tests()
    for name in (
        "kernels/test_norm",
        "conformance/test_51_capture",
        "nn/attention/test_kv_cache_graphs",
        "cuda/test_execution",
    ):
        assert f"tests/{name}.py" in files
    assert "tests/test_sharding.py" not in files


FIELDS = {"commit", "gpu", "driver", "arch", "cpu", "cuda", "torch", "python", "cores", "date", "seconds", "stages"}
ROW = {"kernel", "case", "pass", "shape", "dtype", "bytes", "ms", "gb_per_s", "copy_ms", "share_of_copy", "extra_bytes"}


class _Forked(torchrun._Process):
    """As much of subprocess.Popen as a stage uses, of ``python -m`` in a fork of the ranks' server: that has torch."""

    def __init__(self, argv, cwd, env, stdin, stdout, **_):
        assert argv[:2] == [sys.executable, "-m"]
        reader, writer = ranks._context.Pipe(duplex=False)
        files = reader, connection.Connection(os.dup(stdout.fileno()))
        with mock.patch.dict(os.environ, ranks._ENVIRONMENT):
            forkserver.ensure_running()
        process = ranks._context.Process(target=_module, args=(argv[2:], str(cwd), env, *files))
        process.start()
        self.stdin = os.fdopen(os.dup(writer.fileno()), "wb") if stdin == subprocess.PIPE else None
        for each in (*files, writer):
            each.close()
        super().__init__(process.pid, process)


def _module(argv, folder, environment, stdin, stdout):
    os.setsid()
    os.chdir(folder)
    os.dup2(stdin.fileno(), 0)
    sys.stdin = open(0)  # noqa: SIM115
    torchrun._redirect(stdout, stdout)
    sys.argv = list(argv)
    torchrun._program(lambda: runpy.run_module(argv[0], run_name="__main__", alter_sys=True), environment)


@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["", "cold"])
def test_a_dry_run_writes_every_field(cold, tmp_path, monkeypatch, capfd):
    """In this process and forks of one, and in processes of their own, as a user starts it."""
    argv = ["--device", "cpu", "--quick", "--benchmarks", "rope", "--out", str(tmp_path)]
    argv += ["--stages", "^kernels|^benchmarks$|memcheck"]
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    if cold:
        code = subprocess.run([sys.executable, "-m", gpu_check.__name__, *argv], timeout=250).returncode
    else:
        forks = SimpleNamespace(**vars(subprocess) | {"Popen": _Forked})
        with mock.patch("signal.signal"), mock.patch.object(jobs, "subprocess", forks):  # SIGTERM is pytest's
            code = gpu_check.main(argv)
    printed = capfd.readouterr().out
    assert code == 0, printed
    results = saved(tmp_path)
    assert set(results) == FIELDS | {"rows", "goals"} and results["gpu"] is None and results["cpu"]
    status = {stage["name"]: stage["status"] for stage in results["stages"]}
    passed = dict.fromkeys(("kernels", "benchmarks"), "passed")
    assert status == {"build": "not run", "memcheck": "not run"} | passed
    assert all(stage["passed"] > 0 for stage in results["stages"] if stage["name"] == "kernels")
    rows = results["rows"]
    assert {row["case"] for row in rows} == {
        f"{k} {w}" for k in ("half", "interleaved", "batch", "packed") for w in ("fwd", "bwd", "fwd+bwd")
    }
    assert all(set(row) == ROW | {"peers_ms"} and row["ms"] > 0 and row["bytes"] > 0 for row in rows)
    assert all(set(row["peers_ms"]) == {"torch eager"} for row in rows)
    assert "rope" in printed and "not measured" in printed


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
    assert goal(rows, "norm: forward") == {
        "goal": "norm: forward, share of a copy",
        "target": ">= 0.95",
        "value": 0.93,
        "case": "layer fwd",
        "met": False,
    }
    assert goal(rows, "norm: backward")["met"] is True
    assert goal(rows, "norm + residual: backward")["value"] == 0.82 and goal(rows, "norm + residual: backward")["met"]
    assert goal(rows, "rope: forward")["met"] is True and goal(rows, "rope: backward")["met"] is None
    assert goal(rows, "gated_act: forward")["met"] is None  # its benchmark failed
    rows += [row("shard_pack", "pack fwd", 0.99), row("gemm", "linear fwd", None, size=0)]
    names = {
        g["goal"].partition(":")[0]: g["met"] for g in gpu_results.goals(rows) if g["goal"].startswith(("sh", "ge"))
    }
    assert names == {"shard_pack": True}
    large, logits = gpu_results.LARGE_LOSS, 8192 * 131072 * 2
    assert goal(rows, f"{large}: ms")["met"] is None
    rows.append(row("vocab_cross_entropy", large, 0.9, ms=1.7, extra=logits // 100))
    assert goal(rows, f"{large}: ms")["met"] is False
    peak = goal(rows, f"{large}: peak")
    assert peak["met"] is True and peak["value"] == pytest.approx(1.01)


def test_readme_shows_the_measured_figures(tmp_path, capsys):
    rows = [
        row("norm", "rms fwd", 0.97) | {"peers_ms": {"torch eager": 2.0, "Liger": 3.0}},
        row("rope", "half bwd", 0.91),
    ]
    rows += [row("rope", "half fwd+bwd", 0.92)]
    stamp = {"gpu": "a GPU", "driver": "1", "cuda": "13.0", "torch": "2.15", "commit": "abc", "date": "2026-01-02T03"}
    file = tmp_path / "results.json"
    file.write_text(json.dumps(stamp | {"rows": rows, "goals": gpu_results.goals(rows), "stages": []}))
    (tmp_path / "into").mkdir()
    gpu_results.main([str(file), "--into", str(tmp_path / "into")])
    printed = capsys.readouterr().out
    assert "| norm, rms fwd | 1.000 | 1.00 | 97% | 2.000 |  | Liger 3.000 |" in printed
    assert "abc, 2026-01-02: `make gpu-check`" in printed
    assert "half fwd+bwd" in printed and "half bwd" not in printed
    assert (tmp_path / "into" / "gpu_check.png").read_bytes().startswith(b"\x89PNG")
    assert (tmp_path / "into" / "gpu_check.json").read_text() == file.read_text()
    file.write_text(json.dumps(stamp | {"gpu": None, "rows": rows}))
    with pytest.raises(SystemExit, match="dry run"):
        gpu_results.main([str(file), "--into", str(tmp_path / "into")])
