"""Chunks: over all ranks the owned ones are the full tensor exactly once, on TP-local tensors and on what FSDP2 or a
DTensor of several data axes makes of them, and they are views.
"""

from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import tp_ext
from tests.helpers import ranks
from tests.test_sharding import cuts
from tp_ext import Layout, Part, Sharding
from tp_ext.chunks import LocalChunk
from tp_ext.group import ParallelGroup
from tp_ext.model.model_groups import ModelGroups

pytestmark = pytest.mark.core


def local_chunks(tensor, sharding, rank, p):
    """The shape and the chunks of a tensor of one rank of p, sharded or replicated over them."""
    group = ParallelGroup(f"group@{rank}/{p}", p, rank)
    groups = ModelGroups((group,), {group.name: (0, True)})
    with mock.patch("tp_ext.group.global_ranks", lambda name: [-1]):  # in no mesh of a DTensor
        return groups.local_chunks(tensor, Layout() if sharding is None else Layout((sharding, group)))


def assert_covers(full: torch.Tensor, held: list[list[LocalChunk]]) -> None:
    """The chunks have the values of the full tensor at their offsets; the owned ones are there once, all of them."""
    count = torch.zeros_like(full)
    for offsets, tensor, owned in (chunk for one in held for chunk in one):
        where = tuple(slice(o, o + n) for o, n in zip(offsets, tensor.shape, strict=True))
        assert tensor.numel() and torch.equal(tensor, full[where])
        count[where] += owned
    assert torch.equal(count, torch.ones_like(full))


@settings(max_examples=200, deadline=None)
@given(cuts)
def test_plain_tensors(cut):
    p, parts = cut
    for dim in (0, 1, -1):
        sharding = Sharding(dim, parts)
        shape = [3, 3]
        shape[dim] = sharding.size
        full, held = torch.randn(shape), []
        for rank in range(p):
            local = sharding.shard(full, rank, p)
            shape, found = local_chunks(local, sharding, rank, p)
            assert shape == full.shape
            held.append(found)
            size = sum(s.stop - s.start for s in sharding.slices(rank, p))
            assert sum(chunk.tensor.shape[dim] for chunk in found) == size  # copies too, padding not
            storage = local.untyped_storage().data_ptr()
            assert all(chunk.tensor.untyped_storage().data_ptr() == storage for chunk in found)
        assert_covers(full, held)


@pytest.mark.parametrize("shape", [(), (3,), (2, 3)])
def test_replicated_tensors_are_owned_by_rank_0(shape):
    full = torch.randn(shape)
    found = [local_chunks(full, None, rank, 3) for rank in range(3)]
    assert [[chunk.owned for chunk in one] for _, one in found] == [[True], [False], [False]]
    assert_covers(full, [one for _, one in found])


def test_adjacent_parts_are_one_chunk():
    """q | k | v at p = 1, and at p = 2 the k and v that follow each other neither locally nor in full."""
    sharding = Sharding(0, (4, 2, 2))
    assert len(local_chunks(torch.ones(8, 2), sharding, 0, 1)[1]) == 1
    assert [chunk.offsets for chunk in local_chunks(torch.ones(4, 2), sharding, 1, 2)[1]] == [(2, 0), (5, 0), (7, 0)]
    shape, found = local_chunks(torch.ones(8, 2), Sharding(0, [Part(5, padding=3)]), 0, 1)
    assert shape == (5, 2) and [chunk.tensor.shape for chunk in found] == [(5, 2)]


def test_empty_tensors_have_no_chunk():
    assert local_chunks(torch.ones(0, 3), None, 0, 1) == ((0, 3), [])
    assert local_chunks(torch.ones(0, 3), Sharding(0, [1]), 1, 2) == ((1, 3), [])


SHARDINGS = {
    "replicated": None,
    "rows": Sharding(0, [7]),
    "columns": Sharding(1, [8]),
    "q|k|v": Sharding(0, [Part(8, 2, groups=2), Part(4, 2, copies=2), Part(4, 2, copies=2)]),
    "padded": Sharding(0, [Part(5, padding=3)]),
}


