"""The prediction of one step of a layout: its time by cause, collectives, memory, and pictures of it."""

import json
import os
from dataclasses import dataclass
from typing import Any, NamedTuple

from tp_ext._checks import check_int, check_path, check_type
from tp_ext.parallel.schedules import SCHEDULES, check_microbatches
from tp_ext.planner.core import dtypes_of, layout_of, planner_of
from tp_ext.planner.layout import Layout
from tp_ext.planner.machine import Cluster
from tp_ext.planner.pipeline import PHASES, Timeline, simulate_pipeline
from tp_ext.planner.workload import Workload

GIB = 2**30


class CollectiveRow(NamedTuple):
    """Equal collectives of one rank in one step, counted as :func:`tp_ext.debug.count_collectives` does.

    Attributes:
        axis: ``tp``, ``cp``, ``ep``, ``dp`` (all data axes together) or ``pp``. kind, size: of the collective and its
            group. number: of calls. payload: bytes of one. payload_bytes, wire_bytes: of all. time: seconds of all of
            them alone, exposed: those in which nothing else runs.
    """

    axis: str
    kind: str
    size: int
    number: float
    payload: float
    payload_bytes: float
    wire_bytes: float
    time: float
    exposed: float


class StageMemory(NamedTuple):
    """Bytes of a rank of one index along pp.

    Attributes:
        parameters, gradients, states: what it keeps of them, by the stage of ZeRO. activations: at the peak, of all
            microbatches in flight. buffers: cast and gathered weights, unsharded gradients. logits: with their
            gradient. peak: at most their sum.
    """

    parameters: float
    gradients: float
    states: float
    activations: float
    buffers: float
    logits: float
    peak: float


