"""What was made of a model's parameters before ``tp_ext.auto.apply`` put shards in their place: an error, where it
would silently leave them as they are."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import tp_ext
from tests.helpers.simulated import run
from tp_ext.outside.live_shards import Replaced

X = torch.randn(3, 8, generator=torch.Generator().manual_seed(0))


def _model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 8), nn.LayerNorm(8))


def _stepped(model: nn.Module, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    model(X).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return optimizer


def _optimizer(make: Callable[[nn.Module], torch.optim.Optimizer], steps: bool = False) -> Callable[[nn.Module], Any]:
    """What is made before, and used after: returns the use."""

    def before(model: nn.Module) -> Callable[[], Any]:
        optimizer = make(model)
        if steps:
            _stepped(model, optimizer)
        return lambda: optimizer.step()

    return before


def _norm(model: nn.Module) -> Callable[[], Any]:
    parameters = list(model.parameters())
    model(X).square().sum().backward()
    torch.nn.utils.clip_grad_norm_(parameters, 1.0)  # a list that is known
    return lambda: torch.nn.utils.clip_grad_norm_(parameters, 1.0)


STALE = {
    "SGD": _optimizer(lambda m: torch.optim.SGD(m.parameters(), 0.1)),
    "fused AdamW": _optimizer(lambda m: torch.optim.AdamW(m.parameters(), fused=True)),
    "groups": _optimizer(lambda m: torch.optim.Adam([{"params": m[3].parameters()}, {"params": m[0].parameters()}])),
    "of one shard": _optimizer(lambda m: torch.optim.RMSprop([m[2].weight])),
    "has stepped": _optimizer(lambda m: torch.optim.Adagrad(m.parameters()), steps=True),
    "clipping": _norm,
}
KEPT = {
    "norm alone": _optimizer(lambda m: torch.optim.AdamW(m[3].parameters())),
    "a row's bias": _optimizer(lambda m: torch.optim.SGD([m[2].bias], 0.1)),
    "a copy": _optimizer(lambda m: torch.optim.SGD(copy.deepcopy(m).parameters(), 0.1)),
}


def _used_after(before: Callable[[nn.Module], Callable[[], Any]], p: int, use: Callable[[Callable], None]) -> None:
    plan = tp_ext.auto.plan(_model(), (X,), p)

    def on_rank(group: Any) -> None:
        model = _model()
        act = before(model)
        tp_ext.auto.apply(plan, model, group)
        model(X).square().sum().backward()
        use(act)
        torch.optim.SGD(model.parameters(), 0.1).step()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)

    run(on_rank, p)


@pytest.mark.parametrize("kind", STALE)
def test_is_refused(kind: str) -> None:
    def refused(act: Callable) -> None:
        with pytest.raises(
            ValueError, match=r"is no longer the model's, which has a shard .*take model.parameters\(\)"
        ):
            act()

    _used_after(STALE[kind], 2, refused)


@pytest.mark.parametrize("kind", [kind for kind in STALE if kind not in ("of one shard",)])
def test_at_one_rank_the_parameters_stay(kind: str) -> None:
    _used_after(STALE[kind], 1, lambda act: act())


@pytest.mark.parametrize("kind", KEPT)
def test_of_parameters_that_stay_it_is_right(kind: str) -> None:
    _used_after(KEPT[kind], 2, lambda act: act())


def _counts(_: int, group: Any) -> list[int]:
    model, counts = _model(), [Replaced.count]
    plan = tp_ext.auto.plan(model, (X,), 2)
    counts.append(Replaced.count)
    tp_ext.auto.apply(plan, model, group)
    counts.append(Replaced.count)
    model[1].register_forward_hook(lambda module, args, output: output * 2)
    model(X)  # another call than the plan's, which is proven
    return [*counts, Replaced.count]


def test_proofs_replace_nothing_that_optimizers_know() -> None:
    before, planned, _, _ = tp_ext.debug.simulate(_counts, 2)[0]
    assert before == planned
    _, _, applied, called = tp_ext.debug.simulate(_counts, 2)[1]
    assert applied == called
