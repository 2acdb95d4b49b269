"""Regions under everything of torch that wraps, traces, counts or replays them.

Their errors: test_regions_errors.py.
"""

import pytest
import torch
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

import tp_ext
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tests.helpers.region_maps import Case, lengths, simple_cases

AT_TWO = [pytest.param(case, id=str(case)) for case in simple_cases(2)]
UNEVEN = [
    pytest.param(case, id=str(case))
    for case in (
        Case("scatter_to_region", (5, 3), {"dim": 0}),
        Case("gather_from_region", (5, 3), {"dim": 0, "sizes": [4, 1]}),
        Case("all_gather_region", (3, 5), {"dim": 1, "sizes": [0, 5]}),
        Case("reduce_scatter_region", (5, 3)),
        Case("all_to_all_region", (5, 3), {"split_dim": 0, "concat_dim": 1, "concat_sizes": [1, 2]}),
    )
]


def _grad_of_sines(y, x):
    return torch.autograd.grad(y.sin().sum(), x)[0]


def _own(group, xs):
    return xs[group.rank()].clone().requires_grad_()


# Collectives of each region: forward, backward
COLLECTIVES = {
    "copy_to_region": ([], ["allreduce"]),
    "reduce_from_region": (["allreduce"], []),
    "scatter_to_region": ([], ["allgather"]),
    "gather_from_region": (["allgather"], []),
    "all_gather_region": (["allgather"], ["reducescatter"]),
    "reduce_scatter_region": (["reducescatter"], ["allgather"]),
    "all_to_all_region": (["alltoall"], ["alltoall"]),
}


def _heard(counts):
    kinds = ("allreduce", "allgather", "reducescatter", "alltoall")
    kinds_sent = []
    for op, times in counts.get_comm_counts().items():
        plain = str(op).replace("_", "")
        kinds_sent += [next((k for k in kinds if k in plain), plain)] * times
    return sorted(kinds_sent)


@pytest.mark.parametrize("case", AT_TWO)
@on_ranks(2)
def test_each_region_communicates_as_often_as_it_says(group, case):
    x = _own(group, case.inputs(2))
    with CommDebugMode() as forward:
        y = case(x, group)
    with CommDebugMode() as backward:
        y.sum().backward()
    with CommDebugMode() as without, torch.no_grad():
        case(x, group)
    with CommDebugMode() as constant:
        assert not case(x.detach(), group).requires_grad
    assert _heard(without) == _heard(constant) == _heard(forward)
    assert (_heard(forward), _heard(backward)) == COLLECTIVES[case.name]


@pytest.mark.parametrize("case", AT_TWO)
@on_ranks(2)
def test_inference_mode(group, case):
    x = case.inputs(2)[group.rank()]
    want = case(x, group)
    with torch.inference_mode():
        assert torch.equal(case(x, group), want)
        assert torch.equal(case(x.clone(), group), want)


@pytest.mark.parametrize("case", AT_TWO)
@on_ranks(2)
def test_activation_checkpointing(group, case):
    x = _own(group, case.inputs(2))

    def block(x):
        return case(x.sin(), group).exp()

    want = _grad_of_sines(block(x), x)
    with CommDebugMode() as counts:
        got = _grad_of_sines(checkpoint(block, x, use_reentrant=False), x)
    assert torch.equal(got, want)
    forward, backward = COLLECTIVES[case.name]
    # The recomputation may stop at the last tensor that backward needs: exp's result, after it all
    assert _heard(counts) == sorted(2 * forward + backward)


# torch.compile


def _compiled(group, model, xs, backend="aot_eager", dynamic=None):
    torch._dynamo.reset()
    compiled = torch.compile(model, fullgraph=True, backend=backend, dynamic=dynamic)
    for times in (1, 2) if dynamic else (1,):
        x = _own(group, [t.repeat(times, 1) for t in xs])
        y, want = compiled(x, group), model(x, group)
        torch.testing.assert_close(y, want)
        torch.testing.assert_close(_grad_of_sines(y, x), _grad_of_sines(want, x))


