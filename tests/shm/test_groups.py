"""Groups of gloo and tp_shm: subgroups, many of them, made again and again, meshes, names, as the default group."""

import os

import pytest
import torch
import torch.distributed as dist

from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import run
from tests.shm.backends import group_of, launch, results, start, tp_shm_and_gloo

pytestmark = pytest.mark.core


def _sum(group, value):
    x = torch.tensor([float(value)])
    dist.all_reduce(x, group=group)
    return x.item()


def _subgroups(world, backend):
    rank = world.rank()
    sums = {}
    for members in [(0,), (3,), (0, 1), (1, 3), (0, 2, 3), (2, 1, 0), (0, 1, 2, 3)]:
        group = group_of(backend, members)
        if rank not in members:
            assert group is dist.GroupMember.NON_GROUP_MEMBER
            continue
        assert dist.get_backend(group) == backend and dist.get_world_size(group) == len(members)
        assert dist.get_group_rank(group, rank) == group.rank()
        sums[members] = _sum(group, 10**rank)
        x = torch.tensor([float(rank)])
        dist.broadcast(x, members[-1], group=group)  # a rank of the world
        assert x.item() == members[-1]
        dist.barrier(group=group)
    return sums


@tp_shm_and_gloo
def test_subgroups_of_one_two_and_three(backend):
    for rank, sums in enumerate(run(_subgroups, 4, backend)):
        assert sums == {m: float(sum(10**r for r in m)) for m in sums} and all(rank in m for m in sums)


@tp_shm_and_gloo
@on_ranks(2, backend="gloo")
def test_a_group_of_one(world, backend):
    """In a group of one everything is a copy."""
    groups = [group_of(backend, (rank,)) for rank in range(world.size())]
    group, x = groups[world.rank()], torch.arange(6.0)
    y, out = x.clone(), torch.empty(6)
    dist.all_reduce(y, group=group)
    dist.all_reduce(y, dist.ReduceOp.AVG, group=group)
    dist.broadcast(y, group_src=0, group=group)
    dist.all_gather_into_tensor(out, y, group=group)
    assert torch.equal(out, x)
    dist.reduce_scatter_tensor(out.zero_(), y, group=group)
    assert torch.equal(out, x)
    dist.all_to_all_single(out.zero_(), y, group=group)
    assert torch.equal(out, x)
    outs = [torch.empty(6)]
    dist.all_gather(outs, y, group=group)
    dist.gather(y, outs, group_dst=0, group=group)
    dist.scatter(out.zero_(), outs, group_src=0, group=group)
    assert torch.equal(out, x)
    dist.barrier(group=group)


def _again(world, backend, count):
    """Groups come and go; what is left of them is counted."""
    files = len(os.listdir("/proc/self/fd"))
    for i in range(count):
        group = dist.new_group(backend=backend)
        assert _sum(group, i) == i * world.size()
        dist.destroy_process_group(group)
    return len(os.listdir("/proc/self/fd")) - files


@tp_shm_and_gloo
def test_groups_come_and_go(backend):
    for files in run(_again, 2, backend, 20):
        assert files <= 4 or backend == "gloo"


@tp_shm_and_gloo
@on_ranks(2, backend="gloo")
def test_many_groups_at_once(world, backend):
    groups = [dist.new_group(backend=backend) for _ in range(20)]
    for turn in range(2):
        for i, group in enumerate(groups):
            assert _sum(group, i + turn) == (i + turn) * world.size()
    for group in groups:
        dist.destroy_process_group(group)


@tp_shm_and_gloo
@on_ranks(3, backend="gloo")
def test_groups_that_are_hardly_used(world, backend):
    """A group that is destroyed without one call, and one that only a few ranks ever use."""
    unused, group = dist.new_group(backend=backend), dist.new_group(backend=backend)
    dist.barrier(world)  # with gloo others may still be connecting when new_group has returned here
    dist.destroy_process_group(unused)
    if world.rank() < 2:
        x = torch.ones(1)
        (dist.send if world.rank() == 0 else dist.recv)(x, 1 - world.rank(), group=group)
    dist.destroy_process_group(group)


def _halves(world, backend):
    group, groups = dist.new_subgroups(group_size=2, backend=backend)
    assert len(groups) == 2
    first = _sum(group, 10 ** world.rank())
    group, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]], backend=backend)
    return first, _sum(group, 10 ** world.rank())


@tp_shm_and_gloo
def test_new_subgroups(backend):
    assert run(_halves, 4, backend) == [(11, 101), (11, 1010), (1100, 101), (1100, 1010)]


# Attributes


