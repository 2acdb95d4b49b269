"""Embedding and head of multi-token prediction are the model's before the first forward, too."""

import copy
import io
import pickle

import pytest
import torch
from torch import nn

from tests.helpers import simulated
from tests.helpers.dtypes import default_dtype
from tests.nn.test_multi_token import Model, _batch, _overwritten


def _on_meta(model):
    with torch.device("meta"):
        return Model(2, False, group=model.embedding.tp_group.name or None)


def _loaded(model, state, **options):
    model.load_state_dict(copy.deepcopy(state), **options)
    return model


def _put(model):
    for layer in (model.embedding, model.last.head):
        for name, param in list(layer._parameters.items()):
            layer._parameters[name] = nn.Parameter(param.detach().clone())  # as accelerate does it
    return model


def _saved(model):
    torch.save(model, file := io.BytesIO())
    file.seek(0)
    return torch.load(file, weights_only=False)


SEPARATED = {
    "nothing": lambda model: model,
    "assign": lambda model: _loaded(model, model.state_dict(), assign=True),
    "assign on meta": lambda model: _loaded(_on_meta(model), model.state_dict(), assign=True),
    "to_empty": lambda model: _loaded(_on_meta(model).to_empty(device="cpu"), model.state_dict()),
    "dtype": lambda model: model.float().double(),
    "dtype by new parameters": lambda model: _overwritten(model.float()),
    "replaced": _put,
}
READ = {
    "parameters": lambda model: model,
    "deepcopy": copy.deepcopy,
    "pickle": lambda model: pickle.loads(pickle.dumps(model)),
    "torch.save": _saved,
    "copy of a copy": lambda model: copy.deepcopy(_saved(model)),
    "state dict": lambda model: _loaded(model, model.state_dict()),
    "to": lambda model: model.to(torch.float64),
}


def _first_step(group, how, read, order):
    """The state after a step of an optimizer that was made before the first forward, and its number of parameters."""
    with default_dtype(torch.float64):
        torch.manual_seed(0)
        model = Model(2, False, group=group)
        if order == "module first":
            model._modules = {name: model._modules[name] for name in ("last", "blocks", "embedding")}
            model.last._modules = {name: model.last._modules[name] for name in ("mtp", "norm", "head")}
        model = READ[read](SEPARATED[how](model))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        assert model.last.mtp.embedding.weight is model.embedding.weight
        assert model.last.mtp.head.weight is model.last.head.weight and model.last.mtp.head.bias is model.last.head.bias
        model(*_batch()).sum().backward()
        optimizer.step()
        state = model.state_dict()
        return len(optimizer.param_groups[0]["params"]), {name: state[name] for name in sorted(state)}


@pytest.mark.thinned
@pytest.mark.parametrize("order", ["module last", "module first"])
@pytest.mark.parametrize("read", READ)
@pytest.mark.parametrize("how", SEPARATED)
def test_an_optimizer_has_shared_parameters_before_the_first_forward(how, read, order):
    expected = simulated.run(_first_step, 2, "nothing", "parameters", "module last")
    exact = {"rtol": 0, "atol": 0} if "dtype" not in how else {"rtol": 1e-5, "atol": 1e-6}  # of weights in fp32
    torch.testing.assert_close(simulated.run(_first_step, 2, how, read, order), expected, **exact)
