"""The command: its tables and exit codes, and one line that names the option for bad arguments."""

import json
import runpy
import sys

import pytest

from tests.planner.test_values import LLAMA_70B
from tp_ext import planner
from tp_ext.planner import Layout
from tp_ext.planner.__main__ import main


@pytest.fixture
def config(tmp_path):
    path = tmp_path / "config.json"
    path.write_text(json.dumps(LLAMA_70B))
    return path


def command(config, *more):
    return ["--model", str(config), "--gpus", "8", "--device", "h100-sxm", "--global-batch", "8", *more]


UNLIKE = ["--gpus", "8", "--global-batch", "8", "--layout", "param_dtype=bf16,recompute=full"]


def test_unlike_devices(config, capsys):
    two = ["--model", str(config), *UNLIKE, "--devices", "b300", "h200"]
    assert main([*two, "--json"]) == 0
    best = json.loads(capsys.readouterr().out)["best"][0]["layout"]
    assert best["tp"] == 2 and best["shares"][0] > best["shares"][1] > 0
    assert main([*two, "--device", "b300"]) == 2
    assert "--device: not allowed with argument --devices" in capsys.readouterr().err
    for names, says in ((["b300", "tpu"], "--devices: 'tpu' must be one of"), (["b300"] * 3, "--gpus: 8 must be")):
        assert main(["--model", str(config), *UNLIKE, "--devices", *names]) == 2
        assert says in capsys.readouterr().err


@pytest.mark.parametrize(
    "more, says",
    [
        (["--gpus", "abc"], "--gpus: invalid int value: 'abc'"),
        (["--gpus", "0"], "--gpus: 0 must be an integer of at least 1"),
        (["--global-batch", "1.5"], "--global-batch: invalid int value: '1.5'"),
        (["--global-batch", "0"], "--global-batch: 0 must be an integer of at least 1"),
        (["--seq", "0"], "--seq: 0 must be an integer of at least 1"),
        (["--device", "tpu"], "--device: 'tpu' must be one of a100-40"),
        (["--model", "/nowhere"], "--model: '/nowhere' must be a file of JSON"),
        (["--objective", "money"], "--objective: 'money' must be one of step_time"),
        (["--layout", "tensor=8"], "--layout: 'tensor' must be one of"),
        (["--layout", "tp=8,tp=4"], "--layout: 'tp' must be given once; several values are tp=4|8"),
        (["--layout", "tp"], "--layout: 'tp' must be of the form name=value"),
        (["--layout", "zero=4"], "--layout: zero: 4 must be one of 0, 1, 2, 3"),
        (["--layout", "tp=3"], "--layout: 'tp=3' must leave a legal layout of 8 devices"),
        (["--draw", "/nowhere/step.png"], "--draw: '/nowhere/step.png' must be a file that can be written"),
        (["--picture", "step.png"], "unrecognized arguments: --picture step.png"),
    ],
)
def test_bad_arguments(config, more, says, capsys):
    assert main(command(config, *more)) == 2
    output = capsys.readouterr()
    assert says in output.err and output.err.count("\n") == 1 and output.out == ""


def test_a_missing_option(config, capsys):
    assert main(command(config)[2:]) == 2
    error = capsys.readouterr().err
    assert "required: --model" in error and error.count("\n") == 1


def test_a_picture_that_cannot_be_written_is_refused_before_the_search(config, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("tp_ext.planner.__main__.search", lambda *args, **options: pytest.fail("it searched"))
    assert main(command(config, "--draw", str(tmp_path))) == 2
    assert f"--draw: {str(tmp_path)!r} must be" in capsys.readouterr().err


def test_a_picture_is_written_if_something_fits(config, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    path = tmp_path / "step.svg"
    assert main(command(config, "--draw", str(path))) == 1 and not path.exists()
    assert main(command(config, "--device", "b300", "--layout", "tp=8,zero=3", "--draw", str(path))) == 0
    assert "<svg" in path.read_text()


def test_stages_of_the_best_are_printed_if_values_are_fixed(config, capsys):
    fixed = ["--gpus", "64", "--device", "b300", "--global-batch", "64", "--layout", "tp=8,pp=8"]
    assert main(command(config, *fixed)) == 0
    printed = capsys.readouterr().out
    machine = planner.cluster("b300", 64)
    (best, *_) = planner.search(planner.from_config(config), machine, 64, fixed={"tp": [8], "pp": [8]})
    assert printed.endswith(f"{best}\n") and len(best.memory) == 8
    assert all(f"\n{stage:5} " in printed for stage in range(8))
    assert main(command(config, *fixed[:-2])) == 0 and "stage " not in capsys.readouterr().out


def test_the_memory_of_the_nearest_is_printed_if_nothing_fits(config, capsys):
    assert main(command(config, "--layout", "pp=2,tp=4,micro_batch=1,schedule=1F1B,zero=1,recompute=full")) == 1
    printed = capsys.readouterr().out
    layout = Layout(pp=2, tp=4, zero=1, recompute="full")
    want = planner.predict(planner.from_config(config), planner.cluster("h100-sxm", 8), layout, 8)
    assert "nothing fits; the nearest is short by " in printed and printed.endswith(f"{want}\n")
    assert "stage   parameters" in printed


def test_ten_layouts_are_printed(config, capsys):
    assert main(command(config, "--gpus", "64", "--global-batch", "256")) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "70.55 billion parameters" in lines[0] and len(lines) == 2 + 10 + 1
    times = [float(line.split()[0]) for line in lines[2:12]]
    assert times == sorted(times) and "needs " in lines[-1] and " GiB of 80" in lines[-1]


def test_json(config, capsys):
    assert main(command(config, "--gpus", "64", "--json", "--layout", "tp=4|8,pp=8,recompute=full")) == 0
    read = json.loads(capsys.readouterr().out)
    assert {row["layout"]["tp"] for row in read["best"]} <= {4, 8} and read["count"] > 10
    assert Layout.from_json(json.dumps(read["best"][0]["layout"])).pp == 8


@pytest.mark.filterwarnings("ignore:.*found in sys.modules")
def test_it_runs_as_a_module(config, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["planner", *command(config, "--gpus", "0")])
    with pytest.raises(SystemExit) as ended:
        runpy.run_module("tp_ext.planner", run_name="__main__")
    assert ended.value.code == 2 and "--gpus: 0 must be" in capsys.readouterr().err
