"""What is built on collectives, over gloo and tp_shm: functional ones, compiled, differentiable, and our own layers."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as funcol
import torch.distributed.nn.functional as dist_nn

import tp_ext
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import run
from tests.shm.backends import group_of, of_all, same, tp_shm_and_gloo

pytestmark = pytest.mark.core


@tp_shm_and_gloo
@pytest.mark.parametrize("p", [2, 3])
@on_ranks(backend="gloo")
def test_functional_collectives(world, backend):
    group, p, rank = group_of(backend), world.size(), world.rank()
    xs = of_all(p, (2 * p, 3), torch.float64)
    x, total = xs[rank], sum(xs)
    same(funcol.wait_tensor(funcol.all_reduce(x, "sum", group)), total)
    same(funcol.wait_tensor(funcol.all_gather_tensor(x, 0, group)), torch.cat(xs))
    same(funcol.wait_tensor(funcol.all_gather_tensor(x, 1, group)), torch.cat(xs, 1))
    same(funcol.wait_tensor(funcol.reduce_scatter_tensor(x, "sum", 0, group)), total.chunk(p)[rank])
    same(funcol.wait_tensor(funcol.broadcast(x, 1, group)), xs[1])
    exchanged = funcol.wait_tensor(funcol.all_to_all_single(x, None, None, group))
    same(exchanged, torch.cat([y.chunk(p)[rank] for y in xs]))
    sums = funcol.all_reduce_coalesced([x, x[:1]], "sum", group)
    same(funcol.wait_tensor(sums[0]), total)
    same(funcol.wait_tensor(sums[1]), total[:1])
    pending = [funcol.all_reduce(x + i, "max", group) for i in range(10)]
    for i, y in reversed(list(enumerate(pending))):
        same(funcol.wait_tensor(y), torch.stack(xs).amax(0) + i)


# tests/training/test_compile.py compiles a block with inductor, which does not know the backend
@pytest.mark.parametrize("compiler", ["aot_eager", pytest.param("inductor", marks=pytest.mark.exhaustive)])
@on_ranks(2, backend="tp_shm")
def test_compiled(group, compiler):
    p, rank = group.size(), group.rank()
    xs = [x.requires_grad_() for x in of_all(p, (2 * p, 3), torch.float64)]
    x = xs[rank]

    def fn(x):
        y = tp_ext.reduce_from_region(x * 2, group)
        return tp_ext.gather_from_region(y.relu(), group, 0).sin()

    wanted = fn(x)
    (gradient,) = torch.autograd.grad(wanted.square().sum(), x)
    torch._dynamo.reset()
    y = torch.compile(fn, fullgraph=True, backend=compiler)(x)
    torch.testing.assert_close(y, wanted, rtol=1e-14, atol=1e-14)
    torch.testing.assert_close(torch.autograd.grad(y.square().sum(), x)[0], gradient, rtol=1e-14, atol=1e-14)


@pytest.mark.parametrize("p", [2, 3])
@on_ranks(backend="tp_shm")
def test_differentiable_collectives(group):
    """torch.distributed.nn.functional: the loss is a sum over ranks of weighted outputs."""
    p, rank = group.size(), group.rank()
    x = torch.arange(2.0 * p).double().add(rank).requires_grad_()
    weights = [torch.arange(2.0 * p).double() * (r + 1) for r in range(p)]

    y = dist_nn.all_reduce(x, group=group)
    (gradient,) = torch.autograd.grad((y * weights[rank]).sum(), x)
    same(gradient, sum(weights))
    y = torch.stack(dist_nn.all_gather(x, group=group))
    (gradient,) = torch.autograd.grad((y * weights[rank]).sum(), x)
    same(gradient, sum(weights))
    out = torch.empty(2, dtype=torch.float64)
    y = dist_nn.reduce_scatter(out, list(x.chunk(p)), group=group)
    (gradient,) = torch.autograd.grad((y * (rank + 1)).sum(), x)
    same(gradient, torch.arange(1.0, p + 1).double().repeat_interleave(2))
    out = torch.empty(2 * p, dtype=torch.float64)
    y = dist_nn.all_to_all_single(out, x, group=group)
    (gradient,) = torch.autograd.grad((y * weights[rank]).sum(), x)
    same(gradient, torch.cat([weights[r].chunk(p)[rank] for r in range(p)]))
    y = dist_nn.broadcast(x, 0, group=group)
    (gradient,) = torch.autograd.grad((y * weights[rank]).sum(), x)
    same(gradient, sum(weights) if rank == 0 else torch.zeros(2 * p, dtype=torch.float64))


# Our own layers


def _layers(world, backend, sequence_parallel, uneven):
    """Loss and all gradients of a small transformer, after two steps."""
    group, p = group_of(backend), world.size()
    options = {"group": group, "sequence_parallel": sequence_parallel, "dtype": torch.float64}
    torch.manual_seed(3)
    embedding = tp_ext.VocabParallelEmbedding(13, 8, **options)
    norm = tp_ext.LayerNorm(8, **options)
    attention = tp_ext.ParallelAttention(8, 4, num_kv_heads=2, **options)
    mlp = tp_ext.ParallelMLP(8, 11 if uneven else 12, activation="swiglu", **options)
    head = tp_ext.VocabParallelLMHead(8, 13, **options)
    model = torch.nn.ModuleList([embedding, norm, attention, mlp, head])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        ids = torch.randint(13, (12,))
        x = embedding(ids)
        x = x + attention(norm(x), batch_size=1)
        x = x + mlp(norm(x))
        loss = tp_ext.vocab_parallel_cross_entropy(head(x), ids, group, vocab_size=13)
        loss.backward()
        tp_ext.clip_grad_norm_(model, 1.0, group=group)
        optimizer.step()
    assert p == 1 or all(param.grad is not None for param in model.parameters())
    return [loss.detach(), *(param.grad for param in model.parameters()), *model.parameters()]


@pytest.mark.smoke
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("p, uneven", [(2, False), (2, True), (4, True)], ids=["2", "2 uneven", "4 uneven"])
def test_our_layers_are_those_over_gloo(p, uneven, sequence_parallel):
    """Bit by bit at p = 2, where a sum has one order; in fp64 to 1e-9 (AdamW divides by roots of squares) beyond."""
    ours = run(_layers, p, "tp_shm", sequence_parallel, uneven)
    theirs = run(_layers, p, "gloo", sequence_parallel, uneven)
    for rank in range(p):
        for x, wanted in zip(ours[rank], theirs[rank], strict=True):
            if p == 2:
                assert torch.equal(x, wanted)
            else:
                torch.testing.assert_close(x, wanted, rtol=0, atol=1e-9)


@on_ranks(2, backend="gloo")
def test_an_error_of_a_layer_leaves_the_group_whole(world):
    """An error of ours, raised before anything is sent, leaves the group whole."""
    group = group_of("tp_shm")
    layer = tp_ext.ColumnParallelLinear(4, 8, group=group)
    with pytest.raises((ValueError, RuntimeError)):
        layer(torch.ones(3, 5))
    x = torch.ones(2)
    dist.all_reduce(x, group=group)
    assert x.tolist() == [2.0, 2.0]


@tp_shm_and_gloo
@on_ranks(2, backend="gloo")
def test_profiler_and_comm_debug_mode(world, backend):
    """The profiler shows the collectives; CommDebugMode counts them."""
    from torch.distributed.tensor.debug import CommDebugMode

    group = group_of(backend)
    with CommDebugMode() as mode:
        dist.all_reduce(torch.ones(3), group=group)
    with torch.profiler.profile() as profile:
        dist.all_reduce(torch.ones(3), group=group)
        dist.all_gather_into_tensor(torch.ones(world.size()), torch.ones(1), group=group)
    names = [event.key for event in profile.key_averages()]
    assert mode.get_total_counts() == 1
    assert any("allreduce" in n for n in names)
    assert any("allgather" in n for n in names)
