"""The share of wall time in which a job of many devices makes progress, between failures and checkpoints."""

import math
from typing import Any, NamedTuple

from tp_ext._checks import check_choice, check_int, check_number


class Goodput(NamedTuple):
    """The cost of failures, checkpoints and ranks of unequal speed.

    Attributes:
        interval: seconds of work between two checkpoints.
        share: useful time by wall time.
        slowdown: the time of the slowest device by the mean.
        effective_step_time: step time times slowdown by share, in seconds; None without a prediction.
    """

    interval: float
    share: float
    slowdown: float
    effective_step_time: float | None


def goodput(
    prediction: Any,
    *,
    mtbf_per_device: float,
    checkpoint_time: float,
    restart_time: float,
    interval: float | None = None,
    method: str = "daly",
    spread: float = 0.0,
) -> Goodput:
    """Computes the interval of checkpoints and the share of useful time under failures at random times.

    With M = ``mtbf_per_device`` / count, c = ``checkpoint_time``, R = ``restart_time`` and the interval t::

        Young: t = sqrt(2 c M)
        Daly:  t = sqrt(2 c M) (1 + sqrt(c / (2 M)) / 3 + c / (18 M)) - c for c < 2 M, else M
        share = t / (M exp(R / M) (exp((t + c) / M) - 1))

    Args:
        prediction: a :class:`Prediction`, or the number of devices.
        mtbf_per_device: mean seconds between two failures of one device.
        checkpoint_time: seconds in which a checkpoint stops the job. restart_time: from a failure to the last
            checkpoint loaded.
        interval: seconds of work between checkpoints; None: by ``method``, ``"daly"`` or ``"young"``.
        spread: the standard deviation of the step time of one device, by its mean. The slowdown is the expected
            maximum of independent normal times: 1 + ``spread`` times that of standard normal ones.

    Communicates nothing.

    Raises:
        TypeError, ValueError: a number out of its range.

    Young, CACM 17(9), 1974; Daly, FGCS 22(3), 2006.
    """
    layout = getattr(prediction, "layout", None)
    count = prediction if layout is None else layout.ranks
    check_int(least=1, count=count)
    check_number(above=0, mtbf_per_device=mtbf_per_device)
    check_number(least=0, checkpoint_time=checkpoint_time, restart_time=restart_time, spread=spread)
    check_number(above=0, or_none=True, interval=interval)
    check_choice(("daly", "young"), method=method)
    mean = mtbf_per_device / count
    if interval is None:
        interval = math.sqrt(2 * checkpoint_time * mean)
        if method == "daly":
            ratio = checkpoint_time / mean
            interval = interval * (1 + math.sqrt(ratio / 2) / 3 + ratio / 18) - checkpoint_time if ratio < 2 else mean
        if interval == 0:
            raise ValueError("checkpoint_time: 0 must be above 0 unless interval is given")
    share = _share(interval, mean, checkpoint_time, restart_time)
    slowdown = 1 + spread * _mean_of_maximum(count)
    time = None if layout is None else prediction.step_time * slowdown / share if share > 0 else math.inf
    return Goodput(interval, share, slowdown, time)


def _share(interval: float, mean: float, checkpoint: float, restart: float) -> float:
    exponents = restart / mean, (interval + checkpoint) / mean
    if sum(exponents) > 700:  # exp would overflow: no progress
        return 0.0
    return interval / (mean * math.exp(exponents[0]) * math.expm1(exponents[1]))


def _mean_of_maximum(count: int) -> float:
    """Returns the expected maximum of standard normal numbers: the integral of the probability that it is above x,
    minus that it is below -x."""
    step, steps = 0.005, 2400
    values = []
    for i in range(steps + 1):
        tail = max(math.erfc(i * step / math.sqrt(2)) / 2, 1e-300)  # of the numbers above i step
        values.append(-math.expm1(count * math.log1p(-tail)) - math.exp(count * math.log(tail)))
    return step * (sum(values) - (values[0] + values[-1]) / 2)
