"""Products that are added to a gradient: against fp64; and the wrapper of cublasLt over a host imitation of it
(tests/emulation), so that a wrong layout is found without a GPU.
"""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
import torch

from tests.helpers.paths import ROOT
from tp_ext import _ops

DTYPES = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
# rows, in, out: none, one, odd and even widths
SHAPES = [(0, 4, 8), (1, 1, 1), (5, 7, 9), (3, 0, 8), (6, 24, 16), (33, 40, 64)]

core = pytest.mark.core
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=str)
every_shape = pytest.mark.parametrize("shape", SHAPES, ids=str)


def _draw(dtype, device, *shapes):
    return [torch.randn(shape, dtype=dtype, device=device) for shape in shapes]


def _assert_close(got, want, scale, dtype, ulps=2.0):
    """Within `ulps` of scale, which is at least as large as want; fp32 sums of up to 64 products lose 1e-6 of it."""
    assert got.dtype == dtype and got.shape == want.shape
    eps = {torch.float64: 1e-14, torch.float32: 3e-7}.get(dtype, torch.finfo(dtype).eps)
    bound = ulps * eps * scale + (0 if dtype == torch.float64 else 1e-5 * scale.mean().nan_to_num())
    assert ((got.double() - want).abs() <= bound).all()


@pytest.mark.thinned
@core
@every_dtype
@every_shape
@pytest.mark.parametrize("wide", [True, False])
def test_add_weight_grad(device, shape, dtype, wide):
    """main_grad in fp32, however short the factors: within what fp32 loses; in the factors' own dtype within 2 ulp."""
    rows, n, m = shape
    dy, x = _draw(dtype, device, (rows, m), (rows, n))
    of_grad = torch.promote_types(dtype, torch.float32) if wide else dtype
    (main_grad,) = _draw(of_grad, device, (m, n))
    want = main_grad.double() + dy.double().T @ x.double()
    scale = main_grad.double().abs() + dy.double().abs().T @ x.double().abs()
    _ops.add_weight_grad_(main_grad, dy, x)
    _assert_close(main_grad, want, scale, of_grad)


@core
def test_sums_are_exact_where_fp32_is(device):
    """Whole numbers: 300 ones on 1 are 301 in fp32, which bf16 cannot hold, whatever the order of addition."""
    main_grad = torch.ones(24, 16, device=device)
    dy, x = (torch.ones(300, n, dtype=torch.bfloat16, device=device) for n in (24, 16))
    _ops.add_weight_grad_(main_grad, dy, x)
    assert torch.equal(main_grad, torch.full_like(main_grad, 301.0))


@core
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_any_strides(device, dtype):
    """Transposed, cut and expanded factors, a main_grad that is a slice; leading dims; what is not written stays."""
    x, dy = _draw(dtype, device, (24, 2, 3), (1, 3, 16))
    x, dy = x.permute(2, 1, 0), dy.expand(2, 3, 16).transpose(0, 1)
    tolerance = {"rtol": 2e-2, "atol": 2e-2} if dtype == torch.bfloat16 else {}
    whole = torch.zeros(20, 30, device=device)
    rows_dy, rows_x = dy.reshape(6, 16), x.reshape(6, 24)[:, :20]
    _ops.add_weight_grad_(whole[2:18, 5:25], rows_dy, rows_x)
    torch.testing.assert_close(whole[2:18, 5:25], rows_dy.float().T @ rows_x.float(), **tolerance)
    assert whole.count_nonzero() == whole[2:18, 5:25].count_nonzero()
    one = torch.zeros(16, 20, device=device)
    _ops.add_weight_grad_(one, dy[0, :1].expand(1, 16), rows_x[:1])  # a single row, whose stride says nothing
    torch.testing.assert_close(one, dy[0, :1].float().T @ rows_x[:1].float(), **tolerance)


