"""The plan of the last save, which the next one takes where only values have changed."""

import functools
import gc
import weakref

import pytest
import torch
from torch import nn

import tp_ext
from tests.helpers import simulated
from tests.helpers.on_ranks import on_ranks
from tp_ext.checkpoint import sharded
from tp_ext.model.census import census
from tp_ext.sharding import Layout, Sharding


def _step(model, optimizer):
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    optimizer.step()


def _trained(group, **options):
    """Layers of one chunk and of several, replicated and tied tensors, and a buffer."""
    attention = tp_ext.ParallelAttention(12, 6, num_kv_heads=2, group=group)
    gated = tp_ext.ParallelMLP(6, 12, activation="swiglu", group=group)
    model = nn.Sequential(attention, gated, nn.Linear(6, 6), nn.BatchNorm1d(6), nn.Linear(6, 6))
    model[4].weight = model[2].weight
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    _step(model, optimizer)
    return model, optimizer


def _plan(model, optimizer):
    return sharded.plan_of_model(census(model), optimizer, stages_differ=False)


def _same(known, fresh):
    (plan, payload), (wanted_plan, wanted_payload) = known, fresh
    assert plan == wanted_plan and len(payload) == len(wanted_payload)
    for value, other in zip(payload, wanted_payload, strict=True):
        if isinstance(other, torch.Tensor):
            assert value.dtype == other.dtype and torch.equal(value, other)
        else:
            assert value == other


def _values(model, optimizer):
    _step(model, optimizer)
    model[3].running_mean += 1


def _number_of_another_type(model, optimizer):
    optimizer.param_groups[0]["weight_decay"] = 0
    _plan(model, optimizer)
    optimizer.param_groups[0]["weight_decay"] = -0.0


def _replaced(model, optimizer):
    model[2].bias = nn.Parameter(torch.full((6,), 3.0))
    optimizer.param_groups[0]["params"] = [*model.parameters()]


def _untied(model, optimizer):
    model[4].weight = nn.Parameter(torch.zeros(6, 6))


def _other_layout(model, optimizer):
    weight = model[1].down.weight
    model[1].down.tp_layouts["weight"] = Layout((Sharding(0, [6 * model[1].tp_group.size]), model[1].tp_group))
    assert weight.shape[0] == 6


def _of_shape(model, optimizer):
    bias = model[4].bias
    for tensor in (bias, *optimizer.state[bias].values()):
        if tensor.dim():
            tensor.data = torch.ones(7)


def _transposed(model, optimizer):
    weight = model[1].up.weight
    weight.data = weight.data.t().contiguous().t()


def _of_one_storage(model, optimizer):
    weight = model[1].up.weight
    weight.data = torch.cat([torch.zeros(5), weight.data.flatten()])[5:].view(weight.shape)


def _renamed_state(model, optimizer):
    state = optimizer.state[model[2].bias]
    state["mine"] = state.pop("exp_avg_sq")


def _exchanged_groups(model, optimizer):
    optimizer.state.clear()
    _group_of_its_own(model, optimizer, {})
    _plan(model, optimizer)
    first, second = (group["params"] for group in optimizer.param_groups)
    first[0], second[0] = second[0], first[0]


def _group_of_its_own(model, optimizer, options={"lr": 0.5}):  # noqa: B006
    group = optimizer.param_groups[0]
    group["params"] = [param for param in group["params"] if param is not model[4].bias]
    optimizer.state.pop(model[4].bias, None)
    optimizer.add_param_group({"params": [model[4].bias], **options})


