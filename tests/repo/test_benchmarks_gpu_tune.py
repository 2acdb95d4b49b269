"""gpu-tune without a GPU: a dry run times every choice, and the table that it writes is what the kernels look up."""

import json
import re
import shutil
import subprocess

import pytest
import torch

from benchmarks.gpu import tune
from benchmarks.lib.harness import Case
from tests.helpers.paths import CSRC
from tp_ext import _C

LINE = re.compile(r"\{Family::k\w+, \d+, \d+, \d+, \{\d+, \d+, \d+, \d+, \d+\}\},")


def row(family="ce_bwd", width=1000, size=2, best=(0, 32, 4, 0, 0)):
    return {"family": family, "width": width, "bytes": size, "best": best and list(best)}


@pytest.fixture
def table(tmp_path, monkeypatch):
    """An empty table in place of the build's."""
    path = tmp_path / "kernels" / "launch_table.inc"
    path.parent.mkdir()
    path.write_text("// comment\n")
    monkeypatch.setattr(tune, "TABLE", path)
    return path


def test_the_names_are_those_of_the_kernels():
    text = (CSRC / "kernels" / "launch_table.h").read_text()
    names = re.findall(r"k\w+", re.search(r"enum class Family \{(.*?)\}", text, re.S)[1])
    strings = re.findall(r'"(\w+)"', text[text.index("kFamilies") :].partition(";")[0])
    assert [*zip(strings, names, strict=True)] == [(f, tune.NAMES[f]) for f in strings] and len(names) == len(
        tune.NAMES
    )
    assert {subject.family for subject in tune.subjects()} == set(tune.NAMES)
    lines = tune.TABLE.read_text().splitlines()
    assert all(line.startswith("//") or LINE.fullmatch(line) for line in lines)


def test_a_family_that_is_none_is_refused():
    for family in tune.NAMES:
        _C.try_launch(family, (1, 2, 3, 4, 5))
        _C.try_launch(family, None)
    with pytest.raises(ValueError, match="family: 'gelu' is not in"):
        _C.try_launch("gelu", (1, 2, 3, 4, 5))


def test_measuring_again_replaces_what_was_measured(table):
    tune.write_table(table, [row(), row(width=2048), row("columns_fwd", 1024, 4, (0, 0, 0, 4096, 0))], 90)
    tune.write_table(table, [row(best=(0, 64, 1, 0, 0))], 80)
    tune.write_table(table, [row(best=None), row(width=2000, best=(0, 256, 1, 0, 0))], 90)
    assert table.read_text().splitlines() == [
        "// comment",
        "{Family::kCeBackward, 2, 10, 80, {0, 64, 1, 0, 0}},",
        "{Family::kCeBackward, 2, 11, 90, {0, 256, 1, 0, 0}},",
        "{Family::kColumnsForward, 4, 10, 90, {0, 0, 0, 4096, 0}},",
    ]


@pytest.mark.skipif(shutil.which("g++") is None, reason="needs g++")
def test_the_kernels_look_up_what_was_written(table, tmp_path):
    """By family, bytes, width class and architecture; a trial goes before the table."""
    tune.write_table(table, [row(), row("layer_norm_bwd", 4096, best=(1, 0, 0, 2, 2))], 90)
    calls = [("kCeBackward", 2, 1024, 90), ("kCeBackward", 2, 513, 90), ("kCeBackward", 2, 512, 90)]
    calls += [("kCeBackward", 2, 1025, 90), ("kCeBackward", 4, 1024, 90), ("kCeBackward", 2, 1024, 80)]
    calls += [("kCeStats", 2, 1024, 90), ("kLayerNormBackward", 2, 4095, 90)]
    shown = "\n".join(f"  show(choose_launch(Family::{f}, {b}, {w}, {a}));" for f, b, w, a in calls)
    (tmp_path / "main.cpp").write_text(
        '#include "kernels/launch_table.h"\n#include <cstdio>\nusing namespace tp_ext;\n'
        'void show(LaunchChoice c) { printf("%d %d %d %d %d\\n", c.vectors, c.threads, c.rows, c.blocks, c.stages); }\n'
        f"int main() {{\n{shown}\n  launch_trials[2] = {{true, {{9, 9, 9, 9, 9}}}};\n"
        "  show(choose_launch(Family::kCeStats, 2, 5, 90));\n}\n"
    )
    command = ["g++", "-std=c++17", f"-I{tmp_path}", f"-I{CSRC}", tmp_path / "main.cpp", "-o", tmp_path / "main"]
    subprocess.run(command, check=True, timeout=100)
    printed = subprocess.run([tmp_path / "main"], check=True, capture_output=True, text=True).stdout.splitlines()
    found, none = "0 32 4 0 0", "0 0 0 0 0"
    assert printed == [found, found, none, none, none, none, none, "1 0 0 2 2", "9 9 9 9 9"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_does_nothing(table, tmp_path, capsys):
    assert tune.main(["--out", str(tmp_path / "out")]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().out and not (tmp_path / "out").exists()


def test_a_dry_run_times_every_choice(table, tmp_path, monkeypatch):
    """A choice that is much faster than the rule gets an entry, in the folder alone; one that is wrong none."""
    widths = dict.fromkeys(tune.NAMES, 1024) | {"columns_bwd": tune.FLAT}
    some = [s for s in tune.subjects() if (s.width, s.dtype) == (widths[s.family], torch.bfloat16)]
    assert {s.family for s in some} == set(tune.NAMES)
    monkeypatch.setattr(tune, "subjects", lambda: iter(some))
    monkeypatch.setattr(tune, "GAIN", 0.0)  # whatever the clock of this machine says
    out = tmp_path / "out"
    assert tune.main(["--device", "cpu", "--quick", "--out", str(out)]) == 0
    results = json.loads((out / "tune.json").read_text())
    assert results["gpu"] is None and results["failed"] == {} and results["left_out"] == []
    for found, subject in zip(results["rows"], some, strict=True):
        assert set(found["choices_ms"]) == set(map(str, subject.choices)) and found["peer_ms"] > 0 < found["rule_ms"]
    lines = (out / "launch_table.inc").read_text().splitlines()
    assert lines[0] == "// comment" and len(lines) == 1 + len(some) and all(map(LINE.fullmatch, lines[1:]))
    assert table.read_text() == "// comment\n"


def test_a_choice_with_other_results_has_no_entry(table, tmp_path, monkeypatch):
    """Nor does a width that there was no time for."""
    first = next(s for s in tune.subjects() if s.family == "columns_fwd")
    tried = []
    monkeypatch.setattr(tune._C, "try_launch", lambda family, choice: tried.append(choice))

    def wrong(device, dtype, rows, width):
        x = torch.ones(rows, width)
        return Case("", lambda: x * (1 + (tried[-1] == (0, 0, 0, 4096, 0))), {}, bytes_moved=x.nbytes)

    made = tune.Subject("columns_fwd", 64, torch.float32, first.choices, wrong)
    monkeypatch.setattr(tune, "subjects", lambda: iter([made]))
    out = tmp_path / "out"
    assert tune.main(["--device", "cpu", "--quick", "--out", str(out)]) == 1
    (failure,) = json.loads((out / "tune.json").read_text())["failed"].values()
    assert "differs from (0, 0, 0, 4096, 0)" in failure and not (out / "launch_table.inc").exists()
    assert tune.main(["--device", "cpu", "--quick", "--seconds", "-1", "--out", str(out)]) == 0
    assert json.loads((out / "tune.json").read_text())["left_out"] == ["columns_fwd 64 torch.float32"]
