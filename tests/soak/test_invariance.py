"""Steps in tp_invariant on processes and resumed on other ranks: the short form of tests/soak/invariance.py."""

import os
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT
from tests.helpers.ranks import STRICT


@pytest.mark.exhaustive  # by default tests/test_invariance.py
def test_the_same_bits_in_every_run():
    command = [sys.executable, "-m", "tests.soak.invariance", "--steps", "2", "--only", "experts, bf16"]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | STRICT, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0 and "14 of 14" in done.stdout, done.stdout + done.stderr
