"""What works on meshes, over gloo and tp_shm: FSDP2, DTensor, parallelize_module, checkpoints, pipelines."""

import copy

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.helpers.on_ranks import on_ranks
from tests.shm.backends import group_of, tp_shm_and_gloo

pytestmark = pytest.mark.core


def _mesh(backend):
    return DeviceMesh.from_group(group_of(backend), "cpu", mesh_dim_names=("dp",))


def _model():
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(6, 17), nn.Tanh(), nn.Linear(17, 5), nn.Tanh(), nn.Linear(5, 3)).double()


def _batch(p, step):
    return torch.randn(p * 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def _sharded(backend, model):
    mesh = _mesh(backend)
    for layer in (model[0], model[2]):
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _step(model, optimizer, x):
    optimizer.zero_grad()
    loss = model(x).square().mean()
    loss.backward()
    optimizer.step()
    return loss.item()


@tp_shm_and_gloo
@on_ranks(2, 3, backend="gloo")
def test_fsdp2_training_and_its_checkpoint(world, backend, tmp_path):
    """Four steps, a checkpoint, two more; the loaded model does the same two again."""
    folder = str(tmp_path / "saved")
    p, rank = world.size(), world.rank()
    dense, model = _model(), _sharded(backend, _model())
    optimizer, reference = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (model, dense))
    losses = []
    for step in range(6):
        if step == 4:
            state = dict(zip(("model", "optimizer"), get_state_dict(model, optimizer), strict=True))
            dcp.save(state, checkpoint_id=folder, process_group=group_of(backend))
        x = _batch(p, step)
        losses.append(_step(model, optimizer, x.chunk(p)[rank]))
        _step(dense, reference, x)
        for param, wanted in zip(model.parameters(), dense.parameters(), strict=True):
            torch.testing.assert_close(param.full_tensor(), wanted, rtol=0, atol=1e-9)
            torch.testing.assert_close(param.grad.full_tensor(), wanted.grad, rtol=0, atol=1e-13)

    again = _sharded(backend, nn.Sequential(*map(copy.deepcopy, _model())))
    other = torch.optim.AdamW(again.parameters(), lr=0.05)
    state = dict(zip(("model", "optimizer"), get_state_dict(again, other), strict=True))
    dcp.load(state, checkpoint_id=folder, process_group=group_of(backend))
    set_state_dict(again, other, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    assert [_step(again, other, _batch(p, step).chunk(p)[rank]) for step in (4, 5)] == losses[4:]


@tp_shm_and_gloo
@pytest.mark.parametrize("p", [2, 3])
@on_ranks(backend="gloo")
def test_dtensor(world, backend):
    mesh, p = _mesh(backend), world.size()
    full = torch.arange(7 * 5, dtype=torch.float64).view(7, 5)  # no p divides it
    for before in (Shard(0), Shard(1), Replicate()):
        x = distribute_tensor(full, mesh, [before])
        for after in (Shard(0), Shard(1), Replicate()):
            assert torch.equal(x.redistribute(mesh, [after]).full_tensor(), full)
    parts = torch.distributed.tensor.DTensor.from_local(full, mesh, [Partial()])
    assert torch.equal(parts.full_tensor(), p * full)
    assert torch.equal(parts.redistribute(mesh, [Shard(0)]).full_tensor(), p * full)
    x, y = distribute_tensor(full, mesh, [Shard(1)]), distribute_tensor(full.t().contiguous(), mesh, [Shard(0)])
    torch.testing.assert_close((x @ y).full_tensor(), full @ full.t(), rtol=1e-14, atol=0)


@tp_shm_and_gloo
@on_ranks(2, backend="gloo")
def test_parallelize_module(world, backend):
    mesh = _mesh(backend)
    torch.manual_seed(0)
    dense = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)).double()
    model = parallelize_module(copy.deepcopy(dense), mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
    x = _batch(2, 0)
    model(x).square().sum().backward()
    dense(x).square().sum().backward()
    for param, wanted in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(param.grad.full_tensor(), wanted.grad, rtol=1e-12, atol=1e-13)


# Pipelines


@tp_shm_and_gloo
@pytest.mark.parametrize("p, schedule", [(2, ScheduleGPipe), (3, Schedule1F1B)], ids=["gpipe", "1f1b"])
@on_ranks(backend="gloo")
def test_pipelines(world, backend, schedule):
    """One stage per rank, more microbatches than stages: loss and gradients of the unsplit model."""
    p, rank = world.size(), world.rank()
    torch.manual_seed(2)
    dense = nn.Sequential(*(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(p))).double()
    stage = PipelineStage(copy.deepcopy(dense[rank]), rank, p, torch.device("cpu"), group=group_of(backend))
    count = 2 * p

    def loss(y, target):
        return (y - target).square().mean()

    runner = schedule(stage, n_microbatches=count, loss_fn=loss)
    x, target = _batch(count, 0), _batch(count, 1)
    losses: list = []
    for _ in range(2):
        stage.submod.zero_grad()
        losses.clear()
        first, last = rank == 0, rank == p - 1
        runner.step(*([x] if first else []), **({"target": target, "losses": losses} if last else {}))
    whole = loss(dense(x), target)
    whole.backward()
    for param, wanted in zip(stage.submod.parameters(), dense[rank].parameters(), strict=True):
        torch.testing.assert_close(param.grad, wanted.grad, rtol=0, atol=1e-13)
    if rank == p - 1:
        torch.testing.assert_close(torch.stack(losses).mean(), whole, rtol=0, atol=1e-13)


@tp_shm_and_gloo
@on_ranks(4, backend="gloo")
def test_a_mesh_of_two_dimensions(world, backend):
    """FSDP2 along one axis of a mesh of 2 x 2, sums along the other: four small groups of one backend."""
    rank = world.rank()
    axes = [(0, 2), (1, 3)], [(0, 1), (2, 3)]
    groups = [{members: group_of(backend, members) for members in axis} for axis in axes]  # all ranks make all
    mine = [next(group for members, group in axis.items() if rank in members) for axis in groups]
    mesh = DeviceMesh.from_group(mine, "cpu", mesh=[[0, 1], [2, 3]], mesh_dim_names=("dp", "tp"))
    dense, model = _model(), _model()
    fully_shard(model, mesh=mesh["dp"])
    x = _batch(2, 0)
    model(x.chunk(2)[mesh["dp"].get_local_rank()]).square().mean().backward()
    dense(x).square().mean().backward()
    for param, wanted in zip(model.parameters(), dense.parameters(), strict=True):
        gradient = param.grad.full_tensor()
        dist.all_reduce(gradient, dist.ReduceOp.AVG, group=mesh.get_group("tp"))
        torch.testing.assert_close(gradient, wanted.grad, rtol=0, atol=1e-13)
