"""All GPU work in two commands of at most 7 minutes on 16 cores: build, tests, memory checks, times of all kernels.

    make gpu-check                     # with the environment that make sets up; then: make gpu-check PART=2
    python -m benchmarks.gpu.check     # with the torch >= 2.11 of this python, pytest and a CUDA toolkit; no network
    python -m benchmarks.gpu.check --part 2 --built

Part 1 has what is worth most: the build, memory checks, tests of what is new, NCCL ranks that share the GPU, all times.
Part 2: all other tests, and the NCCL ranks again with every module and with torch's other NCCL backend.
Every command is a process of its own with a deadline. FOLDER/results.json is written after each, FOLDER/rows after each
measured case, FOLDER/log.txt has all output; at the end come a table and the goals. Exit code: 0, 1 if a stage failed,
2 if there is no GPU. ``benchmarks.gpu.results`` makes the docs' table and plot from the file of part 1.
``--device cpu --quick`` is a dry run of all stages that work without a GPU.
"""

import argparse
import contextlib
import datetime
import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

import torch

from benchmarks.gpu.results import goals, print_report, read_rows
from benchmarks.lib.report import stamp

ROOT = Path(__file__).resolve().parents[2]

# Seconds from the start by which each phase of a part has ended
BUILD = 200.0
CORRECT = {1: 265.0, 2: 320.0}
SHARED_BY_NCCL = {1: 325.0, 2: 415.0}
TIMED = 412.0  # of part 1 alone
USUAL_BUILD = 120.0  # seconds that the others have less, where the library is built
BENCHMARK = 75.0  # seconds for a script whose turn it is
ONE_OF_NCCL = 60.0  # seconds for a stage of NCCL ranks: they may wait for each other for ever
TAIL = 25  # lines of a command's output that the results keep when it fails
NEW = (
    "float8",
    "low_bits",
    "compressed_blocks",
    "block_attention",
    "tree_total",
)  # measured first: no GPU has run them
NCCL_RANKS = {  # several ranks of NCCL >= 2.30 share a GPU by time slices
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
    "TP_EXT_RANKS_BACKEND": "cpu:gloo,cuda:nccl",
    "TP_EXT_RANKS_SECONDS": "40",
}
OTHER_BACKEND = NCCL_RANKS | {"TORCH_DIST_USE_NCCL2": "0"}  # that of torch before 2.15


@dataclass(frozen=True)
class Stage:
    """Tests that run in a process of their own. `quick`: what a dry run takes of them, -k; None: they need a GPU.
    `environment`: with a GPU alone."""

    part: int
    files: Sequence[str]
    quick: str | None = None
    environment: dict[str, str] = field(default_factory=dict)


