"""The search for the fastest layout that fits, or the one that needs least memory."""

import dataclasses
import itertools
import numbers
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from tp_ext._build import load
from tp_ext._checks import check_choice, check_int, check_type
from tp_ext.parallel.schedules import SCHEDULES
from tp_ext.planner.actions import library_schedule
from tp_ext.planner.core import layout_from, layout_of, machines_of, workload_of
from tp_ext.planner.layout import Layout, shares_of_ranks
from tp_ext.planner.machine import Cluster
from tp_ext.planner.prediction import GIB, Prediction, prediction_of
from tp_ext.planner.workload import Workload
from tp_ext.share_sizes import Weights

_SEARCHED = ("pp", "dp", "ep", "cp", "tp", "micro_batch", "zero", "sequence_parallel", "offload", "overlap_tp")
_MAX_REJECTED = 1000
_SCHEDULES = (("1F1B", 1), ("Interleaved1F1B", 2), ("Interleaved1F1B", 4), ("ZBVZeroBubble", 2))
_LARGEST_MICRO_BATCH = 16
_STEPS = 8  # from shares by the devices' speed to shares by their memory
_Dtypes = tuple[str, str, str]
_DTYPES = ("dtype", "param_dtype", "grad_dtype")
_DEFAULTS = ("sequence_parallel", "offload", "overlap_tp", *_DTYPES)  # not searched over


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
        divisors = _divisors(cluster.count)
        ranks = [len(cluster.devices)] if cluster.devices else divisors
        defaults = Layout()
        searched: dict[str, list[Any]] = {
            "pp": [size for size in divisors if size <= workload.layers],
            "tp": [size for size in ranks if size <= max(1, workload.heads)],
            "cp": [size for size in divisors if size <= workload.seq],
            "ep": [size for size in divisors if size <= max(1, workload.experts)],
            "micro_batch": _micro_batches(global_batch),
            "zero": [0, 1, 2, 3],
            "recompute": [None, "selective", "full"],
        }
        self.values = {name: [getattr(defaults, name)] for name in _DEFAULTS} | searched | _fixed_values(fixed)
        for size in self.values["tp"] if cluster.devices else ():
            if size not in ranks:
                raise ValueError(f"fixed: tp {size} must be the number of devices of the cluster, {ranks[0]}")
        self.dtypes = list(itertools.product(*(self.values[name] for name in _DTYPES)))
        for (dtype, _, _), of_rank in itertools.product(self.dtypes, cluster.of_ranks):
            of_rank.device.flops(dtype)
        if None in self.values.get("dp", []):  # what remains is any
            del self.values["dp"]

    def spaces(self) -> Iterator[tuple[_Dtypes, Weights | None, Any]]:
        """Yields the spaces of the library, one for each dtype and shares."""
        planner = load().planner
        for dtypes in self.dtypes:
            for shares in self.values.get("shares") or _shares_of_devices(self.cluster, dtypes[0]):
                space = planner.Space(**{name: self.values.get(name, []) for name in _SEARCHED})
                if shares is not None:
                    self._restrict(space, shares)
                self._fill(space, dtypes, shares)
                yield dtypes, shares, space

    def _restrict(self, space: Any, shares: Weights) -> None:
        """Leaves what unequal shares have: tp of their number, and no cp and ep (see ``check_layout``)."""
        fewest = self.workload.kv_heads or len(shares)
        space.tp = [size for size in space.tp if size == len(shares) <= fewest]
        space.cp, space.ep = ([size for size in sizes if size == 1] for sizes in (space.cp, space.ep))

    def _fill(self, space: Any, dtypes: _Dtypes, shares: Weights | None) -> None:
        planner = load().planner
        space.recompute = [getattr(planner.Recompute, mode or "none") for mode in self.values["recompute"]]
        space.schedules = self._schedules()
        base = Layout(dp=1, dtype=dtypes[0], param_dtype=dtypes[1], grad_dtype=dtypes[2])
        space.base = layout_of(base if shares is None else dataclasses.replace(base, tp=len(shares), shares=shares))

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
        for dtypes, shares, space in self.spaces():
            layouts = load().planner.legal_layouts(
                space, workload_of(self.workload), self.cluster.count, self.global_batch
            )
            yield from (layout_from(layout, dtypes, shares) for layout in layouts)


def _fixed_values(fixed: Mapping[str, Any]) -> dict[str, list[Any]]:
    """Returns the values of each name, checked one by one."""
    names = {field.name for field in dataclasses.fields(Layout)}
    checked: dict[str, list[Any]] = {}
    for name, value in fixed.items():
        if name not in names:
            raise ValueError(f"fixed: {name!r} must be one of {', '.join(sorted(names))}")
        values = list(value) if isinstance(value, list | tuple | set | range) else [value]
        if not values:
            raise ValueError(f"fixed: {name!r} must have at least one value")
        if name == "shares":
            values = _fixed_shares(values)
        for single in values if name not in ("virtual", "schedule", "shares") else ():
            Layout(**{name: single})
        checked[name] = list(dict.fromkeys(values))
    return checked


