"""The torch-free core of tp_shm under sanitizers: threads and processes for ranks, every result compared.

threads    random sequences of all calls and messages, slots of a few lines, so that all is chunked and slots reused
faults     ranks that disagree, are late, leave or let go: all learn of it by name, nothing hangs
processes  a real segment: who may open it, kill -9 at every moment, forked children
"""

import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

HERE = Path(__file__).parent
CORE = HERE.parent.parent / "csrc"
CORE_FILES = ("calls", "reductions", "moves", "messages", "segment", "engine", "engine_care")
SOURCES = [CORE / "shm" / f"{name}.cpp" for name in CORE_FILES] + [HERE / "plan.cpp"]
PROGRAMS = {"thread": ("threads", "faults"), "address,undefined": ("threads", "faults", "processes")}
FLAGS = ["-std=c++17", "-O1", "-g1", "-pthread", "-fno-sanitize-recover=all", f"-I{CORE}", f"-I{HERE}"]
GXX = shutil.which("g++")
# Where addresses are random over more bits than a race detector's tables allow for, it would not start
PREFIX = ["setarch", "-R"] if shutil.which("setarch") else []


def compile_(*args: str | Path) -> None:
    done = subprocess.run([GXX, *map(str, args)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request, tmp_path_factory):
    """Compiles all programs of one sanitizer; gives a function that runs one of them."""
    if GXX is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("shm")
    sanitize = f"-fsanitize={request.param}"
    (folder / "probe.cpp").write_text("int main() {}")
    probe = subprocess.run([GXX, sanitize, folder / "probe.cpp", "-o", folder / "probe"], capture_output=True)
    if probe.returncode or subprocess.run([*PREFIX, folder / "probe"], capture_output=True).returncode:
        pytest.skip(f"needs a g++ that has {sanitize}")

    def object_of(source):
        target = folder / f"{source.stem}.o"
        compile_(*FLAGS, sanitize, "-c", source, "-o", target)
        return target

    programs = PROGRAMS[request.param]
    with ThreadPoolExecutor(2) as pool:
        objects = list(pool.map(object_of, SOURCES + [HERE / f"{name}.cpp" for name in programs]))
        common = objects[: len(SOURCES)]
        for name, made in zip(programs, objects[len(SOURCES) :], strict=True):
            compile_(sanitize, "-pthread", *common, made, "-o", folder / name, "-lrt")

    def run(name, *args):
        command = [*PREFIX, folder / name, *map(str, args)]
        with (folder / "output").open("w+") as output:  # not a pipe: whoever is forked may keep it open
            done = subprocess.run(command, stdout=output, stderr=output, stdin=subprocess.DEVNULL, timeout=200)
            output.seek(0)
            text = output.read()
        assert done.returncode == 0, text[-6000:]
        return text

    return run


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_threads(program, ranks):
    for seed in (2 * ranks, 2 * ranks + 1):
        assert "1500 operations" in program("threads", ranks, 1500, seed)


def test_faults(program):
    program("faults")


# A race detector sees one process only
@pytest.mark.parametrize("program", ["address,undefined"], indirect=True)
def test_processes(program):
    program("processes")
