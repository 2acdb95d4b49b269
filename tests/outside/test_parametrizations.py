"""torch's parametrizations, old norms and pruning of shards: right, or refused before anything has changed."""

import copy
import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations, parametrize, prune, spectral_norm, weight_norm

import tp_ext
from tests.helpers.oracle import full_gradients, gradients

pytestmark = pytest.mark.core

F64 = torch.float64


class By(nn.Module):
    """A parametrization by a function, and what it holds."""

    def __init__(self, function, **held):
        super().__init__()
        self.function = function
        for name, value in held.items():
            self.register_buffer(name, value)

    def forward(self, weight):
        return self.function(self, weight)


def _by(function):
    return lambda layer: parametrize.register_parametrization(layer, "weight", By(function))


def _mask(layer):
    """A buffer with the layout of the weight."""
    mask = layer.tp_layouts["weight"].shard(_full_mask(layer))
    return parametrize.register_parametrization(layer, "weight", By(lambda own, w: own.mask * w, mask=mask))


def _full_mask(layer):
    return (torch.arange(80).reshape(layer.out_features, layer.in_features) % 3 > 0).to(F64)


RIGHT = {  # on both kinds of linear
    "sinh": _by(lambda own, w: w.sinh()),
    "two": lambda layer: [_by(lambda own, w: w.sinh())(layer), _by(lambda own, w: 2 * w)(layer)],
    "buffer": _mask,
    "custom_from_mask": lambda layer: prune.custom_from_mask(
        layer, "weight", layer.tp_layouts["weight"].shard(_full_mask(layer))
    ),
    "identity": lambda layer: prune.identity(layer, "weight"),
    "own threshold": lambda layer: Threshold.apply(layer, "weight"),
    "own threshold again": lambda layer: [Threshold.apply(layer, "weight"), prune.identity(layer, "weight")],
}
RIGHT_OF_COLUMN = {  # of which a rank has whole rows
    "weight_norm": lambda layer: parametrizations.weight_norm(layer, dim=0),
    "softmax": _by(lambda own, w: w.softmax(1)),
    "triangle of the other dim": _by(lambda own, w: w * (torch.arange(w.shape[1]) > 2)),
}
REFUSED = {
    "norm of the whole": _by(lambda own, w: w / w.norm()),
    "mean of the whole": _by(lambda own, w: w - w.mean()),
    "triangle": _by(lambda own, w: w.triu()),
    "flipped": _by(lambda own, w: w.flip(0, 1)),
    "dropout": _by(lambda own, w: F.dropout(w, 0.5, own.training)),
    "largest norm": _by(lambda own, w: w * (100 / w.norm().clamp(min=100))),
    "norm in eval mode": _by(lambda own, w: w if own.training else w / w.norm()),
    "norm of many rows": _by(lambda own, w: w / w.norm() if len(w) > 3 else w),
    "norm of negative numbers": _by(lambda own, w: w / (1 + w.clamp(max=0).norm())),
    "second of two": lambda layer: [RIGHT["sinh"](layer), _by(lambda own, w: w / w.norm())(layer)],
    "orthogonal": lambda layer: parametrizations.orthogonal(layer),
    "spectral_norm": lambda layer: parametrizations.spectral_norm(layer),
    "weight_norm of the whole": lambda layer: parametrizations.weight_norm(layer, dim=None),
    "old spectral_norm": lambda layer: spectral_norm(layer),
    "old weight_norm": lambda layer: _quiet(lambda: weight_norm(layer)),
    "l1_unstructured": lambda layer: prune.l1_unstructured(layer, "weight", 0.3),
    "l1, a number": lambda layer: prune.l1_unstructured(layer, "weight", 4),
    "random_unstructured": lambda layer: prune.random_unstructured(layer, "weight", 0.3),
    "ln_structured 0": lambda layer: prune.ln_structured(layer, "weight", 0.3, 2, 0),
    "ln_structured 1": lambda layer: prune.ln_structured(layer, "weight", 0.3, 2, 1),
    "random_structured": lambda layer: prune.random_structured(
        layer, "weight", 0.3, layer.tp_layouts["weight"][0][0].dim
    ),
    "global_unstructured": lambda layer: prune.global_unstructured(
        [(layer, "weight")], prune.L1Unstructured, amount=0.3
    ),
    "dense mask": lambda layer: prune.custom_from_mask(layer, "weight", _full_mask(layer)),
    "given scores": lambda layer: prune.l1_unstructured(
        layer, "weight", 0.3, importance_scores=torch.rand_like(layer.weight)
    ),
}
REFUSED_OF_ROW = {
    "weight_norm": lambda layer: parametrizations.weight_norm(layer, dim=0),
    "softmax": _by(lambda own, w: w.softmax(1)),
}