def _fixed_shares(values: list[Any]) -> list[Any]:
    """Returns the shares that are searched over: a list of weights is a single value."""
    several = [values] if any(isinstance(value, numbers.Real) for value in values) else values
    return [None if shares is None else shares_of_ranks(shares, len(shares)) for shares in several]


def _shares_of_devices(cluster: Cluster, dtype: str) -> list[Weights | None]:
    """Returns the shares that may be best for unlike devices: equal ones, those by the speed of the devices, from there
    to those by their memory in equal steps, and by the speed of the fastest of them alone."""
    devices = [of_rank.device for of_rank in cluster.of_ranks]
    if len(devices) == 1:
        return [None]

    def parts(values: list[float]) -> list[float]:
        return [value / sum(values) for value in values]

    capacity = parts([device.memory - device.reserve for device in devices])
    choices: list[Weights | None] = [None]
    for kind in ([device.flops(dtype) for device in devices], [device.memory_bandwidth for device in devices]):
        speed = parts(kind)
        for step in range(_STEPS + 1):
            blend = zip(speed, capacity, strict=True)
            choices.append(tuple(round(a + (b - a) * step / _STEPS, 4) for a, b in blend))
        for least in sorted(set(speed))[1:]:
            choices.append(tuple(round(value, 4) if value >= least else 0.0 for value in speed))
    return [shares for shares in dict.fromkeys(choices) if shares is None or len(set(shares)) > 1]


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

    Over a cluster of unlike ``devices`` tp is their number, and shares are searched over, too: equal ones, by the speed
    of the devices, from there to those by their memory, and such that leave the slowest devices without work.

    A layout is simulated only if a lower bound of its time, that no rank is faster than all of its work, does not
    exceed the time of the last of the best.

    Args:
        fixed: names of :class:`Layout` -> a value, or a list of values to search over; of ``shares`` the weights, or
            a list of such.
        objective: ``"step_time"`` or ``"memory"``, the largest peak of a rank.
        top: number of results.

    Communicates nothing.

    Raises:
        TypeError, ValueError: another objective, a name in ``fixed`` that no layout has, a value out of its range.
    """
    check_type(Workload, "a Workload", workload=workload)
    check_type(Cluster, "a Cluster", cluster=cluster)
    check_int(least=1, global_batch=global_batch, top=top)
    check_choice(("step_time", "memory"), objective=objective)
    if fixed is not None and not isinstance(fixed, Mapping):
        raise TypeError(f"fixed: {type(fixed).__name__} must be a dict of names of Layout")
    asked = _LayoutSearch(workload, cluster, global_batch, fixed or {})
    best: list[Prediction] = []
    rejected: list[tuple[float, int, Layout]] = []
    count = 0
    for dtypes, shares, space in asked.spaces():
        result = load().planner.search(
            space,
            workload_of(workload),
            machines_of(cluster, dtypes[0]),
            global_batch,
            library_schedule,
            objective == "memory",
            top,
            _MAX_REJECTED,
        )
        best += [
            prediction_of(candidate, workload, cluster, layout_from(candidate.layout, dtypes, shares), global_batch)
            for candidate in result.best
        ]
        rejected += [
            (candidate.peak, candidate.rank, layout_from(candidate.layout, dtypes, shares))
            for candidate in result.rejected
        ]
        count += result.count
    best.sort(key=lambda prediction: _key(prediction, objective))
    devices = [of_rank.device for of_rank in cluster.of_ranks]

    def lacking(row: tuple[float, int, Layout]) -> float:
        device = devices[row[1] % len(devices)]
        return row[0] + device.reserve - device.memory

    rejected.sort(key=lacking)
    reasons = {}
    for peak, rank, layout in rejected[:_MAX_REJECTED]:
        # Of the whole memory, as it is sold: what a device keeps to itself is needed, too
        device = devices[rank % len(devices)]
        reason = f"needs {(peak + device.reserve) / GIB:.1f} GiB of {device.memory / GIB:.0f}"
        reasons[layout] = reason + f" on rank {rank}" * (len(devices) > 1)
    return Found(best[:top], reasons, count, asked)


def _key(prediction: Prediction, objective: str) -> tuple[float, ...]:
    peak, layout = max(memory.peak for stage in prediction.memory_of_ranks for memory in stage), prediction.layout
    first = (prediction.step_time, peak) if objective == "step_time" else (peak, prediction.step_time)
    return (*first, layout.tp, layout.pp, layout.cp)
