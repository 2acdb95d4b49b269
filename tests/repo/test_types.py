"""Type checkers see the parameters of the operators that layers call, and not only their number."""

import os
import subprocess
import sys

import pytest

from tests.helpers.paths import ROOT

TORCH = """
from typing import Any

class Tensor:
    def __getattr__(self, name: str) -> Any: ...

def __getattr__(name: str) -> Any: ...
"""  # as much as the types of operators need: of torch itself mypy would read a thousand files
CALLS = """
from torch import Tensor
from tp_ext import _ops

def call(x: Tensor, w: Tensor, sp: bool) -> Tensor:
    _ops.column_parallel_linear(x, w, None, "", sp, None, w, 1)
    _ops.column_parallel_linear(x, w, None, "", w, None, sp, 1)
    _ops.scatter_to_region(x, "", None, -1)
    _ops.row_parallel_linear(x, w, None, "", sequence_paralel=sp)
    _ops.rms_norm_fwd(x, 1e-5, None)
    return _ops.rms_norm_residual(x, x, None, 1e-5)
"""
ERRORS = """
7 Argument 5 to "column_parallel_linear" has incompatible type "Tensor"; expected "bool"
7 Argument 7 to "column_parallel_linear" has incompatible type "bool"; expected "Tensor | None"
8 Argument 3 to "scatter_to_region" has incompatible type "None"; expected "int"
8 Argument 4 to "scatter_to_region" has incompatible type "int"; expected "Sequence[int] | None"
9 Unexpected keyword argument "sequence_paralel" for "row_parallel_linear"; did you mean "sequence_parallel"?
10 Argument 2 to "rms_norm_fwd" has incompatible type "float"; expected "Tensor | None"
10 Argument 3 to "rms_norm_fwd" has incompatible type "None"; expected "float"
11 Incompatible return value type (got "tuple[Tensor, Tensor]", expected "Tensor")
"""


def test_wrong_arguments_of_operators_are_type_errors(tmp_path):
    pytest.importorskip("mypy")
    file, torch = tmp_path / "calls.py", tmp_path / "torch" / "__init__.pyi"
    torch.parent.mkdir()
    torch.write_text(TORCH)
    file.write_text(CALLS)
    command = [sys.executable, "-m", "mypy", "--hide-error-codes", "--no-color-output", "--no-error-summary"]
    command += ["--follow-imports=skip", "--ignore-missing-imports", f"--cache-dir={os.devnull}"]
    sources = [file, torch, ROOT / "tp_ext" / "__init__.py", *(ROOT / "tp_ext" / "_ops").glob("*.py")]
    environment = os.environ | {"MYPYPATH": str(tmp_path)}
    command += map(str, sources)
    result = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=200)
    lines = [line for line in result.stdout.splitlines() if "calls.py:" in line and ": error: " in line]
    found = [line.partition("calls.py:")[2].replace(": error:", "") for line in lines]
    assert found == ERRORS.strip().splitlines(), result.stdout + result.stderr
