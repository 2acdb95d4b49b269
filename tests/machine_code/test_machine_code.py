"""What check.py says of the machine code of the kernels; `make cuda-check` looks at all of them, for every GPU."""

import re

import pytest

from tests.machine_code import check
from tests.machine_code.instances import INSTANCES
from tests.machine_code.loops import loops

NVCC = check.find_nvcc()
needs_nvcc = pytest.mark.skipif(NVCC is None, reason="needs nvcc")


def test_every_kernel_is_looked_at():
    for header in (check.CSRC / "kernels").glob("*.cuh"):
        text = re.sub(r"//.*|__launch_bounds__\(([^()]|\([^()]*\))*\)", "", header.read_text())
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


def test_loops_are_found_in_machine_code():
    """A jump back ends a loop, one ahead does not; predicated and wide accesses count, padding does not."""
    lines = ["MOV R1, R2", "LDG.E.128.CONSTANT R4, [R2.64]", "@!P0 LDG.E.U16 R8, [R2.64]", "@P1 BRA 0x60"]
    lines += ["FADD R1, R4, R5", "FADD R1, R1, R5", "STG.E [R2.64], R1", "@P2 BRA 0x10", "EXIT", "NOP"]
    sass = "\n".join(f"        /*{16 * i:04x}*/   {text} ;   /* 0x{i:016x} */" for i, text in enumerate(lines))
    whole, loop = loops(sass)
    assert (whole.instructions, loop.instructions) == (9, 7)
    assert (loop.loaded, loop.stored) == (18, 4) and loop.most["FADD"] == 2 and loop.most["LDG"] == 2
