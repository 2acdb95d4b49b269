"""Published bugs of a Trainer's checkpoints under tensor parallelism: a step of AdamW, a checkpoint, and another step
from it. Ours are the functions that tp_ext.huggingface.Trainer calls."""

import datetime

import pytest
import safetensors.torch
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.device_mesh import DeviceMesh
from torch.utils._pytree import tree_map_only

import tp_ext
from tests.helpers import ranks
from tests.helpers.right_and_wrong import check

FP64 = {"dtype": torch.float64}


def _made(group=None):
    """A layer after a step of AdamW, and its optimizer."""
    torch.manual_seed(3)
    layer = tp_ext.ColumnParallelLinear(4, 6, False, group=group, gather_output=True, **FP64)
    optimizer = torch.optim.AdamW(layer.parameters(), lr=0.1)
    _step(layer, optimizer)
    return layer, optimizer


def _step(layer, optimizer):
    x = torch.randn(5, 4, generator=torch.Generator().manual_seed(8), **FP64)
    (layer(x) * torch.linspace(1, 2, 6, **FP64)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def _full(layer, group=None):
    return tp_ext.full_state_dict(layer, group=group)["weight"]


def _gathered_by_rank_0_alone(group, path):
    layer, _ = _made(group)
    own = dist.new_group(timeout=datetime.timedelta(seconds=1))
    published = None
    if dist.get_rank(group) == 0:  # as one that alone writes the files
        weight = DTensor.from_local(layer.weight.detach(), DeviceMesh.from_group(own, "cpu"), [Shard(0)])
        try:
            published = weight.full_tensor() + 0
        except RuntimeError as error:
            assert "imed out" in str(error)
    dist.barrier(group)
    tp_ext.save_safetensors(path, layer)
    return safetensors.torch.load_file(path / "model.safetensors")["weight"], published


def test_shards_are_gathered_on_all_ranks(tmp_path):
    """Rank 0 alone called the function that gathers the shards, and waited for the others:
    https://github.com/huggingface/transformers/pull/48569, 1."""
    check(ranks.run(_gathered_by_rank_0_alone, 2, tmp_path), _made()[0].weight.detach())


def _read_into_shards(group, path):
    layer, _ = _made(group)
    full = safetensors.torch.load_file(path / "model.safetensors")
    with pytest.raises(RuntimeError, match="load_full_state_dict"):
        layer.load_state_dict(full)
    tp_ext.load_safetensors(path, layer)
    return _full(layer, group)


def test_a_shard_takes_its_slice_of_the_file(tmp_path):
    """The tensors of a checkpoint, which are whole, were loaded into shards:
    https://github.com/huggingface/transformers/pull/48569, 2."""
    expected = {"weight": torch.arange(24.0, **FP64).view(6, 4)}
    safetensors.torch.save_file(expected, tmp_path / "model.safetensors")
    for weight in ranks.run(_read_into_shards, 2, tmp_path):
        assert torch.equal(weight, expected["weight"])


def _resumed(group, path):
    results = []
    for ours in (True, False):
        layer, optimizer = _made(group)
        if ours:
            tp_ext.save_checkpoint(path / "checkpoint", layer, optimizer)
        elif dist.get_rank(group) == 0:
            state = tree_map_only(torch.Tensor, torch.clone, optimizer.state_dict())  # ours say whose shards they are
            torch.save(state, path / "optimizer.pt")
        dist.barrier(group)
        fresh = torch.optim.AdamW(layer.parameters(), lr=0.5)
        if ours:
            tp_ext.load_checkpoint(path / "checkpoint", layer, fresh)
        else:
            fresh.load_state_dict(torch.load(path / "optimizer.pt"))
        _step(layer, fresh)
        results.append(_full(layer, group))
    return results


def test_each_rank_resumes_with_the_moments_of_its_own_shard(tmp_path):
    """Rank 0 wrote the state of its own shards, and all ranks loaded that:
    https://github.com/huggingface/transformers/pull/48569, 3."""
    layer, optimizer = _made()
    _step(layer, optimizer)
    check(ranks.run(_resumed, 2, tmp_path), layer.weight.detach())
