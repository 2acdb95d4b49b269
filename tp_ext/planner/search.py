"""The search for the fastest layout that fits, or the one that needs least memory."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields
from typing import Any

from tp_ext._build import load
from tp_ext._checks import check_choice, check_int
from tp_ext.parallel.schedules import SCHEDULES
from tp_ext.planner.actions import library_schedule
from tp_ext.planner.core import layout_from, layout_of, machine_of, workload_of
from tp_ext.planner.layout import Layout
from tp_ext.planner.machine import Cluster
from tp_ext.planner.prediction import GIB, Prediction, prediction_of
from tp_ext.planner.workload import Workload

_SEARCHED = ("pp", "dp", "ep", "cp", "tp", "micro_batch", "zero", "sequence_parallel", "offload", "overlap_tp")
_MAX_REJECTED = 1000
_SCHEDULES = (("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 4), ("ZBVZeroBubble", 2))
_LARGEST_MICRO_BATCH = 16


class Found(list[Prediction]):
    """The best layouts, the best one first.

    Attributes:
        rejected: of layouts that do not fit the reason, ``"needs 91.3 GiB of 80"``, at most 1000, the nearest first.
        count: number of layouts that were ranked. cluster, global_batch: for which.
    """

    def __init__(
        self, best: Sequence[Prediction], rejected: dict[Layout, str], count: int, search: "_LayoutSearch"
    ) -> None:
        super().__init__(best)
        self.rejected, self._search = rejected, search
        self.cluster, self.global_batch = search.cluster, search.global_batch
        self.count: int = count  # type: ignore[assignment]

    def space(self) -> Iterator[Layout]:
        """Yields the legal layouts, all that were ranked."""
        yield from self._search.layouts()


class _LayoutSearch:
    """The values that are searched over."""

    def __init__(self, workload: Workload, cluster: Cluster, global_batch: int, fixed: Mapping[str, Any]) -> None:
        self.workload, self.cluster, self.global_batch = workload, cluster, global_batch
        names = {field.name for field in fields(Layout)}
        self.values: dict[str, list[Any]] = {}
        for name, value in fixed.items():
            if name not in names:
                raise ValueError(f"fixed: {name!r} must be one of {', '.join(sorted(names))}")
            values = list(value) if isinstance(value, list | tuple | set | range) else [value]
            if not values:
                raise ValueError(f"fixed: {name!r} must have at least one value")
            for value in values:  # each value by itself
                if name not in ("virtual", "schedule"):
                    Layout(**{name: value})
            self.values[name] = list(dict.fromkeys(values))
        divisors = _divisors(cluster.count)
        self.values.setdefault("pp", [size for size in divisors if size <= workload.layers])
        self.values.setdefault("tp", [size for size in divisors if size <= max(1, workload.heads)])
        self.values.setdefault("cp", [size for size in divisors if size <= workload.seq])
        self.values.setdefault("ep", [size for size in divisors if size <= max(1, workload.experts)])
        self.values.setdefault("micro_batch", _micro_batches(global_batch))
        self.values.setdefault("zero", [0, 1, 2, 3])
        self.values.setdefault("recompute", [None, "selective", "full"])
        for name, default in (("sequence_parallel", True), ("offload", False), ("overlap_tp", False)):
            self.values.setdefault(name, [default])
        defaults = Layout()
        self.dtypes = list(
            itertools.product(
                *(self.values.get(n, [getattr(defaults, n)]) for n in ("dtype", "param_dtype", "grad_dtype"))
            )
        )
        for dtype, _, _ in self.dtypes:
            cluster.device.flops(dtype)
        if None in self.values.get("dp", []):  # what remains is any
            del self.values["dp"]

    def spaces(self) -> Iterator[tuple[tuple[str, str, str], Any]]:
        """Yields the spaces of the library, one for each dtype."""
        planner = load().planner
        for dtypes in self.dtypes:
            space = planner.Space()
            for name in _SEARCHED:
                setattr(space, name, self.values.get(name, []))
            space.recompute = [getattr(planner.Recompute, mode or "none") for mode in self.values["recompute"]]
            space.schedules = self._schedules()
            dtype, param_dtype, grad_dtype = dtypes
            space.base = layout_of(Layout(dp=1, dtype=dtype, param_dtype=param_dtype, grad_dtype=grad_dtype))
            yield dtypes, space

    def _schedules(self) -> list[tuple[str, int]]:
        """Returns the schedules with their numbers of stages, first one that a single stage takes, too."""
        if "schedule" not in self.values and "virtual" not in self.values:
            return list(_SCHEDULES)
        schedules = []
        names = self.values.get("schedule", list(dict.fromkeys(name for name, _ in _SCHEDULES)))
        for name, virtual in itertools.product(names, self.values.get("virtual", [1, 2, 4])):
            check_choice(SCHEDULES, schedule=name)
            check_int(least=1, virtual=virtual)
            name = "Interleaved1F1B" if name == "1F1B" and virtual > 1 else name
            known = SCHEDULES[name]
            if virtual == 2 if known.v else known.looped if virtual > 1 else name not in ("Interleaved1F1B",):
                schedules.append((name, virtual))
        return list(dict.fromkeys(sorted(schedules, key=lambda pair: pair[1])))

    def layouts(self) -> Iterator[Layout]:
        """Yields the legal layouts."""
        for dtypes, space in self.spaces():
            layouts = load().planner.legal_layouts(
                space, workload_of(self.workload), self.cluster.count, self.global_batch
            )
            yield from (layout_from(layout, dtypes) for layout in layouts)


def _divisors(number: int) -> list[int]:
    return [divisor for divisor in range(1, number + 1) if number % divisor == 0]


def _micro_batches(global_batch: int) -> list[int]:
    sizes = range(1, min(global_batch, _LARGEST_MICRO_BATCH) + 1)
    return [size for size in sizes if size & (size - 1) == 0 or global_batch % size == 0]


def search(
    workload: Workload,
    cluster: Cluster,
    global_batch: int,
    *,
    fixed: Mapping[str, Any] | None = None,
    objective: str = "step_time",
    top: int = 10,
) -> Found:
    """Ranks all legal layouts; the best first, only those that fit.

    Complete over what the library runs: uneven sizes are legal, and cost what the largest share costs. Searched over
    are, where ``fixed`` has no other: all pp, dp, ep, cp and tp; the schedules 1F1B, Interleaved1F1B (2 and 4 stages a
    rank) and ZBVZeroBubble; ``micro_batch`` the powers of two and the divisors of the batch up to 16; ``zero`` 0 to 3;
    ``recompute`` None, ``"selective"`` and ``"full"``; of the others their defaults. Ties go to the smaller peak, then
    to fewer ranks in tp, pp and cp.

    A layout is simulated only if a lower bound of its time, that no rank is faster than all of its work, does not
    exceed the time of the last of the best.

    Args:
        fixed: names of :class:`Layout` -> a value, or a list of values to search over.
        objective: ``"step_time"`` or ``"memory"``, the largest peak of a rank.
        top: number of results.

    Communicates nothing.

    Raises:
        TypeError, ValueError: another objective, a name in ``fixed`` that no layout has, a value out of its range.
    """
    for name, value, kind in (("workload", workload, Workload), ("cluster", cluster, Cluster)):
        if not isinstance(value, kind):
            raise TypeError(f"{name}: {type(value).__name__} must be a {kind.__name__}")
    check_int(least=1, global_batch=global_batch, top=top)
    check_choice(("step_time", "memory"), objective=objective)
    if fixed is not None and not isinstance(fixed, Mapping):
        raise TypeError(f"fixed: {type(fixed).__name__} must be a dict of names of Layout")
    asked = _LayoutSearch(workload, cluster, global_batch, fixed or {})
    best: list[Prediction] = []
    rejected: list[tuple[float, Layout]] = []
    count = 0
    for dtypes, space in asked.spaces():
        machine = machine_of(cluster, dtypes[0])
        result = load().planner.search(
            space,
            workload_of(workload),
            machine,
            global_batch,
            library_schedule,
            objective == "memory",
            top,
            _MAX_REJECTED,
        )
        best += [
            prediction_of(candidate, workload, cluster, layout_from(candidate.layout, dtypes), global_batch)
            for candidate in result.best
        ]
        rejected += [(candidate.peak, layout_from(candidate.layout, dtypes)) for candidate in result.rejected]
        count += result.count
    best.sort(key=lambda prediction: _key(prediction, objective))
    rejected.sort(key=lambda pair: pair[0])
    # Of the whole memory, as it is sold: what a device keeps to itself is needed, too
    device, kept = cluster.device.memory / GIB, cluster.device.reserve
    nearest = rejected[:_MAX_REJECTED]
    reasons = {layout: f"needs {(peak + kept) / GIB:.1f} GiB of {device:.0f}" for peak, layout in nearest}
    return Found(best[:top], reasons, count, asked)


def _key(prediction: Prediction, objective: str) -> tuple[float, ...]:
    peak, layout = max(memory.peak for memory in prediction.memory), prediction.layout
    first = (prediction.step_time, peak) if objective == "step_time" else (peak, prediction.step_time)
    return (*first, layout.tp, layout.pp, layout.cp)
