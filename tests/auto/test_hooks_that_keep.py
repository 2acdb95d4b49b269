"""Forward hooks that keep what they see, before the plan and after it is applied: right, or refused in a sentence."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import prune, weight_norm

from tp_ext import auto
from tp_ext.debug import simulate

KEPT: list = []


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.up, self.act, self.down = nn.Linear(16, 64), nn.GELU(), nn.Linear(64, 16)

    def forward(self, x):
        return self.down(self.act(self.up(x)))


KEEPERS = {
    "tensor": lambda t: KEPT.append(t),
    "detached": lambda t: KEPT.append(t.detach()),
    "copy in a dict": lambda t: KEPT.append({"a": t.detach().clone()}),
    "norm": lambda t: KEPT.append(t.detach().norm()),
    "mean over features": lambda t: KEPT.append(t.mean(-1)),
    "width": lambda t: KEPT.append(t.shape[-1]),
    "numel": lambda t: KEPT.append(t.numel()),
}
PLACES = {"up": "register_forward_hook", "act": "register_forward_hook", "down": "register_forward_pre_hook"}
X = torch.randn(5, 16, generator=torch.Generator().manual_seed(1))


def _attach(model, place, keep):
    hook = (lambda m, a, o: keep(o)) if PLACES[place] == "register_forward_hook" else (lambda m, a: keep(a[0]))
    getattr(model.get_submodule(place), PLACES[place])(hook)


def _run(model, rank=0):
    """The output, and what the hook has kept in this call."""
    KEPT.clear()
    y = model(X)
    return y.detach(), [t.detach() if isinstance(t, torch.Tensor) else t for t in KEPT[-1:]]


def _applied(plan, model, before=lambda model: None, after=lambda model: None):
    def run(rank, group):
        copied = copy.deepcopy(model)
        before(copied)
        auto.apply(plan, copied, group)
        after(copied)
        return _run(copied)

    return simulate(run, 2)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", ["detached", "width", "norm"])
def test_hooks_before_the_plan_keep_what_the_unsharded_model_has(name, place):
    model = Model()
    _attach(model, place, KEEPERS[name])
    wanted, kept = _run(model)
    plan = auto.plan(model, {"x": X}, 2)
    for y, kept_on_rank in _applied(plan, Model(), before=lambda m: _attach(m, place, KEEPERS[name])):
        torch.testing.assert_close(y, wanted)
        torch.testing.assert_close(kept_on_rank, kept)
    assert "up.weight" not in plan.shardings or "hook" not in plan.whole.get("up.weight", "")


@pytest.mark.parametrize("name", KEEPERS)
def test_hooks_after_apply_that_would_keep_a_shard_are_refused_at_the_next_call(name):
    model = Model()
    plan = auto.plan(model, {"x": X}, 2)
    assert "up.weight" in plan.shardings
    with pytest.raises(RuntimeError, match=r"up\._forward_hooks is .*, which was not so when the plan was applied"):
        _applied(plan, model, after=lambda m: _attach(m, "up", KEEPERS[name]))


def test_a_hook_in_the_place_of_a_harmless_one_is_looked_at():
    model = Model()
    plan = auto.plan(model, {"x": X}, 2)

    def run(rank, group):
        copied = copy.deepcopy(model)
        auto.apply(plan, copied, group)
        handle = copied.up.register_forward_hook(lambda m, a, o: None)
        copied(X)
        handle.remove()
        copied(X)
        copied.up.register_forward_hook(lambda m, a, o: KEPT.append(o))
        copied(X)

    with pytest.raises(RuntimeError, match=r"what a hook of up keeps, \d differs"):
        simulate(run, 2)


def test_the_reason_names_the_hook():
    model = Model()
    _attach(model, "up", KEEPERS["detached"])
    plan = auto.plan(model, {"x": X}, 2)
    assert "what a hook of up keeps, " in str(plan.whole) + str(plan.proof)


@pytest.mark.parametrize(
    "changed",
    [
        pytest.param(lambda up: prune.l1_unstructured(up, "weight", amount=0.5), id="pruned"),
        pytest.param(lambda up: prune.random_structured(up, "weight", amount=0.5, dim=1), id="pruned columns"),
        pytest.param(lambda up: prune.identity(up, "bias"), id="pruned bias"),
        pytest.param(weight_norm, id="weight norm"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_hooks_of_torch_that_compute_a_weight_are_none_that_keep_one(changed):
    def made():
        changed((model := Model()).up)
        return model

    model = made()
    wanted, _ = _run(model)
    plan = auto.plan(model, {"x": X}, 2)
    assert plan.proof == "values" and {"up.bias", "up.bias_orig"} & plan.shardings.keys()
    assert "down.weight" in plan.shardings

    def run(rank, group):  # masks are buffers, and a copy would not have what a hook has computed
        torch.manual_seed(0)
        copied = made()
        copied.load_state_dict(model.state_dict())
        return _run(auto.apply(plan, copied, group))

    for y, _ in simulate(run, 2):
        torch.testing.assert_close(y, wanted)


HARMLESS = {
    "nothing": lambda m: m.up.register_forward_hook(lambda m, a, o: None),
    "of the result": lambda m: m.register_forward_hook(lambda m, a, o: KEPT.append(o.detach())),
    "twice": lambda m: m.up.register_forward_hook(lambda m, a, o: o * 2),
    "computes and forgets": lambda m: m.up.register_forward_hook(lambda m, a, o: (o * 2, None)[1]),
    "dtype": lambda m: m.up.register_forward_hook(lambda m, a, o: KEPT.append(o.dtype)),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_hooks_that_keep_nothing_of_a_shard_change_no_plan(name):
    model = Model()
    HARMLESS[name](model)
    wanted, _ = _run(model)
    plan = auto.plan(model, {"x": X}, 2)
    assert "up.weight" in plan.shardings and plan.proof == "values"
    for y, _ in _applied(plan, Model(), before=HARMLESS[name]):
        torch.testing.assert_close(y, wanted)
    for y, _ in _applied(auto.plan(Model(), {"x": X}, 2), Model(), after=HARMLESS[name]):
        torch.testing.assert_close(y, wanted)
