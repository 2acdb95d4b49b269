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
CASES = [
    *(f"test_logs_and_weights_are_those_of_one_process[{name}-llama-2]" for name in ("sft", "reward", "grpo", "rloo")),
    *(f"test_adapters_and_the_base_as_reference_are_those_of_peft[{name}]" for name in ("dpo", "kto")),
    "test_a_reference_that_is_the_base_takes_no_memory",
]


def test_trainings_with_the_version_before():
    if not FOLDER.exists():
        command = ["pip", "install", "--quiet", "--no-deps", "--target", str(FOLDER), f"trl=={VERSION}.*"]
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, timeout=120)
        if done.returncode:
            reason = f"TRL {VERSION} cannot be installed: {done.stderr.strip()[-300:]}"
            pytest.fail(reason) if os.environ.get("CI") == "true" else pytest.skip(reason)
    paths = [str(FOLDER), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    run = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": 400}
    code = "import trl; print(trl.__version__)"
    version = subprocess.run([sys.executable, "-c", code], **run).stdout
    assert version.startswith(f"{VERSION}.")
    options = ["-q", "-x", "-p", "no:cacheprovider", *(f"{TESTS}::{case}" for case in CASES)]
    done = subprocess.run([sys.executable, "-m", "pytest", *options], **run)
    assert done.returncode == 0, done.stdout[-3000:]
    assert f"{len(CASES)} passed" in done.stdout
