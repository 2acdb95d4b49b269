"""Programs of tests/shm and tests/soak around the torch-free core of tp_shm, compiled with a sanitizer."""

import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path

from tests.helpers.paths import ROOT

HERE = ROOT / "tests" / "shm"
SOURCES = [*sorted((ROOT / "csrc" / "shm" / "core").glob("*.cpp")), HERE / "plan.cpp"]
FLAGS = ["-std=c++17", "-pthread", "-fno-sanitize-recover=all", f"-I{ROOT / 'csrc'}", f"-I{HERE}"]
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


def build(
    folder: Path, sanitizer: str, programs: list[Path], flags: Sequence[str] = ("-O1", "-g1")
) -> Callable[..., str]:
    """Compiles the programs; returns a function that runs one of them, by name, and gives its output.

    All that is compiled is one source, in half the time that is otherwise spent on headers and templates: each program
    is a function ``program`` in a namespace of its own, and no two files of the core have a helper of the same name.
    """
    lines = [f'#include "{source}"' for source in SOURCES + programs]
    lines += ["int main(int, char** args) {", "  const std::string name = args[1];"]
    for source in programs:
        call = f"tp_ext::shm::test::{source.stem}::program(args + 1)"
        lines.append(f'  if (name == "{source.stem}") return {call};')
    whole = folder / "programs.cpp"
    whole.write_text("\n".join([*lines, "  return 2;", "}", ""]))
    compile_(*FLAGS, *flags, f"-fsanitize={sanitizer}", whole, "-o", folder / "programs", "-lrt")

    def run(name: str, *args: object, timeout: float = 200) -> str:
        command = [*PREFIX, folder / "programs", name, *map(str, args)]
        with (folder / "output").open("w+") as output:  # not a pipe: a forked child may keep it open
            done = subprocess.run(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, timeout=timeout)
            output.seek(0)
            text = output.read()
        assert done.returncode == 0, text[-6000:]
        return text

    return run
