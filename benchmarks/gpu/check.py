"""All GPU work in two commands of at most 7 minutes on 16 cores: build, tests, memory checks, times of all kernels.

    make gpu-check                     # with the environment that make sets up; then: make gpu-check PART=2
    python -m benchmarks.gpu.check     # with the torch >= 2.11 of this python, pytest and a CUDA toolkit; no network
    python -m benchmarks.gpu.check --part 2 --built

Part 1 has what is worth most: the build, memory checks, tests of what is new, NCCL ranks that share the GPU, all times.
Part 2: all other tests, and the NCCL ranks again with every module and with torch's other NCCL backend.
Every command is a process of its own with a deadline. FOLDER/results.json is written after each, FOLDER/rows after each
measured case, FOLDER/log.txt has all output; at the end come a table and the goals. Exit code: 0, 1 if a stage failed,
2 if there is no GPU. ``--device cpu --quick``, a dry run without a GPU, collects the tests and runs the benchmarks.
"""

import argparse
import contextlib
import datetime
import importlib.util
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
from pathlib import Path
from typing import IO, Any, NamedTuple

import torch

from benchmarks.gpu.results import goals, print_report, read_rows, write
from benchmarks.lib.report import stamp

ROOT = Path(__file__).resolve().parents[2]

# Seconds from the start by which each phase of a part has ended: what one leaves of its time is there for the next
BUILD = 200.0
CORRECT = {1: 265.0, 2: 320.0}
SHARED_BY_NCCL = {1: 325.0, 2: 415.0}
TIMED = 412.0  # of part 1 alone
USUAL_BUILD = 120.0  # seconds that the others have less, where the library is built
BENCHMARK = 75.0  # seconds for a script whose turn it is
ONE_OF_NCCL = 60.0  # seconds for a stage of NCCL ranks: they may wait for each other for ever
TAIL = 25  # lines of a command's output that the results keep when it fails
# Measured first: no GPU has run them
NEW = ("float8", "low_bits", "compressed_blocks", "block_attention", "tree_total")
NCCL_RANKS = {  # several ranks of NCCL >= 2.30 share a GPU by time slices
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",
    "NCCL_MAX_CTAS": "1",
    "TP_EXT_RANKS_BACKEND": "cpu:gloo,cuda:nccl",
    "TP_EXT_RANKS_SECONDS": "40",
}
OTHER_BACKEND = NCCL_RANKS | {"TORCH_DIST_USE_NCCL2": "0"}  # that of torch before 2.15


class Stage(NamedTuple):
    """Tests that run in a process of their own; those with an environment are ranks of NCCL."""

    part: int
    files: Sequence[str]
    environment: Mapping[str, str] = {}


GRAPHS = ["cuda/test_capture", "conformance/test_51_capture", "nn/attention/test_kv_cache_graphs"]
NCCL = ["cuda/test_nccl_ranks", "cuda/test_nccl"]
RANKS = ["cuda/test_shared_gpu", "test_regions", "conformance/test_31_33_weights", "conformance/test_43_47_attention"]
STAGES = {  # CUDA tests that are in none of them share the stage "kernels" of part 2
    "new kernels": Stage(1, [f"kernels/test_{kernel}" for kernel in NEW if kernel != "block_attention"]),
    "graphs": Stage(1, GRAPHS),
    "NCCL ranks": Stage(1, NCCL, NCCL_RANKS),
    "execution": Stage(2, ["cuda/test_execution"]),
    "large tensors": Stage(2, ["cuda/test_large"]),
    "ranks on one GPU": Stage(2, RANKS),  # gloo
    "NCCL ranks, other backend": Stage(2, NCCL, OTHER_BACKEND),
    "NCCL ranks, all modules": Stage(2, RANKS, NCCL_RANKS),
}
NO_SANITIZER = r"Device not supported|not supported on this|Unable to find injection|insufficient permission"


def cuda_tests() -> list[str]:
    """The files that have a test with the mark `cuda`, by name or through the fixture `device`."""
    marked = re.compile(r"mark\.cuda\b|^def test_\w+\([^)]*\bdevice\b", re.M)
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [
        file.relative_to(ROOT / "tests").with_suffix("").as_posix() for file in files if marked.search(file.read_text())
    ]


def options(about: str) -> argparse.ArgumentParser:
    """Returns a parser with the options that all programs for a GPU have."""
    parser = argparse.ArgumentParser(description=about)
    parser.add_argument("--device", default="cuda", choices=["cuda", "cpu"], help="cpu: a dry run, with --quick")
    parser.add_argument("--quick", action="store_true", help="one size, no figures to keep")
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


class Command(NamedTuple):
    """`cannot`: output of a failure that means that its tool does not work here: no failure of ours. `note`: why it is
    not run."""

    stage: str
    name: str
    argv: Sequence[str]
    environment: Mapping[str, str] = {}
    cannot: str = ""
    note: str = ""


Begun = tuple[subprocess.Popen[bytes], IO[bytes]]


