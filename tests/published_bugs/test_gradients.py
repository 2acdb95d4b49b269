"""Published bugs of gradients between replicated and sharded tensors, and of what sums them over tensor-parallel ranks,
against plain torch in one process, in fp64 where the bug is not one of rounding."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.nn.functional import all_reduce
from torch.distributed.tensor import DTensor, Partial, Replicate

import tp_ext
from tests.helpers import ranks
from tests.helpers.oracle import own_tokens
from tests.helpers.right_and_wrong import check

FP64 = {"dtype": torch.float64}


def leaves(*tensors):
    return [tensor.detach().clone().requires_grad_() for tensor in tensors]


def linears():
    torch.manual_seed(2)
    return nn.Linear(4, 6, **FP64), nn.Linear(6, 4, **FP64), torch.randn(3, 4, **FP64)


def _shared_key(group, queries, weight, x):
    own = queries.chunk(group.size(), 1)[group.rank()]  # heads
    results = []
    for ours in (True, False):
        weight, x = leaves(weight, x)
        key = x @ weight.T  # the same on all ranks, for all heads
        if ours:
            key = tp_ext.copy_to_region(key, group)
        scores = (own * key[:, None]).sum(-1).tanh().sum()
        tp_ext.reduce_from_region(scores, group).backward()
        results.append([weight.grad, x.grad])
    return results


def test_a_key_that_all_heads_share():
    """The positional part of MLA's key, which every rank expands over its own heads, had the gradient of those heads
    alone: https://github.com/NVIDIA/Megatron-LM/issues/1699."""
    torch.manual_seed(1)
    queries, weight, x = torch.randn(3, 4, 5, **FP64), torch.randn(5, 2, **FP64), torch.randn(3, 2, **FP64)
    leaf, its_x = leaves(weight, x)
    (queries * (its_x @ leaf.T)[:, None]).sum(-1).tanh().sum().backward()
    check(ranks.run(_shared_key, 2, queries, weight, x), [leaf.grad, its_x.grad])


def _latent_and_key(group, queries, down, up, x):
    own, rows = (t.chunk(group.size(), dim)[group.rank()] for t, dim in ((queries, 1), (up, 0)))  # heads
    results = []
    for ours in (True, False):
        (leaf,) = leaves(down)
        latent, key = (x @ leaf.T).split([3, 2], -1)
        k = (tp_ext.copy_to_region(latent, group) @ rows.T).unflatten(-1, (-1, 2))
        key = tp_ext.copy_to_region(key, group) if ours else key
        tp_ext.reduce_from_region((own * torch.cat([k, key[:, None].expand_as(k)], -1)).tanh().sum(), group).backward()
        if not ours:
            dist.all_reduce(leaf.grad)  # as every replicated parameter's
        results.append(leaf.grad)
    return results


def test_the_latent_and_the_key_of_one_replicated_projection():
    """MLA's down projection: the gradient of its latent, already summed by the column linear after it, was summed once
    more together with that of the key, which was not: https://github.com/inclusionAI/AReno/pull/496."""
    torch.manual_seed(3)
    queries, up, x = torch.randn(4, 6, 4, **FP64), torch.randn(12, 3, **FP64), torch.randn(4, 5, **FP64)
    down = torch.randn(5, 5, **FP64)
    (leaf,) = leaves(down)
    latent, key = (x @ leaf.T).split([3, 2], -1)
    k = (latent @ up.T).unflatten(-1, (-1, 2))
    (queries * torch.cat([k, key[:, None].expand_as(k)], -1)).tanh().sum().backward()
    check(ranks.run(_latent_and_key, 2, queries, down, up, x), leaf.grad)


def _local_activation(group):
    up, down, x = linears()
    ours, published = leaves(x, x)
    column = tp_ext.ColumnParallelLinear.from_linear(up, group=group)
    row = tp_ext.RowParallelLinear.from_linear(down, group=group)
    row(column(ours).tanh()).sin().sum().backward()
    mesh = tp_ext.init_mesh("cpu", tp=2)["tp"]
    replicated = DTensor.from_local(published, mesh, [Replicate()]).to_local()  # without grad_placements
    hidden = nn.functional.linear(replicated, column.weight.detach(), column.bias.detach()).tanh()
    partial = DTensor.from_local(hidden @ row.weight.detach().T, mesh, [Partial()])
    y = partial.redistribute(placements=[Replicate()]).to_local() + row.bias.detach()
    y.sin().sum().backward()
    return ours.grad, published.grad


def test_the_local_tensor_of_a_replicated_activation():
    """``DTensor.to_local()`` without ``grad_placements`` in front of sharded experts lost the sum over ranks in
    backward: https://github.com/pytorch/torchtitan/pull/1878."""
    up, down, x = linears()
    (x,) = leaves(x)
    down(up(x).tanh()).sin().sum().backward()
    check(ranks.run(_local_activation, 2), x.grad)


