"""What check.py says of the machine code of the kernels; `make cuda-check` looks at all of them, for every GPU."""

import re

import pytest

from tests.machine_code import check
from tests.machine_code.instances import INSTANCES

NVCC = check.find_nvcc()
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc")


def test_every_kernel_is_looked_at():
    for header in (check.CSRC / "kernels").glob("*.cuh"):
        text = re.sub(r"//.*|__launch_bounds__\(.*\)", "", header.read_text())
        kernels = re.findall(r"__global__ void\s+(\w+)\(", text)
        assert len(kernels) == text.count("__global__")
        assert set(kernels) == {i.kernel for i in INSTANCES if i.header == header.stem}, header.name


@needs_nvcc
@pytest.mark.parametrize("header", [pytest.param("rope", marks=pytest.mark.exhaustive), "column_sum"])
def test_kernels_keep_to_their_registers(header):
    arch = check.known_archs(NVCC)[-1]
    found = check.compile_header(NVCC, header, arch, [i for i in INSTANCES if i.header == header])
    assert found and not [usage for usage in found if usage.spills]


@needs_nvcc
def test_local_memory_is_found(tmp_path):
    (tmp_path / "kernels").mkdir()
    (tmp_path / "kernels" / "bad.cuh").write_text("""
        namespace tp_ext {
        template <typename T>
        __global__ void bad_kernel(T* x, int n) {
          T kept[32];  // indexed at run time
          for (int i = 0; i < n; ++i) kept[i % 32] = x[i];
          x[0] = kept[n % 32];
        }
        }""")
    bad = check.Instance("bad", "bad_kernel", ("float",), 256, "float")
    (usage,) = check.compile_header(NVCC, "bad", check.known_archs(NVCC)[0], [bad], tmp_path)
    assert usage.spills and usage.stack >= 128 and not check.waived(usage)
