"""docs/develop/add_an_op.md is true: its files compile against the installed torch, and its tests pass."""

import ast
import os
import re
import shutil
import subprocess
import sys

import pytest
from torch.utils import cpp_extension

from tests.helpers.paths import CSRC, ROOT

PAGE = ROOT / "docs" / "develop" / "add_an_op.md"
# Python's side of the operator, in the place of an edited tp_ext/_ops/activation.py
PLUGIN = """
import torch

from tp_ext import _ops
from tp_ext._ops import activation

torch.ops.load_library({library!r})
exec({declaration!r}, vars(activation))
_ops.scale_add, _ops.scale_add_fwd = activation.scale_add, activation.scale_add_fwd
"""


def blocks():
    """The code of each file of the page, by its heading, and of its tests."""
    code_of = {}
    for section in re.split(r"^#{2,3} ", PAGE.read_text(), flags=re.M)[1:]:
        title, *code = re.split(r"^```(?:cpp|python theirs)?\n", section, flags=re.M)
        name = re.match(r"\d+\. `(.+?)`|Tests", title)
        if name and code:
            code_of[name[1] or "Tests"] = code[0]
    return code_of


def compiler_flags():
    """CXX_FLAGS of setup.py."""
    names: dict = {}
    for node in ast.parse((ROOT / "setup.py").read_text()).body:
        if "CXX_FLAGS" in ast.unparse(node) and isinstance(node, ast.Assign | ast.AugAssign):
            exec(ast.unparse(node), names)
    return names["CXX_FLAGS"]


def test_the_page_has_every_file_of_its_table():
    table = re.findall(r"^\| \d+ \| `([^`]+)` \|", PAGE.read_text(), re.M)
    assert [file.replace("<op>", "scale_add") for file in table] == [file for file in blocks() if file != "Tests"]


@pytest.mark.exhaustive
@pytest.mark.timeout(900)
def test_the_page_compiles_and_its_tests_pass(tmp_path):
    code, sources = blocks(), []
    shutil.copytree(CSRC, tmp_path / "csrc")
    for file, text in code.items():
        path = tmp_path / file
        if file == "csrc/operators.h":  # lines to add
            text = path.read_text().replace("\n}  // namespace tp_ext", f"\n{text}}}  // namespace tp_ext")
        if file == "csrc/library.cpp":  # those of the library itself are loaded
            path = tmp_path / "csrc" / "added.cpp"
            defined = "".join(f'  m.def("{line}", {{at::Tag::pt2_compliant_tag}});\n' for line in text.splitlines())
            text = f"#include <torch/library.h>\nTORCH_LIBRARY_FRAGMENT(tp_ext, m) {{\n{defined}}}\n"
        if file.startswith("csrc/"):
            path.write_text(text)
        if path.suffix == ".cpp":  # objects of cpp_extension.load have the names of the sources, without their folders
            source = tmp_path / f"{len(sources)}.cpp"
            source.write_text(f'#include "{path.relative_to(tmp_path / "csrc")}"\n')
            sources.append(str(source))
    (tmp_path / "build").mkdir()
    cpp_extension.load(
        "scale_add",
        sources,
        extra_cflags=[*compiler_flags(), "-Werror"],
        extra_include_paths=[str(tmp_path / "csrc")],
        build_directory=str(tmp_path / "build"),
        is_python_module=False,
    )
    library = str(tmp_path / "build" / "scale_add.so")
    declaration = code["tp_ext/_ops/<family>.py"]
    (tmp_path / "page.py").write_text(PLUGIN.format(library=library, declaration=declaration))
    (tmp_path / "test_scale_add.py").write_text(code["Tests"])
    environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), str(ROOT / "examples"), str(tmp_path)])}
    argv = [sys.executable, "-m", "pytest", "-q", "-p", "tests.conftest", "-p", "page", "-c", os.devnull]
    argv += ["--rootdir", str(tmp_path), str(tmp_path / "test_scale_add.py")]
    ran = subprocess.run(argv, env=environment, cwd=tmp_path, capture_output=True, text=True)
    assert ran.returncode == 0 and "passed" in ran.stdout, ran.stdout + ran.stderr
