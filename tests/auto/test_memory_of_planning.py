"""Plans, sharded models and simulated ranks leave nothing alive."""

import contextlib
import gc
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tp_ext import auto, debug
from tp_ext.auto import planner

IDS = torch.arange(12).view(2, 6)
Refs = list[weakref.ref]
layer: Any = None  # a global with the name of an attribute that forward reads
alive: "weakref.WeakSet[nn.Module]" = weakref.WeakSet()  # models that have run


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.layer, self.drop = nn.Embedding(16, 8), nn.Linear(8, 32), nn.Dropout(0.1)
        self.out, self.head = nn.Linear(32, 8), nn.Linear(8, 16, bias=False)

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
        h = self.embedding(ids)
        logits = self.head(h + self.drop(self.out(F.relu(self.layer(h)))))
        return logits if labels is None else (F.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits)


def _objects(*models: nn.Module) -> Refs:
    """The modules, parameters and gradients of models."""
    parameters = [p for model in models for p in model.parameters()]
    modules = [module for model in models for module in model.modules()]
    return [weakref.ref(x) for x in (*modules, *parameters, *(p.grad for p in parameters if p.grad is not None))]


def _trained(model: nn.Module, p: int, group: Any, **options: Any) -> Refs:
    """Plans, applies and trains; another length is planned again."""
    auto.apply(auto.plan(model, {"ids": IDS, "labels": IDS}, p, **options), model, group)
    for ids in (IDS, IDS[:, :5]):
        loss, logits = model(ids, labels=ids)
        (loss + logits[..., 0].sum()).backward()
    return _objects(model)


def _planned() -> Refs:
    auto.plan(model := Model(), (IDS,), 2)
    return _objects(model)


def _refused() -> Refs:
    refs = _objects(model := Model())
    with pytest.raises(ValueError, match="hints"):
        auto.plan(model, (IDS,), 2, hints={"drop": "sharded"})
    return refs


def _with_global() -> Refs:
    global layer
    refs = _objects(layer := Model())
    auto.plan(layer, (IDS,), 2)
    layer = None
    return refs


def _of_local_class() -> Refs:
    shared, table = nn.Linear(8, 8), torch.ones(8)

    class Table(nn.Embedding):
        def forward(self, ids: Tensor) -> Tensor:
            return super().forward(ids) * table

    class Local(Model):
        def forward(self, ids: Tensor, labels: Tensor | None = None) -> Any:
            loss, logits = super().forward(ids, labels)
            return loss + shared(self.embedding(ids)).mean(), logits

    model = Local()
    model.embedding = Table(16, 8)
    return [*_trained(model, 1, None), *_objects(shared), *map(weakref.ref, (table, Local, Table))]


def _on_ranks(p: Any, fails: bool = False, **options: Any) -> Refs:
    refs: Refs = []

    def run(rank: int, group: Any) -> nn.Module:
        group = group if isinstance(p, int) else group["tp"].get_group()
        model = Model()
        refs.extend(_trained(model, 2, group, **options))
        if fails and rank == 1:
            raise KeyError("rank 1 ends")
        dist.barrier(group)
        vars(model)["group"] = group
        return model

    try:
        debug.simulate(run, p)
    except RuntimeError as error:
        assert fails and "rank 1 ends" in str(error)
    return refs


def _in_closure() -> Refs:
    model = Model()
    losses = debug.simulate(lambda rank, group: model(IDS, IDS)[0], 2)
    return [*_objects(model), *map(weakref.ref, losses)]


CASES: dict[str, Callable[[], Refs]] = {
    "a plan": _planned,
    "a plan that is refused": _refused,
    "a plan, with a global of the name of a layer": _with_global,
    "a sharded model": lambda: _trained(Model(), 1, None),
    "a sharded model of a class with a closure": _of_local_class,
    "simulated ranks": lambda: _on_ranks(2),
    "simulated ranks of a function with a closure": _in_closure,
    "simulated ranks of a mesh": lambda: _on_ranks({"dp": 2, "tp": 2}),
    "simulated ranks of which one raises": lambda: _on_ranks(2, fails=True),
    "simulated ranks with sharded tokens": lambda: _on_ranks(2, sequence_parallel=True),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore")
def test_nothing_stays_alive(case):
    refs = CASES[case]()
    gc.collect()
    assert refs
    assert [ref() for ref in refs if ref() is not None] == []
    # Copies that the proof by values has run; by its type, since a proxy's class is what it stands for
    assert [x for x in gc.get_objects() if issubclass(type(x), Model)] == []


class NoDoubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        alive.add(self)
        y = self.first(x)
        if x.dtype == torch.float64:
            raise TypeError("no doubles")
        gc.collect()
        assert all(model.first.weight.dtype != torch.float64 for model in alive)
        return self.second(F.relu(y))


def test_failed_run_is_freed_before_next_one():
    plan = auto.plan(NoDoubles(), (torch.randn(3, 4),), 2)
    assert (plan.proof, len(plan.shardings)) == ("values", 3)


@pytest.mark.parametrize("frozen", [pytest.param(False, id="none frozen"), pytest.param(True, id="some frozen")])
@pytest.mark.parametrize("fails", [pytest.param(False, id="a plan"), pytest.param(True, id="a plan that is refused")])
def test_objects_older_than_a_plan_are_frozen_during_it(frozen: bool, fails: bool, monkeypatch: pytest.MonkeyPatch):
    counts, original = [], planner._planned

    def noted(*args: Any) -> Any:
        counts.append(gc.get_freeze_count())
        return original(*args)

    monkeypatch.setattr(planner, "_planned", noted)
    gc.freeze() if frozen else gc.unfreeze()
    try:
        with pytest.raises(ValueError, match="forward fails") if fails else contextlib.nullcontext():
            auto.plan(Model(), (IDS, IDS[:, :5]) if fails else (IDS,), 2)
        assert counts and all(counts)
        assert bool(gc.get_freeze_count()) == frozen  # those that the program has frozen stay so
    finally:
        gc.freeze()  # as tests/conftest.py
