"""torch.amp.GradScaler with our models: an overflow in one rank's shard is no step on any."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tp_ext
from tests.helpers import ranks
from tests.helpers.data_parallel import mesh

pytestmark = pytest.mark.core

OPTIMIZERS = {
    "sgd": lambda params: torch.optim.SGD(params, lr=0.1),
    "fused": lambda params: torch.optim.Adam(params, lr=0.1, fused=True),  # gets the flag, and skips by itself
}


def _model(tp):
    torch.manual_seed(3)
    dense = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4))
    if tp is not None:
        dense[0] = tp_ext.ColumnParallelLinear.from_linear(dense[0], group=tp)
        dense[2] = tp_ext.RowParallelLinear.from_linear(dense[2], group=tp)
    return dense


def _local(tensor):
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def _train(tp, overflows, optimizer, explicit, place=0, how=None, dp=None):
    """Four steps, of which the second overflows in one element that one rank holds; scales and the full state."""
    model = _model(tp)
    wrapped = model
    if how == "fsdp":
        wrapped = fully_shard(model, mesh=dp)
    elif how == "ddp":
        wrapped = DistributedDataParallel(model, process_group=dp.get_group())
    stepper = OPTIMIZERS[optimizer](model.parameters())
    scaler, scales = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2), []
    for step in range(4):
        stepper.zero_grad()
        x = torch.linspace(-1, 1 + step, 8).view(2, 4)
        scaler.scale(wrapped(x).square().sum()).backward()
        if step == 1 and place == overflows:
            _local(model[0].weight.grad)[0, 0] = float("inf")
        if explicit:
            scaler.unscale_(stepper)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(stepper)
        scaler.update()
        scales.append(scaler.get_scale())
    return scales, tp_ext.full_state_dict(model)


def _on_rank(rank, group, *args):
    return _train(group, *args, place=rank)


def _compare(results, want):
    assert want[0] == [1024.0, 512.0, 512.0, 1024.0]
    for scales, state in results:
        assert scales == want[0]
        torch.testing.assert_close(state, want[1], rtol=1e-5, atol=1e-5)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("explicit", [False, True], ids=["step", "unscale, clip"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("p", [2, 3, 4])
def test_all_ranks_skip_the_same_steps(p, optimizer, explicit):
    want = _train(None, 0, optimizer, explicit)
    for overflows in range(p):
        _compare(tp_ext.debug.simulate(_on_rank, p, overflows, optimizer, explicit), want)


def _on_mesh(group, overflows, optimizer, how):
    axes = mesh(2, 2)
    place = group.rank() if how == "fsdp" else axes["tp"].get_local_rank()  # DDP has averaged the gradients
    return _train(axes["tp"], overflows, optimizer, True, place, how, axes["dp"])


@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_with_a_data_axis(how):
    want = _train(None, 0, "sgd", True)
    for overflows in range(2 if how == "ddp" else 4):
        _compare(ranks.run(_on_mesh, 4, overflows, "sgd", how), want)


def _partly(rank, group):
    """Gradients on one rank alone; an optimizer of what is no shard; no gradient on any rank."""
    layer, other = tp_ext.ColumnParallelLinear(4, 8, group=group), nn.Linear(4, 4)
    found = []
    for optimizer in (torch.optim.SGD(layer.parameters(), 1.0), torch.optim.SGD(other.parameters(), 1.0)):
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        scaler.scale(torch.ones(()))
        if rank == 1:
            for param in itertools.chain(layer.parameters(), other.parameters()):
                param.grad = torch.full_like(param, float("nan"))
        else:
            other.zero_grad()
            other.weight.grad = torch.zeros_like(other.weight)
        scaler.step(optimizer)
        scaler.update()
        found.append(scaler.get_scale())
    return found


def test_a_rank_without_gradients_and_an_optimizer_without_shards():
    assert tp_ext.debug.simulate(_partly, 2) == [[2.0, 4.0], [2.0, 2.0]]


def test_without_shards_it_is_torchs():
    """Its assertion, too, in a process that has shards."""
    keeps = tp_ext.debug.simulate(lambda rank, group: tp_ext.ColumnParallelLinear(2, 2, group=group), 2)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(()))
    with pytest.raises(AssertionError, match="No inf checks"):
        scaler.step(torch.optim.SGD(nn.Linear(2, 2).parameters()))
    del keeps
