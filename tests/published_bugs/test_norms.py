"""Published bugs of the norm of all gradients, by which they are clipped: over tensor parallelism with replicated
parameters, over the stages of a pipeline, with tied weights, other orders and bf16; against torch's norm of the
gradients of the model in one process."""

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import Shard, distribute_tensor

import tp_ext
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tests.helpers.right_and_wrong import check, check_on_rank
from tests.helpers.stages import backward, dense, stages, take_gradients

FP64 = {"dtype": torch.float64}


def block(group):
    torch.manual_seed(4)
    parts = {
        "norm": tp_ext.LayerNorm(4, group=group, **FP64),
        "mlp": tp_ext.ParallelMLP(4, 6, group=group, **FP64),
        "own": tp_ext.ColumnParallelLinear(4, 6, group=group, **FP64),
    }
    return nn.ModuleDict(parts)


def with_gradients(group):
    net = block(group)
    x = torch.randn(3, 4, **FP64, generator=torch.Generator().manual_seed(8))
    x = net["mlp"](net["norm"](x)) + x
    net["own"](x).square().sum().backward()
    return net


def of_one_process(norm_type=2.0):
    return torch.nn.utils.get_total_norm([param.grad for param in with_gradients(None).parameters()], norm_type)


def squares(net, counted):
    """The sum of the squares of this rank's gradients, those for which counted(sharded) is true."""
    table = dict(tp_ext.shardings(net))
    grads = [param.grad for name, param in net.named_parameters() if counted(table[name] is not None)]
    return sum((grad.square().sum() for grad in grads), torch.zeros((), **FP64))


def _clipped(group, counted):
    """The norm that is clipped by, and a gradient after that: ours, and by the squares of the counted gradients."""
    results = []
    for ours in (True, False):
        net = with_gradients(group)
        if ours:
            norm = tp_ext.clip_grad_norm_(net, 1.0, group=group)
        else:
            norm = counted(net, group).sqrt()
            torch.nn.utils.clip_grads_with_norm_(net.parameters(), 1.0, norm)
        results.append([norm, net["norm"].weight.grad])
    return results


def clipped():
    net = with_gradients(None)
    norm = torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    return [norm, net["norm"].weight.grad]


def _of_this_rank(net, group):
    return squares(net, lambda sharded: True)


def _mixed(group):
    mesh = tp_ext.init_mesh("cpu", tp=2)["tp"]
    distributed = distribute_tensor(torch.ones(4), mesh, [Shard(0)])
    torch.nn.utils.get_total_norm([distributed, torch.ones(2)])


def test_sharded_and_replicated_gradients_together():
    """Clipping stopped at the mixture of DTensors and tensors that tensor parallelism makes, and after a first fix
    ranks had different norms: https://github.com/huggingface/transformers/issues/36296 and
    https://github.com/huggingface/transformers/pull/36132."""
    ranks.run_raises(_mixed, 2, RuntimeError, "mixed torch.Tensor and DTensor", in_turns=False)
    results = ranks.run(_clipped, 2, _of_this_rank)
    check(results, clipped())
    assert results[0][1][0] != results[1][1][0]  # each rank scales by another factor


def _of_rank_0(net, group):
    total = squares(net, lambda sharded: group.rank() == 0)
    dist.all_reduce(total)
    return total


def test_sharded_gradients_of_ranks_other_than_the_first():
    """One flag for the flattened gradients of sharded and replicated parameters together took all for replicated, and
    only those of tensor-parallel rank 0 counted: https://github.com/deepspeedai/DeepSpeed/pull/5411."""
    check(ranks.run(_clipped, 2, _of_rank_0), clipped())


def _of_all_ranks(net, group):
    total = squares(net, lambda sharded: True)
    dist.all_reduce(total)
    return total


def test_replicated_gradients_count_once():
    """Replicated weights were marked as sharded and counted once for each tensor-parallel rank, a norm too large by
    a third to a half: https://github.com/ROCm/TransformerEngine/pull/715."""
    check(ranks.run(_clipped, 2, _of_all_ranks), clipped())


@on_ranks(2)
def test_norms_of_another_order(group):
    """Norms of the tensors were squared, and the root of order ``norm_type`` taken of their sum:
    https://github.com/deepspeedai/DeepSpeed/pull/8313."""
    net = with_gradients(group)
    table, sums = dict(tp_ext.shardings(net)), torch.zeros(2, **FP64)  # of replicated and of sharded parameters
    for name, param in net.named_parameters():
        sums[int(table[name] is not None)] += param.grad.norm(3) ** 2
    dist.all_reduce(sums[1])
    check_on_rank(group, (tp_ext.grad_norm(net, 3, group=group), sums.sum() ** (1 / 3)), of_one_process(3))


# Pipelines


def _of_stages(group, tied):
    mesh = tp_ext.init_mesh("cpu", pp=2)
    model, _ = dense(tied=tied)
    backward(model)
    want = torch.nn.utils.get_total_norm([param.grad for param in model.parameters()])
    made, _ = stages(mesh, tied=tied)
    take_gradients(made, model)
    total = sum(param.grad.square().sum() for stage in made for param in stage.parameters())
    if tied:
        dist.all_reduce(total)
    return tp_ext.grad_norm(made, mesh=mesh), total.sqrt(), want


def test_each_stage_clipped_by_its_own_norm():
    """Each rank of a pipeline computed the norm of its own stages alone:
    https://github.com/pytorch/torchtitan/issues/596."""
    results = ranks.run(_of_stages, 2, False)
    check([(ours, published) for ours, published, _ in results], results[0][2])


def test_a_weight_tied_over_two_stages():
    """The copy of the embedding on the last stage counted a second time:
    https://github.com/NVIDIA/Megatron-LM/pull/7227."""
    results = ranks.run(_of_stages, 2, True)
    check([(ours, published) for ours, published, _ in results], results[0][2])


# Two tensors on each of two stages, whose squares sum up to 7 and 108; the root of 115 is 10.72, in bf16 10.75
GRADIENTS = [torch.full((n,), value, dtype=torch.bfloat16) for n, value in ((3, 1.0), (1, 2.0), (104, 1.0), (1, 2.0))]


@on_ranks(2)
def test_the_norm_of_bf16_gradients_does_not_depend_on_the_stages(group):
    """Each stage's part of the norm is rounded to bf16 before the parts are combined, so that the norm depends on the
    number of stages: https://github.com/pytorch/pytorch/pull/194033."""
    mesh = tp_ext.init_mesh("cpu", pp=2)
    rank, own = group.rank(), nn.ParameterDict()
    for i in (2 * rank, 2 * rank + 1):
        own[str(i)] = nn.Parameter(torch.zeros_like(GRADIENTS[i]))
        own[str(i)].grad = GRADIENTS[i].clone()
    ours = tp_ext.grad_norm(own, mesh=mesh)
    partial = torch.nn.utils.get_total_norm([param.grad for param in own.parameters()]) ** 2
    dist.all_reduce(partial)
    check_on_rank(group, (ours, partial.sqrt()), torch.tensor(10.75).bfloat16(), rtol=0, atol=0)