@core
def test_opcheck_and_errors(device):
    rows = _draw(torch.float32, device, (6, 16), (6, 8))
    torch.library.opcheck(_ops.add_weight_grad_, (torch.zeros(16, 8, device=device), *rows))
    with pytest.raises(ValueError, match=r"main_grad: shape \[8, 16\] must be \[16, 8\]"):
        _ops.add_weight_grad_(torch.zeros(8, 16, device=device), *rows)
    with pytest.raises(ValueError, match=r"dy: shape \[5, 16\] must have two dims, and as many rows as x, \[6, 8\]"):
        _ops.add_weight_grad_(torch.zeros(16, 8, device=device), rows[0][1:], rows[1])
    with pytest.raises(TypeError, match="x: dtype BFloat16 must be that of dy, Float"):
        _ops.add_weight_grad_(torch.zeros(16, 8, device=device), rows[0], rows[1].bfloat16())
    with pytest.raises(TypeError, match="main_grad: dtype Long must be"):
        _ops.add_weight_grad_(torch.zeros(16, 8, device=device).long(), *rows)


@pytest.mark.cuda
def test_cuda_graph():
    """Captured and replayed on new values: the bits of the eager call. A first call outside chooses the algorithm."""
    dy, x = _draw(torch.bfloat16, "cuda", (64, 48), (64, 32))
    main_grad = torch.zeros(48, 32, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        _ops.add_weight_grad_(main_grad, dy, x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        _ops.add_weight_grad_(main_grad, dy, x)
    for t in (x, dy):
        t.normal_()
    main_grad.zero_()
    graph.replay()
    replayed = main_grad.clone()
    main_grad.zero_()
    _ops.add_weight_grad_(main_grad, dy, x)
    assert torch.equal(replayed, main_grad)


def _cublaslt_headers() -> Path | None:
    """The headers of a CUDA toolkit, or of the wheels that torch's CUDA builds bring."""
    import_path = Path(torch.__file__).parent.parent / "nvidia"
    folders = [*sorted(import_path.glob("*/include")), Path("/usr/local/cuda/include")]
    complete = [f for f in folders if all((f / name).exists() for name in ("cublasLt.h", "driver_types.h"))]
    return complete[0] if complete else None


def test_wrapper_over_an_imitation_of_cublaslt(tmp_path):
    """tests/emulation/gemm.cpp: layouts, transposes, leading dims, types, beta, algorithms, errors.

    Runs under the address sanitizer, which reports accesses outside a matrix.
    """
    headers, compiler = _cublaslt_headers(), shutil.which("g++")
    if headers is None or compiler is None:
        pytest.skip("no g++, or no header of cublasLt: neither a CUDA toolkit nor a CUDA build of torch")
    sanitize = ["-fsanitize=address,undefined", "-fno-sanitize-recover"]
    (tmp_path / "probe.cpp").write_text("int main() {}")
    probe = [compiler, *sanitize, str(tmp_path / "probe.cpp"), "-o", str(tmp_path / "probe")]
    if subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("needs a g++ that has sanitizers")
    emulation, program = ROOT / "tests" / "emulation", tmp_path / "gemm"
    flags = ["-std=c++20", "-O0", "-Wall", "-Wextra", *sanitize]
    folders = [f"-I{ROOT / 'csrc'}", f"-I{emulation}", "-isystem", str(headers)]
    # At once: each would read the headers
    (tmp_path / "whole.cpp").write_text('#include "gemm.cpp"\n#include "fake_cublaslt.cpp"\n')
    command = [compiler, *flags, *folders, str(tmp_path / "whole.cpp"), "-o", str(program)]
    subprocess.run(command, check=True, timeout=240)
    environment = os.environ | {"ASAN_OPTIONS": "detect_leaks=0"}  # leaks: the imitation counts them
    result = subprocess.run([str(program)], capture_output=True, text=True, timeout=60, env=environment)
    assert result.returncode == 0, result.stdout + result.stderr
