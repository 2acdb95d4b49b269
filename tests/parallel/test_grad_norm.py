"""clip_grad_norm_ against torch.nn.utils.clip_grad_norm_ of the unsharded model, in fp64 within 1e-12. With torch's
ShardedGradScaler over the group, what overflows on one rank is no step on any (torch.amp.GradScaler:
tests/outside/test_scaling.py).
"""

import itertools

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.tensor.debug import CommDebugMode

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import counts_by_kind, gathered, local_grads

pytestmark = pytest.mark.core

NORMS = [1, 2, 3.5, float("inf"), -1.5, float("-inf")]
FLAGS = [None, True, False]
close = {"rtol": 1e-12, "atol": 1e-12}


class Model(nn.Module):
    """Cut evenly and not, copied (one KV head on several ranks), padded, replicated."""

    def __init__(self, group=None, dtype=torch.float64):
        super().__init__()
        options = {"group": group, "dtype": dtype}
        pad = None if group is None else 4
        self.embedding = tp_ext.VocabParallelEmbedding(13, 8, pad_to_multiple_of=pad, **options)
        self.norm = tp_ext.LayerNorm(8, **options)
        self.attention = tp_ext.ParallelAttention(8, 4, num_kv_heads=1, head_dim=2, **options)
        self.column = tp_ext.ColumnParallelLinear(8, 7, **options)
        self.frozen = nn.Parameter(torch.ones(3), requires_grad=False)


def _with_grads(group, grads, dtype=torch.float64):
    """A model whose gradients are its shards of `grads`, padding filled with what must not count."""
    torch.manual_seed(1)
    model = Model(group, dtype)
    table = dict(tp_ext.shardings(model))
    for name, param in model.named_parameters():
        if name in grads:
            cut = table[name]
            param.grad = (
                (grads[name] if cut is None else cut.shard(grads[name], *_place(group))).to(param.dtype).clone()
            )
    rows = model.embedding.vocab_local
    if "embedding.weight" in grads:
        model.embedding.weight.grad[rows:] = 1e9
    return model


def _place(group):
    return (0, 1) if group is None else (group.rank(), group.size())


def _grads(scale=1.0):
    return {
        name: scale * torch.randn(p.shape, dtype=torch.float64)
        for name, p in Model().named_parameters()
        if p.requires_grad
    }


def _clip(group, grads, bare, max_norm, norm_type, options):
    model = _with_grads(group, grads)
    what = model.parameters() if bare else model
    if bare:
        model.frozen.tp_sharding = None
    norm = tp_ext.clip_grad_norm_(what, max_norm, norm_type, group=group, **options)
    rows = model.embedding.vocab_local
    model.embedding.weight.grad[rows:] = 0
    model.frozen.requires_grad_(False)
    clipped = {k: v for k, v in local_grads(model).items() if v is not None}
    return norm, clipped, {k: v for k, v in tp_ext.shardings(model) if k in clipped}


def _dense(grads, max_norm, norm_type):
    params = {name: nn.Parameter(torch.zeros_like(g)) for name, g in grads.items()}
    for name, param in params.items():
        param.grad = grads[name].clone()
    norm = nn.utils.clip_grad_norm_(params.values(), max_norm, norm_type)
    return norm, {name: param.grad for name, param in params.items()}


@pytest.mark.thinned
@pytest.mark.parametrize("bare", [False, True], ids=["module", "parameters"])
@pytest.mark.parametrize(("norm_type", "foreach"), list(itertools.product(NORMS, FLAGS)))
@pytest.mark.parametrize("p", [1, 2, 4])
def test_norm_and_clipped_gradients_are_those_of_the_unsharded_model(p, norm_type, foreach, bare):
    """Padding holds 1e9, copies exist p times, replicated gradients p times: any of them counted wrongly shows."""
    grads = _grads()
    for max_norm in (0.5, 1e6, 0):
        want, wanted = _dense(grads, max_norm, norm_type)
        results = ranks.run(_clip, p, grads, bare, max_norm, norm_type, {"foreach": foreach})
        norms, clipped, tables = zip(*results, strict=True)
        assert all(torch.equal(norm, norms[0]) for norm in norms)
        torch.testing.assert_close(norms[0], want, **close)
        torch.testing.assert_close(gathered(clipped, tables[0]), wanted, **close)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("names", [["norm.weight", "norm.bias"], ["attention.qkv.bias"], []], ids=str)
@on_ranks(4)
def test_ranks_that_own_nothing(group, names, dtype):
    """Replicated gradients are rank 0's to count: the others have none, whatever the dtype, and send as much."""
    # Norm of the gradients of some parameters alone, all of them ones.
    count = {0: 0, 1: 12, 2: 16}[len(names)]
    grads = {k: torch.ones(v.shape) for k, v in Model().named_parameters() if k in names}
    norm = tp_ext.clip_grad_norm_(_with_grads(group, grads, dtype), 1.0)
    assert norm.dtype == (dtype if names else torch.float32)
    torch.testing.assert_close(norm.double(), torch.tensor(count**0.5).double(), rtol=1e-2, atol=0)


