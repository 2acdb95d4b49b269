"""2 and 4 ranks that share a GPU, on the backend that TP_EXT_RANKS_BACKEND names: NCCL's in `make gpu-check`.

Every collective, training next to one process, FSDP2 of a tensor-parallel model, gradients in 8 bits, trees of sums, a
step in a CUDA graph. On the CPU the same bodies run over gloo: what fails on a GPU alone is the GPU's or NCCL's.
"""

import os

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tp_ext
from tests.cuda.test_shared_gpu import train
from tests.helpers import ranks, small_gpt
from tests.helpers.compression import Exchange
from tests.helpers.dtypes import default_dtype
from tp_ext import _ops
from tp_ext.invariance import blocks_of_ranks
from tp_ext.low_precision import compress_gradients

NCCL = "nccl" in os.environ.get(ranks.BACKEND, "")
P = pytest.mark.parametrize("p", [2, 4])


def collectives(group, device):
    """The result of each collective that a layer of ours makes, in whole numbers."""
    p, rank = group.size(), group.rank()
    x = torch.arange(4.0 * p, device=device) + 100 * rank
    total, shard, everything = x.clone(), x.new_empty(4), x.new_empty(4 * p * p)
    dist.all_reduce(total, group=group)
    dist.reduce_scatter_tensor(shard, x, group=group)
    dist.all_gather_into_tensor(everything, x, group=group)
    sizes = [1 + (rank + peer) % 3 for peer in range(p)]  # rank sends as many to a peer as it gets from it
    own = torch.cat([x.new_full((n,), 10.0 * rank + peer) for peer, n in enumerate(sizes)])
    exchanged = torch.empty_like(own)
    dist.all_to_all_single(exchanged, own, sizes, sizes, group=group)
    first = x.clone()
    dist.broadcast(first, 0, group=group)
    passed = torch.empty_like(x)
    operations = [dist.P2POp(dist.isend, x, (rank + 1) % p), dist.P2POp(dist.irecv, passed, (rank - 1) % p)]
    for work in dist.batch_isend_irecv(operations):
        work.wait()
    backend = group._get_backend(device).name()
    return backend, [total, shard, everything, exchanged, first, passed]


@P
def test_collectives(p, device):
    base, sum_of_ranks = torch.arange(4.0 * p), 50.0 * p * (p - 1)
    expected_total = p * base + sum_of_ranks
    for rank, (backend, found) in enumerate(ranks.run(collectives, p, device)):
        sizes = [1 + (rank + peer) % 3 for peer in range(p)]
        expected = [
            expected_total,
            expected_total[4 * rank : 4 * rank + 4],
            torch.cat([base + 100 * peer for peer in range(p)]),
            torch.cat([torch.full((n,), 10.0 * peer + rank) for peer, n in enumerate(sizes)]),
            base,
            base + 100 * ((rank - 1) % p),
        ]
        assert ("nccl" in backend.lower()) == (NCCL and device.type == "cuda")
        assert all(map(torch.equal, found, expected)), rank


@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("p", [2, 4])
def test_training_is_that_of_one_process(p, sp, device):
    """fp64, another order of sums: the bounds of test_shared_gpu."""
    numbers, state = train(None, sp, device)
    for got, full in ranks.run(train, p, sp, device):
        torch.testing.assert_close(got, numbers, rtol=1e-9, atol=1e-9)
        for name, value in state.items():
            torch.testing.assert_close(full[name], value.cpu(), rtol=1e-7, atol=1e-9)