CHANGES = {
    "values": (_values, True),
    "learning rate": (lambda _, optimizer: optimizer.param_groups[0].update(lr=0.125), True),
    "number of another type": (_number_of_another_type, True),
    "another storage": (_of_one_storage, True),
    "nested option": (lambda _, optimizer: optimizer.param_groups[0].update(mine=[1, 2]), False),
    "tensor as an option": (lambda _, optimizer: optimizer.param_groups[0].update(lr=torch.tensor(0.1)), False),
    "new option": (lambda _, optimizer: optimizer.param_groups[0].update(mine=7), False),
    "new group": (_group_of_its_own, False),
    "replaced parameter": (_replaced, False),
    "exchanged parameters of groups": (_exchanged_groups, False),
    "renamed state": (_renamed_state, False),
    "renamed buffer": (
        lambda model, _: model[3]._buffers.update(mine=model[3]._buffers.pop("num_batches_tracked")),
        False,
    ),
    "declared copy": (lambda model, _: tp_ext.declare_tied(model[2], {"bias": "elsewhere.bias"}), False),
    "untied": (_untied, False),
    "dtype": (lambda model, _: model[2].to(torch.bfloat16), False),
    "shape": (_of_shape, False),
    "strides": (_transposed, False),
    "layout": (_other_layout, False),
    "less state": (lambda model, optimizer: optimizer.state[model[2].bias].pop("exp_avg"), False),
    "state that is a number": (lambda model, optimizer: optimizer.state[model[2].bias].update(step=3), False),
    "no state": (lambda _, optimizer: optimizer.state.clear(), False),
    "new buffer": (lambda model, _: model[3].register_buffer("mine", torch.ones(2)), False),
    "buffer that is not saved": (lambda model, _: model[3]._non_persistent_buffers_set.add("running_var"), False),
    "new module": (lambda model, _: model.append(nn.LayerNorm(6)), False),
    "another order": (lambda model, _: model._modules.update({"2": model._modules.pop("2")}), False),
    "renamed module": (lambda model, _: model._modules.update({"last": model._modules.pop("4")}), False),
    "extra state": (lambda model, _: setattr(type(model[3]), "get_extra_state", lambda self: {"a": 1}), False),
}


def _change(name, group):
    change, _ = CHANGES[name]
    model, optimizer = _trained(group)
    model[3].__class__ = type("Norm", (nn.BatchNorm1d,), {})
    _plan(model, optimizer)
    change(model, optimizer)
    known = sharded._plans.get(model)
    found = _plan(model, optimizer)
    reused = known is not None and sharded._plans.get(model) is known
    sharded._plans.pop(model, None)
    _same(found, _plan(model, optimizer))
    return reused


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("name", CHANGES)
def test_a_plan_is_that_of_a_first_save(name, p):
    """Whatever has changed since the last one; what only changes values, or numbers of options, lists no entry."""
    assert set(simulated.run(functools.partial(_change, name), p)) == {CHANGES[name][1]}


@on_ranks(1, 2)
def test_a_second_save_has_the_values_of_its_call(group, tmp_path):
    model, optimizer = _trained(group)
    tp_ext.save_checkpoint(tmp_path / "first", model, optimizer)
    _values(model, optimizer)
    wanted = [tensor.clone() for tensor in model.state_dict().values()]
    state = {key: value.clone() for key, value in optimizer.state[model[0].qkv.weight].items()}
    saving = tp_ext.save_checkpoint(tmp_path / "second", model, optimizer, asynchronous=True)
    _values(model, optimizer)
    saving.result()
    new, new_optimizer = _trained(group, lr=0.25)
    tp_ext.load_checkpoint(tmp_path / "second", new, new_optimizer)
    assert all(map(torch.equal, wanted, new.state_dict().values()))
    assert all(torch.equal(value, new_optimizer.state[new[0].qkv.weight][key]) for key, value in state.items())
    assert new_optimizer.param_groups[0]["lr"] == 0.001


def test_an_error_is_raised_by_each_save_and_a_model_is_not_kept(tmp_path):
    model, optimizer = _trained(None)
    tp_ext.save_checkpoint(tmp_path, model, optimizer)
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})
    for _ in range(2):
        with pytest.raises(ValueError, match=r"optimizer: a parameter of shape \(3,\) must be one of the module's"):
            tp_ext.save_checkpoint(tmp_path, model, optimizer)
    tp_ext.save_checkpoint(tmp_path, model)
    different = sharded.plan_of_model(census(model), None, stages_differ=True)[0]
    assert "0.qkv.weight" in different.names and not _plan(model, None)[0].names
    reference = weakref.ref(model)
    assert model in sharded._plans
    del model, optimizer
    gc.collect()
    assert reference() is None
