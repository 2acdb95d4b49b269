"""Names the test files that a change reaches, nearest first, as many as fit a time: `make test-changed`.

    python -m tests.changed --base main              # of the working tree against its merge base with main
    python -m tests.changed --commits 50             # what the last 50 commits would have run, and for how long

A test file is as near to a changed module as there are imports between them; a public name, ``tp_ext.P``, is an import
of the module that defines it. Files of csrc/ are reached through their includes, from the modules of ``tp_ext/_ops``
that name them. Tests that have the name of the changed file come first. The seconds of a file are those of its last run
here, which pytest keeps in its cache.
"""

import argparse
import ast
import collections
import heapq
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path

from tests.helpers.paths import ROOT

SECONDS = ROOT / ".pytest_cache" / "v" / "tp_ext" / "seconds"  # of config.cache, see tests/conftest.py
UNKNOWN = 3.0  # seconds of a file that has not run here
# What no import shows: a file's text is read by these
READERS = {
    "docs/": ["tests/repo/test_docs.py", "tests/repo/test_references.py", "tests/repo/test_words.py"],
    "README.md": ["tests/repo/test_docs.py", "tests/repo/test_references.py"],
    "csrc/kernels/": ["tests/emulation/test_emulation.py"],
    "tp_ext/": ["tests/repo/test_tree.py", "tests/repo/test_words.py", "tests/repo/test_walks.py"],
    "benchmarks/": ["tests/repo/test_benchmarks.py"],
    "examples/": ["tests/end_to_end/test_torchrun.py"],
}


def git(*arguments: str) -> list[str]:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


@cache
def text(file: str) -> str:
    return (ROOT / file).read_text()


@cache
def public_names() -> dict[str, str]:
    """The module of each public name, from the table of ``tp_ext/__init__.py``."""
    table = next(
        node.value
        for node in ast.parse(text("tp_ext/__init__.py")).body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "_NAMES"
    )
    names = ast.literal_eval(table)
    return {name: f"tp_ext.{module}" for module, joined in names.items() for name in joined.split()}


def imported(file: str) -> Iterator[str]:
    """Dotted names of what a Python file imports, anywhere in it; a public name in the module that defines it."""
    for node in ast.walk(ast.parse(text(file))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            public = public_names() if node.module == "tp_ext" else {}
            yield from (public.get(alias.name, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "tp_ext":
            yield public_names().get(node.attr, f"tp_ext.{node.attr}")


def file_of(name: str, files: set[str]) -> str | None:
    """The file of a dotted name, which may be a name in a module."""
    parts = name.split(".")
    for end in (len(parts), len(parts) - 1):
        stem = "/".join(parts[:end])
        for candidate in (f"{stem}.py", f"{stem}/__init__.py"):
            if candidate in files:
                return candidate
    return None


def users() -> dict[str, set[str]]:
    """For each file of the tree, the files that import, include or name it."""
    files = {file for file in git("ls-files", "-co", "--exclude-standard") if (ROOT / file).is_file()}
    users: dict[str, set[str]] = collections.defaultdict(set)
    by_name = collections.defaultdict(set)
    for file in files:
        by_name[Path(file).name].add(file)
    for file in files:
        if file.endswith(".py") and file.startswith(("tp_ext/", "tests/", "benchmarks/", "examples/")):
            for name in imported(file):
                if (target := file_of(name, files)) and target != "tp_ext/__init__.py":
                    users[target].add(file)
            if file.startswith("tp_ext/_ops/"):  # its docstrings say where in C++ an operator is
                for name in re.findall(r"\w+\.(?:cpp|cu)\b", text(file)):
                    for target in by_name[name]:
                        users[target].add(file)
        elif file.startswith(("csrc/", "tests/emulation/")) and file.endswith((".cpp", ".cu", ".h", ".cuh")):
            for name in re.findall(r'#include "([\w./]+)"', text(file)):
                for target in by_name[Path(name).name]:
                    users[target].add(file)
            if file.endswith((".cpp", ".cu")):
                users[file] |= by_name[f"{Path(file).stem}.h"]  # which says what it does
            if file.startswith("tests/emulation/"):
                users[file].add("tests/emulation/test_emulation.py")
    return users


def has_its_name(test: str, file: str) -> bool:
    return re.fullmatch(rf"test_{re.escape(Path(file).stem.lstrip('_'))}(_\w+)?", Path(test).stem) is not None


def reached(changed: Iterable[str], users: dict[str, set[str]]) -> list[tuple[float, str]]:
    """Test files that a change reaches, with the number of imports between; 0.5 if they have its name."""
    distance: dict[str, float] = {}
    queue = [(0.0, file) for file in changed]
    tests = {user for files in users.values() for user in files if Path(user).name.startswith("test_")}
    for file in changed:
        queue += [(0.5, test) for prefix, readers in READERS.items() if file.startswith(prefix) for test in readers]
        queue += [(0.5, test) for test in tests if has_its_name(test, file)]
    heapq.heapify(queue)
    while queue:
        steps, file = heapq.heappop(queue)
        if file in distance:
            continue
        distance[file] = steps
        for user in users.get(file, ()):
            heapq.heappush(queue, (steps + 1, user))
    return sorted((d, f) for f, d in distance.items() if Path(f).name.startswith("test_") and f.endswith(".py"))


def chosen(tests: list[tuple[float, str]], seconds: dict[str, float], limit: float) -> list[str]:
    """The nearest tests that fit, those of the same distance from the shortest on; a changed test always."""
    left, result = limit, []
    for steps, test in sorted(tests, key=lambda pair: (pair[0], seconds.get(pair[1], UNKNOWN))):
        cost = seconds.get(test, UNKNOWN)
        if steps == 0 or cost <= left:
            left -= cost
            result.append(test)
    return result


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--base", default="main", help="a branch or commit; its merge base with HEAD counts")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--commits", type=int, default=0)
    options = parser.parse_args()
    seconds = json.loads(SECONDS.read_text()) if SECONDS.exists() else {}
    limit = options.seconds * options.workers
    if options.commits:
        graph, lengths = users(), []
        for commit in git("log", f"-{options.commits}", "--format=%h"):
            files = git("diff-tree", "-r", "--no-commit-id", "--name-only", commit)
            tests = reached([file for file in files if (ROOT / file).is_file()], graph)
            named = chosen(tests, seconds, limit)
            lengths.append(sum(seconds.get(test, UNKNOWN) for test in named) / options.workers)
            print(f"{commit} {len(files)} files, {len(named)} of {len(tests)} test files, {lengths[-1]:.0f} s")
        print(f"median {statistics.median(lengths):.0f} s")
        return 0
    base = git("merge-base", options.base, "HEAD")[0]
    changed = {*git("diff", "--name-only", base), *git("ls-files", "--others", "--exclude-standard")}
    tests = reached([file for file in changed if (ROOT / file).is_file()], users())
    named = chosen(tests, seconds, limit)
    print(
        f"{len(changed)} files have changed since {base[:8]}: {len(named)} of {len(tests)} test files", file=sys.stderr
    )
    print("\n".join(named))
    return 0


if __name__ == "__main__":
    sys.exit(main())
