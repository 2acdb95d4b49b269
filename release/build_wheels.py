"""Builds one wheel for each Python, with a library for each minor version of torch inside, into dist/: `make wheels`.

Of each torch only headers and libraries are used, in build/wheels/torch-*. Objects that name no function of Python
are compiled once for each torch; the others, and the link, for each Python. What is already there is not made again.
With TP_EXT_CUDA=1 each torch gets a wheel of its own, in a folder of dist/ of its own, and the label of its CUDA.
"""

import argparse
import hashlib
import importlib.util
import os
import re
import runpy
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[1]
WORK, DIST = ROOT / "build" / "wheels", ROOT / "dist"
NEWEST_GLIBC, MAX_BYTES = (2, 34), 20_000_000  # of a wheel without CUDA kernels
SYSTEM = {"libc.so.6", "libgcc_s.so.1", "libm.so.6", "libstdc++.so.6", "ld-linux-x86-64.so.2", "libtp_ext.so"}
TORCHS = {"libc10.so", "libtorch.so", "libtorch_cpu.so", "libtorch_python.so"}
CUDAS = {"libc10_cuda.so", "libtorch_cuda.so", "libcudart", "libcublasLt"}  # torch loads the last two before us
# As in setup.py
OF_MODULE = re.compile(r"/(csrc/|units/)(planner|python|simulate)[/_]")
LIBRARY_PATHS = ("$ORIGIN/../torch/lib", "$ORIGIN/../../../torch/lib")


class Python(NamedTuple):
    """An interpreter: its tag, such as cp312, the folder of its headers, the end of a module's file name."""

    tag: str
    include: str
    suffix: str


class Torch(NamedTuple):
    """A torch and what was compiled for it: its minor version, its CUDA (such as cu130, or empty), the folders of its
    libraries, of the objects, and of the file that says what was compiled."""

    minor: tuple[int, int]
    cuda: str
    libraries: Path
    objects: Path
    built_for: Path