# Whole shapes: test_compile_all_regions_at_once
@pytest.mark.parametrize(
    "case", [*(pytest.param(*c.values, id=c.id, marks=pytest.mark.exhaustive) for c in AT_TWO), *UNEVEN]
)
@on_ranks(2, backend="gloo")
def test_compile_without_graph_breaks(group, case):
    _compiled(group, lambda x, group: case(x * 2, group) * 3, case.inputs(2))


def _all_regions(x, group):
    x = tp_ext.copy_to_region(x.sin(), group)
    x = tp_ext.scatter_to_region(x, group) * 2
    x = tp_ext.gather_from_region(x, group).cos()
    x = tp_ext.reduce_scatter_region(x, group)
    x = tp_ext.all_to_all_region(x, group, 1, 0)
    x = tp_ext.all_to_all_region(x, group, 0, 1).exp()
    return tp_ext.reduce_from_region(tp_ext.all_gather_region(x, group), group)


def _compiled_all(group, xs, how):
    mesh = init_device_mesh("cpu", (group.size(),))
    other = {"name": group.group_name, "mesh": mesh, None: None}.get(how, group)
    model = _all_regions if other is group else lambda x, _: _all_regions(x, other)
    backend = "inductor" if how == "inductor" else "aot_eager"
    _compiled(group, model, xs, backend, True if how == "dynamic" else None)


@pytest.mark.parametrize("how", ["name", pytest.param("mesh", marks=pytest.mark.exhaustive), None, "dynamic"])
def test_compile_all_regions_at_once(how):
    xs = [torch.rand(4, 6, dtype=torch.float64) for _ in range(2)]
    ranks.run(_compiled_all, 2, xs, how)


@pytest.mark.exhaustive  # the next test compiles a region with inductor, training/test_compile.py a block
def test_compile_with_inductor():
    xs = [torch.rand(4, 6, dtype=torch.float64) for _ in range(2)]
    ranks.run(_compiled_all, 2, xs, "inductor", timeout=300)


def _inductor_in_turns(group, x, turns):
    y = None
    for turn in turns:
        if turn == group.rank():
            torch._dynamo.reset()
            compiled = torch.compile(lambda x: tp_ext.scatter_to_region(x, group), fullgraph=True)
            y = compiled(x)
        dist.barrier(group)
    return y


def test_compiled_code_on_disk_is_not_taken_from_another_rank_or_another_p():
    # The compiled region depends on p and this rank: the keys of torch's caches must contain both.
    x = torch.arange(12.0)
    for p, turns in ((2, (0, 1)), (3, (1,))):  # rank 1 after rank 0, and of 3 after that of 2
        got = ranks.run(_inductor_in_turns, p, x, turns, timeout=120)
        for rank in turns:
            assert torch.equal(got[rank], x.tensor_split(p)[rank]), f"p = {p}: {got}"


# A fake group


def _one_of_many(rank, p):
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=p)
    group, shapes = dist.group.WORLD, []
    n = lengths(p + 3, p)[rank]
    for case in (
        *simple_cases(p),
        Case("scatter_to_region", (2, p + 3)),
        Case("gather_from_region", (p + 3, 2), {"dim": 0, "sizes": lengths(p + 3, p)}),
        Case("all_gather_region", (p + 3, 2), {"sizes": lengths(p + 3, p)}),
        Case("reduce_scatter_region", (p + 3, 2)),
    ):
        x = torch.zeros(case.local_shape(rank, p), requires_grad=True)
        y = case(x, group)
        y.sum().backward()
        assert x.grad.shape == x.shape
        shapes.append(tuple(y.shape))
    return n, shapes


@pytest.mark.parametrize("rank", [0, 1023])
def test_a_group_of_1024_ranks(rank):
    p = 1024
    n, shapes = ranks.run_fresh(_one_of_many, rank, p)
    assert n == (2 if rank == 0 else 1)
    full = (2 * p, 4 * p)
    assert shapes == [
        full,
        full,
        (2 * p, 4),
        full,
        full,
        (2, 4 * p),
        (2, 4 * p),
        (2, n),
        (p + 3, 2),
        (p + 3, 2),
        (n, 2),
    ]