class Threshold(prune.BasePruningMethod):
    """An elementwise mask of one's own."""

    PRUNING_TYPE = "unstructured"

    def compute_mask(self, t, default_mask):
        return default_mask * (t > 0)


def _quiet(call):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        return call()


def _layer(kind, group, device="cpu"):
    torch.manual_seed(4)
    sizes = (8, 10) if kind == "column" else (10, 8)
    make = {"column": tp_ext.ColumnParallelLinear, "row": tp_ext.RowParallelLinear}[kind]
    return make(*sizes, group=group, device=device, dtype=F64)


def _train(rank, group, kind, how):
    """Three steps, clipped by torch's function."""
    layer = _layer(kind, group)
    {**RIGHT, **RIGHT_OF_COLUMN}[how](layer)
    optimizer, x = torch.optim.SGD(layer.parameters(), 0.1), torch.linspace(-1, 1, 3 * layer.in_features, dtype=F64)
    x = x.view(3, -1)
    if kind == "row":
        x = tp_ext.Sharding(-1, (10,)).shard(x, rank, 1 if group is None else group.size())
    for step in range(3):
        optimizer.zero_grad()
        y = layer(x)
        loss = y.square().sum()
        loss.backward()
        norm = torch.nn.utils.clip_grad_norm_(layer.parameters(), 0.5)
        if step < 2:
            optimizer.step()
    return norm, gradients(layer), tp_ext.full_state_dict(layer)


@pytest.mark.parametrize("kind", ["column", "row"])
@pytest.mark.parametrize("p", [2, 3])
def test_what_each_shard_computes_alone_is_right(p, kind):
    for how in {**RIGHT, **(RIGHT_OF_COLUMN if kind == "column" else {})}:
        norm, grads, state = _train(0, None, kind, how)
        results = tp_ext.debug.simulate(_train, p, kind, how)
        for got, _, trained in results:
            torch.testing.assert_close(got, norm, rtol=1e-11, atol=0, msg=how)
            torch.testing.assert_close(trained, state, rtol=1e-11, atol=1e-12)
        torch.testing.assert_close(full_gradients([r[1] for r in results]), full_gradients([grads]))


def _refused(rank, group, kind, device):
    for name, wrap in {**REFUSED, **(REFUSED_OF_ROW if kind == "row" else {})}.items():
        if name == "global_unstructured" and device == "meta":
            continue  # torch itself cannot
        layer = _layer(kind, group, device)
        before, generator = copy.deepcopy(layer.state_dict()), torch.get_rng_state()
        if group is None or group.size() == 1:
            if name != "dense mask" and not (name == "orthogonal" and device == "meta"):
                wrap(layer)
            continue
        with pytest.raises(ValueError, match=r"weight.*(must|shard)|shard of .weight"):
            wrap(layer)
            pytest.fail(f"{name} passes")
        if name not in ("second of two", "given scores", "orthogonal", "spectral_norm"):  # these draw, or change twice
            assert torch.equal(torch.get_rng_state(), generator), name
            assert layer.state_dict().keys() == before.keys(), name
            if device == "cpu":
                torch.testing.assert_close(dict(layer.state_dict()), dict(before), rtol=0, atol=0)
                layer(torch.ones(1, layer.weight.shape[1], dtype=F64))


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("kind", ["column", "row"])
def test_the_rest_is_refused(kind, device):
    for p in (1, 2, 3):
        if (p, device) != (1, "meta"):
            tp_ext.debug.simulate(_refused, p, kind, device)