@tp_shm_and_gloo
@on_ranks(2, backend="gloo")
def test_the_attributes_of_a_group(world, backend):
    group = group_of(backend)
    own = group._get_backend(torch.device("cpu"))
    assert own.name() == backend and own.size() == world.size() and own.rank() == world.rank()
    assert group.group_name and dist.get_process_group_ranks(group) == list(range(world.size()))
    assert backend in repr(dist.get_backend_config(group))
    assert not own.supports_splitting or backend == "gloo"


def test_the_backend_is_registered_for_the_cpu():
    assert "tp_shm" in dist.Backend.backend_list and dist.is_backend_available("tp_shm")
    assert dist.Backend.backend_capability["tp_shm"] == ["cpu"]
    assert str(dist.Backend("TP_SHM")) == "tp_shm"


# As the default group


def _default(rank, p, folder, backend):
    for name in ("first", "second"):  # the second after the first was destroyed
        world = start(rank, p, folder, backend, name=name)
        assert world.size() == p and dist.get_rank() == rank
        total = _sum(None, rank)
        half = dist.new_group(list(range(p // 2 + 1)))  # of the default's backend
        if rank <= p // 2:
            assert half._get_backend(torch.device("cpu")).name() == backend.removeprefix("cpu:")
            assert _sum(half, 1) == p // 2 + 1
        things = [None] * p
        dist.all_gather_object(things, {"rank": rank})
        assert things == [{"rank": r} for r in range(p)]
        mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (p // 2, 2), mesh_dim_names=("dp", "tp"))
        assert _sum(mesh.get_group("tp"), 10**rank) == sum(10**r for r in (rank // 2 * 2, rank // 2 * 2 + 1))
        assert _sum(mesh.get_group("dp"), 1) == p // 2
        dist.barrier()
        dist.destroy_process_group()
        assert not dist.is_initialized()
    return total


@pytest.mark.parametrize("backend", [pytest.param("cpu:gloo", marks=pytest.mark.exhaustive), "tp_shm", "cpu:tp_shm"])
def test_as_the_default_group(backend):
    """Twice in the same processes; with a subgroup, objects and a mesh of 2 x 2."""
    assert results(launch(_default, 4, backend)) == [6.0] * 4


def _more_than_cores(rank, p, folder, backend, rounds):
    start(rank, p, folder, backend)
    for i in range(rounds):
        assert _sum(None, i + rank) == i * p + p * (p - 1) / 2
        out = torch.empty(p * 100)
        dist.all_gather_into_tensor(out, torch.full((100,), float(rank)))
        assert out.view(p, 100)[:, 0].tolist() == list(range(p))
    dist.barrier()


@pytest.mark.parametrize("backend", [pytest.param("cpu:gloo", marks=pytest.mark.exhaustive), "cpu:tp_shm"])
def test_more_ranks_than_cores(backend):
    results(launch(_more_than_cores, 8, backend, 50))


def _mixed(rank, p, folder):
    """tp_shm for CPU tensors, and another backend, in one group."""
    start(rank, p, folder, "cpu:tp_shm,cuda:gloo")
    gloo = dist.new_group(backend="gloo")
    return _sum(None, rank + 1), _sum(gloo, 1)  # a rank that left without a call might leave another connecting


def test_with_another_backend_in_one_group():
    assert results(launch(_mixed, 2)) == [(3.0, 2.0)] * 2


def _wrapped(rank, p, folder, backend):
    """The wrapper of torch compares what the ranks call before it calls the backend."""
    assert dist.get_debug_level() == dist.DebugLevel.DETAIL
    start(rank, p, folder, backend, seconds=20)
    totals = _sum(None, rank), _sum(dist.new_group(), rank)
    x, y = torch.ones(2, 3), torch.empty(p * 2, 3)
    dist.all_gather_into_tensor(y, x)
    dist.reduce_scatter_tensor(x, y)
    dist.all_to_all_single(torch.empty(4), torch.ones(4))
    dist.barrier()
    messages = []
    for shape in ((3,), (3 + rank,)):
        try:
            dist.all_reduce(torch.ones(shape))
        except RuntimeError as e:
            messages.append(str(e))
    return totals, messages


@pytest.mark.parametrize("backend", [pytest.param("cpu:gloo", marks=pytest.mark.exhaustive), "cpu:tp_shm"])
def test_the_wrapper_of_debug_level_detail(backend):
    outcomes = launch(_wrapped, 2, backend, environment={"TORCH_DISTRIBUTED_DEBUG": "DETAIL"})
    for totals, messages in results(outcomes):
        assert totals == (1.0, 1.0)
        assert len(messages) == 1 and "shape" in messages[0].lower()
