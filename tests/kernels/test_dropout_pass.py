"""A pass of dropout on CPU: AVX-512 and the portable loops give the same bits, wherever a pass starts and ends, and
nothing else is read or written."""

import ctypes
import os
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.helpers.paths import CSRC
from tests.helpers.philox_numpy import dropout_numbers, kept

GXX = shutil.which(os.environ.get("CXX", "g++"))
NEEDED = {"avx512f", "avx512bw", "avx512vl", "avx512dq"}
SOURCE = """
#include "cpu/dropout_pass.cpp"
#include "cpu/half_convert.cpp"
#include "cpu/philox_words.cpp"
using namespace tp_ext;
#define PASS(T, how) \\
  extern "C" void how##_##T(uint64_t seed, double p, const T* x, const float* bias, const T* residual, T* y, \\
                            float* sums, int64_t n, uint64_t first) { \\
    how<T>({PhiloxKeys(seed), Dropout<float>(p), x, bias, residual, y, sums, n, first}); \\
  }
PASS(float, in_loops) PASS(Bf16, in_loops) PASS(Fp16, in_loops)
#ifdef TP_PHILOX_X86
PASS(float, in_vectors) PASS(Bf16, in_vectors) PASS(Fp16, in_vectors)
#endif
"""
TYPES = {torch.float32: "float", torch.bfloat16: "Bf16", torch.float16: "Fp16"}
PARTS = [(), ("bias",), ("residual",), ("bias", "residual"), ("sums",)]
ROOM, BEFORE = 460, 5
SEED = 0x9E3779B97F4A7C15
RUNS = [
    (0, 1),
    (3, 1),
    (0, 63),
    (0, 64),
    (1, 63),
    (2, 64),
    (0, 128),
    *((8 * k, 129) for k in range(5)),
    (3, 130),
    (1, 400),
    (5, 250),
    (7, 121),
    (2**35 - 300, 300),
    (2**63 + 2, 333),
]


@pytest.fixture(scope="module")
def library(tmp_path_factory):
    if GXX is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("dropout")
    (folder / "pass.cpp").write_text(SOURCE)
    flags = ["-std=c++17", "-O2", "-shared", "-fPIC", f"-I{CSRC}"]
    subprocess.run([GXX, *flags, folder / "pass.cpp", "-o", folder / "pass.so"], check=True, timeout=120)
    return ctypes.CDLL(str(folder / "pass.so"))


@pytest.fixture(scope="module")
def vectors(library):
    if not set(Path("/proc/cpuinfo").read_text().split()) >= NEEDED:
        pytest.skip("needs AVX-512")


def tensors(dtype: torch.dtype) -> dict[str, torch.Tensor]:
    """x has every kind of number: of all sizes, infinities, NaN, zeros, subnormal ones, the largest; and with the bias
    sums halfway between two numbers of the dtype."""
    torch.manual_seed(3)
    x = torch.randn(ROOM) * torch.randn(ROOM).mul(4).exp()
    special = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0, 1e-39, 3e-8, 65504.0, 3e38])
    x[::5] = special.repeat(ROOM)[: len(x[::5])]
    bias, eps = torch.randn(ROOM), torch.finfo(dtype).eps
    x[3::5] = 1 + eps * torch.arange(len(x[3::5]))
    bias[3::5] = eps / 2
    return {
        "x": x.to(dtype),
        "bias": bias,
        "residual": torch.randn(ROOM).to(dtype),
        "sums": torch.randn(ROOM),
        "y": torch.full((ROOM,), 7.0, dtype=dtype),
    }


def ran(library, how: str, dtype: torch.dtype, parts: tuple[str, ...], p: float, n: int, first: int):
    t = tensors(dtype)
    pointers = {
        name: ctypes.c_void_p(v[BEFORE:].data_ptr() if name in (*parts, "x", "y") else 0) for name, v in t.items()
    }
    arguments = [pointers[name] for name in ("x", "bias", "residual", "y", "sums")]
    seed = ctypes.c_uint64(SEED)
    getattr(library, f"{how}_{TYPES[dtype]}")(
        seed, ctypes.c_double(p), *arguments, ctypes.c_int64(n), ctypes.c_uint64(first)
    )
    return t


def same_bits(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """NaN is NaN, whatever its bits."""
    whole = {2: torch.int16, 4: torch.int32}[a.dtype.itemsize]
    return (a.view(whole) == b.view(whole)) | (a.isnan() & b.isnan())


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("parts", PARTS, ids="+".join)
def test_vectors_and_loops_give_the_same_bits(library, vectors, dtype, parts):
    """With a residual compilers may round its sum with the product at once or not, half a last place of the product."""
    for n, first in ((n, first) for first, n in RUNS):
        for p in (0.1, 0.5, 1.0):
            ours, want = (ran(library, how, dtype, parts, p, n, first) for how in ("in_vectors", "in_loops"))
            at = slice(BEFORE, BEFORE + n)
            assert (ours["y"][:BEFORE] == 7).all() and (ours["y"][BEFORE + n :] == 7).all()
            before = tensors(dtype)
            for name in ("x", "bias", "residual"):
                assert same_bits(ours[name], before[name]).all()
            assert same_bits(ours["sums"], want["sums"]).all()
            assert ("sums" in parts) == (not same_bits(ours["sums"], before["sums"]).all())
            same = same_bits(ours["y"], want["y"])
            if "residual" in parts:
                product = before["x"].float() + (before["bias"] if "bias" in parts else 0)
                bound = product.abs() / max(1 - p, 0.5) * 2**-23 + want["y"].float().abs() * torch.finfo(dtype).eps
                same |= (ours["y"].double() - want["y"].double()).abs() <= bound
            assert same[at].all(), (n, first, p)


@pytest.mark.parametrize("dtype", TYPES, ids=str)
@pytest.mark.parametrize("how", ["in_vectors", "in_loops"])
def test_the_lower_half_decides_where_the_upper_one_equals_the_threshold(library, how, dtype, request):
    """At an element's own number, which keeps it, above and below it: everywhere in a block, at its ends, in one that
    is cut."""
    if how == "in_vectors":
        request.getfixturevalue("vectors")
    first, n = 36, 390
    index = first + np.arange(n)
    numbers = dropout_numbers(SEED, index)
    for i in (1, 3, 7, 24, 91, 92, 123, 124, 131, 158, 389):
        for above in (-1, 0, 1):
            p = (int(numbers[i]) + above) / 2**32
            t = ran(library, how, dtype, ("bias",), p, n, first)
            sums, y = t["x"].float()[BEFORE:][:n] + t["bias"][BEFORE:][:n], t["y"][BEFORE:][:n]
            decided = (sums.isfinite() & (sums.abs() > 1e-6)).numpy()
            want = kept(SEED, p, index)
            assert want[i] == (above <= 0) and decided[i]
            assert np.array_equal((y != 0).numpy()[decided], want[decided])


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_cutting_a_pass_changes_nothing(library, vectors, dtype):
    n, first = 400, 8 * 77 + 1
    for parts in PARTS:
        whole = ran(library, "in_vectors", dtype, parts, 0.3, n, first)
        for cut in (1, 2, 3, 64, 66, 127, 130, 258, 399):
            head = ran(library, "in_vectors", dtype, parts, 0.3, cut, first)
            assert same_bits(head["y"][BEFORE:][:cut], whole["y"][BEFORE:][:cut]).all()
            assert same_bits(head["sums"][BEFORE:][:cut], whole["sums"][BEFORE:][:cut]).all()
