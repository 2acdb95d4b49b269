"""Muon of sharded parameters is that of the unsharded model: over one group and over two, with fused parts, copied
key-value heads, ties and stacks of experts, under FSDP2, across checkpoints at another p; and what it communicates.
"""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor

import tp_ext
from tests.helpers import ranks
from tests.helpers.dtypes import default_dtype
from tests.helpers.meshes import mesh_of
from tp_ext import Layout, Sharding
from tp_ext.optim import Muon, split_parameters

pytestmark = pytest.mark.core

HIDDEN, FFN, EXPERTS, VOCAB = 12, 20, 3, 19
CLOSE = {"rtol": 1e-11, "atol": 1e-11}


class Experts(nn.Module):
    """A stack of matrices, sharded by experts over one group and by rows over another."""

    def __init__(self, tp, dp=None):
        super().__init__()
        layout = Layout((Sharding(0, [EXPERTS]), tp), (Sharding(1, [HIDDEN]), dp))
        self.weight = nn.Parameter(layout.shard(torch.randn(EXPERTS, HIDDEN, 5)))
        tp_ext.declare_layouts(self, {"weight": layout})


class Model(nn.Module):
    """One of each kind of matrix; gradients are given, so there is no forward."""

    def __init__(self, group=None, other=None, weight_group=None):
        super().__init__()
        one = {"group": group, "weight_group": weight_group}
        self.embedding = tp_ext.VocabParallelEmbedding(VOCAB, HIDDEN, group=group)
        self.attention = tp_ext.ParallelAttention(HIDDEN, 4, num_kv_heads=1, group=group)
        self.mlp = tp_ext.ParallelMLP(HIDDEN, FFN, activation="swiglu", **one)
        self.down = tp_ext.RowParallelLinear(HIDDEN, HIDDEN, group=group)
        self.same = tp_ext.RowParallelLinear(HIDDEN, HIDDEN, group=group)
        self.same.weight = self.down.weight
        self.router = nn.Linear(HIDDEN, EXPERTS)
        self.experts = Experts(group, other)
        self.head = tp_ext.VocabParallelLMHead(HIDDEN, VOCAB, group=group, bias=False)
        self.head.weight = self.embedding.weight


def made(*groups, dtype=torch.float64, **options):
    with default_dtype(dtype):
        tp_ext.manual_seed(3)
        torch.manual_seed(3)
        model = Model(*groups, **options)
        return model


def optimizer_of(model, optimizer=Muon, ns_dtype=torch.float64, **options):
    matrices, others = split_parameters(model)
    return optimizer(
        matrices, lr=0.02, adamw_params=[{"params": others, "lr": 0.01}], ns_dtype=ns_dtype, model=model, **options
    )


def give_gradients(model, step):
    """The shards of gradients that are a function of the name, of two sizes so that singular values differ."""
    table, whole = dict(tp_ext.layouts(model)), {}
    for number, (name, param) in enumerate(model.named_parameters()):
        with default_dtype(torch.float64):
            shape = table[name].full_shape(param.shape)
            generator = torch.Generator().manual_seed(100 * step + number)
            full = torch.randn(shape, generator=generator) * torch.linspace(0.01, 2, shape[-1])
        full = full.to(param.dtype)
        whole[name] = full
        grad = table[name].shard(full).clone()
        if isinstance(param, DTensor):
            grad = distribute_tensor(grad, param.device_mesh, param.placements, src_data_rank=None)
        param.grad = grad
    return whole


def train(model, optimizer, steps, first=0):
    for step in range(first, first + steps):
        give_gradients(model, step)
        optimizer.step()


def trained(group, kind, steps=20, dtype=torch.float64, **options):
    """The full state after training on these ranks."""
    p = 1 if group is None else group.size()
    if kind == "unsharded":
        model = made(dtype=dtype)
    elif kind == "tp":
        model = made(group, dtype=dtype)
    elif kind == "two axes":
        mesh = mesh_of(1, 2, 1, p // 2)
        model = made(mesh["tp"], mesh["dp"], mesh["dp"], dtype=dtype)
    else:
        mesh = mesh_of(1, 2, 1, p // 2)
        model = made(mesh["tp"], dtype=dtype)
        for block in (model.attention, model.mlp):
            fully_shard(block, mesh=mesh["dp"])
        fully_shard(model, mesh=mesh["dp"])
    optimizer = optimizer_of(model, ns_dtype=dtype, **options)
    train(model, optimizer, steps)
    tp_ext.debug.check(model, optimizer=optimizer)
    state = tp_ext.full_optimizer_state_dict(model, optimizer)["state"]
    return tp_ext.full_state_dict(model), {f"{n}.{k}": v for n, of in state.items() for k, v in of.items()}


@pytest.mark.parametrize("form", ["auto", "gram"])
@pytest.mark.parametrize(
    ("kind", "p"), [("tp", 2), ("tp", 3), ("tp", 4), ("two axes", 4), ("fsdp2", 4)], ids=lambda x: str(x)
)
def test_training_is_that_of_the_unsharded_model(kind, p, form):
    want = trained(None, "unsharded")
    for got in ranks.run(trained, p, kind, form=form):
        torch.testing.assert_close(got, want, **CLOSE)


def test_bits_of_the_gathered_form_do_not_depend_on_the_ranks():
    want = trained(None, "unsharded", 3, torch.float32)
    for kind, p in (("tp", 2), ("tp", 4), ("two axes", 4), ("fsdp2", 4)):
        for got in ranks.run(trained, p, kind, 3, torch.float32, form="gather"):
            for mine, theirs in zip(got, want, strict=True):
                assert [k for k in theirs if not torch.equal(mine[k], theirs[k])] == [], (kind, p)
