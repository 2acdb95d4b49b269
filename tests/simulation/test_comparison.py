"""The comparison of one process with p ranks: differences of tensors and of runs, the loss of a run, bounds."""

import itertools
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tp_ext.simulation.comparison import (
    NOISE,
    SPAN,
    RunResults,
    UnfitResultError,
    bound_of,
    difference,
    differences,
    differences_of_models,
    outputs_of,
    projection,
)

FLOATS = torch.float64, torch.float32, torch.bfloat16, torch.complex64
NUMBERS = [*itertools.product(FLOATS, ["", "infinite", "one infinite", "nan", "nan in both"]), (torch.int64, "")]


@pytest.mark.parametrize(("dtype", "what"), NUMBERS, ids=str)
@pytest.mark.parametrize("shape", [(2 * SPAN + 5,), (5, SPAN // 2), (3,), ()], ids=str)
def test_the_largest_difference_is_that_of_all_elements(dtype: torch.dtype, what: str, shape: tuple[int, ...]):
    generator = torch.Generator().manual_seed(0)
    wanted, got = (torch.randn(shape, generator=generator).mul(3).to(dtype) for _ in range(2))
    value = {"infinite": -torch.inf, "one infinite": torch.inf}.get(what, torch.nan)
    for tensor in (wanted, got) if what in ("infinite", "nan in both") else (got,) if what else ():
        tensor.view(-1)[-1] = value
    left, right = (torch.view_as_real(t) if t.is_complex() else t.double() for t in (wanted, got))
    finite = torch.isfinite(left) & torch.isfinite(right)
    sizes = [
        t[finite].double().abs().max().item() if finite.any() else 0.0 for t in (left.double() - right.double(), left)
    ]
    alone = what in ("one infinite", "nan") or (sizes[0] > 0 and not dtype.is_floating_point and not dtype.is_complex)
    expected = torch.inf if alone else sizes[0] / sizes[1] if sizes[0] else 0.0
    runs = [RunResults({"y": t.t() if t.dim() == 2 else t}) for t in (wanted, got)]
    assert list(differences(*runs, {})) == [(expected, "y")]


ONE = torch.ones(3)
OTHER = {
    "shape": torch.ones(1),
    "dtype": torch.ones(3).double(),
    "sign of infinity": torch.tensor([1, 1, -torch.inf]),
    "integers": torch.ones(3).int(),
}


@pytest.mark.parametrize("what", OTHER)
def test_what_has_no_difference_differs_infinitely(what: str):
    right = {"sign of infinity": -OTHER[what], "integers": 2 * OTHER[what]}.get(what, ONE)
    assert difference([OTHER[what]], [right]) == math.inf and difference([right], [right]) == 0.0


def test_differences_are_relative_to_all_ranks_and_to_the_noise():
    shards, off = [torch.ones(2) * 100, torch.ones(2)], [torch.ones(2) * 100, torch.ones(2) + 1]
    assert difference(off, shards) == 0.01 and difference(off, shards, floor=200.0) == 0.005
    # A gradient of rounding, next to one of size 1; one that a side lacks is zero, or wrong
    wanted, got = ({"a": ONE, "b": ONE * size, **more} for size, more in ((1e-17, {}), (0.0, {"c": ONE * 0, "d": ONE})))
    rows = {name: error for error, name in differences(RunResults({}, wanted), RunResults({}, got), {})}
    assert rows["the gradient of a"] == rows["the gradient of c"] == 0 and rows["the gradient of d"] == math.inf
    assert rows["the gradient of b"] == pytest.approx(1e-17 / NOISE)


class Result:
    def __init__(self, y: Tensor, loss: Tensor | None) -> None:
        self.y, self.loss = y, loss


class Model(nn.Module):
    """``factor``: of the result; ``number``: returned."""

    def __init__(self, factor: float = 1.0, number: float = 1.0, drift: float = 0.0) -> None:
        super().__init__()
        self.weight, self.factor, self.number, self.drift = nn.Parameter(torch.ones(2)), factor, number, drift
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor, loss: bool = False) -> Any:
        self.seen = self.seen + 1 + self.drift
        y = self.weight * x.mul_(2) * torch.rand(())  # the argument is a copy, and both draw the same
        result = Result(y * self.factor, y.sum() if loss else None)
        return result if loss else (result, self.number)


CASES = {"equal": Model(), "output": Model(1.1), "number": Model(number=2.0), "buffer": Model(drift=0.5)}


@pytest.mark.parametrize("case", CASES)
def test_runs_differ_by_outputs_numbers_gradients_and_buffers(case: str):
    x = torch.tensor([1.0, -3.0])
    rows = differences_of_models(Model(), CASES[case], (x.clone(),), input_gradients=False)
    wrong = {name for error, name in rows if error > 1e-6}
    expected = {"output": {"the result[0].y", "the gradient of weight"}, "number": {"number 0"}, "buffer": {"seen"}}
    assert wrong == expected.get(case, set()) and rows[-1][0] == max(rows)[0]
    # By the loss alone no other output counts
    rows = differences_of_models(Model(), Model(1.1), (x,), {"loss": True}, by_loss=True, input_gradients=False)
    assert {name: error for error, name in rows} == {"the loss": 0, "the gradient of weight": 0, "seen": 0}


def test_the_loss_sees_elements_that_change_places():
    y = torch.arange(4.0, requires_grad=True)
    values = [projection({"y": t}) for t in (y, y.flip(0))]
    assert values[0] != values[1] and projection({"y": y.detach()}) is None
    z = torch.complex(y, y)
    projection({"z": z}).backward()
    assert y.grad is not None and y.grad.abs().min() > 0


def test_objects_that_hide_tensors_are_refused():
    assert set(outputs_of({"a": ONE, "n": 2})) == {"the result['a']", "number 0"}
    with pytest.raises(UnfitResultError, match="the result: a set may hold tensors that cannot be compared"):
        outputs_of({ONE})


def test_bounds_are_above_rounding_and_below_mistakes():
    for weights in ("known", "trained", "random"):
        bounds = [bound_of(dtype, weights) for dtype in (torch.float64, torch.float32, torch.bfloat16)]
        assert bounds == sorted(bounds) and bounds[0] <= 1e-6 and bounds[2] < 0.1
