"""A refit equals a save and a load, bit by bit, and each rank receives what it lacks, once."""

import pytest
import torch
import torch.distributed as dist

import tp_ext
from tests.helpers import simulated
from tests.helpers.on_ranks import on_ranks
from tests.helpers.peak_memory import Peak
from tests.helpers.ranks import run
from tests.refit import drawn


def _lacking(source, target, names, full, mine, theirs):
    """The number of elements of this rank's target that its source does not hold, tied ones once: by sets of values,
    each element of the source having one of its own."""
    start, ids = 0, {}
    for name, tensor in full.items():
        ids[name] = torch.arange(start, start + tensor.numel()).view(tensor.shape) + 1
        start += tensor.numel()
    present = {int(v) for name, layout in mine.items() for v in layout.shard(ids[name]).flatten() if v}
    needed = set()
    for name, layout in theirs.items():
        whole = drawn.full_of(name, target, names, ids, source)
        needed |= {int(v) for v in layout.shard(whole).flatten() if v}
    return len(needed - present)


def _pair(group, seed, options):
    rank = group.rank()
    _, source, target, names, dtypes = drawn.draw(seed)
    meshes = drawn.mesh_of(source), drawn.mesh_of(target)
    mine, theirs = (drawn.layouts_on(rank, side, mesh) for side, mesh in zip((source, target), meshes, strict=True))
    full = drawn.fulls(seed, source, dtypes[0])
    a = drawn.model_of(rank, source, mine, full, dtypes[0])
    zeros = {name: torch.zeros(shape) for name, (shape, _, _) in target.entries.items()}
    b = drawn.model_of(rank, target, theirs, zeros, dtypes[1])
    plan = tp_ext.refit.plan(a, b, names=names, **options)
    for turn in range(2):
        if turn:
            with torch.no_grad():
                for name, layout in mine.items():
                    a.get_parameter(name).copy_(layout.shard(full[name] * 3))
            full = {name: tensor * 3 for name, tensor in full.items()}
        moved = plan.run(check=bool(turn))
        for name, layout in theirs.items():
            expected = layout.shard(drawn.full_of(name, target, names, full, source).to(dtypes[1]))
            assert torch.equal(b.get_parameter(name), expected), name
    size = min(dtype.itemsize for dtype in dtypes)
    lacking = _lacking(source, target, names, full, mine, theirs)
    assert moved.received == lacking * size
    return plan.bytes, moved, lacking * size


MORE = [pytest.param(batch, marks=pytest.mark.exhaustive) for batch in range(2, 10)]


@pytest.mark.parametrize("batch", [0, 1, *MORE])
def test_random_pairs(batch):
    """Bit-equal, twice, and the fewest bytes."""
    for seed in range(batch * 30, batch * 30 + 30):
        p = drawn.draw(seed)[0]
        options = {"bucket_bytes": 64 if seed % 3 else 1 << 20, "atomic": seed % 2 == 0}
        results = simulated.run(_pair, p, seed, options)
        assert {planned for planned, _, _ in results} == {sum(least for _, _, least in results)}
        assert sum(moved.sent for _, moved, _ in results) == sum(moved.received for _, moved, _ in results)


def _over_shared_memory(world, seeds):
    group = dist.new_group(backend="tp_shm")
    for seed in seeds:
        options = {"bucket_bytes": 64 if seed % 3 else 1 << 20, "atomic": seed % 2 == 0, "process_group": group}
        _pair(world, seed, options)


def test_random_pairs_over_shared_memory():
    """Rows of models without a copy in between, where each rank sends one at most to each other one."""
    by_size: dict[int, list[int]] = {}
    for seed in range(200):
        by_size.setdefault(drawn.draw(seed)[0], []).append(seed)
    for p in (2, 3, 4):
        assert len(by_size[p]) >= 6
        run(_over_shared_memory, p, by_size[p][:6])


@pytest.mark.parametrize("atomic", [True, False])
@on_ranks(2)
def test_later_runs_send_buckets_and_a_confirmation_in_bounded_memory(group, atomic):
    """From rows to columns: half of what a rank gets comes from the other."""
    source = tp_ext.ColumnParallelLinear(64, 32, bias=False, group=group)
    target = tp_ext.RowParallelLinear(64, 32, bias=False, group=group)
    plan = tp_ext.refit.plan(source, target, bucket_bytes=512, atomic=atomic)
    plan.run()
    with tp_ext.debug.count_collectives() as counted:
        moved = plan.run()
    with Peak() as peak:
        plan.run()
    kinds = counted.by_kind()
    most = peak.most
    assert moved == (2048, 2048, 2048) and plan.bytes == 4096
    assert kinds == {"all_to_all": 2048 // 512, "all_reduce": 1}
    bytes_of_buckets = 2048 if atomic else 512
    flag = 8 + 8  # the number of the confirmation, and its copy
    assert bytes_of_buckets <= most <= bytes_of_buckets + 512 + flag


@on_ranks(2)
def test_memory_that_was_exchanged(group):
    """A run uses the current memory of a parameter whose ``.data`` was assigned, and of a buffer that was replaced."""
    source = tp_ext.ColumnParallelLinear(6, 4, group=group)
    target = tp_ext.ColumnParallelLinear(6, 4, group=None)
    for model in (source, target):
        model.register_buffer("scale", torch.zeros(3))
    plan = tp_ext.refit.plan(source, target)
    plan.run()
    for turn in range(1, 3):
        for model in (source, target):
            value = float(turn if model is source else 7)
            if turn == 1:
                model.scale = torch.full((3,), value)
            for param in model.parameters() if turn == 2 else ():
                param.data = torch.full_like(param, value)
        plan.run()
        assert (target.scale == 1).all()
    assert all((param == 2).all() for param in target.parameters())