def sharded_twice(group, device, steps):
    """Losses and state of a tensor-parallel model whose parameters FSDP2 shards, on a (2, 2) mesh; without a group, of
    one process with the sequences of both data ranks."""
    with default_dtype(torch.float64):
        mesh = group and init_device_mesh(device.type, (2, 2), mesh_dim_names=("dp", "tp"))
        model = small_gpt.make(mesh and mesh["tp"].get_group(), dropout=0.0, sequence_parallel=mesh is not None)
        model = model.to(device)
        if mesh:
            for block in model.blocks:
                fully_shard(block, mesh=mesh["dp"])
            fully_shard(model, mesh=mesh["dp"])
        own = slice(mesh["dp"].get_local_rank(), mesh["dp"].get_local_rank() + 1) if mesh else slice(2)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=0.01, eps=1e-4, fused=True), []
        for ids, target in small_gpt.batches(steps):
            loss = model.loss(ids[own].to(device), target[own].to(device))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        mean = torch.stack(losses)
        if mesh:
            dist.all_reduce(mean, dist.ReduceOp.SUM, group=mesh["dp"].get_group())
            mean /= 2
        return mean, tp_ext.full_state_dict(model)


def test_fsdp2_of_a_tensor_parallel_model(device):
    losses, state = sharded_twice(None, device, 4)
    for found, full in ranks.run(sharded_twice, 4, device, 4):
        torch.testing.assert_close(found, losses.cpu(), rtol=1e-9, atol=1e-9)
        for name, value in state.items():
            torch.testing.assert_close(full[name], value.cpu(), rtol=1e-7, atol=1e-9)


def compressed(group, device, compress):
    """The gradient of this rank and the mean, of two steps."""
    torch.manual_seed(group.rank())
    model = torch.nn.Linear(96, 40, bias=False, device=device)
    handle, results = compress_gradients(model, compress, group=group), []
    for _ in range(2):
        model.weight.grad = torch.randn(40, 96).to(device)
        own = model.weight.grad.clone()
        handle.average()
        results.append((own, model.weight.grad))
    return results


@P
@pytest.mark.parametrize("compress", ["int8", "float8"])
def test_means_of_compressed_gradients(compress, p, device):
    results, exchange = ranks.run(compressed, p, device, compress), Exchange(p, 64, compress == "float8", True)
    for step in range(2):
        expected = exchange([result[step][0] for result in results])
        assert all(torch.equal(result[step][1], expected) for result in results), step


def tree(group, device, nodes):
    """The sum of the rank's nodes in the tree over those of all ranks, whole and its slice."""
    own = nodes.tensor_split(group.size())[group.rank()].to(device)
    return [
        _ops.block_sum(own, group.group_name, blocks_of_ranks(len(nodes), group.size()), scatter)
        for scatter in (False, True)
    ]


@P
def test_trees_of_sums_have_the_same_bits(p, device):
    """Whatever the number of ranks: of p nodes, one a rank; magnitudes differ, so that another order has other bits."""
    nodes = torch.randn(p, 33, 5) * 10 ** torch.randn(p, 33, 5)
    pairs = list(nodes)
    while len(pairs) > 1:
        pairs = [a + b for a, b in zip(pairs[::2], pairs[1::2], strict=True)]
    for rank, (whole, part) in enumerate(ranks.run(tree, p, device, nodes)):
        assert torch.equal(whole, pairs[0]) and torch.equal(part, pairs[0].tensor_split(p)[rank])


def captured(group):
    """An MLP with sequence parallelism, forward and backward in one graph, replayed with other values."""
    device = torch.device("cuda", 0)
    torch.manual_seed(0)
    mlp = tp_ext.ParallelMLP(64, 128, group=group, sequence_parallel=True).to(device)
    inputs = [torch.randn(8, 64, device=device) for _ in range(3)]
    x = inputs[0].clone().requires_grad_()

    def step():
        x.grad = None
        y = mlp(x)
        y.square().sum().backward()
        return y.detach(), x.grad

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = step()
    pairs = []
    for values in inputs:
        with torch.no_grad():
            x.copy_(values)
        graph.replay()
        pairs.append([*(t.clone() for t in replayed), *step()])
    return pairs


@P
@pytest.mark.cuda
@pytest.mark.skipif(not NCCL, reason="gloo's collectives cannot be captured")
def test_a_step_in_a_graph(p):
    for pairs in ranks.run(captured, p):
        for y, dx, expected, expected_dx in pairs:
            torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
            torch.testing.assert_close(dx, expected_dx, rtol=1e-5, atol=1e-5)
