"""fp16 loss scaling: what overflows on one rank is no step on any with torch's ShardedGradScaler over the group, as the
docstring of tp_ext.grad_norm recommends, and with torch.amp.GradScaler the ranks come apart.
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


def _step(group, kind, overflowing, data):
    """Whether anything changed in a step where a shard on rank `overflowing` has an infinite gradient; the scale."""
    mesh = init_device_mesh("cpu", (data, group.size() // data), mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"]
    model = nn.Sequential(
        tp_ext.RMSNorm(4, group=tp), tp_ext.ParallelMLP(4, 8, group=tp), tp_ext.ColumnParallelLinear(4, 4, group=tp)
    )
    if data > 1:
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if kind == "sharded":
        whole = dist.group.WORLD if data > 1 else tp.get_group()
        scaler = ShardedGradScaler("cpu", init_scale=1024.0, process_group=whole)
    else:
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    before = [param.detach().clone() for param in model.parameters()]
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    if group.rank() == overflowing:
        grad = model[1].up.weight.grad
        (grad if data == 1 else grad.to_local())[0, 0] = float("inf")
    if kind == "sharded":
        scaler.unscale_(optimizer)
        tp_ext.clip_grad_norm_(model, 1.0, group=tp)
    scaler.step(optimizer)
    scaler.update()
    stored = [p.detach() if data == 1 else p.detach().to_local() for p in model.parameters()]
    start = [b if data == 1 else b.to_local() for b in before]
    return any(not torch.equal(a, b) for a, b in zip(stored, start, strict=True)), scaler.get_scale()


@pytest.mark.parametrize(("p", "data"), [(2, 1), (3, 1), (4, 2)], ids=["p = 2", "p = 3", "2 x 2 under FSDP2"])
def test_no_rank_steps(p, data):
    for overflowing in range(p):
        assert ranks.run(_step, p, "sharded", overflowing, data) == [(False, 512.0)] * p
    assert ranks.run(_step, p, "sharded", None, data) == [(True, 1024.0)] * p


def test_a_scaler_without_a_group_lets_the_ranks_diverge():
    """In their scales, too."""
    assert ranks.run(_step, 2, "plain", 1, 1) == [(True, 1024.0), (False, 512.0)]
