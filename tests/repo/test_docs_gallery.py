"""docs/guide/gallery.md shows commands and what they print: the commands run, and print that."""

import math
import os
import re
import shlex
import subprocess
import sys

import pytest

from tests.helpers import torchrun
from tests.helpers.paths import ROOT

PAGE = (ROOT / "docs" / "guide" / "gallery.md").read_text()
PAIRS = re.findall(r"^```\n(.*?)^```\n\n```text\n(.*?)^```$", PAGE, re.M | re.S)
VARIES = re.compile(r"[\d,.]+ (?:tokens/s|MiB)")  # with the machine
NUMBER = re.compile(r"\d+\.\d+(?:e[-+]\d+)?")  # a difference of none at all is 0.0e+00


def words_of(command, folder):
    """The words of a command of the page, with its output in ``folder``."""
    return shlex.split(command.replace("\\\n", " ").replace("runs/", f"{folder}/"))


def under_torchrun(command, folder, cold):
    """Runs a command of the page; returns what it prints."""
    first, *words = words_of(command, folder)
    assert first == "torchrun"
    job = torchrun.start(words, folder / "printed.txt", ROOT, cold=cold)
    assert job.wait(250) == 0, job.output
    return job.output


def lines(text, folder):
    """Lines without trailing spaces, those of the machine's speed and the output's place made alike."""
    text = VARIES.sub("..", text.replace(f"{folder}/", "runs/"))
    return [line.rstrip() for line in text.splitlines() if line.strip()]


def test_the_page_shows_four_commands():
    assert len(PAIRS) == 4 and PAGE.count("```text") == 4


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("cold", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["", "cold"])
def test_training_and_its_resumption_print_the_output_of_the_page(cold, tmp_path):
    """In fp64, so that the digits shown, and the text sampled, are the same on any machine. In processes that are
    forked, and as a user starts them."""
    for command, shown in PAIRS[:2]:
        printed = lines(under_torchrun(command, tmp_path, cold), tmp_path)
        expected = lines(shown, tmp_path)
        assert [NUMBER.sub("x", line) for line in printed] == [NUMBER.sub("x", line) for line in expected]
        for line, other in zip(printed, expected, strict=True):
            numbers = [[float(number) for number in NUMBER.findall(text)] for text in (line, other)]
            assert numbers[0] == pytest.approx(numbers[1], abs=1.1e-4), other


@pytest.mark.exhaustive
@pytest.mark.timeout(600)
def test_the_demo_prints_the_table_of_the_page(tmp_path):
    """Its text, and so its losses, depend on the version of Python."""
    command, shown = PAIRS[2]
    environment = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    whole = [sys.executable, *words_of(command, tmp_path)[1:]]
    result = subprocess.run(whole, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=250)
    assert result.returncode == 0, result.stdout + result.stderr
    texts = (result.stdout.replace(f"{tmp_path}/", "runs/"), shown)
    table, expected = (text.partition("\nloss, nats per byte")[2].splitlines() for text in texts)
    assert [NUMBER.sub("x", line) for line in table] == [NUMBER.sub("x", line) for line in expected]
    (apart,) = (float(line.split()[-1]) for line in table if line.startswith("largest difference"))
    assert (
        math.isfinite(apart) and apart < 1e-9 and "text sampled after training                      the same" in table
    )


@pytest.mark.exhaustive  # tests/end_to_end/test_mesh_programs.py runs the programs
def test_the_programs_on_a_mesh_print_the_lines_of_the_page(tmp_path):
    command, shown = PAIRS[3]
    printed = [
        line.rsplit(maxsplit=1) for line in under_torchrun(command, tmp_path, False).splitlines() if "differs" in line
    ]
    assert [name for name, _ in printed] == [line.rsplit(maxsplit=1)[0] for line in shown.splitlines()]
    assert all(float(difference) < 1e-12 for _, difference in printed)
