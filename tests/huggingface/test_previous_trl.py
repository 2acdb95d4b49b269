"""The version of TRL before the one that is installed: trainings of test_trainer_for.py run with it, too."""

import os
import re
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

pytest.importorskip("trl")
VERSION = re.search(r'"trl>=([\d.]+)', (ROOT / "pyproject.toml").read_text()).group(1)
FOLDER = ROOT / "build" / f"trl-{VERSION}"
TESTS = "tests/huggingface/test_trainer_for.py"
TRAININGS = "test_logs_and_weights_are_those_of_one_process[{}-llama-2]"
ADAPTERS = "test_adapters_and_the_base_as_reference_are_those_of_peft[{}]"
CASES = {  # by default one of each part of TRL: batches, generation, references
    "few": [TRAININGS.format("sft"), TRAININGS.format("grpo"), "test_a_reference_that_is_the_base_takes_no_memory"],
    "others": [*map(TRAININGS.format, ("reward", "rloo")), *map(ADAPTERS.format, ("dpo", "kto"))],
}


@pytest.mark.parametrize("cases", ["few", pytest.param("others", marks=pytest.mark.exhaustive)])
def test_trainings_with_the_version_before(cases):
    if not FOLDER.exists():
        command = ["pip", "install", "--quiet", "--no-deps", "--target", str(FOLDER), f"trl=={VERSION}.*"]
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=120)
        if done.returncode:
            reason = f"TRL {VERSION} cannot be installed: {done.stderr.strip()[-300:]}"
            pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    paths = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    options = ["-q", "-x", "-p", "no:cacheprovider", *(f"{TESTS}::{case}" for case in CASES[cases])]
    code = f"import pytest, trl; print('TRL', trl.__version__); raise SystemExit(pytest.main({options}))"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=400)
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"TRL {VERSION}." in done.stdout and f"{len(CASES[cases])} passed" in done.stdout
