"""The components of torchtitan 0.3 over shards: ``ModelWrapper``, ``OptimizersContainer``, clipping, checkpoints.
torchtitan asks for other versions of what the tests use, so here are the calls that they make."""

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.stateful import Stateful

import tp_ext
from tests.helpers.ranks import run

NEW = pytest.mark.skipif(not hasattr(dcp, "CheckpointableTensor"), reason="needs torch 2.15")


class Model(Stateful):
    """torchtitan.components.checkpointer.base.ModelWrapper."""

    def __init__(self, model):
        self.model, self.cached = model, dict(model.state_dict())

    def state_dict(self):
        for key, value in self.model.state_dict().items():
            cached = self.cached.get(key)
            if cached is None or cached.shape != value.shape or cached.dtype != value.dtype:
                self.cached[key] = value
            elif cached.untyped_storage().data_ptr() != value.untyped_storage().data_ptr():
                cached.copy_(value)
        return self.cached

    def load_state_dict(self, state):
        self.model.load_state_dict(state, strict=False)
        self.cached = dict(self.model.state_dict())


class Optimizers(Stateful):
    """torchtitan.components.optimizer.OptimizersContainer: a flat state by names, also before the first step."""

    def __init__(self, model):
        named = list(model.named_parameters())
        groups = [[pair for pair in named if ("bias" in pair[0]) == bias] for bias in (False, True)]
        params = [{"params": [p for _, p in one], "param_names": [n for n, _ in one]} for one in groups]
        self.optimizer = torch.optim.AdamW(params, lr=0.1)

    def _initialise(self):
        if self.optimizer.state:
            return
        rates = [group["lr"] for group in self.optimizer.param_groups]
        for group in self.optimizer.param_groups:
            group["lr"] = 0.0
            for param in group["params"]:
                param.grad = torch.zeros_like(param)
        self.optimizer.step(closure=None)
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate
        self.optimizer.zero_grad(set_to_none=True)

    def state_dict(self):
        self._initialise()
        state, flat = self.optimizer.state_dict(), {}
        for group in state["param_groups"]:
            for number, name in zip(group["params"], group["param_names"], strict=True):
                flat |= {f"state.{name}.{key}": value for key, value in state["state"][number].items()}
                kept = group.keys() - {"params", "param_names"}
                flat |= {f"param_groups.{name}.{key}": group[key] for key in kept}
        return flat

    def load_state_dict(self, flat):
        self._initialise()
        state, groups, number = {}, [], 0
        for group in self.optimizer.param_groups:
            numbers = []
            for name, param in zip(group["param_names"], group["params"], strict=True):
                numbers.append(number)
                state[number] = {key: flat[f"state.{name}.{key}"] for key in self.optimizer.state[param]}
                number += 1
            first = group["param_names"][0]
            kept = group.keys() - {"params", "param_names"}
            groups.append({"params": numbers} | {key: flat[f"param_groups.{first}.{key}"] for key in kept})
        self.optimizer.load_state_dict({"state": state, "param_groups": groups})


def clip(parameters, max_norm):
    """torchtitan.distributed.utils.clip_grad_norm_."""
    parameters = list(parameters)
    total = torch.nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None], 2.0, False, None)
    torch.nn.utils.clip_grads_with_norm_(parameters, max_norm, total, None)
    return total


def theirs(model):
    """The components themselves, where torchtitan is installed."""
    base = pytest.importorskip("torchtitan.components.checkpointer.base", exc_type=ImportError)
    optimizer = pytest.importorskip("torchtitan.components.optimizer", exc_type=ImportError)
    utils = pytest.importorskip("torchtitan.distributed.utils", exc_type=ImportError)
    group = optimizer.ParamGroupConfig(pattern=".*", optimizer_name="AdamW", optimizer_kwargs={"lr": 0.1})
    config = optimizer.OptimizersContainer.Config(param_groups=[group], implementation="for-loop")
    optimizers = optimizer.OptimizersContainer(config, model_parts=[model])
    optimizers.optimizer = optimizers.optimizers[0]
    return base.ModelWrapper(model), optimizers, utils.clip_grad_norm_


def train(group, first, last, folder=None, load=None, initialised=False, real=False):
    """Steps of training; returns losses, norms and the full weights."""
    torch.manual_seed(0)
    model = nn.Sequential(
        tp_ext.ColumnParallelLinear(6, 9, group=group), nn.Tanh(), tp_ext.RowParallelLinear(9, 4, group=group)
    )
    wrapped, optimizers, clipped = theirs(model) if real else (Model(model), Optimizers(model), clip)
    if initialised:
        optimizers.state_dict()
    if load is not None:  # as CheckpointManager: the model's names and the optimizers' in one dict
        states = {**wrapped.state_dict(), "optimizer": optimizers}
        dcp.load(states, checkpoint_id=load)
        wrapped.load_state_dict({key: value for key, value in states.items() if key != "optimizer"})
    seen = []
    for step in range(first, last):
        inputs = torch.randn(5, 6, generator=torch.Generator().manual_seed(step))
        loss = model(inputs).square().mean()
        loss.backward()
        seen.append((loss.item(), clipped(model.parameters(), 0.1).item()))
        optimizers.optimizer.step()
        optimizers.optimizer.zero_grad()
    if folder is not None:
        dcp.async_save({**wrapped.state_dict(), "optimizer": optimizers}, checkpoint_id=folder).result()
    return seen, tp_ext.full_state_dict(model)


def assert_same(got, want):
    for seen, weights in got:
        torch.testing.assert_close(seen, want[0][-len(seen) :], atol=1e-5, rtol=0)
        torch.testing.assert_close(weights, want[1], atol=1e-5, rtol=0)


@pytest.mark.parametrize("p", [2, 3])
def test_clipping(p):
    assert_same(run(train, p, 0, 4), train(None, 0, 4))


@NEW
@pytest.mark.parametrize("p, steps", [(2, 2), (3, 2), (2, 0)])
def test_checkpoints_fit_any_ranks(p, steps, tmp_path):
    """Also one that is saved before the first step, for which torchtitan makes a step of its own."""
    run(train, p, 0, steps, str(tmp_path / "saved"))
    want = train(None, 0, 4, initialised=not steps)
    for q in (2, 3, 4):
        assert_same(run(train, q, steps, 4, load=str(tmp_path / "saved")), want)


@NEW
def test_the_components_themselves(tmp_path):
    theirs(nn.Linear(1, 1))
    run(train, 2, 0, 2, str(tmp_path / "saved"), real=True)
    assert_same(run(train, 3, 2, 4, load=str(tmp_path / "saved"), real=True), train(None, 0, 4))
