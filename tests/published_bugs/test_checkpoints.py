"""Published bugs of checkpoints of parameters that tensor parallelism and FSDP2 both shard, on 2 x 2 ranks; ours are
the tensors of the model in one process."""

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.distributed.tensor.placement_types import _StridedShard

import tp_ext
from tests.helpers import ranks
from tests.helpers.right_and_wrong import check

HIDDEN, FFN = 2, 8


def model(group=None):
    parts = {
        "column": tp_ext.ColumnParallelLinear(HIDDEN, FFN, False, group=group),
        "mlp": tp_ext.ParallelMLP(HIDDEN, FFN, activation="swiglu", group=group),
    }
    net = nn.ModuleDict(parts)
    rows = torch.arange(1.0, 1 + 2 * FFN * HIDDEN).view(2 * FFN, HIDDEN)
    state = {"column.weight": rows[:FFN], "mlp.up.weight": rows}
    tp_ext.load_full_state_dict(net, state, group=group, strict=False)
    return net


def sharded():
    mesh = tp_ext.init_mesh("cpu", dp=2, tp=2)
    net = model(mesh["tp"])
    for part in net.values():
        fully_shard(part, mesh=mesh["dp"])
    return mesh, net


def _in_the_order_of_the_mesh(group):
    mesh, net = sharded()
    ours = tp_ext.full_state_dict(net, mesh=mesh)["column.weight"]
    local = net["column"].weight.to_local()
    return ours, DTensor.from_local(local, mesh["dp", "tp"], [Shard(0), Shard(0)]).full_tensor()


def test_a_dim_that_both_axes_cut():
    """``full_tensor()`` of a weight that tensor parallelism cut first, and FSDP2 along the same dim, had its rows in
    another order: https://github.com/pytorch/pytorch/issues/129206."""
    check(ranks.run(_in_the_order_of_the_mesh, 4), model()["column"].weight.detach(), rtol=0, atol=0)


def _gate_and_up(group):
    mesh, net = sharded()
    local = net["mlp"].up.weight.to_local()  # of this rank's gate, then of its up
    of_tp = tp_ext.all_gather_region(local, mesh["dp"], 0)
    return tp_ext.full_state_dict(net, mesh=mesh)["mlp.up.weight"], tp_ext.all_gather_region(of_tp, mesh["tp"], 0)


def test_gate_and_up_in_one_weight():
    """The checkpoint of FSDP2 with tensor parallelism did not know that the rows of a SwiGLU weight are gate and up of
    each rank in turn: https://github.com/NVIDIA/Megatron-LM/issues/2769."""
    check(ranks.run(_gate_and_up, 4), model()["mlp"].up.weight.detach(), rtol=0, atol=0)


def _saved(group, path):
    mesh, net = sharded()
    tp_ext.save_checkpoint(path, net, mesh=mesh)
    local, whole = torch.empty(FFN, HIDDEN), {"shape": (2 * FFN, HIDDEN), "stride": (HIDDEN, 1)}
    packed = DTensor.from_local(local, mesh["tp"], [_StridedShard(0, split_factor=2)], **whole)
    return [(chunk.offsets[0], chunk.sizes[0]) for chunk in packed.__create_chunk_list__()]


def _loaded(group, path):
    mesh = tp_ext.init_mesh("cpu", tp=2)
    net = model(mesh["tp"])
    for param in net.parameters():
        nn.init.zeros_(param)
    tp_ext.load_checkpoint(path, net, mesh=mesh)
    return tp_ext.full_state_dict(net, mesh=mesh)["mlp.up.weight"]


def test_a_shard_of_several_chunks(tmp_path):
    """A shard of several sections of a tensor counted as one contiguous chunk, so that chunks of ranks overlapped, and
    saving failed: https://github.com/huggingface/transformers/pull/48802."""
    chunks = ranks.run(_saved, 4, tmp_path / "saved")
    covered = [range(offset, offset + size) for offset, size in {chunk for one in chunks for chunk in one}]
    assert sorted(row for rows in covered for row in rows) != list(range(2 * FFN))
    want = model()["mlp"].up.weight.detach()
    for ours in ranks.run(_loaded, 2, tmp_path / "saved"):
        assert ours.equal(want)


def _a_mesh_in_descending_order(group, folder):
    mesh = DeviceMesh("cpu", torch.tensor([[1], [0]]), mesh_dim_names=("dp", "tp"))
    net = nn.Sequential(nn.Linear(1, 8, bias=False))
    fully_shard(net, mesh=mesh["dp"])
    full = torch.arange(8.0).view(8, 1)
    tp_ext.load_full_state_dict(net, {"0.weight": full}, mesh=mesh)
    assert torch.equal(net[0].weight.full_tensor(), full)
    read = []
    for name, state in (("ours", net.state_dict()), ("theirs", dict(net.named_parameters()))):
        dcp.save(state, checkpoint_id=f"{folder}/{name}")
        reader = {"0.weight": torch.zeros(8, 1)}
        dcp.load(reader, checkpoint_id=f"{folder}/{name}")
        read.append(reader["0.weight"])
    return tuple(read)


def test_a_mesh_whose_ranks_do_not_ascend(tmp_path):
    """torch cuts and joins a DTensor by ranks in the axis's group, which are sorted, and its distributed checkpoint
    wrote it by places in the mesh: halves changed places. https://github.com/pytorch/pytorch/issues/193224."""
    check(ranks.run(_a_mesh_in_descending_order, 2, str(tmp_path)), torch.arange(8.0).view(8, 1), rtol=0, atol=0)
