"""Times our operators against their peers: check first, warm up, interleave, report ratios.

A benchmark gives `main` a function `cases_factory(device, dtype) -> list[Case]`. Every callable of a case does the
same work from scratch (forward, or forward and backward) and returns its results. Ratios are peer / ours: above 1
means that ours is faster. "min" columns are the ratio of the fastest repeats, which a busy machine disturbs least.

    python benchmarks/bench_norm.py --threads 1,2 --dtype float32,bfloat16 --device cpu --csv
"""

import argparse
import inspect
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from report import Record, add_options, draw_bars, line, stamp, write

Call = Callable[[], object]

# ||ours - peer|| / ||peer|| that two correct implementations stay under
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
FLUSH_BYTES = 256 << 20  # more than the L2 cache of any GPU, and long enough to hide the launch that follows


@dataclass(frozen=True)
class Case:
    """`check` raises if results are wrong; None compares what `ours` returns with what each peer returns.

    `bytes_moved` counts each tensor that must be read or written once (0: unknown, no bandwidth is reported).
    """

    name: str
    ours: Call
    peers: Mapping[str, Call]
    check: Call | None = None
    bytes_moved: int = 0


def inference(forward: Call) -> object:
    """What a forward case calls: no graph is built."""
    with torch.no_grad():
        return forward()


def trained(forward: Call, grad: torch.Tensor, inputs: Sequence[torch.Tensor]) -> object:
    """What a forward + backward case calls: y, and the gradients of ``inputs`` from that of y."""
    y = forward()
    assert isinstance(y, torch.Tensor)
    return [y.detach(), *torch.autograd.grad(y, inputs, grad)]


def _tensors(result: object) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for item in result for t in _tensors(item)] if isinstance(result, (tuple, list)) else []


def _check(case: Case) -> None:
    if case.check is not None:
        case.check()
        return
    ours = _tensors(case.ours())
    for peer, call in case.peers.items():
        theirs = _tensors(call())
        if not ours or len(ours) != len(theirs):
            raise AssertionError(f"{case.name}: {len(ours)} tensors, {peer} returns {len(theirs)}: cannot compare")
        for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
            if a.shape != b.shape or a.dtype != b.dtype:
                raise AssertionError(f"{case.name}: result {i} is {a.dtype} {a.shape}, {peer} {b.dtype} {b.shape}")
            error = ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()
            if not error <= TOLERANCE.get(a.dtype, 0.0):
                raise AssertionError(f"{case.name}: result {i} differs from {peer} by {error:.2e} of its norm")


def _time_on_cpu(call: Call) -> float:
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def _cuda_timer() -> Callable[[Call], float]:
    flush = torch.empty(FLUSH_BYTES, dtype=torch.uint8, device="cuda")

    def timed(call: Call) -> float:
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        flush.zero_()
        start.record()
        call()
        end.record()
        end.synchronize()
        return float(start.elapsed_time(end))

    return timed


def run(cases: Sequence[Case], device: str, seconds: float = 2.0, turns: int = 10) -> list[Record]:
    """Checks and times each case for about `seconds`, at least `turns` times; ours and peers take turns, each round in
    another order.

    One record per case and peer: medians in ms, GB/s, on GPU the share of the speed of a copy that moves as much.
    """
    timed = _cuda_timer() if device == "cuda" else _time_on_cpu
    records: list[Record] = []
    for case in cases:
        _check(case)
        subjects: dict[str, Call] = {"ours": case.ours, **case.peers}
        if device == "cuda" and case.bytes_moved:
            source = torch.empty(case.bytes_moved // 2, dtype=torch.uint8, device=device)
            target = torch.empty_like(source)
            subjects["copy"] = lambda s=source, t=target: t.copy_(s)  # type: ignore[misc]
        for call in [*subjects.values()] * 3:
            timed(call)
        names = list(subjects)
        times: dict[str, list[float]] = {name: [] for name in names}
        start, turn = time.perf_counter(), 0
        while turn < turns or (time.perf_counter() - start < seconds and turn < 1000):
            for i in range(len(names)):
                name = names[(turn + i) % len(names)]
                times[name].append(timed(subjects[name]))
            turn += 1
        medians = {name: statistics.median(values) for name, values in times.items()}
        ours = medians["ours"]
        common: Record = {"case": case.name, "ours_ms": ours}
        common["gb_per_s"] = case.bytes_moved / ours / 1e6 if case.bytes_moved else None
        common["share_of_copy"] = medians["copy"] / ours if "copy" in medians else None
        for peer in case.peers:
            ratios = {"ratio": medians[peer] / ours, "min_ratio": min(times[peer]) / min(times["ours"])}
            records.append(common | {"peer": peer, "peer_ms": medians[peer]} | ratios)
    return records


WIDTHS = {"case": -32, "dtype": -9, "threads": 8, "ours_ms": 9, "peer": -16, "peer_ms": 9}


def _draw(figure: Any, records: Sequence[Record]) -> None:
    """A panel for each dtype and number of threads: how many times as fast as each peer ours is."""
    panels: dict[str, dict[str, float]] = {}
    for r in records:
        ratio = r["ratio"]
        assert isinstance(ratio, float)
        panels.setdefault(f"{r['dtype']}, threads: {r['threads']}", {})[f"{r['case']} / {r['peer']}"] = ratio
    draw_bars(figure, panels, "times as fast as the peer", mark=1.0)


def main(cases_factory: Callable[[str, torch.dtype], list[Case]]) -> None:
    parser = argparse.ArgumentParser(description="Times our operators against their peers.")
    parser.add_argument("--threads", help="thread counts, CPU only (default: 1,2; --quick: 1)")
    parser.add_argument("--dtype", help="default: float32; --full: float32,bfloat16")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--seconds", type=float, help="time spent on each case (default: 0.4; --full: 2; --quick: 0)")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    add_options(parser)
    args = parser.parse_args()
    seconds = args.seconds if args.seconds is not None else 0.0 if args.quick else 2.0 if args.full else 0.4
    counts = [int(t) for t in (args.threads or ("1" if args.quick else "1,2")).split(",")]
    dtypes = (args.dtype or ("float32,bfloat16" if args.full else "float32")).split(",")
    run_stamp = stamp(args.device)
    print(", ".join(f"{key} {value}" for key, value in run_stamp.items()))
    records: list[Record] = []
    for threads in counts if args.device == "cpu" else [torch.get_num_threads()]:
        torch.set_num_threads(threads)
        for dtype in dtypes:
            for case in [c for c in cases_factory(args.device, getattr(torch, dtype)) if args.only in c.name]:
                for record in run([case], args.device, seconds, turns=2 if args.quick else 10 if args.full else 4):
                    record = {"dtype": dtype, "threads": threads} | record
                    if not records:
                        print(line({key: key for key in record}, WIDTHS))
                    print(line(record, WIDTHS), flush=True)
                    records.append(record)
    if args.csv and records:
        script = Path(inspect.getfile(cases_factory)).stem
        write(args.csv, script, run_stamp, records, lambda figure: _draw(figure, records))