class Run:
    """Runs commands and keeps their results. Deadlines are in seconds from the start of the run."""

    def __init__(self, folder: Path, about: dict[str, Any]):
        folder.mkdir(parents=True, exist_ok=True)
        self.file, self.log, self.rows = folder / "results.json", folder / "log.txt", folder / "rows"
        shutil.rmtree(self.rows, ignore_errors=True)  # scripts append to it
        self.log.write_text("")
        self.results: dict[str, Any] = {**about, "commands": []}
        self._lock, self._start = threading.Lock(), time.monotonic()
        self.save()

    def run(
        self, commands: Sequence[Command], until: float, each: float = 1e9, cores: int = 1, begun: bool = False
    ) -> None:
        """Runs a command on each core, each for `each` seconds at most. `begun`: starts all of them at once; each waits
        for a line of input, which is its turn."""
        pool, running = ThreadPoolExecutor(cores), dict[int, Begun]()

        def to_end(i: int) -> None:
            if not commands[i].note and not begun:
                running[i] = _begin(commands[i])
            self._finish(commands[i], running.get(i), min(self._elapsed() + each, until))

        try:
            if begun:
                running |= {i: _begin(command) for i, command in enumerate(commands)}
            list(pool.map(to_end, range(len(commands))))
        finally:  # interrupted: what runs is ended
            pool.shutdown(wait=False, cancel_futures=True)
            for process, _ in list(running.values()):
                _kill(process)

    def failed(self) -> list[str]:
        """The stages of which a command failed."""
        bad = (c["stage"] for c in self.results["commands"] if c["status"] in ("failed", "timed out"))
        return list(dict.fromkeys(bad))

    def save(self) -> None:
        """Writes the results, with the rows that there are."""
        rows = read_rows(self.rows)
        self.results |= {"seconds": round(self._elapsed(), 1), "rows": rows, "goals": goals(rows)}
        write(self.file, self.results)

    def _elapsed(self) -> float:
        return time.monotonic() - self._start

    def _finish(self, command: Command, begun: Begun | None, until: float) -> None:
        began, status, code, text = self._elapsed(), "not run", None, ""
        if begun:
            process, output = begun
            with contextlib.suppress(subprocess.TimeoutExpired, BrokenPipeError):
                process.communicate(b"\n", timeout=max(0.0, until - began))
            code = process.poll()
            _kill(process)
            output.seek(0)
            text = output.read().decode(errors="replace")
            cannot = command.cannot and re.search(command.cannot, text)
            status = {None: "timed out", 0: "passed"}.get(code, "unavailable" if cannot else "failed")
        seconds, counts = round(self._elapsed() - began, 1), counted(text)
        result = {"stage": command.stage, "name": command.name, "status": status, "exit_code": code, **counts}
        lines = [] if status in ("passed", "not run") else text.splitlines()[-TAIL:]
        summary = f"{command.stage}, {command.name}: {status}, {seconds} s {command.note}{counts or ''}".rstrip()
        with self._lock, self.log.open("a") as log:
            log.write(f"\n=== {summary}\n{text}")
            print("\n    ".join([summary, *lines[-3:]]), flush=True)
            self.results["commands"].append(result | {"seconds": seconds, "note": command.note, "output": lines})
            self.save()


def _begin(command: Command) -> Begun:
    """Starts the command, in a session of its own: its children end with it."""
    output, environment = tempfile.TemporaryFile(), os.environ | command.environment  # noqa: SIM115, ends with the run
    streams: dict[str, Any] = {"stdin": subprocess.PIPE, "stdout": output, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command.argv, cwd=ROOT, env=environment, start_new_session=True, **streams), output


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kills the command and its children, which are in its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def counted(output: str) -> dict[str, int]:
    """Pytest's counts of its tests; empty of other output."""
    summaries = re.findall(r"^(?:=+ )?((?:\d+ \w+,? )+)in [\d.]+s", output, re.M)
    return {name: int(number) for number, name in re.findall(r"(\d+) (\w+)", summaries[-1])} if summaries else {}


class Plan(NamedTuple):
    """The commands of a part."""

    build: list[Command]
    together: list[Command]  # the longest first
    nccl: list[Command]  # one at a time: each rank waits for the others in a kernel, and the GPU's time goes round
    timed: list[Command]