def _cut_twice(group, mesh_shape, placements):
    """This data rank's chunks of the tensors of each of 4 tensor-parallel ranks, sharded again by the placements."""
    mesh, p, found = init_device_mesh("cpu", mesh_shape), 4, {}
    for name, sharding in SHARDINGS.items():
        full = torch.arange(16 * 8.0).view(16, 8)[: sharding.size if sharding and sharding.dim == 0 else 16]
        found[name] = full, []
        for rank in range(p):
            local = full if sharding is None else sharding.shard(full, rank, p)
            if any(isinstance(placement, _StridedShard) for placement in placements) and len(local) % 4:
                continue  # torch shards even ones only
            tensor = distribute_tensor(local, mesh, placements)
            shape, held = local_chunks(tensor, sharding, rank, p)
            assert shape == full.shape
            storage = tensor.to_local().untyped_storage().data_ptr()
            assert all(chunk.tensor.untyped_storage().data_ptr() == storage for chunk in held)
            found[name][1].append([tuple(chunk) for chunk in held])
    return found


LAID = [
    ((2,), (Shard(0),)),
    ((3,), (Shard(1),)),
    ((3,), (Replicate(),)),
    ((2, 2), (Replicate(), Shard(0))),
    ((2, 2), (Shard(1), Shard(0))),
    ((2, 2), (Shard(0), Shard(0))),
    ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
]


@pytest.mark.parametrize(("mesh_shape", "placements"), LAID, ids=str)
def test_tensors_that_data_axes_cut_again(mesh_shape, placements):
    per_rank = ranks.run(_cut_twice, torch.Size(mesh_shape).numel(), mesh_shape, placements)
    checked = 0
    for name in SHARDINGS:
        full, found = per_rank[0][name]
        if len(found) == 4:
            assert_covers(full, [[LocalChunk(*chunk) for chunk in held] for one in per_rank for held in one[name][1]])
            checked += 1
    assert checked >= 2


def _strided(group):
    tensor = distribute_tensor(
        torch.arange(8.0), init_device_mesh("cpu", (2, 2)), (_StridedShard(0, split_factor=2), Shard(0))
    )
    half = distribute_tensor(torch.arange(8.0), init_device_mesh("cpu", (4,)), (_StridedShard(0, split_factor=2),))
    return [[chunk.offsets for chunk in local_chunks(t, None, 0, 1)[1]] for t in (tensor, half)]


def test_strided_shards_are_several_chunks():
    assert ranks.run(_strided, 4)[1] == [[(4,)], [(1,), (5,)]]


def _partial(group):
    mesh = init_device_mesh("cpu", (2,))
    local_chunks(torch.distributed.tensor.DTensor.from_local(torch.ones(2), mesh, (Partial(),)), None, 0, 1)


def test_errors():
    with pytest.raises(ValueError, match=r"tensor: shape \(3, 2\) on rank 1 must have 2 elements in dim 0.*p = 2"):
        local_chunks(torch.ones(3, 2), Sharding(0, [5]), 1, 2)
    with pytest.raises(ValueError, match="tensor"):
        local_chunks(torch.ones(()), Sharding(0, [5]), 1, 2)
    ranks.run_raises(_partial, 2, ValueError, "tensor: .*partial sums")


def _fsdp(group, sizes):
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=("dp", "tp"))
    tp = mesh["tp"]
    model = tp_ext.ParallelAttention(8, 4, num_kv_heads=1, head_dim=2, qk_norm=True, group=tp, dtype=torch.float64)
    want = tp_ext.full_state_dict(model)
    fully_shard(model, mesh=mesh["dp"])
    table = dict(tp_ext.shardings(model))
    held = {}
    for name, param in model.named_parameters():
        shape, found = local_chunks(param, table[name], tp.get_local_rank(), tp.size())
        assert shape == want[name].shape
        held[name] = [tuple(chunk) for chunk in found]
    return want, held


@pytest.mark.parametrize("sizes", [(2, 2), (3, 1), (1, 3)])
def test_modules_under_fsdp2(sizes):
    per_rank = ranks.run(_fsdp, torch.Size(sizes).numel(), sizes)
    for name, full in per_rank[0][0].items():
        assert_covers(full, [[LocalChunk(*chunk) for chunk in held[name]] for _, held in per_rank])