@dataclass(frozen=True, repr=False)
class Prediction:
    """The prediction of one step: forward, backward and optimizer.

    Attributes:
        workload, layout, global_batch: what was predicted, with ``dp`` resolved. cluster: on what.
        step_time: seconds. breakdown: seconds by cause, mean over the ranks of a pipeline; their sum is the step time.
        collectives, memory: of each index along pp, those of one rank; where shares or devices of the ranks of tp
            differ, the memory of each of them, and the collectives of the slowest.
        stages: seconds of forward, input gradient and weight gradient of one microbatch in each stage. send: seconds
            of a message between stages.
    """

    workload: Workload
    cluster: Cluster
    layout: Layout
    global_batch: int
    step_time: float
    breakdown: dict[str, float]
    collectives: tuple[tuple[CollectiveRow, ...], ...]
    memory: tuple[StageMemory | tuple[StageMemory, ...], ...]
    stages: tuple[tuple[float, float, float], ...]
    send: float

    def __hash__(self) -> int:
        return hash((self.layout, self.global_batch, self.step_time))  # not the dict of seconds, which has none

    @property
    def mfu(self) -> float:
        """The FLOPs of the model by those of all devices at the peak of the layout's dtype in the step."""
        flops = self.workload.flops(self.global_batch * self.workload.seq)
        peaks = [of_rank.device.flops(self.layout.dtype) for of_rank in self.cluster.of_ranks]
        return flops / (self.step_time * self.layout.ranks * sum(peaks) / len(peaks))

    @property
    def tokens_per_second(self) -> float:
        """The tokens of a step over its seconds, of all devices together."""
        return self.global_batch * self.workload.seq / self.step_time

    @property
    def shortfall(self) -> float:
        """Bytes that the rank lacks that lacks most; 0 if it fits."""
        return max(0.0, self._short[0])

    @property
    def fits(self) -> bool:
        """True if the peak of every rank is at most the memory of its device minus its reserve."""
        return self.shortfall == 0

    @property
    def memory_of_ranks(self) -> tuple[tuple[StageMemory, ...], ...]:
        """``memory`` by stage and by rank of tp, also where these are alike and have one."""
        return tuple((stage,) if isinstance(stage, StageMemory) else stage for stage in self.memory)

    @property
    def _short(self) -> tuple[float, int, int]:
        """Bytes that a rank lacks, below 0 if it has some left, the stage and the rank: of the one that lacks most."""
        devices = [of_rank.device for of_rank in self.cluster.of_ranks]
        limits = [device.memory - device.reserve for device in devices]
        return max(
            (
                (memory.peak - limits[rank % len(limits)], stage, rank)
                for stage, ranks in enumerate(self.memory_of_ranks)
                for rank, memory in enumerate(ranks)
            ),
            key=lambda row: row[0],
        )

    def timeline(self) -> Timeline:
        """Returns the simulated passes of the step, a row for each index along pp."""
        layout, microbatches = self.layout, self.layout.microbatches(self.global_batch)
        schedule, virtual = (layout.torch_schedule, layout.virtual) if layout.pp > 1 else ("1F1B", 1)
        forward, input_grad, weight_grad = (list(times) for times in zip(*self.stages, strict=True))
        return simulate_pipeline(
            schedule,
            layout.pp,
            microbatches,
            virtual=virtual,
            forward=forward,
            input_grad=input_grad,
            weight_grad=weight_grad,
            send=self.send,
        )

    def draw(self, path: str | os.PathLike[str]) -> None:
        """Draws the step, a row for each stage, as :func:`tp_ext.debug.record_timeline` does of a measured one."""
        self.timeline().draw(path, f"{self.layout}: {self.step_time:.4g} s, predicted")

    def trace(self, path: str | os.PathLike[str]) -> None:
        """Writes the step as JSON of Chrome's traces, which https://ui.perfetto.dev opens.

        Raises:
            TypeError: ``path`` is no path.
        """
        check_path(path=path)
        events: list[dict[str, Any]] = []
        for rank, rows in enumerate(self.timeline().rows):
            events.append({"ph": "M", "pid": 0, "tid": rank, "name": "thread_name", "args": {"name": f"stage {rank}"}})
            for action, start, end in rows:
                kind = PHASES[next(letter for letter in action if letter in PHASES)]
                when = {"ts": 1e6 * start, "dur": 1e6 * (end - start)}
                events.append({"ph": "X", "pid": 0, "tid": rank, "name": action, "cat": kind, **when})
        with open(path, "w") as file:
            json.dump({"traceEvents": events}, file)

    def __str__(self) -> str:
        state = "fits" if self.fits else self.why()
        names = " / ".join(dict.fromkeys(of_rank.device.name for of_rank in self.cluster.of_ranks))
        lines = [
            f"{self.workload.name} on {self.layout.ranks} {names}, {self.layout}: "
            f"{self.step_time:.4g} s a step, {self.tokens_per_second / self.layout.ranks:,.0f} tokens a second and "
            f"device, MFU {self.mfu:.1%}, {state}",
            "  ".join(f"{name} {seconds / self.step_time:.1%}" for name, seconds in self.breakdown.items() if seconds),
            "stage " + " ".join(f"{name:>12}" for name in StageMemory._fields) + "   GiB",
        ]
        for index, ranks in enumerate(self.memory_of_ranks):
            for rank, memory in enumerate(ranks):
                label = f"{index}" if len(ranks) == 1 else f"{index}.{rank}"
                lines.append(f"{label:>5} " + " ".join(f"{size / GIB:12.2f}" for size in memory))
        return "\n".join(lines)

    __repr__ = __str__

    def why(self) -> str:
        """Returns why it does not fit: ``"short by 12.4 GiB on stage 0: activations 31.2, states 40.1, .."``, with the
        rank of tp where these differ."""
        if self.fits:
            return "fits"
        _, index, rank = self._short
        ranks = self.memory_of_ranks[index]
        sizes = sorted(ranks[rank]._asdict().items(), key=lambda item: -item[1])
        parts = ", ".join(f"{name} {size / GIB:.1f}" for name, size in sizes if name != "peak" and size)
        return f"short by {self.shortfall / GIB:.1f} GiB on stage {index}{f', rank {rank}' * (len(ranks) > 1)}: {parts}"


