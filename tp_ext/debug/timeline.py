"""The timeline of a step: when each rank computes, when it communicates, and when it is idle.

``with tp_ext.debug.record_timeline() as timeline: ...; timeline.save("step.png")``.
"""

import importlib
import json
import os
import re
import tempfile
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed import ProcessGroup
from torch.profiler import ProfilerActivity, profile

from tp_ext._build import load
from tp_ext._object_collectives import all_gather_objects

PHASES = ("forward", "backward", "weight gradient", "optimizer")
COMMUNICATION = "communication"
_PHASE = re.compile(r"(forward|backward|weight gradient)\b")
_OPTIMIZER = re.compile(r"Optimizer\.step#(\w+)")
_WORK = re.compile(r"(?:gloo|tp_shm|mpi|ucc):(\w+)$")
_KERNEL = re.compile(r"nccl(?:DevKernel|Kernel)_(\w+?)(?:_|$)")
_COLORS = {
    "forward": "#4878cf",
    "backward": "#6acc65",
    "weight gradient": "#b8860b",
    "optimizer": "#956cb4",
    COMMUNICATION: "#d65f5f",
}
_LANES = {"phases": (0.08, 0.44), COMMUNICATION: (0.54, 0.18), "messages": (0.74, 0.18)}  # of a row: top, height
_MESSAGES = ("send", "recv")
_MEBIBYTE = 2**20

Event = dict[str, Any]
"""An event of a Chrome trace, as the profiler writes them: times in us."""
Call = tuple[str, str, int]
"""An operator that communicates, the kind of its collective, and the payload in bytes."""


class Span(NamedTuple):
    """A time in which a rank computes a phase of a step, or a collective or message of it is under way."""

    kind: str
    """``"forward"``, ``"backward"``, ``"weight gradient"``, ``"optimizer"`` or ``"communication"``."""
    name: str
    """The name of the range, ``forward 2 of stage 1``, or the kind of collective, ``all_reduce``."""
    begin: float
    """In seconds since the first span of any rank."""
    end: float
    """In seconds since the first span of any rank."""
    size: int = 0
    """The payload of a collective or message in bytes, see :func:`count_collectives`; 0 for phases."""


class Timeline:
    """The spans of all ranks, from :func:`record_timeline`.

    Attributes:
        ranks: of each rank its spans, in order of their begin; empty inside of the block.
    """

    def __init__(self) -> None:
        self.ranks: list[list[Span]] = []

    @property
    def seconds(self) -> float:
        """The time from the first begin to the last end of any rank."""
        return max((span.end for spans in self.ranks for span in spans), default=0.0)

    def idle(self, rank: int) -> float:
        """Returns the share of the time in which the rank is in no phase; collectives within phases are computation."""
        busy, until = 0.0, 0.0
        # Phases may lie within each other, and a time counts once
        for span in self._spans(rank):
            if span.kind != COMMUNICATION and span.end > until:
                busy += span.end - max(span.begin, until)
                until = span.end
        return 1 - busy / self.seconds if self.seconds else 0.0

    def communicated(self, rank: int) -> int:
        """Returns the bytes of all collectives and messages of the rank."""
        return sum(span.size for span in self._spans(rank))

    def _spans(self, rank: int) -> list[Span]:
        if not isinstance(rank, int) or not 0 <= rank < len(self.ranks):
            raise ValueError(f"rank: {rank!r} must be one of the {len(self.ranks)} ranks, in [0, {len(self.ranks)})")
        return self.ranks[rank]

    def save(self, path: str | os.PathLike[str], title: str = "") -> None:
        """Draws a picture: a row for each rank, its phases above, below them its collectives, then its messages, in the
        format of the suffix, such as ``.png`` or ``.svg``.

        Communicates nothing; one rank is enough.

        Raises:
            ImportError: no matplotlib. RuntimeError: the block of :func:`record_timeline` has not ended.
        """
        if not self.ranks:
            raise RuntimeError("save: must come after the block of record_timeline")
        try:
            drawing = importlib.import_module("matplotlib.figure")
        except ImportError as error:
            raise ImportError("save: matplotlib must be installed: pip install matplotlib") from error
        seconds, legend = self.seconds, set[str]()
        figure = drawing.Figure(figsize=(12, 1.2 + 0.7 * len(self.ranks)))
        axes = figure.add_subplot()
        for rank, spans in enumerate(self.ranks):
            bars: dict[tuple[str, str], list[tuple[float, float]]] = {}  # of a lane and kind: begin and length, in ms
            labelled = dict.fromkeys(_LANES, 0.0)  # lane -> the end of the last span with a text
            for span in spans:
                lane = "messages" if span.name in _MESSAGES else span.kind if span.kind == COMMUNICATION else "phases"
                bars.setdefault((lane, span.kind), []).append((1e3 * span.begin, 1e3 * (span.end - span.begin)))
                # Texts are wider than short spans, and would cover each other
                if span.begin >= labelled[lane] and (text := _label(span, seconds)):
                    labelled[lane] = span.end
                    x, y = 1e3 * (span.begin + span.end) / 2, rank + _LANES[lane][0] + _LANES[lane][1] / 2
                    axes.text(x, y, text, ha="center", va="center", fontsize=6, clip_on=True)
            for (lane, kind), of_kind in bars.items():
                axes.broken_barh(
                    of_kind,
                    (rank + _LANES[lane][0], _LANES[lane][1]),
                    facecolor=_COLORS[kind],
                    edgecolor="white",
                    linewidth=0.3,
                    label=None if kind in legend else kind,
                )
                legend.add(kind)
            share = f"idle {self.idle(rank):.0%}\n{self.communicated(rank) / _MEBIBYTE:,.1f} MiB"
            axes.text(1e3 * seconds * 1.01, rank + 0.5, share, va="center", fontsize=7)
        axes.set(xlim=(0, 1e3 * seconds), ylim=(len(self.ranks), 0), xlabel="ms", title=title)
        axes.set_yticks([rank + 0.5 for rank in range(len(self.ranks))], [f"rank {k}" for k in range(len(self.ranks))])
        axes.legend(loc="upper center", bbox_to_anchor=(0.5, -0.35 / (0.5 + 0.35 * len(self.ranks))), ncols=5)
        figure.savefig(path, dpi=120, bbox_inches="tight")