SUITE_OF_RANKS = [
    "tests/cuda/test_shared_gpu.py",
    "tests/test_regions.py",
    "tests/conformance/test_31_33_weights.py",
    "tests/conformance/test_43_47_attention.py",
]
NCCL_TESTS = ["tests/cuda/test_nccl_ranks.py", "tests/cuda/test_nccl.py"]
STAGES = {  # CUDA tests that are in none of them share the stage "kernels" of part 2
    "new kernels": Stage(
        1, [f"tests/kernels/test_{kernel}.py" for kernel in NEW if kernel != "block_attention"], "every_code"
    ),
    "graphs": Stage(
        1,
        [
            "tests/cuda/test_capture.py",
            "tests/conformance/test_51_capture.py",
            "tests/nn/attention/test_kv_cache_graphs.py",
        ],
        "family and relu",
    ),
    "NCCL ranks": Stage(1, NCCL_TESTS, "collectives", NCCL_RANKS),
    "execution": Stage(2, ["tests/cuda/test_execution.py"], "relu"),
    "large tensors": Stage(2, ["tests/cuda/test_large.py"], "bias_act"),
    "ranks on one GPU": Stage(2, SUITE_OF_RANKS, "rms_norm"),  # gloo
    "NCCL ranks, other backend": Stage(2, NCCL_TESTS, "collectives", OTHER_BACKEND),
    "NCCL ranks, all modules": Stage(2, SUITE_OF_RANKS, "rms_norm", NCCL_RANKS),
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


def options(about: str) -> argparse.ArgumentParser:
    """Returns a parser with the options that all programs for a GPU have."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a dry run, with --quick")
    parser.add_argument("--quick", action="store_true", help="a few tests or one size, no figures to keep")
    parser.add_argument("--size", type=int, help="MiB of the largest tensors (default: 256; --quick: 1)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="default: a folder of runs")
    return parser


def begin(program: str, args: argparse.Namespace, cores: int) -> dict[str, Any]:
    """Returns the circumstances of a measurement, without which it means nothing later; nothing if its GPU is missing.

    Makes a signal to end an exit, so that what runs is ended, too."""
    gpu = args.device == "cuda"
    if gpu and (torch.version.cuda is None or not torch.cuda.is_available()):
        print(f"{program} needs a CUDA GPU: torch {torch.__version__} sees none (CUDA {torch.version.cuda})")
        return {}
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    args.size = args.size or (1 if args.quick else 256)
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", "--id=0"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        driver = "unknown"
    provenance = stamp(args.device)
    return {
        "commit": provenance["commit"],
        "gpu": torch.cuda.get_device_name(0) if gpu else None,
        "driver": driver if gpu else None,
        "arch": "{}.{}".format(*torch.cuda.get_device_capability(0)) if gpu else None,
        "cpu": None if gpu else provenance["device"],
        "cuda": torch.version.cuda,
        "torch": torch.__version__,
        "python": sys.version.split()[0],
        "cores": cores,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
    }


@dataclass(frozen=True)
class Command:
    """`cannot`: output of a failure that means that its tool does not work here: no failure of ours. `note`: why it is
    not run."""

    stage: str
    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] = field(default_factory=dict)
    cannot: str = ""
    note: str = ""


class Run:
    """Runs commands and keeps their results. Deadlines are in seconds from the start of the run, so that what one part
    leaves of its time is available to the next."""

    def __init__(self, folder: Path, about: dict[str, Any]):
        folder.mkdir(parents=True, exist_ok=True)
        self.file, self.log = folder / "results.json", folder / "log.txt"
        self.rows = folder / "rows"
        shutil.rmtree(self.rows, ignore_errors=True)  # scripts append to it
        self.log.write_text("")
        self.results: dict[str, Any] = {**about, "commands": []}
        self._lock, self._start, self._running = threading.Lock(), time.monotonic(), set[subprocess.Popen]()
        self.save()

    def together(self, commands: Sequence[Command], cores: int, until: float, seconds: float = float("inf")) -> None:
        """Runs as many commands at once as there are cores, each for `seconds` at most."""
        pool = ThreadPoolExecutor(cores)

        def to_end(command: Command) -> None:
            self._finish(*self._begin(command), min(self._elapsed() + seconds, until))

        try:
            list(pool.map(to_end, commands))
        finally:  # interrupted: what runs is ended
            pool.shutdown(wait=False, cancel_futures=True)
            self._stop()

    def in_turn(self, commands: Sequence[Command], seconds: float, until: float) -> None:
        """Starts all commands, each of which waits for a line of input, and gives it to one after the other."""
        try:
            for begun in [self._begin(command) for command in commands]:
                self._finish(*begun, min(self._elapsed() + seconds, until))
        finally:
            self._stop()

    def failed(self) -> list[str]:
        """The stages of which a command failed."""
        bad = (c["stage"] for c in self.results["commands"] if c["status"] in ("failed", "timed out"))
        return list(dict.fromkeys(bad))

    def save(self, **more: Any) -> None:
        """Writes the results, and adds these to them, and the rows that there are."""
        rows = read_rows(self.rows)
        self.results |= {**more, "seconds": round(self._elapsed(), 1), "rows": rows, "goals": goals(rows)}
        new = self.file.with_suffix(".new")
        new.write_text(json.dumps(self.results, indent=1) + "\n")
        os.replace(new, self.file)

    def _elapsed(self) -> float:
        return time.monotonic() - self._start

    def _begin(self, command: Command) -> tuple[Command, subprocess.Popen | None, IO[bytes]]:
        output = tempfile.TemporaryFile()  # noqa: SIM115, closed when the command has ended
        process, streams = None, {"stdin": subprocess.PIPE, "stdout": output, "stderr": subprocess.STDOUT}
        if not command.note:
            environment = os.environ | command.environment
            # A session of its own: its children end with it
            process = subprocess.Popen(command.argv, cwd=ROOT, env=environment, start_new_session=True, **streams)
            self._running.add(process)
        return command, process, output

    def _finish(self, command: Command, process: subprocess.Popen | None, output: IO[bytes], until: float) -> None:
        began, code = self._elapsed(), None
        if process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
                process.communicate(b"\n", timeout=max(0.0, until - began))
            code = process.poll()
            if code is None:
                _kill(process)
            self._running.discard(process)
        output.seek(0)
        text = output.read().decode(errors="replace")
        output.close()
        status = {None: "not run" if command.note else "timed out", 0: "passed"}.get(code, "failed")
        if status == "failed" and command.cannot and re.search(command.cannot, text):
            status = "unavailable"
        seconds, counts = round(self._elapsed() - began, 1), counted(text)
        result = {"stage": command.stage, "name": command.name, "status": status, "exit_code": code, **counts}
        lines = [] if status in ("passed", "not run") else text.splitlines()[-TAIL:]
        summary = f"{command.stage}, {command.name}: {status}, {seconds} s {command.note}{counts or ''}".rstrip()
        with self._lock, self.log.open("a") as log:
            log.write(f"\n=== {summary}\n{text}")
            print("\n    ".join([summary, *lines[-3:]]), flush=True)
            self.results["commands"].append(result | {"seconds": seconds, "note": command.note, "output": lines})
            self.save()

    def _stop(self) -> None:
        for process in list(self._running):
            _kill(process)


def _kill(process: subprocess.Popen) -> None:
    """Kills the command and its children, which are in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def counted(output: str) -> dict[str, int]:
    """Pytest's counts of its tests; empty of other output."""
    summaries = re.findall(r"^(?:=+ )?((?:\d+ \w+,? )+)in [\d.]+s", output, re.M)
    if not summaries:
        return {}
    numbers = {name: int(number) for number, name in re.findall(r"(\d+) (\w+)", summaries[-1])}
    errors = numbers.get("error", 0) + numbers.get("errors", 0)
    return {name: numbers.get(name, 0) + errors * (name == "failed") for name in ("passed", "failed", "skipped")}


class Plan:
    """The commands of a part; `scratch` is for files that they pass on, the benchmarks' rows come into `rows`."""

    def __init__(self, args: argparse.Namespace, cores: int, arch: str, scratch: Path, rows: Path):
        self.args, self.cores, self.arch, self.rows = args, cores, arch, rows
        scripts = [script for script in benchmarks() if re.search(args.benchmarks, script.stem)]
        scripts.sort(key=lambda script: script.stem.removeprefix("bench_") not in NEW)
        self.scripts = scripts if args.part == 1 else []
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

    def build(self) -> list[Command]:
        environment = {"TP_EXT_CUDA": "1", "TORCH_CUDA_ARCH_LIST": self.arch, "MAX_JOBS": str(self.cores)}
        note = "" if self.args.device == "cuda" else "nothing to build for a GPU"
        note = "--built" if self.args.built else note
        argv = [sys.executable, "setup.py", "build_ext", "--inplace"]
        return [Command("build", "setup.py", argv, environment, note=note)]

    def correctness(self) -> list[Command]:
        """The longest first."""
        commands = [self._sanitizer("memcheck" if self.args.part == 1 else "racecheck")]
        commands += [self._pytest(name, stage) for name, stage in STAGES.items() if not stage.environment]
        own = {file for stage in STAGES.values() for file in stage.files}
        shared = [file for file in cuda_tests() if file not in own]
        kernels = Stage(2, ["tests/kernels/test_norm.py"] if self.args.quick else shared, "autocast or rate")
        shards = max(1, min(8, self.cores // 2)) if self.args.part == 2 else 0
        commands += [self._pytest("kernels", kernels, f"{i}/{shards}") for i in range(shards)]
        return self._wanted([*commands, *(self._benchmark("benchmarks, checked", script) for script in self.scripts)])

    def shared_by_nccl(self) -> list[Command]:
        """One at a time: each rank waits for the others in a kernel, and the GPU's time goes round."""
        return self._wanted([self._pytest(name, stage) for name, stage in STAGES.items() if stage.environment])

    def timed(self) -> list[Command]:
        """Returns the stages, the new kernels first."""
        return self._wanted([self._benchmark("benchmarks", script) for script in self.scripts])

    def _wanted(self, commands: list[Command]) -> list[Command]:
        parts = {name: stage.part for name, stage in STAGES.items()}
        commands = [command for command in commands if parts.get(command.stage, self.args.part) == self.args.part]
        return [command for command in commands if re.search(self.args.stages, command.stage)]

    def _pytest(self, name: str, stage: Stage, shard: str = "") -> Command:
        gpu, files = self.args.device == "cuda", stage.files[:1] if self.args.quick else stage.files
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *files]
        argv += ["-m", "cuda" if gpu else "not cuda"]
        argv += ["-k", stage.quick or ""] if self.args.quick else []
        argv += ["--maxfail=3"] if stage.environment else []  # each that hangs takes its deadline
        if importlib.util.find_spec("pytest_timeout") is None:  # the settings name its option
            argv += ["-o", "addopts=-ra --strict-markers"]
        more = (stage.environment if gpu else {}) | ({"TP_EXT_SHARD": shard} if shard else {})
        note = "" if gpu or stage.quick is not None else "needs a GPU"
        return Command(name, shard or "pytest", argv, self.environment | more, note=note)

    def _sanitizer(self, tool: str) -> Command:
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
        return Command(tool, tool, argv, environment, cannot=NO_SANITIZER, note=note)

    def _benchmark(self, stage: str, script: Path) -> Command:
        checked, quick = stage == "benchmarks, checked", self.args.quick
        module = ".".join(script.relative_to(ROOT).with_suffix("").parts)
        dtype = "bfloat16" if self.args.device == "cuda" else "float32"
        argv = [sys.executable, "-m", module, "--device", self.args.device, "--dtype", dtype]
        argv += ["--size", str(self.args.size)]
        argv += ["--quick"] if checked or quick else ["--seconds", "0.25", "--threads", "1"]
        argv += [] if checked else ["--wait-for-input", "--csv", str(self.rows)]
        return Command(stage, script.stem.removeprefix("bench_"), argv, self.environment)


def main(arguments: list[str] | None = None) -> int:
    parser = options("Builds, tests and times everything on a GPU.")
    parser.add_argument("--built", action="store_true", help="the library has been built: test and time it as it is")
    parser.add_argument("--benchmarks", default="", metavar="PATTERN", help="those whose script's name matches")
    parser.add_argument("--stages", default="", metavar="PATTERN", help="those whose name matches, and the build")
    parser.add_argument("--part", type=int, default=1, choices=[1, 2], help="of the check; 1 has what is worth most")
    args = parser.parse_args(arguments)
    cores = len(os.sched_getaffinity(0))
    about = begin("gpu-check", args, cores)
    if not about:
        return 2
    run = Run(args.out or ROOT / "runs" / ("gpu_check" if args.part == 1 else "gpu_check_2"), about)
    print(", ".join(f"{key} {value}" for key, value in run.results.items() if isinstance(value, str)), flush=True)
    earlier = USUAL_BUILD if args.built else 0.0
    with tempfile.TemporaryDirectory(prefix="gpu_check_") as scratch:
        plan = Plan(args, cores, about["arch"] or "", Path(scratch), run.rows)
        try:
            run.together(plan.build(), 1, BUILD)
            if not run.failed():
                run.together(plan.correctness(), cores, CORRECT[args.part] - earlier)
                run.together(plan.shared_by_nccl(), 1, SHARED_BY_NCCL[args.part] - earlier, ONE_OF_NCCL)
                run.in_turn(plan.timed(), BENCHMARK, TIMED - earlier)
        finally:  # ended from outside: what is there is kept
            run.save()
    print_report(run.results)
    print(f"{run.file}, all output in {run.log}")
    if failed := run.failed():
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
