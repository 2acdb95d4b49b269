"""simulate: regions, layers, meshes and state of ranks as in processes, in a fixed order, and nothing left behind."""

import random
import threading
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import tp_ext
from tests.helpers import small_gpt
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import run, run_fresh
from tests.helpers.region_maps import cases
from tp_ext import debug
from tp_ext.debug import count_collectives
from tp_ext.group import process_group

pytestmark = pytest.mark.core
F64 = torch.float64


def simulate(*args, **kwargs):
    """As tp_ext's; nothing is left behind: no thread, no group, and all of the caller's state is as before."""
    before = _process_state()
    try:
        return debug.simulate(*args, **kwargs)
    finally:
        assert _process_state() == before


def _process_state():
    world = dist.distributed_c10d._world
    return (
        torch.get_rng_state().tolist(),
        random.getstate(),
        [str(part) for part in np.random.get_state()],
        [random.random, np.random.rand, np.random.seed],
        [torch.get_default_dtype(), torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")],
        [torch.backends.cuda.flash_sdp_enabled(), torch.backends.cuda.math_sdp_enabled()],
        [warnings.filters, warnings.showwarning],
        dict(vars(tp_ext.random_scope.base)),
        threading.active_count(),
        [len(table) for table in (world.pg_map, world.pg_names, world.pg_group_ranks, world.pg_to_tag)],
        world.group_count,  # of it torch makes names, by which processes find each other
    )


# Values


def _region(rank, group, case, xs, gs, hs):
    x = xs[rank].clone().requires_grad_()
    y = case(x, group)
    g = gs[rank].clone().requires_grad_()
    (first,) = torch.autograd.grad(y, x, g, create_graph=True)
    (second,) = torch.autograd.grad(first, g, hs[rank])
    return y.detach(), first.detach(), second


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_regions_and_their_derivatives(p):
    """Sums of small whole numbers: exact. The second derivative of a linear map is the map itself."""
    for case in cases(p):
        xs = case.inputs(p)
        leaves = [x.clone().requires_grad_() for x in xs]
        ys = case.emulate(leaves)
        gs = [torch.randint(-4, 5, y.shape).double() for y in ys]
        firsts = torch.autograd.grad(ys, leaves, gs)
        hs = [torch.randint(-4, 5, x.shape).double() for x in xs]
        for rank, results in enumerate(simulate(_region, p, case, xs, gs, hs)):
            expected = ys[rank], firsts[rank], case.emulate(hs)[rank]
            for result, value in zip(results, expected, strict=True):
                assert torch.equal(result, value), (str(case), rank)


def _train(group, **options):
    losses, norms, model = small_gpt.train(group, F64, 3, **options)
    return losses, norms, [p.detach() for p in model.parameters()]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("p", [4, 3, 2, 1])
@pytest.mark.parametrize("options", [{}, {"sequence_parallel": True, "activation_checkpointing": True}], ids=str)
def test_training_has_the_bits_of_processes_over_tp_shm(p, options):
    """Embedding, attention, MLP, norms, dropout, loss, clipping and optimizer; the order of sums is that of tp_shm."""
    here = run_fresh(_train_simulated, p, options)  # with the threads and the MKL of the processes
    there = run(_train_over_tp_shm, p, options)
    for (losses, norms, weights), (losses_there, norms_there, weights_there) in zip(here, there, strict=True):
        assert losses == losses_there and norms == norms_there
        assert all(torch.equal(a, b) for a, b in zip(weights, weights_there, strict=True))


def _train_simulated(p, options):
    return simulate(lambda rank, group: _train(group, **options), p)


def _train_over_tp_shm(world, options):
    return _train(dist.new_group(backend="tp_shm"), **options)


def _two_axes(rank, mesh, x):
    tp_ext.manual_seed(3, mesh)
    mlp = tp_ext.ParallelMLP(6, 8, group=mesh["tp"]).double()
    mlp(x.chunk(mesh["dp"].size())[mesh.get_local_rank("dp")]).square().sum().backward()
    for parameter in mlp.parameters():
        dist.all_reduce(parameter.grad, group=mesh.get_group("dp"))
    norm = tp_ext.clip_grad_norm_(mlp, 0.1)
    full = tp_ext.full_state_dict(mlp)
    return norm.item(), {name: value.clone() for name, value in full.items()}


def test_a_mesh_trains_as_a_rank():
    x = torch.randn(4, 6, dtype=F64)
    ((norm, weights),) = simulate(_two_axes, {"dp": 1, "tp": 1}, x)
    for other_norm, other_weights in simulate(_two_axes, {"dp": 2, "tp": 2}, x):
        assert other_norm == pytest.approx(norm, rel=1e-12)
        assert all(torch.allclose(other_weights[name], weights[name], rtol=1e-12) for name in weights)


def test_places_on_a_mesh():
    def place(rank, mesh):
        tp, dp = mesh["tp"], mesh.get_group("dp")
        assert mesh.shape == (3, 2) and mesh.mesh_dim_names == ("dp", "tp")
        assert mesh.get_coordinate() == (rank // 2, rank % 2) and mesh.get_rank() == rank
        assert mesh.get_local_rank("dp") == dist.get_rank(dp) == dp.rank() == rank // 2
        assert tp.get_local_rank() == rank % 2 and tp.size() == dist.get_world_size(tp.get_group()) == 2
        assert dist.get_process_group_ranks(dp) == [rank % 2, rank % 2 + 2, rank % 2 + 4]
        assert process_group(tp) is mesh.get_group("tp")
        sums = [torch.tensor(10.0**rank) for _ in range(3)]
        for x, group in zip(sums, (tp.get_group(), dp, None), strict=True):
            dist.all_reduce(x, group=group)
        return [x.item() for x in sums]

    pairs, thrice, all_of_them = [11.0, 1100.0, 110000.0], [10101.0, 101010.0], 111111.0
    assert simulate(place, {"dp": 3, "tp": 2}) == [[pairs[r // 2], thrice[r % 2], all_of_them] for r in range(6)]


def test_groups_that_ranks_make():
    def make(rank, group):
        ends, again, everyone = dist.new_group([0, 2]), dist.new_group([2, 0], backend="gloo"), dist.new_group()
        mesh = dist.init_device_mesh("cpu", (3, 1), mesh_dim_names=("a", "b"))
        sums = [torch.tensor(10.0**rank) for _ in range(4)]
        for x, one in zip(sums, (everyone, mesh.get_group("a"), ends, again), strict=True):
            if rank != 1 or one in (everyone, mesh.get_group("a")):
                dist.all_reduce(x, group=one)
        dist.barrier(mesh.get_group("b"))
        if rank != 1:
            assert dist.get_process_group_ranks(ends) == [0, 2] and ends.group_name != again.group_name
            dist.destroy_process_group(ends)
        return [x.item() for x in sums]

    assert simulate(make, 3) == [[111.0, 111.0, part, part] for part in (101.0, 10.0, 101.0)]


def test_a_program_on_a_mesh():
    a, b = torch.randn(4, 6, dtype=F64), torch.randn(6, 5, dtype=F64)

    def program(rank, mesh):
        @tp_ext.spmd(mesh, in_specs=(tp_ext.P("x", "y"), tp_ext.P("y", None)), out_specs=tp_ext.P("x", None))
        def matmul(a, b):
            return tp_ext.lax.psum(a @ b, "y")

        leaves = a.clone().requires_grad_(), b.clone().requires_grad_()
        c = matmul(*leaves)
        return c.detach(), *torch.autograd.grad(c.square().sum(), leaves)

    c = a @ b
    for results in simulate(program, {"x": 2, "y": 3}):
        for result, expected in zip(results, (c, 2 * c @ b.T, 2 * a.T @ c), strict=True):
            assert torch.allclose(result, expected, rtol=1e-12)


def _checkpointed(rank, group, x, reentrant):
    """Two linears computed again in backward, a hook on a weight, a hook on an activation, and a second backward."""
    up = tp_ext.ColumnParallelLinear(6, 8, group=group).double()
    down = tp_ext.RowParallelLinear(8, 6, group=group).double()
    seen = []
    up.weight.register_hook(lambda grad: seen.append(grad.sum()))

    def block(x):
        return down(nn.functional.dropout(up(x), 0.5).tanh() if group.size() == 1 else up(x).tanh())

    leaf = x.clone().requires_grad_()
    y = block(leaf) if reentrant is None else checkpoint(block, leaf, use_reentrant=reentrant)
    y.register_hook(lambda grad: grad * 2)
    y.square().sum().backward()
    assert len(seen) == 1
    return y.detach(), leaf.grad


@pytest.mark.parametrize("reentrant", [True, False])
def test_checkpointing_of_both_kinds_and_hooks(reentrant):
    x = torch.randn(3, 6, dtype=F64)
    for results, expected in zip(
        simulate(_checkpointed, 3, x, reentrant), simulate(_checkpointed, 3, x, None), strict=True
    ):
        assert all(torch.equal(a, b) for a, b in zip(results, expected, strict=True))


# The order of ranks, and what each has for itself


def test_ranks_take_turns_in_their_order():
    def log(rank, group):
        for step in range(2):
            order.append((step, rank))
            dist.barrier(group=group)

    orders = []
    for _ in range(2):
        order: list = []
        orders.append(order)
        simulate(log, 3)
    assert orders[0] == orders[1] == [(0, 0), (0, 1), (0, 2), (1, 2), (1, 0), (1, 1)]


def _draws(rank, meet):
    """Draws whose number and kind depend on the rank, with collectives between them."""
    tp_ext.manual_seed(5 + rank)
    numbers = []
    for step in range(3):
        numbers += [torch.rand(rank + 1).sum().item(), random.random(), np.random.randn(), np.random.rand()]
        with tp_ext.random.at(step, rank):
            meet()
            numbers.append(torch.rand(()).item())
    random.seed(rank)
    np.random.seed(rank)
    meet()
    return [*numbers, random.random(), np.random.rand(), tp_ext.random_scope.base.seed]


def test_every_rank_has_its_own_generators():
    together = simulate(lambda rank, group: _draws(rank, lambda: dist.barrier(group=group)), 3)
    alone = [simulate(lambda _, group, r=rank: _draws(r, lambda: None), 1)[0] for rank in range(3)]
    assert together == alone


def test_every_rank_starts_from_the_seed():
    expected = torch.Generator().manual_seed(9)
    assert (
        simulate(lambda rank, group: torch.rand(3).tolist(), 2, seed=9)
        == [torch.rand(3, generator=expected).tolist()] * 2
    )


def test_every_rank_has_its_own_modes():
    """Blocks that a rank leaves after the others have entered theirs."""

    def modes(rank, group):
        def all_modes():
            return (
                torch.is_grad_enabled(),
                torch.is_autocast_enabled("cpu"),
                torch.get_default_dtype(),
                torch.backends.cuda.flash_sdp_enabled(),
            )

        outside = all_modes()
        with warnings.catch_warnings(record=True) as caught:
            with torch.set_grad_enabled(rank == 0), torch.autocast("cpu", enabled=rank == 1):
                with sdpa_kernel(SDPBackend.MATH if rank == 1 else SDPBackend.FLASH_ATTENTION):
                    torch.set_default_dtype(F64 if rank == 0 else torch.float32)
                    dist.barrier(group=group)
                    warnings.warn(f"of {rank}", stacklevel=1)
                    inside = all_modes()
                dist.barrier(group=group)
            torch.set_default_dtype(outside[2])
        assert all_modes() == outside and [str(w.message) for w in caught] == [f"of {rank}"]
        return outside, inside

    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        results = simulate(modes, 3)
    assert {outside for outside, _ in results} == {(False, True, torch.float32, True)}  # those of the caller
    assert [inside for _, inside in results] == [
        (True, False, F64, True),
        (False, True, torch.float32, False),
        (False, False, torch.float32, True),
    ]


def test_modes_of_the_caller_do_not_reach_the_ranks():
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter, torch.device("meta"):
        devices = simulate(lambda rank, group: (torch.ones(2, 2) @ torch.ones(2, 2)).device.type, 2)
    assert devices == ["cpu", "cpu"] and counter.get_total_flops() == 0


def test_a_simulation_inside_of_a_rank():
    def inner(k, group, rank, outer):
        x = torch.tensor([10.0 * rank + k])
        dist.all_reduce(x, group=group)
        dist.all_reduce(x, group=outer) if k == 0 else None  # the outer ranks go on meanwhile
        return x.item(), torch.rand(()).item(), random.random()

    def outer(rank, group):
        torch.rand(rank)
        random.seed(rank)
        return debug.simulate(inner, 2, rank, group, seed=4), torch.rand(()).item()

    (first, first_draw), (second, second_draw) = simulate(outer, 2)
    assert [x for x, _, _ in first] == [22.0, 1.0] and [x for x, _, _ in second] == [22.0, 21.0]
    assert len({draw for _, draw, _ in first + second}) == 1 and first_draw != second_draw
    assert first[0][2] == first[1][2] != second[0][2]


def test_counts_are_those_of_the_rank_that_counts():
    def counted(rank, group):
        with count_collectives() as counts:
            for _ in range(rank + 1):
                dist.all_reduce(torch.ones(4), group=group)
            debug.simulate(lambda _, inner: dist.barrier(group=inner), 2)
            dist.all_reduce(torch.ones(4), group=group) if rank == 0 else None
        return counts.by_kind(), counts.select(group=group, kind="all_reduce").payload_bytes

    with count_collectives() as counts:
        results = simulate(counted, 2)
    assert results == [({"all_reduce": 2}, 32), ({"all_reduce": 2}, 32)]
    assert counts.by_kind() == {}  # a simulation communicates nothing for those who run it


@on_ranks(2, backend="gloo")
def test_a_default_group_is_left_alone(world):
    before, real = dist.group.WORLD, (dist.get_rank(), dist.get_world_size())

    def inside(rank, group):
        x = torch.ones(2)
        dist.all_reduce(x, group=group)
        return dist.get_rank(group), dist.get_world_size(group), x[0].item()

    results = simulate(inside, 3)
    assert dist.group.WORLD is before and (dist.get_rank(), dist.get_world_size()) == real
    dist.all_reduce(x := torch.ones(2))
    assert results == [(0, 3, 3.0), (1, 3, 3.0), (2, 3, 3.0)]
    assert x[0].item() == 2.0
