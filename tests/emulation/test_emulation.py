"""The CUDA kernels on the host, without a GPU: their own source, every thread of every block, under sanitizers.

Each program runs a family over sizes around its vectors (none, one, a remainder), aligned and shifted pointers, grids
smaller than the work, all by the launchers' own choice of shape, and compares with the formulas element by element.
It does so in three orders of threads and blocks, which must agree to the bit: a missing barrier does not.
"""

import os
import shutil
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.helpers.paths import CCACHE

HERE = Path(__file__).parent
GXX = shutil.which("g++")
FAMILIES = ["columns", "norm", "rope", "vocabulary", "random_words", "shards", "multi_tensor", "experts"]
FAMILIES += ["compressed", "low_bits"]
SANITIZE = ["-fsanitize=address,undefined", "-fno-sanitize=pointer-overflow", "-fno-sanitize-recover=all"]
# Elements are accessed as vectors, and the formula must round as the kernel does: no fma of one's own. Without -g, an
# eighth of the time: the second sanitizer names lines all the same, the first one functions
FLAGS = ["-std=c++17", "-O0", *SANITIZE, "-fno-strict-aliasing", "-ffp-contract=off", "-Wall"]
FLAGS += ["-Wno-unknown-pragmas", "-Wno-sign-compare", f"-I{HERE.parent.parent / 'csrc'}", f"-I{HERE}"]
EVERY_TYPE = "_in_every_type"
pytestmark = pytest.mark.timeout(900)  # seconds, of which the first test needs some tens to compile
MISTAKES = {
    "missing_barrier": "another order of the threads gives other bits",
    "divergent_barrier": "a divergent barrier",
    "lost_thread": "threads wait for others that never come",
    "lost_lane": "a shuffle with a lane that has ended",
    "stranger_lane": "a shuffle with lanes that the block lacks",
    "read_past_end": "heap-buffer-overflow",
    "write_past_end": "heap-buffer-overflow",
    "write_in_front": "written in front of a tensor",
    "odd_vector": "misaligned address",
    "early_read": "a copy that is on its way",
    "int_overflow": "signed integer overflow",
    "tall_grid": "a grid of 1 x 65536 blocks",
    "empty_grid": "a grid of 0 x 1 blocks",
    "large_block": "a block of 1056 threads",
}


def _binary(name):
    """The program that a family is part of. random_fill.h has names that other headers have, too."""
    family = name.removesuffix(EVERY_TYPE)
    return (family if family == "random_words" else "families") + name[len(family) :]


@pytest.fixture(scope="module")
def program(request, tmp_path_factory):
    """Compiles the programs of the tests that were selected; gives a function that runs one of them.

    Programs with the same flags are one source, compiled in half the time that is otherwise spent on headers and
    templates: each is a function ``program`` in a namespace of its own.
    """
    if GXX is None:
        pytest.skip("needs g++")
    folder = tmp_path_factory.mktemp("emulation")
    (folder / "probe.cpp").write_text("int main() {}")
    probe = subprocess.run([GXX, SANITIZE[0], folder / "probe.cpp", "-o", folder / "probe"], capture_output=True)
    if probe.returncode or subprocess.run([folder / "probe"], capture_output=True).returncode:
        pytest.skip("needs a g++ that has sanitizers")

    def make(binary):
        lines = []
        for name in binaries[binary]:
            call = f"emulation::{name}::program(argc - 1, argv + 1)"
            lines += [f'#include "{name}.cpp"', f'if (std::string(argv[1]) == "{name}") return {call};']
        main = ["int main(int argc, char** argv) {", *lines[1::2], "  return 2;", "}", ""]
        source = folder / f"{binary}_whole.cpp"
        source.write_text("\n".join([*lines[::2], *main]))
        more = ["-DEVERY_TYPE"] if binary.endswith(EVERY_TYPE) else []
        compiled = [*CCACHE, GXX, *FLAGS, *more, "-c", source.name, "-o", f"{binary}.o"]  # without this run's folder
        linked = [GXX, *SANITIZE, f"{binary}.o", "-o", binary]
        done = subprocess.run(compiled, cwd=folder, capture_output=True, text=True)
        return done if done.returncode else subprocess.run(linked, cwd=folder, capture_output=True, text=True)

    tests = [item for item in request.session.items if item.path == Path(__file__)]
    suffixes = {"test_kernels": "", "test_kernels_in_every_type": EVERY_TYPE}
    names = sorted(
        {
            item.callspec.params["family"] + suffixes[item.originalname] if item.originalname in suffixes else "faults"
            for item in tests
        }
    )
    binaries = {}
    for name in names:
        binaries.setdefault(_binary(name), []).append(name.removesuffix(EVERY_TYPE))
    with ThreadPoolExecutor(2) as pool:
        for binary, done in zip(binaries, pool.map(make, binaries), strict=True):
            assert done.returncode == 0 and "warning" not in done.stderr, f"{binary}: {done.stderr[-4000:]}"

    def run(name, *args):
        # The sanitizer takes terabytes of address space, of which it uses little
        env = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}
        command = [folder / _binary(name), name.removesuffix(EVERY_TYPE), *args]
        return subprocess.run(command, capture_output=True, text=True, timeout=200, env=env)

    return run


def _number_of_cases(program, name):
    """Runs the program of a family, which ends with 0 if all cases are right."""
    done = program(name)
    assert done.returncode == 0, done.stderr[-4000:]
    return int(done.stdout.split()[0])


@pytest.mark.parametrize("family", FAMILIES)
def test_kernels(program, family):
    """In fp32 and bf16, which differ in their vectors and in what they accumulate in."""
    assert _number_of_cases(program, family) > 10


@pytest.mark.exhaustive  # another compilation, as long
@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "shards"])  # those have no types
def test_kernels_in_every_type(program, family):
    assert _number_of_cases(program, family + EVERY_TYPE) > 10


def test_the_emulation_itself(program):
    done = program("faults")
    assert done.returncode == 0, done.stderr[-4000:]


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_is_found(program, name):
    done = program("faults", name)
    assert done.returncode != 0 and MISTAKES[name] in done.stderr, done.stdout + done.stderr
