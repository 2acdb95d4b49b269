"""All GPU work in one command: build, tests, memory checks, times of all kernels. 9 minutes on 16 cores.

    make gpu-check                     # with the environment that make sets up
    python -m benchmarks.gpu.check     # with the torch >= 2.11 of this python, pytest and a CUDA toolkit; no network

Writes FOLDER/results.json after every stage and prints a table and the goals. Exit code: 0, 1 if a stage failed, 2 if
there is no GPU. ``benchmarks.gpu.results`` makes the docs' table and plot from the file. ``--device cpu --quick`` is a
dry run of all stages that work without a GPU.
"""

import argparse
import datetime
import importlib.util
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.results import goals, print_report, read_rows
from benchmarks.lib.jobs import ROOT, Command, Run, Stage
from benchmarks.lib.report import stamp

# Seconds from the start by which each part has ended
BUILD, CORRECT, TIMED = 300.0, 375.0, 535.0
USUAL_BUILD = 120.0  # seconds that the others have less, where the library is built
ONE_BENCHMARK = 75.0  # seconds for a script whose turn it is
OWN_STAGES = {  # stage -> its files; those with CUDA tests that are not here share "kernels"
    "graphs": [
        "tests/cuda/test_capture.py",
        "tests/conformance/test_51_capture.py",
        "tests/nn/attention/test_kv_cache_graphs.py",
    ],
    "execution": ["tests/cuda/test_execution.py"],
    "large tensors": ["tests/cuda/test_large.py"],
    "ranks on one GPU": [
        "tests/cuda/test_shared_gpu.py",  # gloo
        "tests/test_regions.py",
        "tests/conformance/test_31_33_weights.py",
        "tests/conformance/test_43_47_attention.py",
    ],
    "symmetric memory": ["tests/test_symmetric_memory_cuda.py"],
    "NCCL": ["tests/cuda/test_nccl.py"],
}
QUICK = {  # what a dry run takes of each stage: -k
    "kernels": "autocast or rate",
    "graphs": "family and relu",
    "execution": "relu",
    "large tensors": "bias_act",
    "ranks on one GPU": "rms_norm",
    "NCCL": "step",
}
NO_SANITIZER = r"Device not supported|not supported on this|Unable to find injection|insufficient permission"


def cuda_tests() -> list[str]:
    """The files that have a test with the mark `cuda`, by name or through the fixture `device`."""
    marked = re.compile(r"mark\.cuda\b|^def test_\w+\([^)]*\bdevice\b", re.M)
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(file.relative_to(ROOT)) for file in files if marked.search(file.read_text())]


def benchmarks() -> list[Path]:
    """The scripts that measure kernels: those that use the harness."""
    uses_harness = re.compile(r"^from benchmarks\.lib\.harness import .*\bmain\b", re.M)
    scripts = sorted((ROOT / "benchmarks").rglob("bench_*.py"))
    return [script for script in scripts if uses_harness.search(script.read_text())]


def module_of(script: Path) -> str:
    """The name of a script for ``python -m``, from the root of the repository."""
    return ".".join(script.relative_to(ROOT).with_suffix("").parts)


def gpu() -> dict[str, str]:
    """Name, driver and architecture of the first GPU; empty if torch has none."""
    if torch.version.cuda is None or not torch.cuda.is_available():
        return {}
    name, capability = torch.cuda.get_device_name(0), torch.cuda.get_device_capability(0)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        driver = "unknown"
    return {"gpu": name, "driver": driver, "arch": "{}.{}".format(*capability)}