def run(*command: str | Path, **environment: str) -> str:
    """Returns what a command prints; ends this program with that if it fails."""
    env = {**os.environ, **environment}
    result = subprocess.run(command, cwd=ROOT, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if result.returncode:
        sys.exit(f"{result.stdout[-8000:]}\n{' '.join(map(str, command))} failed")
    return result.stdout


def python_of(command: str) -> Python:
    code = (
        "import sys, sysconfig as s; "
        "print(f'cp{sys.version_info[0]}{sys.version_info[1]}', s.get_path('include'), s.get_config_var('EXT_SUFFIX'))"
    )
    return Python(*run(command, "-c", code).split())


def package_of(version: str) -> Path:
    """Returns the folder of a torch: that of this environment if it has the version, else one that it installs."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None and spec.submodule_search_locations is not None
    own = Path(spec.submodule_search_locations[0])
    if runpy.run_path(str(own / "version.py"))["__version__"].partition("+")[0] == version:
        return own
    folder = WORK / f"torch-{version}"
    if not (folder / "torch" / "version.py").exists():
        pip = (sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile", "--target")
        run(*pip, folder, f"torch=={version}")
    return folder / "torch"


# Compiles with this environment's torch for another one, of which only files are used: to import it, it would need
# the gigabytes of its CUDA libraries
COMPILE = """
import runpy, sys
import torch
from torch.utils import cpp_extension
package, *sys.argv = sys.argv[1:]
version = runpy.run_path(f"{package}/version.py")
torch.__version__, torch.version.cuda = version["__version__"], version["cuda"]
cpp_extension._TORCH_PATH, cpp_extension.TORCH_LIB_PATH = package, f"{package}/lib"
runpy.run_path("setup.py", run_name="__main__")
"""


def compile_for(version: str) -> Torch:
    """Compiles everything for a torch, and this Python. Ninja leaves out what is there."""
    package = package_of(version)
    built = runpy.run_path(str(package / "version.py"))
    kernels = os.environ.get("TP_EXT_CUDA") == "1"
    objects = WORK / f"torch-{built['__version__']}-{'cuda' if kernels else 'cpu'}"  # setup.py names it so
    build = ("--build-temp", WORK, "--build-lib", objects / "lib")
    run(
        *(sys.executable, "-c", COMPILE, package, "setup.py", "--quiet", "build_ext", *build),
        TP_EXT_CUDA="1" if kernels else "0",
    )
    major, minor, *_ = version.split(".")
    label = "cu" + built["cuda"].replace(".", "") if kernels else ""
    return Torch((int(major), int(minor)), label, package / "lib", objects, objects / "lib/tp_ext/_built_for.py")


def objects_for(torch: Torch, python: Python, own: Python) -> list[Path]:
    """Returns the objects of a library for a Python; compiles those that name functions of Python, if it is another
    than this one."""
    ninja = (torch.objects / "build.ninja").read_text()
    builds = re.findall(r"^build (\S+): (.*)$", ninja, re.M)
    if python == own:
        return [Path(name) for name, _ in builds]
    shared, bound = [], []
    for name, rule in builds:
        names = run("nm", "--undefined-only", name)
        (bound if re.search(r" _?Py[A-Z_]| THP", names) else shared).append((name, rule))
    folder = torch.objects / python.tag
    compiled = [(str(folder / Path(name).relative_to(torch.objects)), rule) for name, rule in bound]
    rules = re.sub(r"^build .*\n", "", ninja, flags=re.M).replace(f"-I{own.include} ", f"-I{python.include} ")
    rules = re.sub(r"^default .*\n?", "", rules, flags=re.M)
    folder.mkdir(exist_ok=True)
    (folder / "build.ninja").write_text(rules + "".join(f"build {name}: {rule}\n" for name, rule in compiled))
    run("ninja", "-C", folder)
    return [Path(name) for name, _ in (*shared, *compiled)]


def link(torch: Torch, objects: list[Path], module: Path) -> None:
    """Links libtp_ext.so from the objects without Python, and the extension module from the others."""
    of_module = [file for file in objects if OF_MODULE.search(str(file))]
    paths = ("-Wl,--enable-new-dtags", *(f"-Wl,-rpath,{path}" for path in LIBRARY_PATHS))
    link_one(torch, sorted({*objects} - {*of_module}), module.with_name("libtp_ext.so"), paths)
    link_one(
        torch, of_module, module, (f"-L{module.parent}", "-ltp_ext", "-Wl,--enable-new-dtags", "-Wl,-rpath,$ORIGIN")
    )


def link_one(torch: Torch, objects: list[Path], target: Path, last: tuple[str, ...]) -> None:
    libraries = ["c10", "torch_cpu", "torch_python"]
    extra: list[str] = []
    if torch.cuda:
        libraries += ["c10_cuda", "torch_cuda", "cudart", "cublasLt"]
        extra = [f"-L{os.environ.get('CUDA_HOME', '/usr/local/cuda')}/lib64"]
    target.parent.mkdir(parents=True, exist_ok=True)
    compiler = os.environ.get("CXX", "c++").split()
    options = ("-shared", "-s", "-Wl,--as-needed", f"-L{torch.libraries}", *extra)
    run(*compiler, *options, *sorted(objects), *(f"-l{name}" for name in libraries), *last, "-o", target)
    needed = set(re.findall(r"\(NEEDED\).*\[(.*?)\]", run("readelf", "--dynamic", target)))
    known = SYSTEM | TORCHS | (CUDAS if torch.cuda else set())
    if unknown := {name for name in needed if name not in known and name.partition(".so")[0] not in known}:
        sys.exit(f"{target} needs {', '.join(sorted(unknown))}, which neither torch nor each system has")


def requirement(torchs: list[Torch]) -> str:
    minors = sorted(torch.minor for torch in torchs)
    (major, first), (_, last) = minors[0], minors[-1]
    absent = [f",!={major}.{minor}.*" for minor in range(first, last) if (major, minor) not in minors]
    return f"torch>={major}.{first},<{major}.{last + 1}{''.join(absent)}"


def metadata() -> Path:
    """Returns the folder of the metadata of a wheel."""
    folder = WORK / "metadata"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    hook = "import sys; from setuptools import build_meta; build_meta.prepare_metadata_for_build_wheel(sys.argv[1])"
    run(sys.executable, "-c", hook, folder)
    return next(folder.glob("*.dist-info"))


def make_wheel(torchs: list[Torch], python: Python, own: Python, label: str, out: Path) -> Path:
    stage = WORK / "stage"
    shutil.rmtree(stage, ignore_errors=True)
    for file in sorted(file for end in ("py", "typed", "h", "cmake") for file in (ROOT / "tp_ext").rglob(f"*.{end}")):
        if file.name != "_built_for.py":
            target = stage / file.relative_to(ROOT)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    for torch in torchs:
        folder = stage / "tp_ext" / "_libs" / "torch{}.{}".format(*torch.minor)
        link(torch, objects_for(torch, python, own), folder / f"_C{python.suffix}")
        shutil.copyfile(torch.built_for, folder / "_built_for.py")
    described = metadata()
    text = re.sub(
        r"^Requires-Dist: torch\b.*$",
        f"Requires-Dist: {requirement(torchs)}",
        (described / "METADATA").read_text(),
        flags=re.M,
    )
    version = described.name.removesuffix(".dist-info").partition("-")[2]
    info = stage / f"tp_ext-{version}{label}.dist-info"
    shutil.copytree(described, info)
    (info / "METADATA").write_text(re.sub(r"^Version: .*$", f"Version: {version}{label}", text, flags=re.M))
    tag = f"{python.tag}-{python.tag}-linux_x86_64"
    (info / "WHEEL").write_text(
        f"Wheel-Version: 1.0\nGenerator: release/build_wheels.py\nRoot-Is-Purelib: false\nTag: {tag}\n"
    )
    packed = WORK / "packed"
    shutil.rmtree(packed, ignore_errors=True)
    packed.mkdir()
    run(sys.executable, "-m", "wheel", "pack", stage, "--dest-dir", packed)
    (wheel,) = packed.glob("*.whl")
    repaired = WORK / "repaired"
    shutil.rmtree(repaired, ignore_errors=True)
    excluded = ("libtorch*", "libc10*", "libcudart*", "libcublas*", "libtp_ext*")
    options = [option for name in excluded for option in ("--exclude", name)]
    run(sys.executable, "-m", "auditwheel", "repair", wheel, *options, "--wheel-dir", repaired)
    (wheel,) = repaired.glob("*.whl")
    glibc = min((int(a), int(b)) for a, b in re.findall(r"manylinux_(\d+)_(\d+)", wheel.name))
    if glibc > NEWEST_GLIBC:
        sys.exit(f"{wheel.name} needs glibc {glibc}, newer than {NEWEST_GLIBC}")
    if not label and wheel.stat().st_size > MAX_BYTES:
        sys.exit(f"{wheel.name} has {wheel.stat().st_size} bytes, more than {MAX_BYTES}")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy(wheel, out))


def write_index(folder: Path) -> None:
    """Writes the page that `pip install --find-links` reads, with a digest of each wheel."""
    lines = [
        f'<a href="{file.name}#sha256={hashlib.sha256(file.read_bytes()).hexdigest()}">{file.name}</a><br>'
        for file in sorted(folder.glob("*.whl"))
    ]
    (folder / "index.html").write_text("<!DOCTYPE html>\n" + "\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torches", nargs="+", required=True, help="versions, such as 2.15.0")
    parser.add_argument("--pythons", nargs="+", required=True, help="interpreters with headers, such as python3.12")
    options = parser.parse_args()
    pythons, own = [python_of(name) for name in options.pythons], python_of(sys.executable)
    torchs = [compile_for(version) for version in options.torches]
    groups = [
        ([torch], f"+{torch.cuda}", DIST / f"torch{torch.minor[0]}.{torch.minor[1]}+{torch.cuda}") for torch in torchs
    ]
    for group, label, out in groups if torchs[0].cuda else [(torchs, "", DIST)]:
        for python in pythons:
            wheel = make_wheel(group, python, own, label, out)
            print(f"{wheel.relative_to(ROOT)}: {wheel.stat().st_size / 1e6:.1f} MB", flush=True)
        write_index(out)


if __name__ == "__main__":
    main()