def _bias_of_a_partial_sum(group):
    _, down, x = linears()
    x = torch.cat([x, x[:, :2]], 1)
    own = x.chunk(2, 1)[group.rank()].contiguous()
    row = tp_ext.RowParallelLinear.from_linear(down, group=group)
    results = []
    for published in (False, True):
        own, weight, bias = leaves(own, row.weight.detach(), row.bias.detach())
        if published:
            partial = tp_ext.copy_to_region(own @ weight.T, group)  # whose backward sums once more
            scaled = bias - (1 - 1 / group.size()) * bias.detach()  # bias / p, and its whole gradient
            y = tp_ext.reduce_from_region(partial + scaled, group)
            parameters = [weight, bias]
        else:
            y, parameters = row(own), [row.weight, row.bias]
        y.sin().sum().backward()
        gather = [tp_ext.gather_from_region(t.grad, group) for t in (own, parameters[0])]
        results.append([y.detach(), *gather, parameters[1].grad])
    return results


def test_the_bias_of_a_row_parallel_linear():
    """A bias shared out over the partial sums gave the right output, and the gradient of the product p times:
    https://github.com/pytorch/torchtitan/pull/2106."""
    _, down, x = linears()
    (x,) = leaves(torch.cat([x, x[:, :2]], 1))
    y = down(x)
    y.sin().sum().backward()
    check(ranks.run(_bias_of_a_partial_sum, 2), [y.detach(), x.grad, down.weight.grad, down.bias.grad])


def _all_reduce(group):
    up, down, x = linears()
    results = []
    for reduce in (tp_ext.reduce_from_region, lambda y, group: all_reduce(y, group=group)):
        column = tp_ext.ColumnParallelLinear.from_linear(up, group=group)
        weight = tp_ext.RowParallelLinear.from_linear(down, group=group).weight
        y = reduce(column(x).tanh() @ weight.T, group)
        y.sin().sum().backward()
        results.append([y.detach(), *(tp_ext.gather_from_region(t.grad, group, 0) for t in column.parameters())])
    return results


def test_an_all_reduce_that_is_differentiated():
    """``torch.distributed.nn.all_reduce`` sums the gradients of all ranks in backward, which makes those of a
    tensor-parallel layer p times too large: https://github.com/InternLM/xtuner/pull/1004, which cites pytorch 58005."""
    up, down, x = linears()
    y = up(x).tanh() @ down.weight.T
    y.sin().sum().backward()
    check(ranks.run(_all_reduce, 2), [y.detach(), up.weight.grad, up.bias.grad])


def _norm_of_tokens(group, x, dy):
    results = []
    for norm in (tp_ext.RMSNorm(4, 1e-6, group=group, sequence_parallel=True, **FP64), nn.RMSNorm(4, 1e-6, **FP64)):
        norm(own_tokens(x, group)).backward(own_tokens(dy, group))
        results.append(norm.weight.grad)
    return results


def test_norms_under_sequence_parallelism():
    """A train step of its own left out the all-reduce that Megatron does after backward, and replicated norms had the
    gradient of each rank's tokens: https://github.com/NVIDIA-NeMo/RL/issues/3716."""
    torch.manual_seed(5)
    x, dy = torch.randn(2, 6, 4, **FP64)
    norm = nn.RMSNorm(4, 1e-6, **FP64)
    norm(x).backward(dy)
    check(ranks.run(_norm_of_tokens, 2, x, dy), norm.weight.grad)


def _norm_of_heads(group, x, weight):
    own = x.chunk(group.size(), 1)[group.rank()]  # heads
    results = []
    for ours in (True, False):
        (leaf,) = leaves(weight)
        y = nn.functional.rms_norm(own, (4,), tp_ext.copy_to_region(leaf, group) if ours else leaf, 1e-6)
        tp_ext.reduce_from_region(y.sin().sum(), group).backward()
        results.append(leaf.grad)
    return results


def test_a_norm_of_sharded_heads_without_sequence_parallelism():
    """The norm of GatedDeltaNet's heads, whose weight all ranks hold, had its gradient summed over ranks under sequence
    parallelism alone: https://github.com/NVIDIA/Megatron-LM/issues/7452, finding 11."""
    torch.manual_seed(6)
    x, weight = torch.randn(3, 6, 4, **FP64), torch.randn(4, **FP64)
    (leaf,) = leaves(weight)
    nn.functional.rms_norm(x, (4,), leaf, 1e-6).sin().sum().backward()
    check(ranks.run(_norm_of_heads, 2, x, weight), leaf.grad)


SMALL = 2.0**-10  # 1 + SMALL has no bf16


def _summed_in_half(group):
    mesh = tp_ext.init_mesh("cpu", dp=1, tp=2)
    options, half = {"eps": 1e-30, "bias": False}, {"dtype": torch.bfloat16}
    x = torch.tensor([[1.0, -1]], **half)  # its own normalised values
    dy = torch.full_like(x, SMALL if group.rank() else 1.0)
    ours = tp_ext.LayerNorm(2, group=mesh["tp"], sequence_parallel=True, **options)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fully_shard(ours, mesh=mesh["dp"], mp_policy=policy)
    ours(x).backward(dy)
    published = nn.LayerNorm(2, **options, **half)
    published(x).backward(dy)
    dist.all_reduce(published.weight.grad)  # before the cast to reduce_dtype
    return ours.weight.grad.full_tensor(), published.weight.grad.float()


def test_the_dtype_in_which_gradients_of_norms_are_summed():
    """FSDP2 summed the gradients of norms over tensor-parallel ranks in bf16 whatever ``reduce_dtype`` was:
    https://github.com/pytorch/pytorch/issues/190626."""
    check(ranks.run(_summed_in_half, 2), torch.tensor([1.0, -1]) * (1 + SMALL), rtol=0, atol=0)
