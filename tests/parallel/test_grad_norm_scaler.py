"""fp16 loss scaling: what overflows on one rank is no step on any with torch's ShardedGradScaler over the group. With
torch.amp.GradScaler too: tests/outside/test_scaling.py.
"""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler

import tp_ext
from tests.helpers import ranks

pytestmark = pytest.mark.core


def _step(group, overflowing, data):
    """Returns whether a step with an infinite gradient of a shard on rank `overflowing` changed anything; the scale."""
    mesh = init_device_mesh("cpu", (data, group.size() // data), mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"]
    model = nn.Sequential(
        tp_ext.RMSNorm(4, group=tp), tp_ext.ParallelMLP(4, 8, group=tp), tp_ext.ColumnParallelLinear(4, 4, group=tp)
    )
    if data > 1:
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = dist.group.WORLD if data > 1 else tp.get_group()
    scaler = ShardedGradScaler("cpu", init_scale=1024.0, process_group=whole)
    before = [param.detach().clone() for param in model.parameters()]
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    if group.rank() == overflowing:
        grad = model[1].up.weight.grad
        (grad if data == 1 else grad.to_local())[0, 0] = float("inf")
    scaler.unscale_(optimizer)
    tp_ext.clip_grad_norm_(model, 1.0)
    scaler.step(optimizer)
    scaler.update()
    stored = [p.detach() if data == 1 else p.detach().to_local() for p in model.parameters()]
    start = [b if data == 1 else b.to_local() for b in before]
    return any(not torch.equal(a, b) for a, b in zip(stored, start, strict=True)), scaler.get_scale()


@pytest.mark.parametrize(("p", "data"), [(2, 1), (3, 1), (4, 2)], ids=["p = 2", "p = 3", "2 x 2 under FSDP2"])
def test_no_rank_steps(p, data):
    for overflowing in range(p):
        assert ranks.run(_step, p, overflowing, data) == [(False, 512.0)] * p
    assert ranks.run(_step, p, None, data) == [(True, 1024.0)] * p