def about(found: dict[str, str], cores: int) -> dict[str, Any]:
    """The circumstances of a measurement, without which it means nothing later."""
    made = stamp("cuda" if found else "cpu")
    return {
        "commit": made["commit"],
        "gpu": found.get("gpu"),
        "driver": found.get("driver"),
        "arch": found.get("arch"),
        "cpu": None if found else made["device"],
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "cores": cores,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


class Plan:
    """The stages of a run; `scratch` is for files that they pass on."""

    def __init__(self, args: argparse.Namespace, cores: int, arch: str, scratch: Path):
        self.args, self.cores, self.arch, self.scratch = args, cores, arch, scratch
        earlier = USUAL_BUILD if args.built else 0.0
        self.correct, self.timed_until = CORRECT - earlier, TIMED - earlier
        folders = [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH")]
        self.environment = {
            "PYTHONPATH": os.pathsep.join(filter(None, folders)),
            "PYTHONUNBUFFERED": "1",
            "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
            "OMP_NUM_THREADS": "2",  # several processes share the cores
            "TORCHINDUCTOR_COMPILE_THREADS": "1",
            "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),  # what the first run of a benchmark compiles
            "TP_EXT_REQUIRE_CUDA": "1" if args.device == "cuda" else "0",
        }

    def build(self) -> Stage:
        command = [sys.executable, "setup.py", "build_ext", "--inplace"]
        environment = {"TP_EXT_CUDA": "1", "TORCH_CUDA_ARCH_LIST": self.arch, "MAX_JOBS": str(self.cores)}
        note = "" if self.args.device == "cuda" else "nothing to build for a GPU"
        note = "--built" if self.args.built else note
        return Stage("build", [Command("setup.py", command, environment)], BUILD, note=note)

    def correctness(self) -> list[Stage]:
        """The correctness stages side by side, the longest first."""
        stages = [self._sanitizer("memcheck"), self._sanitizer("racecheck")]
        for name, files in OWN_STAGES.items():
            note = "needs a GPU" if self.args.device == "cpu" and name not in QUICK else ""
            files = files[:1] if self.args.quick else files
            stages.append(Stage(name, [self._pytest(name, files)], self.correct, note=note))
        own = {file for files in OWN_STAGES.values() for file in files}
        shared = [file for file in cuda_tests() if file not in own]
        shards = max(1, min(8, self.cores // 2))
        if self.args.quick:
            shared = [file for file in shared if file == "tests/kernels/test_norm.py"]
        kernels = [self._pytest("kernels", shared, f"{i}/{shards}") for i in range(shards)]
        checked = [self._benchmark(script, True) for script in self.scripts()]
        return [*stages, Stage("kernels", kernels, self.correct), Stage("benchmarks, checked", checked, self.correct)]

    def timed(self) -> Stage:
        return Stage("benchmarks", [self._benchmark(f, False) for f in self.scripts()], self.timed_until, in_turn=True)

    def scripts(self) -> list[Path]:
        return [script for script in benchmarks() if re.search(self.args.benchmarks, script.stem)]

    def _pytest(self, stage: str, files: list[str], shard: str = "") -> Command:
        junit = self.scratch / f"{stage}-{shard}.xml".replace("/", "-")
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={junit}", *files]
        argv += ["-m", "cuda" if self.args.device == "cuda" else "not cuda"]
        if self.args.quick:
            argv += ["-k", QUICK.get(stage, "")]
        if importlib.util.find_spec("pytest_timeout") is None:  # the settings name its option
            argv += ["-o", "addopts=-ra --strict-markers"]
        return Command(shard or "pytest", argv, self.environment | ({"TP_EXT_SHARD": shard} if shard else {}), junit)

    def _sanitizer(self, tool: str) -> Stage:
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
        places = os.pathsep.join([f"{home}/bin", f"{home}/compute-sanitizer", os.environ.get("PATH", "")])
        found = shutil.which("compute-sanitizer", path=places)
        note = "" if found else "no compute-sanitizer in CUDA_HOME or PATH"
        note = note if self.args.device == "cuda" else "needs a GPU"
        options = ["--tool", tool, "--error-exitcode", "9"]
        if tool == "memcheck":
            options += ["--report-api-errors", "no"]  # torch asks the driver some questions whose answer is an error
        argv = [found or "", *options, sys.executable, "-m", "tests.cuda.families", "--device", "cuda"]
        # Each tensor its own allocation, or what lies behind its end would be another's
        environment = self.environment | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
        return Stage(tool, [Command(tool, argv, environment)], self.correct, note=note, cannot=NO_SANITIZER)

    def _benchmark(self, script: Path, only_checked: bool) -> Command:
        dtype = "bfloat16" if self.args.device == "cuda" else "float32"
        argv = [sys.executable, "-m", module_of(script), "--device", self.args.device, "--dtype", dtype]
        argv += ["--size", str(self.args.size)]
        argv += ["--quick"] if only_checked or self.args.quick else ["--seconds", "0.25", "--threads", "1"]
        if not only_checked:
            argv += ["--wait-for-input", "--csv", str(self.scratch / "rows")]
        return Command(script.stem.removeprefix("bench_"), argv, self.environment, None, ONE_BENCHMARK)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Builds, tests and times everything on a GPU.")
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a dry run, with --quick")
    parser.add_argument("--built", action="store_true", help="the library has been built: test and time it as it is")
    parser.add_argument("--quick", action="store_true", help="a few tests, benchmarks without figures to quote")
    parser.add_argument("--size", type=int, help="MiB of the benchmarks' activations (default: 256; --quick: 1)")
    parser.add_argument("--benchmarks", default="", metavar="PATTERN", help="those whose script's name matches")
    parser.add_argument("--stages", default="", metavar="PATTERN", help="those whose name matches, and the build")
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu_check", metavar="FOLDER")
    args = parser.parse_args(arguments)
    args.size = args.size or (1 if args.quick else 256)
    found = gpu() if args.device == "cuda" else {}
    if args.device == "cuda" and not found:
        print(f"gpu-check needs a CUDA GPU: torch {torch.__version__} sees none (CUDA {torch.version.cuda})")
        return 2
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that what runs is ended, too
    cores = len(os.sched_getaffinity(0))
    run = Run(args.out, about(found, cores), cores)
    print(", ".join(f"{key} {value}" for key, value in run.results.items() if isinstance(value, str)), flush=True)
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as scratch:
        plan = Plan(args, cores, found.get("arch", ""), Path(scratch))
        run.together([plan.build()])
        if not run.failed():
            run.together([stage for stage in plan.correctness() if re.search(args.stages, stage.name)])

            def figures(results: dict[str, Any]) -> None:
                results["rows"] = read_rows(Path(scratch) / "rows")
                results["goals"] = goals(results["rows"])

            run.together([stage for stage in [plan.timed()] if re.search(args.stages, stage.name)], figures)
    print_report(run.results)
    print(f"{run.file}, all output in {run.log}")
    if failed := run.failed():
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
