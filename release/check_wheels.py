"""Checks the wheels of dist/ in environments without a compiler, one for each torch and Python: `make wheels-check`.

Installs torch and a wheel, runs README's program on 2 ranks over tp_shm and gloo, whose losses must be those of the
build from source in this environment, and `python -m tp_ext.smoke`. With --swap one environment gets one torch after
another under one installed wheel.
"""

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from packaging.requirements import Requirement

ROOT = Path(__file__).parents[1]
WORK, DIST = ROOT / "build" / "wheels", ROOT / "dist"
BACKENDS = ("tp_shm", "gloo")
# What torch and tp_ext import, but for the CUDA libraries, which are linked from this environment: they are the same
# for all torches of a major version of CUDA, and take gigabytes
IMPORTED = (
    "filelock",
    "fsspec",
    "jinja2",
    "networkx",
    "numpy",
    "safetensors",
    "setuptools<82",
    "sympy",
    "typing-extensions",
)


def program(backend: str) -> str:
    block = re.search(
        r"```python\n(import torch, torch\.distributed as dist, tp_ext\n.*?)```", (ROOT / "README.md").read_text(), re.S
    )
    assert block is not None
    return block[1].replace('"tp_shm"', f'"{backend}"')


def run(*command: str | Path, **environment: str) -> str:
    """Returns what a command prints; ends this program with its errors if it fails. It has no other environment."""
    env = {"HOME": os.environ["HOME"], "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1", **environment}
    env |= {name: value for name, value in os.environ.items() if name.startswith("PIP_")}
    result = subprocess.run(command, cwd=WORK, env=env, capture_output=True, text=True)
    if result.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{result.stdout[-2000:]}{result.stderr[-4000:]}")
    return result.stdout


def losses(python: Path, backend: str, path: str, **environment: str) -> list[str]:
    file = WORK / f"mine_{backend}.py"
    file.write_text(program(backend))
    command = (python, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", file)
    return run(*command, PATH=path, **environment).splitlines()


def cuda_parts(requirements: str) -> set[str]:
    toolkit = re.search(r"cuda-toolkit\[(.*?)\]", requirements)
    return set(toolkit[1].split(",")) if toolkit else set()


class Environment:
    """A fresh environment, whose PATH has nothing else."""

    def __init__(self, command: str, name: str) -> None:
        self.folder = WORK / f"check-{name}"
        shutil.rmtree(self.folder, ignore_errors=True)
        run(command, "-m", "venv", self.folder, PATH=os.environ["PATH"])
        self.path, self.python = str(self.folder / "bin"), self.folder / "bin" / "python"
        self.pip_command = (self.python, "-m", "pip", "--quiet", "--disable-pip-version-check")
        tag = "import sys; print(f'cp{sys.version_info[0]}{sys.version_info[1]}')"
        self.tag = run(self.python, "-c", tag, PATH=self.path).strip()
        assert shutil.which("c++", path=self.path) is None
        (self.packages,) = self.folder.glob("lib/python*/site-packages")
        for cuda in Path(sys.executable).parents[1].glob("lib/python*/site-packages/nvidia"):
            shutil.copytree(cuda, self.packages / "nvidia", copy_function=os.symlink)
        self.pip(*IMPORTED)

    def pip(self, *arguments: str | Path) -> float:
        begin = time.perf_counter()
        run(*self.pip_command, "install", *arguments, PATH=self.path)
        return time.perf_counter() - begin

    def install_torch(self, version: str) -> None:
        files = WORK / "downloads" / self.tag
        if not list(files.glob(f"torch-{version}-*")):
            run(*self.pip_command, "download", "--no-deps", "--dest", files, f"torch=={version}", PATH=self.path)
        self.pip("--no-deps", "--no-compile", "--no-index", "--find-links", files, f"torch=={version}")
        (info,) = self.packages.glob("torch-*.dist-info")
        # Libraries of CUDA that this torch needs and that of this environment does not
        more = cuda_parts((info / "METADATA").read_text()) - cuda_parts(str(importlib.metadata.requires("torch")))
        if more and (self.packages / "nvidia").exists():
            self.pip("--no-deps", *(f"nvidia-{name}" for name in sorted(more)))

    def requirements(self) -> list[str]:
        (info,) = self.packages.glob("tp_ext-*.dist-info")
        return re.findall(r"^Requires-Dist: (.*)$", (info / "METADATA").read_text(), re.M)

    def install_wheel(self) -> float:
        return self.pip("--no-deps", "--no-index", "--find-links", DIST, "tp_ext")  # torch's own are not all there

    def check(self, version: str, wanted: dict[str, list[str]]) -> str:
        """Runs everything; returns a sentence."""
        admitted = next(Requirement(line) for line in self.requirements() if line.startswith("torch"))
        assert admitted.specifier.contains(version), f"the metadata requires {admitted}"
        code = "import tp_ext; print(tp_ext.build_info()['torch_built'])"
        built = run(self.python, "-c", code, PATH=self.path).strip()
        assert built.split(".")[:2] == version.split(".")[:2], f"a library for torch {built} under torch {version}"
        for backend in BACKENDS:
            got = losses(self.python, backend, self.path)
            if got != wanted[backend]:
                sys.exit(f"over {backend} the losses are {got}, those of the build from source {wanted[backend]}")
        return run(self.python, "-m", "tp_ext.smoke", PATH=self.path).splitlines()[-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--torches", nargs="+", required=True)
    parser.add_argument("--pythons", nargs="+", required=True)
    parser.add_argument("--swap", action="store_true")
    options = parser.parse_args()
    WORK.mkdir(parents=True, exist_ok=True)
    own = {
        backend: losses(Path(sys.executable), backend, os.environ["PATH"], PYTHONPATH=str(ROOT)) for backend in BACKENDS
    }
    number = 0
    for python in options.pythons:
        environment = None
        for version in options.torches:
            if environment is None or not options.swap:
                environment = Environment(python, f"{Path(python).name}-{version}")
                environment.install_torch(version)
                seconds = f"tp_ext installed in {environment.install_wheel():.1f} s"
            else:
                environment.install_torch(version)
                seconds = "tp_ext left as it was"
            print(f"{python}, torch {version}: {seconds}; {environment.check(version, own)}", flush=True)
            number += 1
            if not options.swap:
                shutil.rmtree(environment.folder)
        if options.swap and environment is not None:
            shutil.rmtree(environment.folder)
    print(f"{number} of {number} combinations passed")


if __name__ == "__main__":
    main()