@contextmanager
def record_timeline(process_group: ProcessGroup | None = None) -> Iterator[Timeline]:
    """Records when each rank computes and communicates in a ``with`` block, of one step for example.

    ::

        with tp_ext.debug.record_timeline() as timeline:
            run.step(inputs, target)
            optimizer.step()
        if dist.get_rank() == 0:
            timeline.save("step.png")

    It uses ``torch.profiler``. Phases are ranges whose names begin with ``forward``, ``backward`` or ``weight
    gradient``, which :class:`tp_ext.parallel.ParallelRun` and the schedules of
    :func:`tp_ext.parallel.pipeline_stages` make, and your own loop with ``torch.profiler.record_function("forward")``;
    and the ``step`` of torch's optimizers. Communication lasts from the call to its completion, so a rank that waits
    for another one is in it. On CUDA it is that of NCCL's kernels, and a phase lasts from the first to the last of the
    kernels that were launched in it.

    The clocks of several hosts are taken to agree. Recording costs some microseconds for each operator.

    Args:
        process_group: the ranks that record; None stands for all.

    Yields:
        :class:`Timeline`, filled at the end of the block, on all ranks.

    Communicates: a barrier before the block, an exchange of the spans after it. Every rank must reach the end; after
    an exception nothing is communicated.

    Raises:
        RuntimeError: another profiler runs at the begin, or ran in the block; torch has one at a time.
    """
    if torch._C._autograd._profiler_enabled():
        raise RuntimeError("record_timeline: must not be called while a profiler runs, which it would end")
    if process_group is not None and not isinstance(process_group, ProcessGroup):
        raise TypeError(f"process_group: {process_group!r} must be a ProcessGroup or None")
    timeline = Timeline()
    cuda = torch.cuda.is_available() and torch.cuda.is_initialized()
    if not cuda:
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler reports that there is no GPU
    # Ranks that come later than others would show as time in the first collective
    if dist.is_initialized():
        dist.barrier(process_group)
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if cuda else [])]
    library = load()
    counter = library.open_counter(True)
    try:
        profiled = profile(activities=activities)
        profiled.start()
        try:
            yield timeline
            if cuda:
                torch.cuda.synchronize()
            if not torch._C._autograd._profiler_enabled():
                raise RuntimeError(
                    "record_timeline: another profiler must not run in the block, since it ends this one"
                )
        finally:
            if torch._C._autograd._profiler_enabled():  # else torch reads results that are not there
                profiled.stop()
        calls = [(op, kind, payload) for _, _, kind, payload, _, _, op in library.read_calls(counter)]
    finally:
        library.close_counter(counter)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json"
        profiled.export_chrome_trace(str(file))
        own = spans_of_trace(json.loads(file.read_text()), calls)
    everyone = all_gather_objects(own, process_group)
    first = min((spans[0].begin for spans in everyone if spans), default=0.0)
    timeline.ranks = [
        [span._replace(begin=span.begin - first, end=span.end - first) for span in spans] for spans in everyone
    ]


