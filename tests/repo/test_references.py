"""Names that comments, docstrings and pages mention exist: files, tests, public names, variables of the environment,
targets of make.
"""

import ast
import importlib
import re
import subprocess
from functools import cache

import pytest

from tests.helpers.paths import ROOT

SUFFIXES = {".md", ".py", ".h", ".cpp", ".cu", ".cuh", ".toml", ".yml"}
FILE = re.compile(
    r"(?<![\w/*.{}<>\\-])((?:[\w.-]+/)*\w[\w.-]*\.(?:py|cpp|h|cuh|cu|md|toml|yml|svg|png))\b(?![(.]\w|\()"
)
# Names of a reader's own files, of generated ones, of other projects, and of examples
OTHERS = {
    "mine.py", "step.png", "layer.png", "loss.png", "timeline.png", "fcntl.h", "fs.h", "math.h",
    "propagation.md", "base.h", "x.py", "test_x.py", "test_x_more.py",
    "main.cpp",
}  # fmt: skip
OTHER_TESTS = {"test_x", "test_y", "test_x_more", "test_case", "test_case_01", "test_case_NN"}


def listed():
    """Files of the repository: by git, else (a source distribution) those that are there."""
    git = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=False)
    names = git.stdout.split() if git.returncode == 0 else [str(f.relative_to(ROOT)) for f in ROOT.rglob("*")]
    return [ROOT / name for name in names if (ROOT / name).is_file()]


FILES = [file for file in listed() if file.suffix in SUFFIXES]


def docstrings(source):
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield ast.get_docstring(node, clean=False) or ""


@cache
def prose(file):
    """A page; the comments, and in Python the docstrings, of a source."""
    text = file.read_text()
    if file.suffix == ".md":
        return text
    if file.suffix == ".py":
        return "\n".join([*re.findall(r"(?:^|\s)#[^\n]*", text), *docstrings(text)])
    pattern = r"#[^\n]*" if file.suffix in (".toml", ".yml") else r"//[^\n]*|/\*.*?\*/"
    return "\n".join(re.findall(pattern, text, re.S))


def check_all_known(pattern, known):
    """Checks all names in prose that are the pattern's group."""
    named = [(file, name) for file in FILES for name in re.findall(pattern, prose(file))]
    unknown = [f"{file.relative_to(ROOT)}: {name}" for file, name in named if not known(file, name)]
    assert named and not unknown, "\n".join(unknown)


def test_files_exist():
    """By a path from the root, from the file that names it, or the end of a path."""
    ends = {
        "/".join(parts[i:])
        for f in FILES + listed()
        for parts in [f.relative_to(ROOT).parts]
        for i in range(len(parts))
    }

    def known(file, name):
        return name in ends or name.rpartition("/")[2] in OTHERS or "scale_add" in name or (file.parent / name).exists()

    check_all_known(FILE, known)
    assert FILE.findall("see nn/gone.py, and x.h") == ["nn/gone.py", "x.h"] and not known(FILES[0], "gone.py")


def test_tests_exist():
    tests = {
        name for file in FILES if file.suffix == ".py" for name in re.findall(r"\bdef (test_\w+)", file.read_text())
    }
    tests |= {file.stem for file in FILES} | {file.name for file in FILES} | OTHER_TESTS
    example = prose(ROOT / "docs" / "develop" / "add_an_op.md")
    tests |= set(re.findall(r"^def (test_\w+)", example, re.M))
    check_all_known(
        r"(?<![\w/])(test_\w*[a-zA-Z0-9])(?![\w.]*\.(?:py|cpp))(?!\w)", lambda _, name: name.rstrip("_") in tests
    )


def test_notes_of_design_are_those_that_code_cites():
    """`[Note: name]`, each decision of docs/develop/design.md and each citation."""
    note, sources = re.compile(r"\[Note: ([^\]\n]+)\]"), (file for file in FILES if file.suffix != ".md")
    decided = note.findall((ROOT / "docs" / "develop" / "design.md").read_text())
    cited = {name for file in sources for name in note.findall(prose(file))} - {"name"}
    assert len(decided) > 40 and sorted(decided) == sorted(cited)


def exists(name):
    parts = name.split(".")
    value = importlib.import_module(parts[0])
    for i, part in enumerate(parts[1:], 2):
        if not hasattr(value, part):
            try:
                importlib.import_module(".".join(parts[:i]))
            except ImportError:
                return False
        value = getattr(value, part)
    return True


def test_names_of_the_package_exist():
    for extra in ("transformers", "lightning"):
        pytest.importorskip(extra)
    pattern = r"(?<![\w./-])(tp_ext(?:\.\w+)+)(?!\.\w)"
    known = cache(exists)
    check_all_known(pattern, lambda _, name: name == "tp_ext.name" or known(name))
    assert not exists("tp_ext.gone") and not exists("tp_ext.nn.gone")


def test_variables_and_targets_exist():
    sources = [
        f.read_text()
        for f in listed()
        if f.suffix in (SUFFIXES | {".cmake"}) - {".md"} or f.name in ("Makefile", "run")
    ]
    used = set(re.findall(r"""["'${(\s](TP_EXT_[A-Z_]+)\b""", "\n".join(sources)))
    check_all_known(r"\b(TP_EXT_[A-Z_]+)\b", lambda _, name: name in used)
    targets = set(re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.M))
    check_all_known(r"`make ([\w-]+)`", lambda _, name: name in targets)
