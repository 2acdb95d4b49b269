"""torch.nn.utils.parametrize and prune over shards: whatever works on each element, or along dims that are not sharded,
trains as the unsharded module's; the rest is refused where a sharding is asked for."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrize, prune
from torch.nn.utils.parametrizations import orthogonal, spectral_norm, weight_norm

import tp_ext
from tests.helpers import ranks
from tests.helpers.makers import HIDDEN, build, outcome, same
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import full_gradients, gradients

pytestmark = pytest.mark.core

BOTH = pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])


class Curve(nn.Module):
    """Elementwise, with an inverse and one number that is not trained."""

    def __init__(self):
        super().__init__()
        self.register_buffer("factor", torch.tensor(1.5, dtype=torch.float64))

    def forward(self, weight):
        return self.factor * weight.sinh()

    def right_inverse(self, weight):
        return (weight / self.factor).asinh()


def _linears(module):
    """Of each linear and vocabulary layer the weight, and the dim that is not sharded."""
    for layer in module.modules():
        sharding = getattr(layer, "tp_shardings", {}).get("weight")
        if sharding is not None:
            yield layer, sharding.dim


def _parametrized(name, group, sp, how):
    module = build(name, group, sp)
    for layer, dim in _linears(module):
        if how == "elementwise":
            parametrize.register_parametrization(layer, "weight", Curve())
            if getattr(layer, "bias", None) is not None:
                parametrize.register_parametrization(layer, "bias", Curve())
        elif how == "weight_norm":  # a norm for each of the features that are sharded
            weight_norm(layer, dim=dim)
    return module


def _train(group, name, sp, how):
    """Three steps of SGD, clipped; the norms, the full state and the last gradients."""
    module = _parametrized(name, group, sp, how)
    optimizer = torch.optim.SGD(module.parameters(), 0.1)
    norms = []
    for _ in range(3):
        outcome(name, module, group, sp)
        norms.append(tp_ext.clip_grad_norm_(module, 1.0))
        optimizer.step()
    return norms, tp_ext.full_state_dict(module), gradients(module)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("how", ["elementwise", "weight_norm"])
@BOTH
@pytest.mark.parametrize("p", [1, 2, 4])
def test_they_train_as_the_unsharded_modules(p, sp, how):
    """fp64: sums in another order. Copied key and value heads too (attention_mqa), whose originals must not drift."""
    for name in ("column", "row", "mlp", "attention_mqa", "embedding", "head"):
        norms, state, grads = _train(None, name, False, how)
        want = full_gradients([grads])
        results = ranks.run(_train, p, name, sp, how)
        for got_norms, got_state, _ in results:
            torch.testing.assert_close(got_norms, norms, rtol=1e-12, atol=1e-12)
            assert got_state.keys() == state.keys() and any("original" in key for key in state)
            torch.testing.assert_close(got_state, state, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(full_gradients([r[2] for r in results]), want, rtol=1e-11, atol=1e-12)


def _load(group, state, how):
    module = _parametrized("mlp", group, False, how)
    before = outcome("mlp", module, group, False)
    tp_ext.load_full_state_dict(module, state)
    again = tp_ext.full_state_dict(module)
    assert all(torch.equal(again[key], value) for key, value in state.items())
    return not same(outcome("mlp", module, group, False), before)


@pytest.mark.parametrize("how", ["elementwise", "weight_norm"])
def test_full_state_dicts_load_at_any_p(how):
    state = {key: value + 0.1 for key, value in _train(None, "mlp", False, how)[1].items()}
    for p in (1, 2, 3):
        assert all(ranks.run(_load, p, state, how))


@on_ranks(2, backend="gloo")
def test_deepcopy_reset_parameters_and_removal(group):
    """reset_parameters draws the parametrized weight and stores what makes it."""
    for name in ("column", "attention_mqa", "head"):
        module = _parametrized(name, group, False, "elementwise")
        want = outcome(name, module, group, False)
        copied = copy.deepcopy(module)
        copied.tested_dtype = module.tested_dtype
        assert same(outcome(name, copied, group, False), want), name
        assert dict(tp_ext.shardings(copied)) == dict(tp_ext.shardings(module))
        with torch.no_grad():
            [q.fill_(0.5) for q in copied.parameters()]
        torch.manual_seed(11)  # as build() draws
        for layer in copied.modules():
            if hasattr(layer, "reset_parameters"):
                layer.reset_parameters()
        drawn = build(name, group, False, torch.float32)
        for (layer, _), (fresh, _) in zip(_linears(copied), _linears(drawn), strict=True):
            torch.testing.assert_close(layer.weight, fresh.weight.double(), rtol=1e-6, atol=1e-6)
        for layer, _ in _linears(module):
            for tensor in list(layer.parametrizations):
                parametrize.remove_parametrizations(layer, tensor)
        assert same(outcome(name, module, group, False)[:1], want[:1]), name
        assert all(".original" not in key for key, _ in tp_ext.shardings(module))


# What is not a function of each shard on its own


class Scaled(nn.Module):
    def __init__(self, *shape):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(shape))

    def forward(self, weight):
        return self.scale * weight


WRONG = {
    "weight_norm over the sharded dim": ("row", lambda layer: weight_norm(layer, dim=0)),
    "weight_norm of the whole": ("column", lambda layer: weight_norm(layer, dim=None)),
    "a trained number": ("row", lambda layer: parametrize.register_parametrization(layer, "weight", Scaled())),
    "a trained row": ("column", lambda layer: parametrize.register_parametrization(layer, "weight", Scaled(1, HIDDEN))),
}


WHOLE = {"SpectralNorm": spectral_norm, "Orthogonal": orthogonal}


def _ask(group, which, what):
    name, wrap = WRONG[which]
    module = build(name, group, False)
    wrap(module.float())
    {
        "shardings": lambda: list(tp_ext.shardings(module)),
        "clip": lambda: tp_ext.clip_grad_norm_(module, 1.0),
        "state": lambda: tp_ext.full_state_dict(module),
    }[what]()


@pytest.mark.parametrize("what", ["shardings", "clip", "state"])
@pytest.mark.parametrize("which", WRONG)
def test_the_rest_is_refused(which, what):
    match = r"parametrizations\.weight\..*must have the \[5, 5\] elements of weight on the ranks.*p = 2"
    ranks.run_raises(_ask, 2, ValueError, match, which, what, in_turns=False)
    ranks.run(_ask, 1, which, what)


def _whole(group, kind, wrap, what):
    module = build(kind, group, False)
    WHOLE[wrap](module)
    {"shardings": lambda: list(tp_ext.shardings(module)), "state": lambda: tp_ext.full_state_dict(module)}[what]()


@pytest.mark.parametrize("wrap", WHOLE)
@pytest.mark.parametrize("kind", ["column", "row"])
def test_parametrizations_of_the_whole_matrix_are_refused(kind, wrap):
    for what in ("shardings", "state"):
        match = rf"parametrizations\.weight\..*_{wrap} must see all of weight.*p = 2"
        ranks.run_raises(_whole, 2, ValueError, match, kind, wrap, what, in_turns=False)
        ranks.run(_whole, 1, kind, wrap, what)


def _replicated(group, sp):
    """Replicated parameters may be parametrized in any way: a norm's weight."""
    norm = build("rms_norm", group, sp)
    parametrize.register_parametrization(norm, "weight", Scaled().double())
    outcome("rms_norm", norm, group, sp)
    assert all(sharding is None for _, sharding in tp_ext.shardings(norm))
    return norm.parametrizations["weight"][0].scale.grad


@BOTH
def test_replicated_parameters_may_be_parametrized_anyhow(sp):
    want = ranks.run(_replicated, 1, False)[0]
    for got in ranks.run(_replicated, 2, sp):
        torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def _pruned(group):
    module = build("mlp", group, False)
    prune.custom_from_mask(module.up, "weight", (module.up.weight > 0).double())
    prune.custom_from_mask(module.down, "weight", (module.down.weight > 0).double())
    outcome("mlp", module, group, False)
    table = dict(tp_ext.shardings(module))
    assert table["up.weight_orig"] == module.up.tp_shardings["weight"]
    norm = tp_ext.clip_grad_norm_(module, 1.0)
    state = tp_ext.full_state_dict(module)
    assert torch.equal(state["up.weight_mask"] != 0, state["up.weight_orig"] > 0)
    return norm, state


def test_pruned_weights_and_their_masks_are_cut_as_the_weights():
    norm, state = _pruned(None)
    for got_norm, got_state in ranks.run(_pruned, 2):
        torch.testing.assert_close(got_norm, norm, rtol=1e-12, atol=0)
        assert all(torch.equal(got_state[key], value) for key, value in state.items())
