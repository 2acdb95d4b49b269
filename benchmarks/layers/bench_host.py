"""Host time of a layer: small linears, regions, norms, MLP and attention (host_cases.py), ours and others'.

On shapes of 8 x 8 arithmetic takes no time, so the time of a call is that of Python, the dispatcher, autograd and the
process group. "own" is the time of a case minus that of the plain torch operation in its place, usually F.linear;
"times ours" is the peer's own time over ours. valgrind counts instructions, if it is installed: unlike times they
hardly depend on other work on the machine. World sizes: a group of one, and a rank of a fake group of 8.

    python -m benchmarks.layers.bench_host --csv
"""

import argparse
import gc
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from benchmarks.lib import report
from benchmarks.lib.report import Record

WORLDS = (1, 8)
PASSES = ("forward", "forward+backward")
WARM_UP, COUNTED = 20, 50  # calls under valgrind
ROOT = Path(__file__).parents[2]
TIMEOUT = 280.0


def calls(case: Any) -> dict[str, Callable[[], object]]:
    """Forward, which records a graph, and forward with backward, which accumulates gradients."""
    return dict(zip(PASSES, (case.call, lambda: case.call().backward(case.grad)), strict=True))


def check(cases: list[Any]) -> None:
    """Every case gives the results and gradients of its base; except DTensor's, whose results on a rank of a fake group
    mean nothing: its row layer adds a part of the bias before the sum over the ranks.
    """

    def results(case: Any) -> list[torch.Tensor]:
        grads = torch.autograd.grad(case.call(), case.inputs, case.grad)
        return [case.call().detach(), *(getattr(t, "to_local", lambda t=t: t)() for t in grads)]

    wants = {case.base: results(case) for case in cases if case.name == case.base}
    for case in [c for c in cases if c.name != "DTensor" or dist.get_world_size() == 1]:
        for got, want in zip(results(case), wants[case.base], strict=True):
            torch.testing.assert_close(got, want, msg=lambda text, case=case: f"{case.family}, {case.name}: {text}")


def time_cases(cases: list[Any], seconds: float) -> dict[tuple[str, str, str], list[float]]:
    """Microseconds a call, of blocks of about 4 ms in turns, each turn in another order."""
    subjects = {(c.family, c.name, p): call for c in cases for p, call in calls(c).items()}

    def block(call: Callable[[], object], count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            call()
        return (time.perf_counter() - start) / count * 1e6

    counts = {}
    for key, call in subjects.items():
        block(call, 20)
        counts[key] = max(3, min(1000, int(4000 / block(call, 20))))
    keys, times = list(subjects), {key: [] for key in subjects}
    start, turn = time.perf_counter(), 0
    gc.collect()
    gc.disable()
    while turn < 3 or time.perf_counter() - start < seconds:
        for i in range(len(keys)):
            key = keys[(turn + i) % len(keys)]
            times[key].append(block(subjects[key], counts[key]))
        turn += 1
    gc.enable()
    return times


def count_cases(cases: list[Any]) -> None:
    """Under valgrind: one dump of instructions for each case and pass, in their order."""
    subprocess.run(["callgrind_control", "-i", "on", str(os.getpid())], check=True, capture_output=True)
    gc.disable()
    for case in cases:
        for call in calls(case).values():
            for _ in range(WARM_UP):
                call()
            torch._C._valgrind_toggle()
            for _ in range(COUNTED):
                call()
            torch._C._valgrind_toggle_and_dump_stats()


def in_a_rank(world: int, what: str, seconds: float) -> None:
    """The process of one rank: prints what the parent reads."""
    from benchmarks.layers import host_cases

    torch.set_num_threads(1)
    cases = host_cases.all_cases(host_cases.start(world))
    check(cases)
    rows = [{"family": c.family, "case": c.name, "base": c.base} for c in cases]
    if what == "count":
        count_cases(cases)
        print(json.dumps({"cases": rows}))
        return
    os.sched_setaffinity(0, {max(os.sched_getaffinity(0))})
    times = time_cases(cases, seconds)
    print(json.dumps({"cases": rows, "times": [[*key, values] for key, values in times.items()]}))


def rank(world: int, what: str, seconds: float = 0.0, prefix: tuple[str, ...] = ()) -> "subprocess.Popen[str]":
    command = [*prefix, sys.executable, "-m", __spec__.name, "--rank", str(world), what, str(seconds)]
    environment, pipe = os.environ | {"OMP_NUM_THREADS": "1"}, subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment, stdout=pipe, stderr=pipe, text=True)


