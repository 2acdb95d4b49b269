"""bfloat16 and float16 in the CPU loops: every conversion is torch's, bit for bit, on each level of x86-64, and
through the operators, which take them a chunk at a time."""

import ctypes
import os
import platform
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.helpers.paths import CSRC
from tp_ext import _ops

pytestmark = pytest.mark.core

GXX = shutil.which(os.environ.get("CXX", "g++"))
HALVES = [torch.bfloat16, torch.float16]
LEVELS = ["x86-64", "x86-64-v3", "x86-64-v4"] if platform.machine() == "x86_64" else ["native"]
# The conversions of half.h alone, and those of half_convert.cpp, which asks the machine for instructions
SOURCE = """
#include "cpu/half_convert.cpp"
#define LOOPS(T) \\
  extern "C" void to_float_##T(const tp_ext::T* x, float* y, long n) { tp_ext::widen_loop(x, y, n); } \\
  extern "C" void from_float_##T(const float* x, tp_ext::T* y, long n) { tp_ext::narrow_loop(x, y, n); } \\
  extern "C" void widen_##T(const tp_ext::T* x, float* y, long n) { tp_ext::widen(x, y, n); } \\
  extern "C" void narrow_##T(const float* x, tp_ext::T* y, long n) { tp_ext::narrow(x, y, n); }
LOOPS(Bf16)
LOOPS(Fp16)
"""
FLAGS = ["-std=c++17", "-O3", "-fno-math-errno", "-fno-trapping-math", "-shared", "-fPIC", f"-I{CSRC}"]


def runs(level: str) -> bool:
    """True if this machine has the instructions of the level."""
    needed = {"x86-64-v3": "avx2", "x86-64-v4": "avx512vl"}.get(level)
    return needed is None or needed in Path("/proc/cpuinfo").read_text().split()


@pytest.fixture(scope="module", params=LEVELS)
def library(request, tmp_path_factory):
    if GXX is None:
        pytest.skip("needs a C++ compiler")
    if not runs(request.param):
        pytest.skip(f"needs {request.param}")
    folder = tmp_path_factory.mktemp("half")
    (folder / "loops.cpp").write_text(SOURCE)
    command = [GXX, *FLAGS, f"-march={request.param}", folder / "loops.cpp", "-o", folder / "loops.so"]
    subprocess.run(command, check=True, timeout=120)
    return ctypes.CDLL(str(folder / "loops.so"))


def call(function, x: Tensor, dtype: torch.dtype) -> Tensor:
    y = torch.empty(x.shape, dtype=dtype)
    function(ctypes.c_void_p(x.data_ptr()), ctypes.c_void_p(y.data_ptr()), ctypes.c_long(x.numel()))
    return y


def assert_same_bits(ours: Tensor, torchs: Tensor) -> None:
    """NaN is NaN, whatever its bits."""
    whole = {2: torch.int16, 4: torch.int32}[ours.dtype.itemsize]
    same = (ours.view(whole) == torchs.view(whole)) | (ours.isnan() & torchs.isnan())
    assert same.all(), (ours[~same][:4], torchs[~same][:4])


def all_halves(dtype: torch.dtype) -> Tensor:
    return torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(dtype)


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_every_conversion_is_torchs(library, dtype):
    """All 2^16 halves; of fp32, the middle between any two halves, its neighbours, and 2^22 random patterns."""
    name = {torch.bfloat16: "Bf16", torch.float16: "Fp16"}[dtype]
    halves = all_halves(dtype)
    for kind in ("to_float", "widen"):
        assert_same_bits(call(getattr(library, f"{kind}_{name}"), halves, torch.float32), halves.float())
    exact = halves.double()
    exact = exact[exact.isfinite()].sort().values
    middles = ((exact[1:] + exact[:-1]) / 2).float()
    around = [middles.view(torch.int32) + d for d in (-1, 0, 1)]
    around.append(torch.randint(-(2**31), 2**31, (1 << 22,)).to(torch.int32))
    around.append(torch.tensor([65519.996, 65520.0, 65536.0, 1e38, -1e38, float("inf")]).view(torch.int32))
    x = torch.cat(around).view(torch.float32)
    for kind in ("from_float", "narrow"):
        assert_same_bits(call(getattr(library, f"{kind}_{name}"), x, dtype), x.to(dtype))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("n", [1, 7, 1023, 1024, 1025, 2049])
def test_operators_round_sums_as_torch(dtype, n):
    """relu(x + bias), the sum in fp32, rounded once, over the ends of the chunks; what stands behind is not touched."""
    x, bias = ((torch.randn(3, n) * torch.randn(3, n).mul(4).exp()).to(dtype) for _ in range(2))
    want = torch.relu(x.float() + bias[0].float()).to(dtype)
    assert_same_bits(_ops.bias_act(x, bias[0], "relu"), want)
    y = _ops.gated_act(torch.cat([x, x], -1), None, "swiglu")
    assert_same_bits(y[:, -1:], _ops.gated_act(x[:, -1:].repeat(1, 2), None, "swiglu"))


@pytest.mark.parametrize("dtype", HALVES, ids=str)
def test_operators_pass_every_value_through(dtype):
    """Without bias, residual or dropout each of the 2^16 values comes back; times 1.5, subnormal ones are rounded."""
    x, seed = all_halves(dtype), torch.tensor(1)
    assert_same_bits(_ops.bias_dropout_residual(x, None, None, seed, 0.0, x.numel(), x.numel(), 0), x)
    y = _ops.bias_dropout_residual(x, None, None, seed, 1 / 3, x.numel(), x.numel(), 0)
    kept = (y != 0) & x.isfinite()  # 0 times infinity is NaN
    assert kept.double().mean() > 0.6
    assert_same_bits(y[kept], (x.float() * 1.5).to(dtype)[kept])


@pytest.mark.parametrize("dtype", HALVES, ids=str)
@pytest.mark.parametrize("activation", ["gelu", "gelu_tanh", "silu"])
def test_values_are_rounded_once(activation, dtype):
    """At every one of the 2^16 values: half a last place for the rounding, and 5e-5 for functions that are shorter than
    those of fp32. Below the normal numbers half a step; bf16's are fp32's, where e^x ends."""
    x = all_halves(dtype)
    x = x[x.isfinite()]
    exact = x.double()
    if activation == "gelu_tanh":
        exact = exact * torch.sigmoid(2 * (2 / torch.pi) ** 0.5 * (exact + 0.044715 * exact**3))
    else:
        exact = exact * (0.5 * torch.erfc(-exact * 0.5**0.5) if activation == "gelu" else torch.sigmoid(exact))
    info = torch.finfo(dtype)
    error = (_ops.bias_act(x, None, activation).double() - exact).abs()
    smallest = info.eps * info.tiny / 2 if dtype == torch.float16 else 128 * info.tiny
    assert (error <= (info.eps / 2 + 5e-5) * exact.abs() + smallest).all()
