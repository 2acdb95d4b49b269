"""A group of one NCCL rank, which is all that one GPU allows: regions, and training steps as without a group.

On the CPU the same body runs over gloo, and the steps have the same bits.
"""

import pytest
import torch
from torch import distributed as dist

import tp_ext
from tests.helpers import ranks
from tests.helpers.region_maps import cases
from tests.helpers.small_gpt import batches, make

pytestmark = pytest.mark.core


def step(group, device):
    """Losses, gradient norms and weights of three steps, dropout and sequence parallelism included."""
    model = make(group, sequence_parallel=True).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    numbers = []
    torch.manual_seed(3)
    for ids, target in batches(3):
        loss = model.loss(ids.to(device), target.to(device))
        optimizer.zero_grad()
        loss.backward()
        numbers += [loss.detach(), tp_ext.clip_grad_norm_(model, 1.0, group=group)]
        optimizer.step()
    return [torch.stack(numbers), *tp_ext.full_state_dict(model, group=group).values()]


def alone(path, device):
    """In a process of its own: what regions do, the steps in the group and without it, and a sum by the backend."""
    backend = "nccl" if device.type == "cuda" else "gloo"
    bound = torch.device("cuda", 0) if device.type == "cuda" else None
    store = dist.FileStore(path, 1)
    dist.init_process_group(backend, store=store, rank=0, world_size=1, device_id=bound)
    try:
        group, exact = dist.group.WORLD, []
        for case in cases(1):
            (x,) = case.inputs(1)
            (want,) = case.emulate([x])
            own = x.to(device).requires_grad_()
            y = case(own, group)
            y.backward(torch.ones_like(y))
            exact += [torch.equal(y.cpu(), want), torch.equal(own.grad.cpu(), torch.ones_like(x))]
        total = torch.arange(5.0, device=device)
        dist.all_reduce(total, group=group)
        return exact, step(group, device), step(None, device), total
    finally:
        dist.destroy_process_group()


def test_a_step_on_one_rank(device, tmp_path):
    exact, in_group, without, total = ranks.run_fresh(alone, str(tmp_path / "store"), device, timeout=120)
    assert all(exact) and len(exact) > 40
    assert torch.equal(total, torch.arange(5.0))
    assert len(in_group) == len(without) > 10
    for got, want in zip(in_group, without, strict=True):
        if device.type == "cpu":
            assert torch.equal(got, want)
        else:  # attention's backward, torch's, may sum in any order there: fp32 after three steps
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