def said(process: "subprocess.Popen[str]") -> Any:
    try:
        out, errors = process.communicate(timeout=TIMEOUT)
    finally:
        process.kill()
    if process.returncode != 0:
        raise RuntimeError(f"{process.args} failed:\n{errors[-4000:]}")
    return json.loads(out.splitlines()[-1])


def instructions(worlds: list[int]) -> dict[tuple[int, str, str, str], int]:
    """Instructions of a call; empty if valgrind is not installed. One process for each world, side by side."""
    if shutil.which("valgrind") is None or not torch._C._valgrind_supported_platform():
        print("no instruction counts: valgrind is not installed")
        return {}
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        outs = {world: f"{folder}/{world}" for world in worlds}
        options = ("--tool=callgrind", "--instr-atstart=no", "--collect-atstart=no")
        running = {
            world: rank(world, "count", prefix=("valgrind", *options, f"--callgrind-out-file={out}"))
            for world, out in outs.items()
        }
        for world, process in running.items():
            keys = [(c["family"], c["case"], p) for c in said(process)["cases"] for p in PASSES]
            for i, key in enumerate(keys, 1):
                (totals,) = [t for t in Path(f"{outs[world]}.{i}").read_text().splitlines() if t.startswith("totals:")]
                found[(world, *key)] = int(totals.split()[1]) // COUNTED
    return found


def measure(seconds: float, count: bool) -> list[Record]:
    counts = instructions(list(WORLDS)) if count else {}
    records = []
    for world in WORLDS:
        result = said(rank(world, "time", seconds))
        times = {(family, name, which): values for family, name, which, values in result["times"]}
        families = {c["case"]: c["family"] for c in result["cases"] if c["case"] == c["base"]}
        for which in PASSES:
            for c in result["cases"]:
                key, base = (c["family"], c["case"], which), (families[c["base"]], c["base"], which)
                ours = times.get((c["family"], "ours", which), times[key])
                own, ours_own = (min(t) - min(times[base]) for t in (times[key], ours))
                counted, counted_base = (counts.get((world, *k)) for k in (key, base))
                records.append(
                    {
                        "layer": c["family"],
                        "case": c["case"],
                        "world": world,
                        "pass": which,
                        "min_us": min(times[key]),
                        "median_us": statistics.median(times[key]),
                        "own_us": own,
                        "own_median_us": statistics.median(times[key]) - statistics.median(times[base]),
                        "times_ours": own / ours_own if ours_own > 0 and key[1] not in ("ours", c["base"]) else None,
                        "instructions": counted,
                        "own_instructions": None if counted is None or counted_base is None else counted - counted_base,
                    }
                )
    return records


def draw(figure: Any, records: list[Record]) -> None:
    panels: dict[str, dict[str, Any]] = {}
    for r in records:
        if r["world"] == WORLDS[-1] and r["layer"] in ("column", "row"):
            panels.setdefault(f"{r['layer']}, {r['pass']}", {})[str(r["case"])] = r["own_us"]
    report.draw_bars(figure, panels, f"us over F.linear, fastest, {WORLDS[-1]} ranks")


def main() -> None:
    if sys.argv[1:2] == ["--rank"]:
        in_a_rank(int(sys.argv[2]), sys.argv[3], float(sys.argv[4]))
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    report.add_options(parser)
    parser.add_argument("--no-instructions", action="store_true", help="only times, without valgrind")
    args = parser.parse_args()
    run_stamp = report.stamp("cpu", "megatron-core")
    print(", ".join(f"{key} {value}" for key, value in run_stamp.items()))
    seconds = 0.0 if args.quick else 60.0 if args.full else 15.0
    records = measure(seconds, not (args.no_instructions or args.quick))
    report.print_table(records)
    if args.csv:
        report.write(args.csv, Path(__file__).stem, run_stamp, records, lambda figure: draw(figure, records))


if __name__ == "__main__":
    main()
