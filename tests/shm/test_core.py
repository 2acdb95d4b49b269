"""The torch-free core of tp_shm under sanitizers: threads and processes for ranks, every result compared.

threads    random sequences of all calls and messages, slots of a few lines, so that all is chunked and slots reused
faults     ranks that disagree, are late, leave or let go: all learn of it by name, nothing hangs
processes  a real segment: who may open it, kill -9 at every moment, forked children
shm_liars  shared memory that is overwritten at random: an error or the right result, no access out of bounds
"""

import re
from pathlib import Path

import pytest

from tests.shm import core_programs

HERE = Path(__file__).parent
PROGRAMS = {"thread": ["threads", "faults"], "address,undefined": ["threads", "faults", "processes", "shm_liars"]}


@pytest.fixture(scope="module", params=PROGRAMS)
def program(request, tmp_path_factory):
    """Compiles all programs of one sanitizer; gives a function that runs one of them."""
    folder = tmp_path_factory.mktemp("shm")
    if reason := core_programs.why_not(request.param, folder):
        pytest.skip(reason)
    # Races need the speed, and their reports have no lines of their own
    flags = ["-O1", "-g1"] if request.param == "thread" else ["-O0"]
    places = {"shm_liars": HERE.parent / "soak"}
    sources = [places.get(name, HERE) / f"{name}.cpp" for name in PROGRAMS[request.param]]
    return core_programs.build(folder, request.param, sources, flags)


@pytest.mark.parametrize("ranks", [1, 2, pytest.param(3, marks=pytest.mark.exhaustive), 4])
@pytest.mark.parametrize("parity", [0, pytest.param(1, marks=pytest.mark.exhaustive)], ids=["even seed", "odd seed"])
def test_threads(program, ranks, parity):
    assert "1500 operations" in program("threads", ranks, 1500, 2 * ranks + parity)


def test_faults(program):
    program("faults")


# A race detector sees one process only
@pytest.mark.parametrize("program", ["address,undefined"], indirect=True)
def test_processes(program):
    program("processes")


@pytest.mark.parametrize("program", ["address,undefined"], indirect=True)
def test_liars(program):
    """The long form: tests/soak/shm_liars.py."""
    counts = dict(
        map(
            str.split,
            re.findall(r"(?:header|signature|posted|finished|ring|payload) \d+", program("shm_liars", 2500, 1)),
        )
    )
    assert len(counts) == 6 and sum(map(int, counts.values())) >= 2500