def spans_of_trace(trace: dict[str, Any], calls: Iterable[Call]) -> list[Span]:
    """Returns the spans in a Chrome trace of ``torch.profiler``, in order of their begin; in seconds since 1970.

    Args:
        calls: of this process, in the order of their issue.
    """
    events = [event for event in trace["traceEvents"] if event.get("ph") == "X"]
    phases = [found for event in events if (found := _phase_of(event)) is not None]
    kernels = [event for event in events if event.get("cat") in ("kernel", "gpu_memcpy", "gpu_memset")]
    # With kernels the host's own times are those of launches
    if kernels:
        spans = [*_phases_of_kernels(phases, kernels, events), *_collectives_of_kernels(kernels)]
    else:
        spans = [*phases, *_collectives_of_host(events, calls)]
    zero = trace.get("baseTimeNanoseconds", 0) / 1e9
    scaled = [span._replace(begin=zero + span.begin / 1e6, end=zero + span.end / 1e6) for span in spans]
    return sorted(scaled, key=lambda span: (span.begin, -span.end))


def _phase_of(event: Event) -> Span | None:
    """Returns the span of a range of the host; None for one of another kind."""
    name = str(event["name"])
    if event.get("cat") != "user_annotation":
        return None
    if found := _PHASE.match(name):
        return Span(found[1], name, *_times(event))
    if found := _OPTIMIZER.match(name):
        return Span("optimizer", found[1], *_times(event))
    return None


def _times(event: Event) -> tuple[float, float]:
    begin = float(event["ts"])
    return begin, begin + float(event["dur"])


def _collectives_of_host(events: list[Event], calls: Iterable[Call]) -> Iterator[Span]:
    """Yields the collectives from the begin of their operator to the end of the work that it issues."""
    # The profiler knows no sizes: they are those of our counter, whose calls of an operator come in the same order
    issued: dict[str, deque[Call]] = defaultdict(deque)
    for call in calls:
        issued[call[0]].append(call)
    works = [(*_times(event), found[1]) for event in events if (found := _WORK.match(str(event["name"])))]
    works.sort()
    for event in sorted(events, key=_times):
        if event.get("cat") == "cpu_op" and (waiting := issued.get(str(event["name"]))):
            _, kind, payload = waiting.popleft()
            begin, end = _times(event)
            # gloo's work begins when a thread takes it; its reduce-scatter is an all-reduce
            kinds = (kind, "all_reduce") if kind == "reduce_scatter" else (kind,)
            work = next((work for work in works if work[0] >= begin and work[2] in kinds), None)
            if work is not None:
                works.remove(work)
            yield Span(COMMUNICATION, kind, begin, end if work is None else max(end, work[1]), payload)


def _phases_of_kernels(phases: Iterable[Span], kernels: list[Event], events: list[Event]) -> Iterator[Span]:
    """Yields the phases as long as the kernels that the host launched in them."""
    launched = {
        event["args"]["correlation"]: float(event["ts"])
        for event in events
        if event.get("cat") in ("cuda_runtime", "cuda_driver") and "correlation" in event.get("args", {})
    }
    computing = [
        (launched[correlation], float(kernel["ts"]), float(kernel["ts"]) + float(kernel["dur"]))
        for kernel in kernels
        if not _KERNEL.match(str(kernel["name"]))
        and (correlation := kernel.get("args", {}).get("correlation")) in launched
    ]
    for phase in phases:
        own = [(begin, end) for launch, begin, end in computing if phase.begin <= launch <= phase.end]
        if own:
            yield phase._replace(begin=min(begin for begin, _ in own), end=max(end for _, end in own))


def _collectives_of_kernels(kernels: list[Event]) -> Iterator[Span]:
    for kernel in kernels:
        if found := _KERNEL.match(str(kernel["name"])):
            args, begin = kernel.get("args", {}), float(kernel["ts"])
            size = int(args.get("In msg nelems", 0)) * _element_size(str(args.get("dtype", "")))
            name = str(args.get("Collective name", found[1]))
            yield Span(COMMUNICATION, name, begin, begin + float(kernel["dur"]), size)


def _element_size(dtype: str) -> int:
    """Returns the bytes of an element of NCCL's metadata, ``Float``, ``BFloat16``; 0 if unknown."""
    sizes = {"Byte": 1, "Char": 1, "Bool": 1, "Short": 2, "Half": 2, "BFloat16": 2, "Int": 4, "Float": 4}
    return (sizes | {"Long": 8, "Double": 8, "Float8_e4m3fn": 1, "Float8_e5m2": 1}).get(dtype, 0)


def _label(span: Span, seconds: float) -> str:
    """Returns the text in a span of a picture; none in one that is too short for it."""
    text = span.name.split(" of ")[0].replace(span.kind, "").strip()
    if span.kind == COMMUNICATION:
        text = f"{span.name} {_figure(span.size)}"
    return text if (span.end - span.begin) / seconds > 0.009 * len(text) else ""


def _figure(size: int) -> str:
    return f"{size / _MEBIBYTE:,.1f} MiB" if size >= _MEBIBYTE else f"{size / 1024:,.1f} KiB"
