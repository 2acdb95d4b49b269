"""parallelize: wrong arguments, models that cannot be trained, and losses that are none, are named on every rank."""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tp_ext.parallel import sum_gradients


def mse(output, target):
    return (output - target).square().mean()


def linears(frozen=False):
    return nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2)).requires_grad_(not frozen)


def _refused(group, options, make=linears):
    tp_ext.parallelize(make(), mesh_of(1, group.size(), 1, 1), **{"loss": mse} | options)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"compile": "yes"}, TypeError, "compile: 'yes' must be True or False"),
        ({"compile": 1}, TypeError, "compile: 1 must be True or False"),
        ({"offload": "yes", "zero": 2}, TypeError, "offload: 'yes' must be True or False"),
        ({"schedule": 3}, TypeError, "schedule: 3 must be a name, one of"),
        ({"schedule": "2F2B"}, ValueError, r"schedule: '2F2B' must be one of GPipe"),
    ],
)
def test_wrong_options(options, error, match):
    ranks.run_raises(_refused, 2, error, match, options, in_turns=False)


def _frozen():
    return linears(frozen=True)


@pytest.mark.parametrize("make", [nn.ReLU, _frozen])
def test_a_model_that_cannot_be_trained(make):
    match = "model: .* must have a parameter that requires a gradient"
    ranks.run_raises(_refused, 2, ValueError, match, {}, make, in_turns=False)


def _replicas(group, zero):
    """The shard of one rank differs: the ranks of the other half of tp see no difference of their own."""
    mesh = mesh_of(1, 2, 1, 2)
    torch.manual_seed(0)
    model = nn.Sequential(tp_ext.ColumnParallelLinear(2, 4, group=mesh["tp"]), nn.Linear(2, 2))
    if group.rank() == 3:
        model[0].weight.data[1, 0] = 7.0
    tp_ext.parallelize(model, mesh, loss=mse, zero=zero)


def test_replicas_that_start_from_different_weights():
    match = r"same weights on all data ranks, and '0.weight' differs on the ranks \[1, 3\]; seed"
    ranks.run_raises(_replicas, 4, ValueError, match, 2, in_turns=False, timeout=120)


def _again(group, way):
    mesh, model = mesh_of(1, group.size(), 1, 1), linears()
    if way == "fully_shard":
        fully_shard(model, mesh=mesh["dp"])
        tp_ext.parallelize(model, mesh, loss=mse)
    run = tp_ext.parallelize(model, mesh, loss=mse, recompute="full", zero=2)
    tp_ext.parallelize(run.state if way == "state" else model, mesh, loss=mse)


@pytest.mark.parametrize("way", ["model", "state", "fully_shard"])
def test_a_model_is_parallelized_once(way):
    match = "must not be sharded by" if way == "fully_shard" else "Sequential must not have been parallelized before"
    ranks.run_raises(_again, 2, ValueError, f"model: .*{match}", way, in_turns=False)


LOSSES = {
    "tuple": (lambda output, target: (mse(output, target), 0), r"loss: its result, a tuple, must be a tensor with one"),
    "elements": (
        lambda output, target: output - target,
        r"loss: its result of shape \(4, 2\) must be a tensor with one",
    ),
}


def _stepped(group, case, reduction):
    options = {"loss": LOSSES[case][0], "reduction": reduction}
    run = tp_ext.parallelize(linears(), mesh_of(1, group.size(), 1, 1), **options)
    run.step(torch.ones(4, 2), torch.ones(4, 2))


@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("case", LOSSES)
def test_a_loss_is_one_number(case, reduction):
    error = TypeError if case == "tuple" else ValueError
    found = ranks.run_raises(_stepped, 2, error, LOSSES[case][1], case, reduction, in_turns=False)
    assert max(map(len, found)) < 200


def _optimizer(group):
    tp_ext.parallelize(linears(), mesh_of(1, group.size(), 1, 1), loss=mse).optimizer(3)


def test_an_optimizer_that_is_none():
    match = "optimizer_class: 3 must be a class of torch.optim.Optimizer"
    ranks.run_raises(_optimizer, 2, TypeError, match, in_turns=False)


def _summed(group, model):
    sum_gradients(model, group)


@pytest.mark.parametrize("model", [3, torch.ones(2)], ids=str)
def test_gradients_of_no_model(model):
    match = "model: .* must be a module, or the parameters in a list"
    ranks.run_raises(_summed, 2, TypeError, match, model)