@on_ranks(4)
def test_ranks_whose_shards_are_empty(group):
    """2 features on 4 ranks: the last two have none, of which there is no largest."""
    layer = tp_ext.ColumnParallelLinear(3, 2, group=group)
    for param in layer.parameters():
        param.grad = torch.full_like(param, 2.0 + group.rank())
    cubes = tp_ext.grad_norm(layer, 3.0)
    assert tp_ext.grad_norm(layer, float("inf")) == 3.0
    torch.testing.assert_close(cubes, torch.tensor(4 * (2.0**3 + 3.0**3)) ** (1 / 3))


def _mixed(group):
    model = _with_grads(group, {k: torch.ones(v.shape) for k, v in Model().named_parameters()}, torch.bfloat16)
    model.norm.float()
    return tp_ext.clip_grad_norm_(model, 1.0)


def test_parameters_of_several_dtypes():
    one = ranks.run(_mixed, 1)[0]
    for norm in ranks.run(_mixed, 2):
        assert norm.dtype == torch.float32
        torch.testing.assert_close(norm, one, rtol=1e-2, atol=0)  # norms of bf16 tensors, in bf16


def _bare(group, kind):
    model = _with_grads(group, _grads())
    if kind == "one tensor":
        got = tp_ext.clip_grad_norm_(model.column.weight, 1.0, group=group)
        return got, model.column.weight.grad
    params = (
        [nn.Parameter(p.detach()) for p in model.parameters()] if kind == "no attribute" else [nn.Linear(2, 2).bias]
    )
    for param in params:
        param.grad = torch.ones_like(param)
    return tp_ext.clip_grad_norm_(params, 1.0, group=group)


def test_bare_parameters():
    ranks.run_raises(_bare, 2, ValueError, r"parameters_or_module.*tp_sharding.*pass the module", "no attribute")
    ranks.run_raises(_bare, 2, ValueError, r"parameters_or_module.*shape \(2,\).*tp_sharding", "torch's")
    assert ranks.run(_bare, 1, "torch's")[0] == 2**0.5  # one rank: there is nothing to tell
    torch.manual_seed(0)
    norms, grads = zip(*ranks.run(_bare, 2, "one tensor"), strict=True)
    assert torch.equal(*norms)
    torch.testing.assert_close(torch.cat(grads).norm(), torch.ones((), dtype=torch.float64), rtol=1e-5, atol=0)


def _nonfinite(group, value, rank, strict):
    grads = _grads()
    model = _with_grads(group, grads)
    if group.rank() == rank:
        model.column.weight.grad[0, 0] = value
    before = model.norm.weight.grad.clone()
    try:
        return tp_ext.clip_grad_norm_(model, 1.0, error_if_nonfinite=strict)
    finally:
        assert not strict or torch.equal(model.norm.weight.grad, before)


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("strict", [False, True])
def test_a_value_not_finite_on_one_rank_is_so_on_all(value, rank, strict):
    if strict:
        ranks.run_raises(
            _nonfinite, 2, RuntimeError, "error_if_nonfinite.*(nan|inf)", value, rank, True, in_turns=False
        )
    else:
        assert not any(norm.isfinite() for norm in ranks.run(_nonfinite, 2, value, rank, False))


def _count(group):
    model = _with_grads(group, _grads())
    with CommDebugMode() as counts:
        tp_ext.clip_grad_norm_(model, 1.0)
    return counts_by_kind(counts)


def test_one_number_is_sent():
    assert ranks.run(_count, 2) == [{"all_reduce": 1}] * 2
    assert ranks.run(_count, 1) == [{}]


# Loss scaling


def _step(group, overflowing, data):
    """Returns whether a step with an infinite gradient of a shard on rank `overflowing` changed anything; the scale."""
    mesh = mesh_of(data, group.size() // data, names=("dp", "tp"))
    tp = mesh["tp"]
    model = nn.Sequential(
        tp_ext.RMSNorm(4, group=tp), tp_ext.ParallelMLP(4, 8, group=tp), tp_ext.ColumnParallelLinear(4, 4, group=tp)
    )
    if data > 1:
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    whole = dist.group.WORLD if data > 1 else tp.get_group()
    scaler = ShardedGradScaler("cpu", init_scale=1024.0, process_group=whole)
    before = [param.detach().clone() for param in model.parameters()]
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    if group.rank() == overflowing:
        grad = model[1].up.weight.grad
        (grad if data == 1 else grad.to_local())[0, 0] = float("inf")
    scaler.unscale_(optimizer)
    tp_ext.clip_grad_norm_(model, 1.0)
    scaler.step(optimizer)
    scaler.update()
    stored = [p.detach() if data == 1 else p.detach().to_local() for p in model.parameters()]
    start = [b if data == 1 else b.to_local() for b in before]
    return any(not torch.equal(a, b) for a, b in zip(stored, start, strict=True)), scaler.get_scale()


@pytest.mark.parametrize(("p", "data"), [(2, 1), (3, 1), (4, 2)], ids=["p = 2", "p = 3", "2 x 2 under FSDP2"])
def test_no_rank_steps(p, data):
    for overflowing in range(p):
        assert ranks.run(_step, p, overflowing, data) == [(False, 512.0)] * p
    assert ranks.run(_step, p, None, data) == [(True, 1024.0)] * p
