"""Compiles tp_ext._C with the torch of this environment; the metadata is in pyproject.toml.

TP_EXT_CUDA=auto|0|1  CUDA kernels; auto: if torch is a CUDA build and a toolkit with nvcc is found
TORCH_CUDA_ARCH_LIST  GPU architectures to compile for, as in every torch extension (no GPU needed)
MAX_JOBS              parallel compile jobs, default: one per core
CXX, CUDA_HOME        the C++ compiler and the CUDA toolkit, as torch reads them

No -std flag is passed: torch adds the C++ standard that its own headers need.
"""

import os
import re
import shlex
import shutil
import subprocess
import sys
from glob import glob
from pathlib import Path

import setuptools

if int(setuptools.__version__.split(".")[0]) < 77:
    sys.exit("tp_ext needs setuptools >= 77.0.3: run 'pip install --upgrade setuptools ninja'.")
from packaging.version import Version  # setuptools brings it
from setuptools.command.build_ext import build_ext

# Only the build needs torch. The metadata and the sdist are made without it, as in pip's isolated environment
PROBLEM = None
try:
    import torch
    from torch.utils import cpp_extension

    build_ext = cpp_extension.BuildExtension
    TORCH = Version(torch.__version__)
    if TORCH.release[:2] < (2, 11):
        PROBLEM = f"tp_ext needs torch >= 2.11, this is {TORCH}: run 'pip install --upgrade torch'."
except ImportError as error:
    PROBLEM = (
        f"tp_ext is compiled against the torch of your environment, and there is none here ({error}). pip's build "
        "isolation hides your environment: run 'pip install torch setuptools ninja', then install tp_ext by 'pip "
        "install --no-build-isolation'."
    )

DEFAULT_ARCHS = ["8.0", "9.0", "10.0", "12.0"]  # the last one that nvcc knows also as PTX
# math.h's errno, which nobody reads, would keep square roots out of vector code, and the flags of floating point
# exceptions, which nobody reads either, every loop that chooses between two results where there are no mask registers
# [Note: OpenMP is compiled for and not linked]
# OpenMP is compiled for, not linked: at::parallel_for is inline, and shares the runtime and threads of torch
CXX_FLAGS = ["-O3", "-fno-math-errno", "-fno-trapping-math", "-fopenmp", "-g0", "-fvisibility=hidden"]
CXX_FLAGS += ["-Wall", "-Wextra", "-Wno-unused-parameter"]
NVCC_FLAGS = ["-O3", "-lineinfo", "--expt-relaxed-constexpr"]

# The module tp_ext._C has what only Python uses; all other objects are libtp_ext.so, which programs of C++ link to, too
OF_MODULE = re.compile(r"/(csrc/|units/)(planner|python|simulate)[/_]")
# Torch is installed next to the package. A wheel for several versions of torch has the library two folders deeper
LIBRARY_PATHS = ["$ORIGIN/../torch/lib", "$ORIGIN/../../../torch/lib"]


def find_nvcc() -> str | None:
    """The compiler of the CUDA kernels, or None where they are left out."""
    choice = os.environ.get("TP_EXT_CUDA", "auto")
    if choice not in ("auto", "0", "1"):
        raise ValueError(f"TP_EXT_CUDA={choice!r} must be one of auto, 0 and 1")
    home = cpp_extension.CUDA_HOME
    nvcc = shutil.which(os.path.join(home, "bin", "nvcc")) if home else None
    if choice == "1" and torch.version.cuda is None:
        sys.exit(
            f"TP_EXT_CUDA=1 needs a torch built with CUDA, this is the CPU-only {TORCH}: install "
            "the CUDA build of torch, or set TP_EXT_CUDA=0."
        )
    if choice == "1" and nvcc is None:
        sys.exit(
            f"TP_EXT_CUDA=1 needs nvcc, and there is none in CUDA_HOME={home}: install the CUDA "
            f"toolkit {torch.version.cuda} and set CUDA_HOME to its folder, or set TP_EXT_CUDA=0."
        )
    return nvcc if choice != "0" and torch.version.cuda is not None else None


