"""Handles that keep the parameters of a model notice at their next call that the model has others, or serve them."""

import copy
import re

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel
from torch.nn.utils import parametrize

import tp_ext
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tp_ext.low_precision import compress_gradients


def model():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8))
    net[0].requires_grad_(False)
    return net


def _assigned(net):
    net.load_state_dict(copy.deepcopy(net.state_dict()), assign=True)


def _replaced(net):
    net[1].weight = nn.Parameter(net[1].weight.detach().clone())


def _layer_replaced(net):
    net[1] = copy.deepcopy(net[1])


def _added(net):
    net.append(nn.Linear(8, 8))


def _swapped(net):
    torch.__future__.set_swap_module_params_on_conversion(True)
    try:
        net.to(torch.bfloat16)
    finally:
        torch.__future__.set_swap_module_params_on_conversion(False)


# What is done to a model after the handle was made -> what the sentence says; "" where the handle serves it rightly
CHANGES = {
    "load_state_dict(assign=True)": (_assigned, "'1.weight', .* replaced"),
    "a new parameter": (_replaced, "'1.weight' replaced"),
    "a new layer": (_layer_replaced, "'1.weight', '1.bias' replaced"),
    "a layer more": (_added, "'3.weight', '3.bias' added"),
    "a layer less": (lambda net: net.pop(1), "removed"),
    "unfrozen": (lambda net: net[0].requires_grad_(True), "'0.weight', '0.bias' unfrozen"),
    "converted": (lambda net: net.bfloat16(), "'2.bias' converted"),
    "converted by swap": (_swapped, "'2.bias' converted"),
    "frozen": (lambda net: net[1].requires_grad_(False), ""),
    "in eval": (lambda net: net.eval(), ""),
    "loaded in place": (lambda net: net.load_state_dict(copy.deepcopy(net.state_dict())), ""),
    "parametrized": (
        lambda net: parametrize.register_parametrization(net[1], "weight", nn.Identity(), unsafe=True),
        "",
    ),
}


def _compressed(net, group):
    handle = compress_gradients(net, "int8", group=group)
    return net, handle.average


def _compressed_under_ddp(net, group):
    ddp = DistributedDataParallel(net, process_group=group)
    compress_gradients(ddp, "int8")
    return ddp, lambda: None


def _parallelized(net, group):
    run = tp_ext.parallelize(net, init_device_mesh("cpu", (group.size(),), mesh_dim_names=("dp",)), loss=_loss)
    return run, lambda: None


def _loss(output, target):
    return output.float().square().mean()


HANDLES = {
    "compress_gradients": _compressed,
    "compress_gradients of DDP": _compressed_under_ddp,
    "parallelize": _parallelized,
}
HOOKED = {"frozen": "'1.weight', '1.bias' frozen", "parametrized": "'1.parametrizations.weight.original' parametrized"}


def _step(call, net, group):
    dtype = next(net.parameters()).dtype
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(group.rank())).to(dtype)
    if isinstance(call, tp_ext.parallel.ParallelRun):
        call.step(x, torch.zeros(4, dtype=torch.long))
    else:
        _loss(call(x), None).backward()


def _after_a_change(group, handle, change, changed_on):
    """The error of the next step, and its gradients next to the mean of those of all ranks."""
    net = model()
    call, average = HANDLES[handle](net, group)
    _step(call, net, group)
    average()
    net.zero_grad()
    if group.rank() in changed_on:
        CHANGES[change][0](net)
    try:
        _step(call, net, group)
        average()
    except ValueError as error:
        return str(error), 0.0
    grads = {name: p.grad.clone() for name, p in net.named_parameters() if p.grad is not None}
    reference = copy.deepcopy(net)
    sums: dict = {}
    for rank in range(group.size()):
        reference.zero_grad()
        x = torch.randn(4, 8, generator=torch.Generator().manual_seed(rank))
        _loss(reference(x), None).backward()
        for name, p in reference.named_parameters():
            if p.grad is not None:
                sums[name] = sums.get(name, 0) + p.grad / group.size()
    assert grads.keys() == sums.keys()
    return "", max((grads[name] - sums[name]).abs().max().item() for name in grads)


@pytest.mark.parametrize("handle", HANDLES)
@pytest.mark.parametrize("change", CHANGES)
def test_a_handle_notices_other_parameters(handle, change):
    hooked = handle != "compress_gradients"
    if hooked and change == "converted by swap":
        pytest.skip("torch refuses it")
    sentence = HOOKED.get(change, CHANGES[change][1]) if hooked else CHANGES[change][1]
    for text, difference in ranks.run(_after_a_change, 2, handle, change, (0, 1)):
        if sentence:
            assert re.search(f"model: it must have the parameters of the call of .*{sentence}.*: call", text), text
        else:
            assert text == "" and difference < 0.02


@on_ranks(2, backend="gloo")
def test_the_tree_of_invariant_blocks_knows_its_parameters(group):
    with tp_ext.tp_invariant():
        net = nn.Sequential(*(tp_ext.ParallelMLP(8, 16, group=None) for _ in range(2)))
    run = tp_ext.parallelize(net, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), loss=_loss, invariant_blocks=2)
    _step(run, net, group)
    _assigned(net)
    with pytest.raises(ValueError) as error:
        _step(run, net, group)
    assert "replaced: call it anew" in str(error.value)


def _under_fsdp(group, change):
    run = tp_ext.parallelize(model(), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), loss=_loss, zero=2)
    _step(run, run.state, group)
    CHANGES[change][0](run.state)
    try:
        _step(run, run.state, group)
    except ValueError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("change", ["a layer more", "load_state_dict(assign=True)", "unfrozen", "frozen"])
def test_fsdp_follows_its_own_parameters_alone(change):
    for text in ranks.run(_under_fsdp, 2, change):
        assert ("'3.weight', '3.bias' added" in text) if change == "a layer more" else text == ""


@pytest.mark.parametrize("handle", ["compress_gradients", "parallelize"])
def test_a_change_on_one_rank_is_an_error_on_all(handle):
    texts = [text for text, _ in ranks.run(_after_a_change, 2, handle, "a layer more", (1,))]
    assert "'3.weight', '3.bias' added" in texts[1]
    assert texts[0].startswith("model: another rank" if handle == "compress_gradients" else texts[1][:20])


def _frozen_with_a_gradient(group):
    net = model()
    handle = compress_gradients(net, "int8", group=group)
    _step(net, net, group)
    if group.rank() == 1:
        net[0].weight.grad = torch.ones_like(net[0].weight)
    with pytest.raises(ValueError) as error:
        handle.average()
    return str(error.value)


def test_a_frozen_parameter_with_a_gradient_on_one_rank_is_an_error_on_all():
    texts = ranks.run(_frozen_with_a_gradient, 2)
    assert "frozen at compress_gradients must have no gradient, and '0.weight' has" in texts[1]
    assert texts[0] == "model: another rank of the data axis has refused to average, see its error"


def _anew(group):
    net = model()
    first = compress_gradients(net, "int8", group=group)
    _assigned(net)
    second = compress_gradients(net, "int8", group=group)
    _step(net, net, group)
    with pytest.raises(ValueError, match="replaced"):
        first.average()
    second.average()
    with pytest.raises(ValueError, match="must not be compressed already"):
        compress_gradients(net, "int8", group=group)
    return net[1].weight.grad


def test_a_handle_may_be_made_anew():
    first, second = ranks.run(_anew, 2)
    assert torch.equal(first, second)
