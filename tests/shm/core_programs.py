"""Programs of tests/shm and tests/soak around the torch-free core of tp_shm, compiled with a sanitizer."""

import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from tests.helpers.paths import ROOT

HERE = ROOT / "tests" / "shm"
SOURCES = [*sorted((ROOT / "csrc" / "shm" / "core").glob("*.cpp")), HERE / "plan.cpp"]
FLAGS = ["-std=c++17", "-g1", "-pthread", "-fno-sanitize-recover=all", f"-I{ROOT / 'csrc'}", f"-I{HERE}"]
FLAGS += ["-D_GLIBCXX_ASSERTIONS"]  # as distributions that harden what they build
GXX = shutil.which("g++")
# Where addresses are random over more bits than a race detector's tables allow for, it would not start
PREFIX = ["setarch", "-R"] if shutil.which("setarch") else []


def compile_(*args: str | Path) -> None:
    done = subprocess.run([GXX, *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


def why_not(sanitizer: str, folder: Path) -> str | None:
    """Why this machine cannot run programs with the sanitizer, or None."""
    if GXX is None:
        return "needs g++"
    (folder / "probe.cpp").write_text("int main() {}")
    command = [GXX, f"-fsanitize={sanitizer}", folder / "probe.cpp", "-o", folder / "probe"]
    if subprocess.run(command, capture_output=True).returncode:
        return f"needs a g++ that has -fsanitize={sanitizer}"
    if subprocess.run([*PREFIX, folder / "probe"], capture_output=True).returncode:
        return f"programs with -fsanitize={sanitizer} do not start here"
    return None


def build(folder: Path, sanitizer: str, programs: list[Path], optimize: str = "-O1") -> Callable[..., str]:
    """Compiles the programs; returns a function that runs one of them, by name, and gives its output."""
    sanitize = f"-fsanitize={sanitizer}"

    def object_of(source: Path) -> Path:
        target = folder / f"{source.stem}.o"
        compile_(*FLAGS, optimize, sanitize, "-c", source, "-o", target)
        return target

    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(object_of, SOURCES + programs))
    common = objects[: len(SOURCES)]
    for source, made in zip(programs, objects[len(SOURCES) :], strict=True):
        compile_(sanitize, "-pthread", *common, made, "-o", folder / source.stem, "-lrt")

    def run(name: str, *args: object, timeout: float = 200) -> str:
        command = [*PREFIX, folder / name, *map(str, args)]
        with (folder / "output").open("w+") as output:  # not a pipe: a forked child may keep it open
            done = subprocess.run(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, timeout=timeout)
            output.seek(0)
            text = output.read()
        assert done.returncode == 0, text[-6000:]
        return text

    return run
