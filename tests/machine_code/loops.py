"""The loops of the machine code of kernels: instructions, bytes loaded and stored by a thread in one round.

    python -m tests.machine_code.loops norm_bwd --kernel 'norm_bwd_kernel<__nv_bfloat16, __nv_bfloat16, true, 8, 2'

The tables of docs/reference/kernels.md come from here. Counts are of the code, not of a run: both sides of a branch
count. No GPU is needed, only nvcc and cuobjdump, which Triton brings, too.
"""

import argparse
import collections
import importlib.util
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.helpers.paths import CSRC
from tests.machine_code import check
from tests.machine_code.instances import INSTANCES

INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(.*?)\s*;\s*/\* 0x", re.M)
WIDE = {".128": 16, ".64": 8, ".U16": 2, ".S16": 2, ".U8": 1, ".S8": 1}


@dataclass
class Loop:
    instructions: int
    loaded: int  # bytes of global memory
    stored: int
    most: dict[str, int]  # the most frequent operations

    def __str__(self) -> str:
        most = ", ".join(f"{count} {name}" for name, count in self.most.items())
        return f"{self.instructions} instructions, loads {self.loaded} bytes, stores {self.stored}: {most}"


def find_cuobjdump() -> str | None:
    nvcc, triton = check.find_nvcc(), importlib.util.find_spec("triton")
    places = [str(Path(nvcc).parent)] if nvcc else []
    if triton and triton.origin:
        places.append(str(Path(triton.origin).parent / "backends" / "nvidia" / "bin"))
    return next((found for place in places if (found := shutil.which(f"{place}/cuobjdump"))), None)


def loops(sass: str) -> Iterator[Loop]:
    """Yields the whole function, then its loops, each from a jump back to its target, of a text of cuobjdump."""
    code = [(int(at, 16), text) for at, text in INSTRUCTION.findall(sass)]
    spans = [(0, code[-1][0])] if code else []
    end = max((at for at, text in code if text.endswith("EXIT")), default=0)
    for at, text in code:
        jump = re.search(r"\bBRA\b.*\b0x([0-9a-f]+)", text)
        if jump and int(jump[1], 16) < at < end:  # what lies behind the end are detours, which jump back, too
            spans.append((int(jump[1], 16), at))
    for first, last in spans:
        words = [re.sub(r"^@!?U?P\w+\s+", "", text).split()[0] for at, text in code if first <= at <= last]
        moved = {kind: sum(bytes_of(word) for word in words if word.startswith(kind)) for kind in ("LDG", "STG")}
        names = collections.Counter(word.split(".")[0] for word in words if word != "NOP")
        yield Loop(names.total(), moved["LDG"], moved["STG"], dict(names.most_common(8)))


def bytes_of(operation: str) -> int:
    return next((size for part, size in WIDE.items() if part in operation), 4)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("header", help="as norm_bwd for csrc/kernels/norm_bwd.cuh")
    parser.add_argument("--kernel", default="", help="only those whose name contains this")
    parser.add_argument("--arch", type=int, default=90, help="90 is sm_90")
    options = parser.parse_args()
    nvcc, cuobjdump = check.find_nvcc(), find_cuobjdump()
    if nvcc is None or cuobjdump is None:
        print("SKIPPED: there is no nvcc, or no cuobjdump")
        return 0
    names = [str(i) for i in INSTANCES if i.header == options.header and options.kernel in str(i)]
    kernels = ",\n    ".join(f"reinterpret_cast<const void*>(&{name})" for name in names)
    with tempfile.TemporaryDirectory() as folder:
        source, cubin = Path(folder) / "kernels.cu", f"{folder}/kernels.cubin"
        source.write_text(check.SOURCE.format(header=options.header, kernels=kernels))
        flags = ["-std=c++17", "-O3", f"-I{CSRC}", f"-arch=sm_{options.arch}", "-cubin"]
        subprocess.run([nvcc, *flags, source, "-o", cubin], check=True)
        sass = subprocess.run([cuobjdump, "-sass", cubin], check=True, capture_output=True, text=True).stdout
    text = subprocess.run(["c++filt"], input=sass, check=True, capture_output=True, text=True).stdout
    for part in text.split("Function : ")[1:]:
        print(part.partition("(")[0] if "(int)" not in part.split("\n")[0] else part.split("\n")[0][:120])
        for loop in loops(part):
            print("   ", loop)
    return 0


if __name__ == "__main__":
    sys.exit(main())
