"""Times our operators against their peers: check first, warm up, interleave, report ratios.

A benchmark gives `main` a function `cases_factory(device, dtype, size) -> list[Case]`, size being the bytes of its
largest activation. Every callable of a case does the same work (forward, backward, or both) and returns its results.
Ratios are peer / ours: above 1 means that ours is faster. "min" columns are the ratio of the fastest repeats, which a
busy machine disturbs least. On a GPU the time is the device's alone: the L2 cache is cold, and the whole call queued
before it starts.

    python -m benchmarks.kernels.bench_norm --threads 1,2 --dtype float32,bfloat16 --device cpu --csv
    python -m benchmarks.kernels.bench_norm --device cuda --dtype bfloat16 --size 256
"""

import argparse
import importlib.util
import inspect
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.lib.report import Record, add_options, append, draw_bars, line, plot, stamp
from benchmarks.lib.timing import Call, TimeOnCuda, extra_bytes, time_on_cpu
from tp_ext import keep_memory

Outputs = torch.Tensor | Sequence[torch.Tensor]
Forward = Callable[..., Outputs]

# ||ours - peer|| / ||peer|| that two correct implementations stay under
TOLERANCE = {torch.float64: 1e-10, torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}
# Left out where they cannot run here, or give another result
OPTIONAL = (
    "torch.compile",
    "Liger-Kernel",
    "torchao",
    "torchao, compiled",
    "_scaled_mm alone",
    "torch int4",
    "torch int8",
)


@dataclass(frozen=True)
class Case:
    """`check` raises if results are wrong; None compares what `ours` returns with what each peer returns.

    `bytes_moved` counts each tensor that must be read or written once (0: unknown, no bandwidth is reported).
    `before` is called before each call, outside the timing. `shape` is that of the input, for the reader.
    """

    name: str
    ours: Call
    peers: Mapping[str, Call]
    check: Call | None = None
    bytes_moved: int = 0
    before: Call | None = None
    shape: tuple[int, ...] = ()


def inference(forward: Call) -> object:
    """A forward case: no graph is built."""
    with torch.no_grad():
        return forward()


