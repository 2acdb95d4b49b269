"""The proof by values: its runs, in each mode, at two batches, in fp64 or fp32; what the model does not run in some."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.auto.test_proof import ALL, WIDTH, Base, X, compare
from tests.helpers.simulated import run
from tp_ext import auto
from tp_ext.auto.proof import prove_values


class IntegerSum(Base):
    """Sums of an argument in integers raise if it requires a gradient."""

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        return self.mlp(x) * mask.sum(dim=1, dtype=torch.int)[:, None]


class Normalised(Base):
    """In training it takes no batch of one."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(24)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.norm(self.up(x)))


class ByNumber(nn.Module):
    """Reads the results of layers by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Base() for _ in range(5))

    def forward(self, x: Tensor) -> Tensor:
        results = [x]
        for layer in self.layers:
            results.append(results[-1] + layer.mlp(results[-1]))
        return results[4] + results[5]


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 24, dtype=torch.cdouble)
        self.down = nn.Linear(24, WIDTH, dtype=torch.cdouble)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(x)))


MODELS = [
    (IntegerSum, (X, torch.ones(3, 5)), 3),
    (Normalised, (X[:1],), 5),
    (ByNumber, (X,), 15),
    (Complex, (X + 1j,), 3),
]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("p", [3, 2, 1])
@pytest.mark.parametrize(("made", "example", "number"), MODELS, ids=lambda value: getattr(value, "__name__", ""))
def test_what_runs_in_some_modes_is_proven_in_these(made: Any, example: Any, number: int, p: int):
    torch.manual_seed(0)
    model = made() if made is Complex else made().double()
    if made is Normalised:
        model.eval()
    sharded = run(compare, p, model, example)[0]
    assert len(sharded) == (number if p > 1 else len(sharded)), sharded


T, E, G, N = True, False, True, False  # train or eval mode, gradients or none
PAIRS = [(3, T, G), (3, E, N), (2, T, G), (2, T, N), (2, E, G)]
RUNS = [
    (Base, X, PAIRS),
    (Base, X[:1], [(rows - 1, *mode) for rows, *mode in PAIRS]),
    # Training on one row, which BatchNorm refuses, is on two rows in its place
    (Normalised, X[:2], [(2, T, G), (2, E, N), (2, T, N), (1, E, G)]),
]


@pytest.mark.parametrize(("made", "x", "runs"), RUNS, ids=["three rows", "one row", "refused"])
def test_a_proof_runs_a_model_as_seldom_as_modes_and_batches_allow(
    made: Any, x: Tensor, runs: list[tuple[int, bool, bool]], monkeypatch: pytest.MonkeyPatch
):
    """Each run costs as much as the model; any two of batch, mode and gradients occur together in each way."""
    seen: list[tuple[int, bool, bool]] = []
    original = prove_values.run_model

    def counted(model: nn.Module, call: Any, backward: bool, *rest: Any) -> Any:
        result = original(model, call, backward, *rest)
        seen.append((call[0][0].shape[0], model.training, backward))
        return result

    monkeypatch.setattr(prove_values, "run_model", counted)
    plan = auto.plan(made(), (x,), 2)
    assert plan.proof == "values" and set(ALL) <= plan.shardings.keys()
    assert seen[-2 * len(runs) :] == [run for run in runs for _ in range(2)]  # the two ranks, in turns
    assert seen[-3 * len(runs) : -2 * len(runs)] == runs


class Convolutions(nn.Module):
    """Two convolutions; ``before`` and ``after`` change what is between them and the result."""

    def __init__(self, before: Any = F.relu, after: Any = lambda module, y: y) -> None:
        super().__init__()
        self.up, self.down = nn.Conv2d(3, 24, 3), nn.Conv2d(24, 5, 3)
        self.before, self.after = before, after

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self, self.down(self.before(self.up(x))))


def scaled_on_ranks(rows: int, training: bool) -> Any:
    """A factor of ranks alone, in one mode at one batch."""

    def scaled(module: nn.Module, y: Tensor) -> Tensor:
        return y * 3 if (y.shape[0], module.training) == (rows, training) and is_simulated_rank(module) else y

    return scaled


def is_simulated_rank(module: nn.Module) -> bool:
    return module.up.weight.shape[0] < 24


STEP, REST = (1, True, True), [(2, True, True), (2, False, False), (1, True, True), (1, True, False), (1, False, True)]


@pytest.mark.parametrize(
    ("after", "wide", "sharded"),
    [
        pytest.param(lambda module, y: y, [STEP], True, id="as it is"),
        # Of a sum over channels times a million fp32 has no digit
        pytest.param(lambda module, y: torch.sin(y * 1e6), REST, True, id="noise"),
        pytest.param(
            lambda module, y: torch.sin(y * 1e6) if y.shape[0] == 2 and module.training else y,
            REST[:1],
            True,
            id="noise in a step",  # which is then the one in fp64
        ),
        pytest.param(scaled_on_ranks(1, True), [STEP], False, id="wrong in a step"),
        pytest.param(scaled_on_ranks(2, False), [STEP, REST[1]], False, id="wrong in eval mode"),
    ],
)
def test_convolutions_run_in_fp64_once_and_where_fp32_differs(
    after: Any, wide: list[tuple[int, bool, bool]], sharded: bool, monkeypatch: pytest.MonkeyPatch
):
    seen: list[tuple[torch.dtype, int, bool, bool]] = []
    original = prove_values.run_model

    def counted(model: nn.Module, call: Any, backward: bool, *rest: Any) -> Any:
        result = original(model, call, backward, *rest)
        if not is_simulated_rank(model):
            x = call[0][0]
            seen.append((x.dtype, x.shape[0], model.training, backward))
        return result

    monkeypatch.setattr(prove_values, "run_model", counted)
    plan = auto.plan(Convolutions(after=after), (torch.randn(2, 3, 8, 8),), 2)
    assert plan.proof == "values" and (set(plan.shardings) == {"up.weight", "up.bias", "down.weight"}) == sharded
    assert seen[: len(REST)] == [(torch.float32, *run) for run in REST]
    first = [run for dtype, *run in seen[len(REST) : len(REST) + len(wide)]]
    assert [tuple(run) for run in first] == wide