def warn_if_a_gpu_is_left_out() -> None:
    """TP_EXT_CUDA=auto without nvcc builds for the CPU alone. pip hides this without -v, but the import warns."""
    automatic = os.environ.get("TP_EXT_CUDA", "auto") == "auto"
    if automatic and NVCC is None and torch.version.cuda is not None and torch.cuda.is_available():
        print(
            f"tp_ext: there is a GPU, but no nvcc in CUDA_HOME={cpp_extension.CUDA_HOME}: building for the CPU only. "
            f"For CUDA kernels install the CUDA toolkit {torch.version.cuda}, set CUDA_HOME to its folder and "
            "TP_EXT_CUDA=1.",
            file=sys.stderr,
        )


# [Note: files are compiled in units]
FILES_PER_UNIT = 7
# Files of csrc/cpu of which most is loops, and those that include few headers of torch, as all of shm/core
COMPILED_ALONE = "bias_act", "few_rows_gemm", "gated_act", "half_convert", "philox_words", "random_fill"
# The longest is a unit by itself: units are compiled before single files, the last of which leaves the other cores idle
LONGEST = "csrc/cpu/norm.cpp"


def write_units(sources: list[str]) -> list[str]:
    """Returns the files to compile for these; writes those that only include others."""
    alone = {f"csrc/cpu/{name}.cpp" for name in COMPILED_ALONE} | {"csrc/cuda/norm.cu"}
    folders: dict[tuple[str, str], list[str]] = {}
    units = []
    for file in sources:
        if file in alone or file.startswith("csrc/shm/core/"):
            units.append(file)
        elif file == LONGEST:
            folders["norm", ".cpp"] = [file]
        else:
            folders.setdefault((file.split("/")[1], Path(file).suffix), []).append(file)
    for (folder, suffix), files in folders.items():
        if len(files) == 1 and files != [LONGEST]:
            units += files
            continue
        count = -(-len(files) // FILES_PER_UNIT)
        for i in range(count):
            unit = Path("build/units", f"{folder}_{i + 1}_of_{count}{suffix}")
            text = "".join(f'#include "{file.removeprefix("csrc/")}"\n' for file in files[i::count])
            unit.parent.mkdir(parents=True, exist_ok=True)
            if not unit.exists() or unit.read_text() != text:  # ninja compiles newer files again
                unit.write_text(text)
            units.append(str(unit))
    return units


def make_extension(nvcc: str | None) -> setuptools.Extension:
    os.environ.setdefault("MAX_JOBS", str(len(os.sched_getaffinity(0))))
    sources, flags = sorted(glob("csrc/**/*.cpp", recursive=True)), {"cxx": list(CXX_FLAGS)}
    make = cpp_extension.CppExtension
    if nvcc:
        banner = subprocess.check_output([nvcc, "--version"], text=True)
        version = re.search(r"release (\d+\.\d+)", banner)[1]
        if not os.environ.get("TORCH_CUDA_ARCH_LIST"):  # torch's default would need a visible GPU
            known = subprocess.check_output([nvcc, "--list-gpu-arch"], text=True).split()
            archs = [a for a in DEFAULT_ARCHS if "compute_" + a.replace(".", "") in known]
            os.environ["TORCH_CUDA_ARCH_LIST"] = ";".join(archs) + "+PTX"
        flags["nvcc"] = NVCC_FLAGS
        flags["cxx"] += [
            "-DTP_EXT_WITH_CUDA",
            f'-DTP_EXT_CUDA_VERSION="{version}"',
            f'-DTP_EXT_CUDA_ARCHS="{os.environ["TORCH_CUDA_ARCH_LIST"]}"',
        ]
        sources += sorted(glob("csrc/**/*.cu", recursive=True))
        make = cpp_extension.CUDAExtension
    library = {
        "include_dirs": [os.path.abspath("csrc"), os.path.abspath("tp_ext/include")],
        "libraries": ["rt"],  # shm_open, before glibc 2.34
    }
    if nvcc:
        library["libraries"].append("cublasLt")  # at run time that of torch, which has loaded it
    return make("tp_ext._C", sources, extra_compile_args=flags, **library)


class BuildExt(build_ext):
    """Torch's build_ext; looks for the compiler first, links a library for C++ and the module for Python, and notes the
    torch it compiled against."""

    def build_extension(self, ext: setuptools.Extension) -> None:
        link = self.compiler.link_shared_object

        def link_both(objects: list[str], module: str, libraries: list[str], **options) -> None:
            path, without_python = Path(module).parent, [name for name in libraries if name != "torch_python"]
            of_library = [file for file in objects if not OF_MODULE.search(file)]
            rpath = {
                "runtime_library_dirs": [*LIBRARY_PATHS, *([cpp_extension.TORCH_LIB_PATH] if self.in_sources else [])]
            }
            exports = [*(options.get("extra_postargs") or []), "-Wl,--version-script=csrc/libtp_ext.map"]
            of_library_alone = {"libraries": without_python, "extra_postargs": exports, **rpath}
            link(of_library, str(path / "libtp_ext.so"), **{**options, **of_library_alone})
            folders = {"library_dirs": [*options["library_dirs"], str(path)], "runtime_library_dirs": ["$ORIGIN"]}
            of_module = [file for file in objects if OF_MODULE.search(file)]
            link(of_module, module, libraries=["tp_ext", *libraries], **{**options, **folders})

        self.compiler.link_shared_object = link_both
        super().build_extension(ext)

    def run(self) -> None:
        if PROBLEM:
            sys.exit(PROBLEM)
        warn_if_a_gpu_is_left_out()
        compiler = os.environ.get("CXX") or "c++"
        if hasattr(cpp_extension, "_wrap_compiler"):  # newer torch puts ccache before CXX, one word, by itself
            os.environ["CXX"] = compiler = compiler.removeprefix("ccache ")
        for word in shlex.split(compiler):  # such as "ccache g++ -m64"
            if word.startswith("-"):
                break
            if shutil.which(word) is None:
                sys.exit(f"tp_ext needs a C++ compiler, {word!r} is not found: install g++ or set CXX.")
        # Objects outlive the build (pip's -e would put them into a temporary folder), so that ninja
        # recompiles only what changed; one folder per torch and device, so that none is mixed up.
        base = "build/temp" if self.editable_mode else self.build_temp
        self.build_temp = os.path.join(base, f"torch-{TORCH}-{'cuda' if NVCC else 'cpu'}")
        for ext in self.extensions:
            ext.sources = write_units(ext.sources)
        self.in_sources = self.inplace or self.editable_mode  # torch is in another folder than the package
        self.force = True  # leaves it to ninja to decide what is compiled, links always
        super().run()
        torch_folder = f"TORCH_FOLDER = {os.path.dirname(torch.__file__)!r}\n" if self.in_sources else ""
        built_for = f"TORCH = {str(TORCH)!r}\nTORCH_CUDA = {torch.version.cuda if NVCC else None!r}\n"
        folder = Path(self.get_ext_fullpath("tp_ext._C")).parent
        if self.inplace:
            shutil.copy2(Path(self.build_lib, "tp_ext", "libtp_ext.so"), folder)
        (folder / "_built_for.py").write_text("# Written by setup.py.\n" + built_for + torch_folder)


requirement, extension, NVCC = "torch>=2.11", setuptools.Extension("tp_ext._C", []), None
if not PROBLEM:
    NVCC = find_nvcc()
    extension = make_extension(NVCC)
    if "sdist" not in sys.argv:  # a wheel works with the torch minor version that it was compiled for
        requirement = f"torch=={TORCH.major}.{TORCH.minor}.*"
setuptools.setup(
    # torch moves objects between ranks by numpy: checkpoints and debug.check need it
    install_requires=[requirement, "numpy>=1.26", "safetensors>=0.4.3", "tqdm>=4.66"],
    ext_modules=[extension],
    cmdclass={"build_ext": BuildExt},
)