def _counts(own, w):
    own.calls += 1
    return w / w.norm() if own.calls > 2 else w


def _switch(own, w):
    return w / w.norm() if own.on else w


SWITCHES = {  # a change after the registration, by which the parametrization normalises
    "buffer": (_switch, {"on": torch.tensor(False)}, lambda own: own.on.fill_(True)),
    "buffer replaced": (_switch, {"on": torch.tensor(False)}, lambda own: setattr(own, "on", torch.tensor(True))),
    "attribute": (_switch, {"on": False}, lambda own: setattr(own, "on", True)),
    "counter": (_counts, {"calls": 0}, lambda own: None),
    "loaded": (
        _switch,
        {"on": torch.tensor(False)},
        lambda own: own.load_state_dict({"on": torch.tensor(True)}),
    ),
}


def _switched(rank, group, name):
    function, held, change = SWITCHES[name]
    layer, own = _layer("column", group), By(function, **{k: v for k, v in held.items() if isinstance(v, torch.Tensor)})
    for key, value in held.items():
        setattr(own, key, copy.deepcopy(value))
    parametrize.register_parametrization(layer, "weight", own)
    layer, x = copy.deepcopy(layer), torch.ones(1, 8, dtype=F64)
    layer(x)
    change(layer.parametrizations.weight[0])
    with pytest.raises(ValueError, match=r"weight.*this parametrization is not one of each shard on its own"):
        for _ in range(3):
            layer(x)


@pytest.mark.parametrize("name", SWITCHES)
def test_a_switch_that_is_set_later_is_judged_again(name):
    tp_ext.debug.simulate(_switched, 2, name)


def _scaled_later(rank, group):
    layer = _layer("column", group)
    parametrize.register_parametrization(
        layer, "weight", By(lambda own, w: own.by * w, by=torch.tensor(1.0, dtype=F64))
    )
    x = torch.ones(1, 8, dtype=F64)
    before = layer(x)[..., :1]
    layer.parametrizations.weight[0].by.fill_(2.0)
    return before, layer(x)[..., :1], layer.bias[:1]


def test_a_number_that_changes_is_right():
    for before, after, bias in tp_ext.debug.simulate(_scaled_later, 2):
        torch.testing.assert_close(after - bias, 2 * (before - bias))


def _elsewhere(rank, group):
    """Replicated parameters, and modules of torch, take anything."""
    layer, other = _layer("row", group), nn.Linear(4, 4)
    prune.l1_unstructured(layer, "bias", 0.5)
    parametrizations.spectral_norm(other)
    prune.l1_unstructured(other, "bias", 1)
    torch.testing.assert_close(torch.linalg.matrix_norm(other.weight, 2), torch.ones(()), rtol=0.1, atol=0)
    assert [int((one.bias_mask == 0).sum()) for one in (layer, other)] == [layer.bias.numel() // 2, 1]
    parametrize.register_parametrization(tp_ext.RMSNorm(4, group=group), "weight", By(lambda own, w: w / w.norm()))


def test_what_is_no_shard_is_torchs():
    tp_ext.debug.simulate(_elsewhere, 2)


def _auto(rank, group, wrap, dense, plan):
    model = tp_ext.auto.apply(plan, copy.deepcopy(dense), group)
    with pytest.raises(ValueError, match="weight"):
        REFUSED[wrap](model[0])


@pytest.mark.parametrize("wrap", ["spectral_norm", "triangle", "old weight_norm", "l1_unstructured"])
def test_layers_that_auto_has_sharded(wrap):
    dense = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    plan = tp_ext.auto.plan(dense, (torch.ones(2, 4),), 2, prove=False)
    tp_ext.debug.simulate(_auto, 2, wrap, dense, plan)
