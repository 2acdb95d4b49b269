"""Corrections of a described machine by measured steps."""

import dataclasses
import math
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np

from tp_ext._checks import check_number, check_type
from tp_ext.planner.layout import Layout
from tp_ext.planner.machine import Cluster
from tp_ext.planner.prediction import check_layout, predict
from tp_ext.planner.workload import Workload

MeasuredStep = tuple[Workload, Layout, int, float] | tuple[Workload, Layout, int, float, int]
"""A measured step: workload, layout, global batch, seconds, and the number of devices, by default the cluster's."""

MAX_CONSTANTS = 5
# How far a factor may be from 1, as the deviation of its logarithm. Assumed: kernels of libraries are known best, and
# shares of links that ZeRO reaches least
_PRIORS = {"gemm": 0.2, "memory": 0.2, "attention": 0.2, "inner": 0.3, "outer": 0.5, "gather": 1.5}
_MEASURED = 0.02  # the deviation of a measured step, and of what the model leaves out; assumed
_HUBER = 1.345  # of the deviation: 95 % as efficient as squares where all errors are normal
_STEP, _ROUNDS = 1e-3, 40  # of the derivatives, and at most: it ends when nothing changes any more


def calibrate(cluster: Cluster, rows: Sequence[MeasuredStep]) -> Cluster:
    """Returns the cluster with the constants that bring predictions closest to measured steps.

    At most five factors: the speed of GEMMs of each dtype of the rows, ``attention`` if they have other lengths,
    ``inner`` if a row has tp, ``memory``, ``gather`` if one has ZeRO 2 or 3, ``outer`` if one crosses nodes. They
    minimise::

        sum H(log(predicted / measured) / 0.02) + sum (log(factor) / prior)^2

    H is Huber's loss, e^2 up to 1.345 and linear from there on: a row that no constants explain, since its recipe lost
    time elsewhere, does not spoil the others. The priors are 0.2 for kernels, 0.3 and 0.5 for links and 1.5 for
    ``gather``, so that one row is enough, and what no row shows stays at 1.

    Args:
        rows: tuples (workload, layout, global_batch, seconds[, count]).

    Returns:
        the cluster with ``constants``, ``fit_error``, the median relative error of the rows, and ``cross_error``, that
        of each row with constants of the others, for at least two rows.

    Communicates nothing.

    Raises:
        TypeError, ValueError: no rows, rows of another form; see :func:`predict`.

    Huber, "Robust estimation of a location parameter", Annals of Mathematical Statistics 35 (1964).
    """
    check_type(Cluster, "a Cluster", cluster=cluster)
    checked = [_checked(cluster, row) for row in rows] if isinstance(rows, Sequence) else []
    if not checked:
        raise ValueError(f"rows: {rows!r} must be at least one tuple (workload, layout, global_batch, seconds)")
    fitted = _fit(cluster, checked)
    errors = [_error(fitted, row) for row in checked]
    crossed = None
    if len(checked) > 1:
        others = [checked[:i] + checked[i + 1 :] for i in range(len(checked))]
        crossed = statistics.median(
            abs(math.expm1(_error(_fit(cluster, some), row))) for some, row in zip(others, checked, strict=True)
        )
    fit_error = statistics.median(abs(math.expm1(error)) for error in errors)
    return dataclasses.replace(fitted, fit_error=fit_error, cross_error=crossed)


def _checked(cluster: Cluster, row: Any) -> tuple[Workload, Layout, int, float, int]:
    if not isinstance(row, tuple | list) or len(row) not in (4, 5):
        raise ValueError(f"rows: {row!r} must be a tuple (workload, layout, global_batch, seconds[, count])")
    workload, layout, global_batch, seconds, *count = row
    check_number(above=0, seconds=seconds)
    devices = count[0] if count else cluster.count
    check_layout(workload, dataclasses.replace(cluster, count=devices), layout, global_batch)
    return workload, layout, global_batch, seconds, devices


def _error(cluster: Cluster, row: tuple[Workload, Layout, int, float, int]) -> float:
    """Returns log(predicted / measured)."""
    workload, layout, global_batch, seconds, count = row
    sized = cluster if count == cluster.count else dataclasses.replace(cluster, count=count)
    return math.log(predict(workload, sized, layout, global_batch).step_time / seconds)


def _names(cluster: Cluster, rows: Sequence[tuple[Workload, Layout, int, float, int]]) -> list[str]:
    """Returns the constants that the rows can say something about, the most important first."""
    dtypes = dict.fromkeys("bf16" if layout.dtype == "fp16" else layout.dtype for _, layout, *_ in rows)
    names = [f"gemm_{dtype}" for dtype in dtypes]
    if len({workload.seq for workload, *_ in rows}) > 1:
        names.append("attention")
    if any(layout.tp > 1 for _, layout, *_ in rows):
        names.append("inner")
    names.append("memory")
    if any(layout.zero >= 2 for _, layout, *_ in rows):
        names.append("gather")
    node = cluster.links[0].group_size or cluster.count
    if any(count > node for *_, count in rows) and len(cluster.links) > 1:
        names.append("outer")
    return names[:MAX_CONSTANTS]


def _fit(cluster: Cluster, rows: Sequence[tuple[Workload, Layout, int, float, int]]) -> Cluster:
    """Fits by Gauss-Newton in the logarithms of the factors, in which the errors are nearly linear. Large errors get
    weights that make their squares grow as absolute values (iteratively reweighted least squares)."""
    names = _names(cluster, rows)
    priors = np.array([_PRIORS[name.partition("_")[0]] for name in names])
    x = np.zeros(len(names))

    def machine(logs: Any) -> Cluster:
        kept = {name: value for name, value in cluster.constants.items() if name not in names}
        values = {name: cluster.factor(name) * math.exp(log) for name, log in zip(names, logs, strict=True)}
        return cluster.with_constants(kept | values)

    def errors(logs: Any) -> Any:
        return np.array([_error(machine(logs), row) / _MEASURED for row in rows])

    def loss(residuals: Any, logs: Any) -> float:
        sizes = np.abs(residuals)
        losses = np.where(sizes <= _HUBER, sizes**2, _HUBER * (2 * sizes - _HUBER))
        return float(losses.sum() + ((logs / priors) ** 2).sum())

    now = errors(x)
    for _ in range(_ROUNDS):
        slopes = np.stack([(errors(x + _STEP * unit) - now) / _STEP for unit in np.eye(len(names))], axis=1)
        weights = np.sqrt(np.minimum(1, _HUBER / np.maximum(np.abs(now), 1e-9)))
        left = np.concatenate([slopes * weights[:, None], np.diag(1 / priors)])
        change = -np.linalg.lstsq(left, np.concatenate([now * weights, x / priors]), rcond=None)[0]
        least = loss(now, x)
        for share in 0.5 ** np.arange(10):
            later = errors(x + share * change)
            if loss(later, x + share * change) < least:
                break
        else:
            break
        x, now = x + share * change, later
        if np.abs(share * change).max() < 1e-4:
            break
    return machine(x)