def trained(forward: Forward, grad: Outputs, inputs: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """A forward + backward case: y (or several), and the gradients of ``inputs`` from that of y."""
    y = forward()
    return [*(t.detach() for t in _tensors(y)), *torch.autograd.grad(y, inputs, grad)]


def backward(forward: Forward, grad: Outputs, inputs: Sequence[torch.Tensor]) -> Call:
    """A backward case: the gradients of ``inputs``, through a graph made once, at the first call."""
    graph: list[Outputs] = []

    def call() -> object:
        if not graph:
            graph.append(forward())
        return torch.autograd.grad(graph[0], inputs, grad, retain_graph=True)

    return call


def torch_peers(eager: Forward, device: str) -> dict[str, Forward]:
    """The composition of torch's operators; on a GPU also compiled by inductor."""
    peers = {"torch eager": eager}
    if device == "cuda" and importlib.util.find_spec("triton"):
        torch._dynamo.config.recompile_limit = 256  # one function, many shapes: beyond the limit it would run eagerly
        torch._functorch.config.donated_buffer = False  # the backward case goes through one graph many times
        peers["torch.compile"] = torch.compile(eager, dynamic=False)
    return peers


def makeable(makers: Mapping[str, Callable[[], Forward]]) -> dict[str, Forward]:
    """The peers that can be made here; the output has a line for each of the others."""
    peers = {}
    for name, make in makers.items():
        try:
            peers[name] = make()
        except Exception as error:
            print(f"without {name}: {str(error).splitlines()[0] if str(error) else error!r}")
    return peers


def passes(
    name: str,
    ours: Forward,
    peers: Mapping[str, Forward],
    inputs: Sequence[torch.Tensor],
    grad: Outputs,
    moved: tuple[int, int],
    check: Call | None = None,
) -> list[Case]:
    """Forward, backward and both, as three cases. ``moved``: the bytes of forward and of backward; ``inputs``: the
    arguments of the functions, all with a gradient.
    """

    def made(forward: Forward) -> tuple[Call, Call, Call]:
        def call() -> Outputs:
            return forward(*inputs)

        return (lambda: inference(call)), backward(call, grad, inputs), (lambda: trained(call, grad, inputs))

    own, others = made(ours), {peer: made(forward) for peer, forward in peers.items()}
    shape, both = tuple(inputs[0].shape), sum(moved)
    return [
        Case(f"{name} {what}", own[i], {peer: calls[i] for peer, calls in others.items()}, check, size, None, shape)
        for i, (what, size) in enumerate(zip(("fwd", "bwd", "fwd+bwd"), (*moved, both), strict=True))
    ]


def what(name: str) -> str:
    """The pass that the case of this name measures: fwd, bwd, fwd+bwd, or "" if the name has none."""
    forward, backward = (any(word in name for word in words) for words in (("fwd", "forward"), ("bwd", "backward")))
    return "+".join(["fwd"] * forward + ["bwd"] * backward)


def _tensors(result: object) -> list[torch.Tensor]:
    if isinstance(result, torch.Tensor):
        return [result]
    return [t for item in result for t in _tensors(item)] if isinstance(result, (tuple, list)) else []


def compare(case: Case, peer: str) -> None:
    """Raises if ours and the peer return other results."""
    ours, theirs = (_tensors(_prepared(case, call)) for call in (case.ours, case.peers[peer]))
    if not ours or len(ours) != len(theirs):
        raise AssertionError(f"{case.name}: {len(ours)} tensors, {peer} returns {len(theirs)}: cannot compare")
    for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        if a.shape != b.shape or a.dtype != b.dtype:
            raise AssertionError(f"{case.name}: result {i} is {a.dtype} {a.shape}, {peer} {b.dtype} {b.shape}")
        error = ((a.double() - b.double()).norm() / b.double().norm().clamp_min(1e-30)).item()
        if not error <= TOLERANCE.get(a.dtype, 0.0):
            raise AssertionError(f"{case.name}: result {i} differs from {peer} by {error:.2e} of its norm")


def _prepared(case: Case, call: Call) -> object:
    if case.before is not None:
        case.before()
    return call()


def _checked(case: Case) -> dict[str, Call]:
    """The peers to measure; raises if ours or torch's is wrong."""
    if case.check is not None:
        case.check()
    peers = {}
    for peer, call in case.peers.items():
        try:
            compare(case, peer) if case.check is None else _prepared(case, call)
        except Exception as error:
            if peer not in OPTIONAL:
                raise
            print(f"{case.name}: without {peer}: {str(error).splitlines()[0] if str(error) else error!r}")
        else:
            peers[peer] = call
    return peers


def run(cases: Iterable[Case], device: str, seconds: float = 2.0, turns: int = 10) -> list[Record]:
    """Checks and measures each case for about `seconds`, at least `turns` times; ours and peers take turns, each round
    in another order.

    One record per case and peer: medians in ms, GB/s, on GPU the share of the speed of a copy that moves as much, and
    the most memory that ours takes in addition to its inputs.
    """
    timed = TimeOnCuda() if device == "cuda" else time_on_cpu
    records: list[Record] = []
    for case in cases:
        peers = _checked(case)
        subjects: dict[str, Call] = {"ours": case.ours, **peers}
        if device == "cuda" and case.bytes_moved:
            source = torch.empty(case.bytes_moved // 2, dtype=torch.uint8, device=device).random_()
            target = torch.empty_like(source)
            subjects["copy"] = lambda s=source, t=target: t.copy_(s)  # type: ignore[misc]
        for call in [*subjects.values()] * 3:
            timed(call, case.before)
        names = list(subjects)
        times: dict[str, list[float]] = {name: [] for name in names}
        start, turn = time.perf_counter(), 0
        while turn < turns or (time.perf_counter() - start < seconds and turn < 1000):
            order = names[turn % len(names) :] + names[: turn % len(names)]
            # Every other turn backwards: else each would always follow the same one, whose data fill the caches
            for name in reversed(order) if turn % 2 else order:
                times[name].append(timed(subjects[name], case.before))
            turn += 1
        medians = {name: statistics.median(values) for name, values in times.items()}
        ours = medians["ours"]
        shape = "x".join(map(str, case.shape))
        common: Record = {"case": case.name, "shape": shape, "bytes": case.bytes_moved, "ours_ms": ours}
        common["gb_per_s"] = case.bytes_moved / ours / 1e6 if case.bytes_moved else None
        common["copy_ms"] = medians.get("copy")
        common["share_of_copy"] = medians["copy"] / ours if "copy" in medians else None
        common["extra_bytes"] = extra_bytes(case.ours, case.before) if device == "cuda" else None
        for peer in peers or [None]:
            named: Record = {"peer": peer, "peer_ms": None, "ratio": None, "min_ratio": None}
            if peer is not None:
                ratios = medians[peer] / ours, min(times[peer]) / min(times["ours"])
                named |= {"peer_ms": medians[peer], "ratio": ratios[0], "min_ratio": ratios[1]}
            records.append(common | named)
    return records


WIDTHS = {"case": -32, "dtype": -9, "threads": 8, "ours_ms": 9, "peer": -16, "peer_ms": 9}
HIDDEN = ("shape", "bytes", "copy_ms", "extra_bytes")  # for the file alone


def _draw(figure: Any, records: Sequence[Record]) -> None:
    """A panel for each dtype and number of threads: the speed of ours relative to each peer."""
    panels: dict[str, dict[str, float]] = {}
    for r in records:
        ratio = r["ratio"]
        if not isinstance(ratio, float):  # no peer
            continue
        panels.setdefault(f"{r['dtype']}, threads: {r['threads']}", {})[f"{r['case']} / {r['peer']}"] = ratio
    if panels:
        draw_bars(figure, panels, "times as fast as the peer", mark=1.0)


def _shown(record: Record) -> Record:
    return {key: value for key, value in record.items() if key not in HIDDEN}


def main(cases_factory: Callable[..., Iterable[Case]]) -> None:
    parser = argparse.ArgumentParser(description="Times our operators against their peers.")
    parser.add_argument("--threads", help="thread counts, CPU only (default: 1,2; --quick: 1)")
    parser.add_argument("--dtype", help="default: float32; --full: float32,bfloat16")
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    parser.add_argument("--size", type=int, help="MiB of the largest activation (default: 16, on a GPU 64)")
    parser.add_argument("--seconds", type=float, help="time spent on each case (default: 0.4; --full: 2; --quick: 0)")
    parser.add_argument("--only", default="", help="run the cases whose name contains this")
    parser.add_argument("--wait-for-input", action="store_true", help="wait for a line of input before anything is run")
    add_options(parser)
    args = parser.parse_args()
    if args.wait_for_input:  # the imports are done, the device is untouched
        sys.stdin.readline()
    seconds = args.seconds if args.seconds is not None else 0.0 if args.quick else 2.0 if args.full else 0.4
    counts = [int(t) for t in (args.threads or ("1" if args.quick else "1,2")).split(",")]
    dtypes = (args.dtype or ("float32,bfloat16" if args.full else "float32")).split(",")
    size = (args.size or (64 if args.device == "cuda" else 16)) << 20
    turns = 2 if args.quick else 10 if args.full else 4
    sized = len(inspect.signature(cases_factory).parameters) == 3
    if args.device == "cpu":
        keep_memory()  # ours and the peers' tensors: else some calls wait for fresh pages, at random
    run_stamp = stamp(args.device)
    print(", ".join(f"{key} {value}" for key, value in run_stamp.items()))
    records: list[Record] = []
    failed: list[str] = []
    script = Path(inspect.getfile(cases_factory)).stem
    for threads in counts if args.device == "cpu" else [torch.get_num_threads()]:
        torch.set_num_threads(threads)
        for dtype in dtypes:
            cases = cases_factory(args.device, getattr(torch, dtype), *[size] * sized)
            for case in cases:
                if args.only not in case.name:
                    continue
                try:
                    new = [{"dtype": dtype, "threads": threads} | r for r in run([case], args.device, seconds, turns)]
                except Exception:  # the other cases are measured, too
                    traceback.print_exc(file=sys.stdout)
                    failed.append(case.name)
                    continue
                for record in new:
                    if not records:
                        print(line({key: key for key in _shown(record)}, WIDTHS))
                    print(line(_shown(record), WIDTHS), flush=True)
                    records.append(record)
                if args.csv:  # at once: what comes next may hang, or be ended
                    append(args.csv, script, run_stamp, new)
    if args.csv and records:
        plot(args.csv, script, run_stamp, lambda figure: _draw(figure, records))
    if failed:
        sys.exit(f"FAILED: {', '.join(failed)}")
