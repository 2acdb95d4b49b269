"""Two ranks over tp_shm, one of which shares its core with a busy process: equal shares, and measured ones.

A rank on each of two cores trains an MLP of 1024 features and 4096 of the hidden layer; a third process computes on the
second core all the time. "measured" has the weights of ``planner.measure_shares``. "ideal" is the time of a step by the
speeds of both ranks together: the work of a whole layer, as each rank alone does it next to the busy process, by the
sum of the speeds. The ratio to it is to be at most 1.15 with measured shares, and is about 1.5 with equal ones, where
the second rank has half of its core.
"""

import contextlib
import functools
import multiprocessing
import statistics
from collections.abc import Callable, Iterator
from typing import Any

import torch

import tp_ext
from benchmarks.lib import interleave, report
from benchmarks.lib.report import Record
from tp_ext import planner

Case = tuple[int, int, int]  # tokens, features, features of the hidden layer


def mlp(case: Case, group: Any, weights: tuple[float, ...] | None) -> tuple[Callable[[], object], Any, Any]:
    """Returns a step, the model and its input."""
    tokens, features, hidden = case
    with tp_ext.shares(weights):
        model = tp_ext.ParallelMLP(features, hidden, group=group)
    x = torch.randn(tokens, features, generator=torch.Generator().manual_seed(0))
    params = list(model.parameters())
    return lambda: torch.autograd.grad(model(x).sum(), params), model, x


@functools.cache
def measured(case: Case) -> tuple[float, ...]:
    group = interleave.group_on("tp_shm")
    _, model, x = mlp(case, group, None)
    return tuple(planner.measure_shares(model, (x,), group))


@functools.cache
def on_rank(way: str, case: Case) -> Callable[[], object]:
    """On a rank: the call that is measured."""
    weights = measured(case) if way == "measured" else None
    return mlp(case, None if way == "alone" else interleave.group_on("tp_shm"), weights)[0]


def weights_of(group: Any, case: Case) -> tuple[float, ...]:
    return measured(case)


def seconds_alone(group: Any, case: Case, count: int) -> float:
    """Returns the seconds of the whole work on this rank, both ranks at once."""
    return statistics.median(interleave.seconds_of(on_rank("alone", case), count))


def _compute(core: int) -> None:
    interleave.pin([core])
    torch.set_num_threads(1)
    x = torch.ones(256, 256)
    while True:
        torch.mm(x, x)


@contextlib.contextmanager
def busy(core: int) -> Iterator[None]:
    """Within it another process computes on the core."""
    neighbour = multiprocessing.get_context("spawn").Process(target=_compute, args=(core,), daemon=True)
    neighbour.start()
    try:
        yield
    finally:
        neighbour.kill()
        neighbour.join()


def measure(case: Case, seconds: float, block: float) -> list[Record]:
    cores = interleave.cores()[:2]
    interleave.pin_ranks(2, cores, True)
    with busy(cores[-1]):
        alone = interleave.ranks.run(seconds_alone, 2, case, 20 if seconds else 2)
        weights = interleave.ranks.run(weights_of, 2, case)[0]
        subjects = {way: interleave.on_ranks(2, on_rank, way, case) for way in ("equal", "measured")}
        times = interleave.take(subjects, seconds, block)
    ideal = 1 / sum(1 / taken for taken in alone)
    rows: list[Record] = []
    for way, taken in times.items():
        median = statistics.median(taken)
        shares = "1/2, 1/2" if way == "equal" else ", ".join(f"{weight:.3f}" for weight in weights)
        rows.append({"case": way, "shares": shares, "median_ms": median * 1e3, "of ideal": median / ideal})
    return rows


draw = report.bars("step", "median_ms", "ms, medians", None)


def main() -> None:
    report.run(__file__, __doc__, lambda quick: [(16, 64, 256) if quick else (512, 1024, 4096)], measure, draw)


if __name__ == "__main__":
    main()
