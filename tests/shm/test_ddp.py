"""DistributedDataParallel over gloo and tp_shm: gradients and weights are those of one process with the whole batch."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.algorithms.join import Join
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.parallel import DistributedDataParallel

from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import run
from tests.shm.backends import both_backends, group_of

pytestmark = pytest.mark.core


class Model(nn.Module):
    """A part that only some inputs use, a part that none does."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 3))
        self.left, self.right, self.nowhere = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 3)
        self.register_buffer("scale", torch.ones(3))

    def forward(self, x, side="both"):
        x = self.body(x) * self.scale
        out = x if side == "body" else 0 * x
        if side in ("left", "both"):
            out = out + self.left(x)
        if side in ("right", "both"):
            out = out + self.right(x)
        return out


def _model():
    torch.manual_seed(1)
    return Model().double()


def _batch(p, step, rows=4):
    generator = torch.Generator().manual_seed(step)
    return torch.randn(p * rows, 6, dtype=torch.float64, generator=generator)


def _close(model, dense):
    """fp64: a sum over the ranks and one over the batch differ by rounding alone."""
    for (name, param), wanted in zip(model.named_parameters(), dense.parameters(), strict=True):
        assert (param.grad is None) == (wanted.grad is None), name
        torch.testing.assert_close(param, wanted, rtol=0, atol=1e-12, msg=lambda m, n=name: f"{n}: {m}")
        if wanted.grad is not None:
            torch.testing.assert_close(param.grad, wanted.grad, rtol=0, atol=1e-13, msg=lambda m, n=name: f"{n}: {m}")


OPTIONS = {
    "default": {},
    "a bucket per parameter": {"bucket_cap_mb": 1e-5},
    "views of buckets": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "no unused": {"side": "both"},
}


def _train(world, backend, options, p, steps):
    group, rank = group_of(backend), world.rank()
    options = dict(options)
    dense, model = _model(), _model()
    for module in (dense, model):
        module.nowhere.requires_grad_(False)
    with torch.no_grad():
        model.body[0].weight.add_(rank)  # rank 0's weights and buffers are what all start from
        model.scale.add_(rank)
    side = options.pop("side", "both")
    ddp = DistributedDataParallel(model, process_group=group, **options)
    optimizers = [torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9) for m in (model, dense)]
    for step in range(steps):
        x = _batch(p, step)
        for optimizer in optimizers:
            optimizer.zero_grad()
        ddp(x.chunk(p)[rank], side).square().mean().backward()
        dense(x, side).square().mean().backward()
        for optimizer in optimizers:
            optimizer.step()
        _close(model, dense)
    return [param.detach() for param in model.parameters()]


@pytest.mark.thinned
@both_backends
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("p", [2, 3])
def test_training_is_that_of_one_process(p, options, backend):
    first, *others = run(_train, p, backend, OPTIONS[options], p, 4)
    assert all(torch.equal(x, y) for other in others for x, y in zip(first, other, strict=True))


@both_backends
@on_ranks(2, 3, backend="gloo")
def test_unused_parameters(world, p, backend):
    """Each rank uses one side; the gradient of the other comes from the ranks that use it, that of neither is None."""
    group, rank = group_of(backend), world.rank()
    dense, model = _model(), _model()
    ddp = DistributedDataParallel(model, process_group=group, find_unused_parameters=True)
    for step in range(3):
        x = _batch(p, step)
        ddp.zero_grad()
        dense.zero_grad()
        sides = ["left" if (r + step) % 2 else "right" for r in range(p)]
        ddp(x.chunk(p)[rank], sides[rank]).square().mean().backward()
        sum(dense(part, side).square().mean() for part, side in zip(x.chunk(p), sides, strict=True)).div(p).backward()
        assert model.nowhere.weight.grad is None
        _close(model, dense)


@both_backends
@on_ranks(2, backend="gloo")
def test_no_sync(world, backend):
    group, rank = group_of(backend), world.rank()
    dense, model = _model(), _model()
    model.nowhere.requires_grad_(False)
    ddp = DistributedDataParallel(model, process_group=group)
    for step in range(3):
        x = _batch(2, step)
        if step < 2:
            with ddp.no_sync():
                ddp(x.chunk(2)[rank]).square().mean().backward()
        else:
            ddp(x.chunk(2)[rank]).square().mean().backward()
        dense(x).square().mean().backward()
    _close(model, dense)


def _hook(state, bucket):
    """Two collectives, one after the other, over all buckets at once: all_reduce, then a broadcast of the same."""
    group = state
    future = dist.all_reduce(bucket.buffer(), group=group, async_op=True).get_future()

    def then(f):
        x = f.value()[0].div_(group.size())
        dist.broadcast(x, group_src=0, group=group)
        return x

    return future.then(then)


@pytest.mark.parametrize("backend, hook", [("gloo", "allreduce"), ("tp_shm", "allreduce")])
@on_ranks(2, backend="gloo")
def test_communication_hooks(world, backend, hook):
    group, rank = group_of(backend), world.rank()
    dense, model = _model(), _model()
    model.nowhere.requires_grad_(False)
    ddp = DistributedDataParallel(model, process_group=group)
    ddp.register_comm_hook(group, default_hooks.allreduce_hook)
    for step in range(3):
        x = _batch(2, step)
        ddp.zero_grad()
        dense.zero_grad()
        ddp(x.chunk(2)[rank]).square().mean().backward()
        dense(x).square().mean().backward()
        _close(model, dense)


@both_backends
@on_ranks(2, backend="gloo")
def test_join_with_uneven_inputs(world, backend):
    """Join: ranks with fewer batches shadow the others' collectives."""
    group, rank = group_of(backend), world.rank()
    model = _model()
    model.nowhere.requires_grad_(False)
    ddp = DistributedDataParallel(model, process_group=group)
    with Join([ddp]):
        for step in range(1 + 2 * rank):
            ddp.zero_grad()
            ddp(_batch(1, step)).square().mean().backward()
    assert [param.grad for param in model.parameters() if param.grad is not None]


@both_backends
@on_ranks(2, 3, backend="gloo")
def test_the_zero_redundancy_optimizer(world, p, backend):
    group, rank = group_of(backend), world.rank()
    dense, model = _model(), _model()
    for module in (dense, model):
        module.nowhere.requires_grad_(False)
    ddp = DistributedDataParallel(model, process_group=group)
    used = [param for param in model.parameters() if param.requires_grad]
    optimizer = ZeroRedundancyOptimizer(used, torch.optim.Adam, process_group=group, lr=0.01)
    reference = torch.optim.Adam([param for param in dense.parameters() if param.requires_grad], lr=0.01)
    for step in range(3):
        x = _batch(p, step)
        optimizer.zero_grad()
        reference.zero_grad()
        ddp(x.chunk(p)[rank]).square().mean().backward()
        dense(x).square().mean().backward()
        optimizer.step()
        reference.step()
    optimizer.consolidate_state_dict(to=0)
    for param, wanted in zip(model.parameters(), dense.parameters(), strict=True):
        torch.testing.assert_close(param, wanted, rtol=0, atol=1e-9)  # Adam divides by roots of squares
    if rank == 0:
        assert len(optimizer.state_dict()["state"]) == len(used)