def plan(args: argparse.Namespace, cores: int, arch: str, scratch: Path, rows: Path) -> Plan:
    """Returns the commands; `scratch` is for files that they pass on, the benchmarks' rows come into `rows`."""
    gpu, first = args.device == "cuda", args.part == 1
    folders = [str(ROOT), str(ROOT / "examples"), os.environ.get("PYTHONPATH")]
    environment = {
        "PYTHONPATH": os.pathsep.join(filter(None, folders)),
        "PYTHONUNBUFFERED": "1",
        "GLOO_SOCKET_IFNAME": os.environ.get("GLOO_SOCKET_IFNAME", "lo"),
        "OMP_NUM_THREADS": "2",  # several processes share the cores
        "TORCHINDUCTOR_COMPILE_THREADS": "1",
        "TORCHINDUCTOR_CACHE_DIR": str(scratch / "inductor"),  # what the first run of a benchmark compiles
        "TP_EXT_REQUIRE_CUDA": "1" if gpu else "0",
    }

    def build() -> Command:
        more = {"TP_EXT_CUDA": "1", "TORCH_CUDA_ARCH_LIST": arch, "MAX_JOBS": str(cores)}
        note = "--built" if args.built else "" if gpu else "nothing to build for a GPU"
        return Command("build", "setup.py", [sys.executable, "setup.py", "build_ext", "--inplace"], more, note=note)

    def sanitizer(tool: str) -> Command:
        home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
        places = os.pathsep.join([f"{home}/bin", f"{home}/compute-sanitizer", os.environ.get("PATH", "")])
        found = shutil.which("compute-sanitizer", path=places)
        note = "needs a GPU" if not gpu else "" if found else "no compute-sanitizer in CUDA_HOME or PATH"
        argv = [found or "", "--tool", tool, "--error-exitcode", "9"]
        if tool == "memcheck":
            argv += ["--report-api-errors", "no"]  # torch asks the driver some questions whose answer is an error
        argv += [sys.executable, "-m", "tests.cuda.families", "--device", "cuda"]
        # Each tensor its own allocation, or what lies behind its end would be another's
        return Command(tool, tool, argv, environment | {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}, NO_SANITIZER, note)

    def tests(name: str, files: Sequence[str], more: Mapping[str, str] = {}, shard: str = "") -> Command:
        argv = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "cuda"]
        argv += [f"tests/{file}.py" for file in files]
        argv += ["--maxfail=3"] if more else []  # each that hangs takes its deadline
        argv += [] if gpu else ["--collect-only"]
        if importlib.util.find_spec("pytest_timeout") is None:  # the settings name its option
            argv += ["-o", "addopts=-ra --strict-markers"]
        return Command(name, shard or "pytest", argv, environment | more | ({"TP_EXT_SHARD": shard} if shard else {}))

    def benchmark(stage: str, script: Path) -> Command:
        checked = stage == "benchmarks, checked"
        argv = [sys.executable, "-m", ".".join(script.relative_to(ROOT).with_suffix("").parts)]
        argv += ["--device", args.device, "--dtype", "bfloat16" if gpu else "float32", "--size", str(args.size)]
        argv += ["--quick"] if checked or args.quick else ["--seconds", "0.25", "--threads", "1"]
        argv += [] if checked else ["--wait-for-input", "--csv", str(rows)]
        return Command(stage, script.stem.removeprefix("bench_"), argv, environment)

    stages = {name: stage for name, stage in STAGES.items() if stage.part == args.part}
    together = [sanitizer("memcheck" if first else "racecheck")]
    together += [tests(name, stage.files) for name, stage in stages.items() if not stage.environment]
    timed = []
    if first:
        harness = re.compile(r"^from benchmarks\.lib\.harness import .*\bmain\b", re.M)
        scripts = [s for s in sorted((ROOT / "benchmarks").rglob("bench_*.py")) if harness.search(s.read_text())]
        scripts.sort(key=lambda script: script.stem.removeprefix("bench_") not in NEW)
        together += [benchmark("benchmarks, checked", script) for script in scripts]
        timed = [benchmark("benchmarks", script) for script in scripts]
    else:
        shared = [file for file in cuda_tests() if file not in {f for s in STAGES.values() for f in s.files}]
        shards = max(1, min(8, cores // 2))
        together += [tests("kernels", shared, shard=f"{i}/{shards}") for i in range(shards)]
    nccl = [tests(name, s.files, s.environment if gpu else {}) for name, s in stages.items() if s.environment]
    wanted = ([c for c in cs if re.search(args.stages, f"{c.stage}, {c.name}")] for cs in (together, nccl, timed))
    return Plan([build()], *wanted)


def main(arguments: list[str] | None = None) -> int:
    parser = options("Builds, tests and times everything on a GPU.")
    parser.add_argument("--built", action="store_true", help="the library has been built: test and time it as it is")
    parser.add_argument(
        "--stages", default="", metavar="PATTERN", help="those whose 'stage, name' match, and the build"
    )
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
        part = plan(args, cores, about["arch"] or "", Path(scratch), run.rows)
        try:
            run.run(part.build, BUILD)
            if not run.failed():
                run.run(part.together, CORRECT[args.part] - earlier, cores=cores)
                run.run(part.nccl, SHARED_BY_NCCL[args.part] - earlier, ONE_OF_NCCL)
                run.run(part.timed, TIMED - earlier, BENCHMARK, begun=True)
        finally:  # ended from outside: what is there is kept
            run.save()
    print_report(run.results)
    print(f"{run.file}, all output in {run.log}")
    if failed := run.failed():
        print(f"FAILED: {', '.join(failed)}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
