"""A ``forward`` that is set on a module after the plan was applied: proven at the next call, or refused by its name."""

import inspect
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import tp_ext
from tests.helpers.simulated import run

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))
FORWARDS: dict[str, Callable] = {
    "length of its argument": lambda f, x: f(x) / x.shape[-1],
    "length of its result": lambda f, x: f(x) / f(x).shape[-1],
    "norm": lambda f, x: f(x) / f(x).norm(),
}


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.LayerNorm(8))


def _wrapped(model: nn.Module, place: int, forward: Callable) -> None:
    plain = model[place].forward
    model[place].forward = lambda x: forward(plain, x)


def _results(model: nn.Module) -> Tensor:
    result: Tensor = model(X)
    result.square().sum().backward()
    return result.detach()


@pytest.mark.parametrize("place", [0, 1, 2], ids=["column", "tanh", "row"])
@pytest.mark.parametrize("kind", FORWARDS)
def test_is_that_of_the_unsharded_model_or_refused(kind: str, place: int) -> None:
    dense = _model()
    _wrapped(dense, place, FORWARDS[kind])
    expected = _results(dense)
    plan = tp_ext.auto.plan(_model(), (X,), 2)

    def on_rank(group) -> bool:
        model = _model()
        tp_ext.auto.apply(plan, model, group)
        model(X)
        _wrapped(model, place, FORWARDS[kind])
        try:
            torch.testing.assert_close(_results(model), expected)
        except RuntimeError as error:
            assert f"{place}.forward is" in str(error)
            return False
        return True

    assert len({*run(on_rank, 2)}) == 1


@pytest.mark.parametrize("forward", [lambda f, x: f(x) * 2, lambda f, x: f(x) + x], ids=["scaled", "residual"])
def test_of_single_elements_is_right(forward: Callable) -> None:
    dense = _model()
    _wrapped(dense, 1, forward)
    expected = _results(dense)
    plan = tp_ext.auto.plan(_model(), (X,), 2)

    def on_rank(group) -> None:
        model = _model()
        tp_ext.auto.apply(plan, model, group)
        _wrapped(model, 1, forward)
        torch.testing.assert_close(_results(model), expected)

    run(on_rank, 2)


class _Inner(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)

    def forward(self, x: Tensor, scale: float = 1.0, *, mask: Tensor | None = None) -> Tensor:
        batch, features = x.shape  # which sizes of views are then made local
        h = self.up(x).view(batch, 2, features).relu().view(batch, 2 * features)
        return self.down(h) * scale


class _Outer(nn.Module):
    def __init__(self, by_name: bool) -> None:
        super().__init__()
        self.inner, self.head, self.by_name = _Inner(), nn.Linear(8, 24), by_name

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        h = self.inner.forward(x, mask=mask) if self.by_name else self.inner(x, mask=mask)
        return self.head(h)


@pytest.mark.parametrize("by_name", [False, True])
def test_forwards_keep_their_arguments(by_name: bool) -> None:
    """Exports, trainers and ``generate`` ask for them."""
    dense = _Outer(by_name)
    plan = tp_ext.auto.plan(dense, (X,), 2)

    def on_rank(group) -> list[str]:
        model = tp_ext.auto.apply(plan, _same(_Outer(by_name)), group)
        for name in ("", "inner"):
            forward, plain = model.get_submodule(name).forward, dense.get_submodule(name).forward
            assert inspect.signature(forward) == inspect.signature(plain)
        return [type(module.__dict__.get("forward")).__name__ for module in (model, model.inner)]

    (forwards,) = {tuple(names) for names in run(on_rank, 2)}
    assert "SizedForward" in forwards or "CalledForward" in forwards


def _same(model: nn.Module) -> nn.Module:
    for number, param in enumerate(model.parameters()):
        nn.init.normal_(param, generator=torch.Generator().manual_seed(number))
    return model