def check_layout(workload: Workload, cluster: Cluster, layout: Layout, global_batch: int) -> Layout:
    """Returns the layout with ``dp`` resolved.

    Raises:
        TypeError, ValueError: values of other types; ranks that are not those of the cluster; what the model or the
            schedule cannot be cut into.
    """
    check_type(Workload, "a Workload", workload=workload)
    check_type(Cluster, "a Cluster", cluster=cluster)
    check_type(Layout, "a Layout", layout=layout)
    check_int(least=1, global_batch=global_batch)
    for of_rank in cluster.of_ranks:
        of_rank.device.flops(layout.dtype)
    if cluster.devices and layout.tp != len(cluster.devices):
        raise ValueError(f"tp: {layout.tp} must be the number of devices of the cluster, {len(cluster.devices)}")
    layout = layout.resolve(cluster.count)
    assert layout.dp is not None
    limits = {
        "tp": (layout.tp, max(1, workload.heads), "heads"),
        "pp virtual": (layout.pp * layout.virtual, workload.layers + 2, "layers + 2"),
        "cp": (layout.cp, workload.seq, "seq"),
        "ep": (layout.ep, max(1, workload.experts), "experts"),
        "dp ep": (layout.dp * layout.ep, global_batch, "global_batch"),
        "micro_batch": (layout.micro_batch, global_batch, "global_batch"),
    }
    for name, (value, limit, what) in limits.items():
        if value > limit:
            raise ValueError(f"{name}: {value} must be at most {what}, {limit}")
    if 0 < workload.kv_heads < layout.tp and layout.tp % workload.kv_heads:
        raise ValueError(f"tp: {layout.tp} must be a multiple of kv_heads, {workload.kv_heads}, which are fewer")
    _check_shares(workload, layout)
    if layout.pp > 1:
        _check_pipeline(layout, global_batch)
    return layout


def _check_shares(workload: Workload, layout: Layout) -> None:
    if layout.shares is None or len(set(layout.shares)) == 1:
        return
    for name, value in (("cp", layout.cp), ("ep", layout.ep)):
        if value > 1:
            raise ValueError(f"{name}: {value} must be 1 with unequal shares")
    if 0 < workload.kv_heads < layout.tp:
        raise ValueError(f"kv_heads: {workload.kv_heads} must be at least tp, {layout.tp}, with unequal shares")


def _check_pipeline(layout: Layout, global_batch: int) -> None:
    schedule = SCHEDULES[layout.torch_schedule]
    check_microbatches(schedule, layout.microbatches(global_batch), layout.pp, layout.pp * layout.virtual)
    if schedule.splits and layout.recompute:
        raise ValueError(
            f"recompute: {layout.recompute!r} must be None with {schedule.name}, which splits the backward"
        )


def predict(workload: Workload, cluster: Cluster, layout: Layout, global_batch: int) -> Prediction:
    """Predicts one step of a layout: forward, backward and optimizer.

    The passes of a pipeline are simulated (:func:`simulate_pipeline`); kernels cost the larger of FLOPs by what the
    device reaches and the host's launch, memory-bound ones their bytes; collectives alpha and beta of the slowest level
    that they cross, by ring or tree, less the computation that runs during them. The formulas:
    docs/reference/planner.md.

    Args:
        workload, cluster, layout: what, on what, and how; ``layout.dp`` None is what remains.
        global_batch: sequences of a step, of all data ranks.

    Communicates nothing.

    Raises:
        TypeError, ValueError: see :func:`check_layout`.
    """
    layout = check_layout(workload, cluster, layout, global_batch)
    result = planner_of(workload, cluster, dtypes_of(layout), global_batch).predict(layout_of(layout))
    return prediction_of(result, workload, cluster, layout, global_batch)


def prediction_of(result: Any, workload: Workload, cluster: Cluster, layout: Layout, global_batch: int) -> Prediction:
    """Returns the prediction of the library as values."""
    return Prediction(
        workload=workload,
        cluster=cluster,
        layout=layout,
        global_batch=global_batch,
        step_time=result.step_time,
        breakdown=result.breakdown,
        collectives=tuple(tuple(CollectiveRow(*row) for row in rows) for rows in result.collectives),
        memory=tuple(
            StageMemory(*ranks[0]) if len(ranks) == 1 else tuple(StageMemory(*rank) for rank in ranks)
            for ranks in result.memory
        ),
        stages=tuple(result.stages),
        send=result.send,
    )
