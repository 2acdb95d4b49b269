"""Compiles every kernel of csrc/kernels for several GPUs, without torch, and fails where one spills registers.

    python -m tests.machine_code.check [--arch 80 90 100] [--header norm ...] [--all]

A kernel that moves memory must keep what it works on in registers: a spill, or an array that is indexed at run time,
goes through local memory, thus through the caches that the data should have. ptxas says what it did (-Xptxas -v). The
table has, per kernel and architecture: registers of a thread, bytes of stack, spilled and reloaded bytes, static shared
memory, and the warps of a multiprocessor that registers, shared memory and threads leave room for, of 64.
No GPU is needed, only nvcc. Without --all the table shows the kernels with the fewest warps of each file.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.paths import CSRC
from tests.machine_code.instances import INSTANCES, Instance

ARCHS = (80, 90, 100)
# The beginning of an instance's name, architecture and most bytes of stack: why
WAIVED: dict[tuple[str, int, int], str] = {}

SOURCE = """
#include <cassert>
#include "kernels/{header}.cuh"
using namespace tp_ext;
struct InRange {{
  __device__ void operator()(bool ok) const {{ assert(ok); }}
}};
const void* const* instances() {{
  static const void* const all[] = {{
    {kernels}
  }};
  return all;
}}
"""


@dataclass
class Usage:
    instance: str
    arch: int
    threads: int
    registers: int
    stack: int
    stores: int
    loads: int
    shared: int

    @property
    def spills(self) -> bool:
        return self.stack + self.stores + self.loads > 0

    @property
    def warps(self) -> int:
        """Of the 64 of a multiprocessor, with 64 K registers (given in 256s to a warp) and 160 KiB of shared memory."""
        each = self.threads // 32
        blocks = min(64 // each, 65536 // (-(-self.registers * 32 // 256) * 256 * each))
        return each * min(blocks, (160 << 10) // max(self.shared, 1))


def find_nvcc() -> str | None:
    home = os.environ.get("CUDA_HOME", "/usr/local/cuda")
    return shutil.which(f"{home}/bin/nvcc") or shutil.which("nvcc")


def known_archs(nvcc: str) -> list[int]:
    """Those of ARCHS that this nvcc compiles for."""
    codes = subprocess.run([nvcc, "--list-gpu-code"], capture_output=True, text=True, check=True).stdout
    return [arch for arch in ARCHS if f"sm_{arch}" in codes.split()]


def compile_header(nvcc: str, header: str, arch: int, instances: Iterable[Instance], csrc: Path = CSRC) -> list[Usage]:
    """The report of ptxas on the instances, all of them kernels of the header."""
    threads = {str(i): i.threads for i in instances}
    kernels = ",\n    ".join(f"reinterpret_cast<const void*>(&{name})" for name in threads)
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / f"{header}.cu"
        source.write_text(SOURCE.format(header=header, kernels=kernels))
        command = [nvcc, "-std=c++17", "-O3", "-Xptxas", "-v", f"-I{csrc}", f"-arch=sm_{arch}"]
        done = subprocess.run([*command, "-cubin", source, "-o", f"{folder}/x"], capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"{header} does not compile for sm_{arch}:\n{done.stderr[-4000:]}")
        text = subprocess.run(["c++filt"], input=done.stderr, capture_output=True, text=True, check=True).stdout
    found = list(parse(text, arch, threads))
    missing = set(threads) - {usage.instance for usage in found}
    assert not missing, f"ptxas says nothing of {sorted(missing)}"
    return found


def parse(text: str, arch: int, threads: dict[str, int]) -> Iterable[Usage]:
    for part in text.split("Compiling entry function '")[1:]:
        name = part.split("' for ")[0]
        name = re.sub(r"tp_ext::|\((int|bool)\)|^void ", "", name)
        name = name.rsplit(">(", 1)[0] + ">" if ">(" in name else name.split("(")[0]
        name = re.sub(r"(?<!unsigned )\bint\b", "int32_t", name.replace("> >", ">>").replace("long", "int64_t"))
        stack = re.search(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads", part)
        used, shared = re.search(r"Used (\d+) registers", part), re.search(r"(\d+) bytes smem", part)
        numbers = [int(n) for n in stack.groups()]
        yield Usage(name, arch, threads.get(name, 256), int(used[1]), *numbers, int(shared[1]) if shared else 0)


def table(usages: Iterable[Usage]) -> str:
    rows = [("kernel", "sm", "registers", "stack", "spilled", "reloaded", "shared", "warps")]
    for u in usages:
        rows.append((u.instance, u.arch, u.registers, u.stack, u.stores, u.loads, u.shared, u.warps))
    wide = [max(len(str(row[i])) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join([str(row[0]).ljust(wide[0]), *(str(c).rjust(w) for c, w in zip(row[1:], wide[1:], strict=True))])
        for row in rows
    )


def waived(usage: Usage) -> bool:
    """All that it spills is known, and why."""
    return any(
        usage.instance.startswith(name) and usage.arch == arch and usage.stack <= most for name, arch, most in WAIVED
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--arch", type=int, nargs="+", help="80 is sm_80; default: of 80, 90, 100 those that nvcc knows"
    )
    parser.add_argument("--header", nargs="+", help="only these, as norm for csrc/kernels/norm_fwd.cuh")
    parser.add_argument("--all", action="store_true", help="show every kernel")
    options = parser.parse_args()
    nvcc = find_nvcc()
    if nvcc is None:
        print("SKIPPED: there is no nvcc, so the code for GPUs was not looked at")
        return 0
    begin = time.monotonic()
    headers = options.header or list(dict.fromkeys(i.header for i in INSTANCES))
    jobs = [
        (nvcc, h, arch, [i for i in INSTANCES if i.header == h])
        for h in headers
        for arch in options.arch or known_archs(nvcc)
    ]
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = list(pool.map(lambda job: compile_header(*job), jobs))
    usages = [usage for one in found for usage in one]
    spilling = [u for u in usages if u.spills]
    shown = usages if options.all else [min(one, key=lambda u: u.warps) for one in found]
    print(table(shown + [u for u in spilling if u not in shown]))
    print(f"{len(usages)} kernels, {len(spilling)} use local memory, {time.monotonic() - begin:.0f} s")
    for (name, arch, most), why in WAIVED.items():
        print(f"waived: {name}.. on sm_{arch}, {most} bytes: {why}")
    return int(any(not waived(u) for u in spilling))


if __name__ == "__main__":
    sys.exit(main())
