"""Breaks the library in one line at a time and runs the tests that must notice: a measure of the test suite.

``python -m tests.mutations.run [--only NAME ..] [--list]`` works in a copy of the repository in build/mutations, which
it builds once and keeps; the working tree is not touched. Bugs of C++ are compiled, in a minute each; with ccache the
way back is free. It prints a table, and ends with 1 if a bug was missed or could not be tried. Tests that only
``make test-all`` runs do not count.
"""

import argparse
import importlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

from tests.helpers.paths import ROOT
from tests.mutations.mutation import Mutation

FILES = sorted(file.stem for file in Path(__file__).parent.glob("*_bugs.py"))
# The list of auto_bugs.py is AUTO_BUGS
MUTATIONS: list[Mutation] = [
    mutation for file in FILES for mutation in getattr(importlib.import_module(f"tests.mutations.{file}"), file.upper())
]
SECONDS = 400  # for the tests of one bug


class CannotTryError(Exception):
    """A mutation that could not be tried."""


def copy_sources(to: Path) -> None:
    """Makes ``to`` a copy of the sources; files that are equal keep their times, so ninja compiles what differs."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\0")
    names = {name for name in listed if name and (ROOT / name).is_file()}
    for name in names:
        target = to / name
        if not target.exists() or target.read_bytes() != (ROOT / name).read_bytes():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, target)
    for folder in ("csrc", "tp_ext", "tests"):
        for file in (to / folder).rglob("*.*"):
            known = str(file.relative_to(to)) in names or file.suffix in (".so", ".pyc") or file.name == "_built_for.py"
            if file.is_file() and not known:
                file.unlink()


def environment(copy: Path) -> dict[str, str]:
    cache = {"CCACHE_BASEDIR": os.environ.get("CCACHE_BASEDIR", str(copy)), "CCACHE_NOHASHDIR": "1"}
    ours = {"PYTHONPATH": str(copy), "TP_EXT_CUDA": "0", "GLOO_SOCKET_IFNAME": "lo", "PYTHONDONTWRITEBYTECODE": "1"}
    return os.environ | cache | ours


def build(copy: Path) -> None:
    command = [sys.executable, "setup.py", "--quiet", "build_ext", "--inplace"]
    done = subprocess.run(command, cwd=copy, env=environment(copy), capture_output=True, text=True)
    if done.returncode:
        errors = [line for line in (done.stdout + done.stderr).splitlines() if "error" in line]
        raise CannotTryError(f"does not compile: {errors[:3]}")


def run_tests(copy: Path, tests: tuple[str, ...], seconds: float = SECONDS) -> int | None:
    """Returns pytest's exit status, None for tests that hang."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout=150"]
    command += ["-m", "not exhaustive", *(f"tests/{test}" for test in tests)]  # what make test runs
    with (copy / "build" / "tests.log").open("w") as log:
        process = subprocess.Popen(command, cwd=copy, env=environment(copy), stdout=log, stderr=log)
        try:
            return process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return None


def verdict(status: int | None, log: str) -> str:
    """Returns a line of the table. A hang is an outcome of its own, since a busy machine causes some, too."""
    if status == 0:
        return "MISSED"
    if status in (None, 1):
        return "caught (hang)" if status is None or "from pytest-timeout" in log else "caught"
    raise CannotTryError(f"pytest ended with {status}, see build/mutations/build/tests.log")


def try_out(copy: Path, mutation: Mutation) -> str:
    """Applies a mutation to the copy, runs its tests and takes it back."""
    file = copy / mutation.file
    text = file.read_text()
    if text.count(mutation.old) != 1:
        raise CannotTryError(f"the text to replace occurs {text.count(mutation.old)} times in {mutation.file}")
    file.write_text(text.replace(mutation.old, mutation.new))
    try:
        if mutation.compiled:
            build(copy)
        return verdict(run_tests(copy, mutation.tests), (copy / "build" / "tests.log").read_text())
    finally:
        file.write_text(text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--only", nargs="+", metavar="NAME", help="the bugs to try; default: all")
    parser.add_argument("--list", action="store_true", help="print the bugs and do nothing")
    options = parser.parse_args()
    if unknown := set(options.only or ()) - {mutation.name for mutation in MUTATIONS}:
        parser.error(f"--only: there is no bug {sorted(unknown)}")
    chosen = [m for m in MUTATIONS if not options.only or m.name in options.only]
    if options.list:
        print("\n".join(f"{m.name:32} {m.file}: {m.bug}" for m in chosen))
        return
    copy = ROOT / "build" / "mutations"
    (copy / "build").mkdir(parents=True, exist_ok=True)
    copy_sources(copy)
    build(copy)
    chosen.sort(key=lambda mutation: mutation.compiled)  # those without a build first
    tests = tuple(dict.fromkeys(test for m in chosen for test in m.tests))
    if run_tests(copy, tests, SECONDS * len(chosen)) != 0:
        sys.exit("The tests must pass without a bug; see build/mutations/build/tests.log")
    bad = 0
    for mutation in chosen:
        begin = time.monotonic()
        try:
            found = try_out(copy, mutation)
        except CannotTryError as error:
            found = f"ERROR: {error}"
        bad += not found.startswith("caught")
        print(f"{mutation.name:32} {time.monotonic() - begin:5.0f} s  {found}", flush=True)
    build(copy)
    print(f"{len(chosen) - bad} of {len(chosen)} bugs were caught")
    sys.exit(bad > 0)


if __name__ == "__main__":
    main()
