"""Philox words in vectors: those of the generator as the paper writes it, bit for bit, on each path of
csrc/cpu/philox_words.cpp that this machine can take, wherever a run of elements starts and ends."""

import ctypes
import os
import platform
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

from tests.helpers.paths import CSRC
from tests.helpers.philox_numpy import words

GXX = shutil.which(os.environ.get("CXX", "g++"))
PATHS = {"plain": None, "avx2": "avx2", "avx512": "avx512f"} if platform.machine() == "x86_64" else {"plain": None}
RUN = 256
SOURCE = """
#include "cpu/philox_words.cpp"
using namespace tp_ext;
#define PATH(name) \\
  extern "C" void name(uint64_t seed, uint64_t counter, int64_t n, uint32_t* words) { \\
    draw_##name(PhiloxKeys(seed), counter, n, words); \\
  }
PATH(plain)
#ifdef TP_PHILOX_X86
PATH(avx2)
PATH(avx512)
#endif
extern "C" const uint32_t* draw(uint64_t seed, uint64_t first, int64_t n) {
  static WordBuffer buffer;
  draw_words(PhiloxKeys(seed), first / 4, counters_over(first, n, 4), buffer);
  return buffer.words + first % 4;
}
extern "C" int64_t counters(uint64_t first, int64_t n, int64_t each) { return counters_over(first, n, each); }
// Writes first and n of each run, and returns how many there are
extern "C" int64_t runs(int64_t inner, int64_t full, int64_t offset, int64_t begin, int64_t end, int64_t limit,
                        int64_t* found) {
  int64_t at = begin, count = 0;
  for_each_chunk({inner, full, offset}, begin, end, limit, [&](int64_t i, uint64_t first, int64_t n) {
    if (i != at || n < 1 || n > limit || int64_t(first) / limit != int64_t(first + n - 1) / limit) count = -1000000;
    at += n, found[2 * count] = first, found[2 * count + 1] = n, ++count;
  });
  return at == end ? count : -1;
}
"""


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if GXX is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("words")
    (folder / "words.cpp").write_text(SOURCE)
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", f"-I{CSRC}"]
    subprocess.run([GXX, *flags, folder / "words.cpp", "-o", folder / "words.so"], check=True, timeout=120)
    library = ctypes.CDLL(str(folder / "words.so"))
    library.draw.restype = ctypes.POINTER(ctypes.c_uint32)
    library.runs.restype = library.counters.restype = ctypes.c_int64
    return library


def runs_here(path: str) -> bool:
    flag = PATHS[path]
    return flag is None or flag in Path("/proc/cpuinfo").read_text().split()


def expected(seed: int, counter: int, n: int) -> np.ndarray:
    return words(seed, np.uint64(counter) + np.arange(n, dtype=np.uint64)).ravel()


SEEDS = [0, 1, 2**31 + 5, 0x9E3779B97F4A7C15, 2**64 - 1]
HIGH = [0, 1, 2**30 - 1]  # halves of counters; an index has 64 bits, so a counter 62


@pytest.mark.parametrize("path", PATHS)
def test_every_path_draws_the_words_of_the_paper(library, path):
    """Every count of counters up to a run, first and last ones of a high half; nothing beyond a group of 16 is written,
    and nothing before the words."""
    if not runs_here(path):
        pytest.skip(f"needs {PATHS[path]}")
    room = np.zeros(4 * (1 + RUN // 4 + 16), np.uint32)
    for seed in SEEDS:
        for high in HIGH:
            for n in range(1, RUN // 4 + 1):
                for low in (0, 12345, 2**32 - n):
                    room[:] = 77
                    counter = high << 32 | low
                    at = room.ctypes.data + 16
                    getattr(library, path)(
                        *map(ctypes.c_uint64, (seed, counter)), ctypes.c_int64(n), ctypes.c_void_p(at)
                    )
                    assert np.array_equal(room[4 : 4 + 4 * n], expected(seed, counter, n)), (seed, counter, n)
                    assert (room[:4] == 77).all() and (room[4 + 4 * ((n + 15) // 16 * 16) :] == 77).all()


@pytest.mark.parametrize("first", [0, 1, 2, 3, 4 * 2**32 - 130, 4 * 2**32 - 17, 2**63 + 5, 2**64 - 300])
def test_a_run_has_the_words_of_its_elements(library, first):
    """Over the counter at which the high half changes, too."""
    for n in (1, 2, 5, 16, 17, 63, 100, RUN - first % 4):
        for seed in SEEDS:
            drawn = library.draw(*map(ctypes.c_uint64, (seed, first)), ctypes.c_int64(n))
            want = expected(seed, first // 4, (first % 4 + n + 3) // 4)[first % 4 :][:n]
            assert np.array_equal(np.ctypeslib.as_array(drawn, (n,)), want), (seed, n)


@pytest.mark.parametrize("each", [4, 8])
def test_counters_over_a_run(library, each):
    for first in (*range(20), 2**63 + 5):
        for n in range(1, 40):
            count = library.counters(ctypes.c_uint64(first), *map(ctypes.c_int64, (n, each)))
            assert count == (first + n - 1) // each - first // each + 1


SLICES = [(1000, 1000, 0), (7, 33, 6), (1, 3, 2), (256, 512, 256), (300, 301, 1)]


@pytest.mark.parametrize("limit", [4, RUN, 2**35])
@pytest.mark.parametrize("inner, full, offset", SLICES)
def test_runs_cover_all_elements(library, inner, full, offset, limit):
    total = 2 * inner if inner > 100 else 40 * inner
    index = np.arange(total)
    index = index // inner * full + offset + index % inner
    found = np.zeros(2 * total, np.int64)
    for begin, end in ((0, total), (3 % total, total), (inner, total - 1), (inner - 1, inner + 1)):
        arguments = (*map(ctypes.c_int64, (inner, full, offset, begin, end, limit)), ctypes.c_void_p(found.ctypes.data))
        count = library.runs(*arguments)
        pairs = found[: 2 * count].reshape(count, 2)
        covered = np.concatenate([first + np.arange(n) for first, n in pairs])
        assert np.array_equal(covered, index[begin:end])
