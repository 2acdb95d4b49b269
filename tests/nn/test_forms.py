"""A form of a linear that exists in this file alone, weights rounded to multiples of 1/64, in every layer with a form.

The peer is the unsharded model, in its plain form, with weights that were rounded before: the gradient of the rounding
is the identity. So outputs and gradients are the same up to the order of sums, in fp64.
"""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tp_ext
from tests.helpers.on_ranks import on_ranks
from tests.helpers.same_values import same_gradients
from tp_ext.nn.forms import Form

FP64 = {"dtype": torch.float64}
TOKENS, WIDTH = 8, 16
close = {"rtol": 1e-9, "atol": 1e-9}


class _Rounding(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight):
        return (weight * 64).round() / 64

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@dataclass(frozen=True)
class Rounded(Form):
    """All that a new format has to write."""

    def multiply(self, x, weight):
        return F.linear(x, _Rounding.apply(weight))


class Network(nn.Module):
    """For auto: its linears become column and row layers, that sum the gradients of inputs together."""

    def __init__(self):
        super().__init__()
        self.table, self.norm = nn.Embedding(11, WIDTH, **FP64), nn.LayerNorm(WIDTH, **FP64)
        sizes = (WIDTH, 24), (WIDTH, 24), (24, WIDTH)
        self.gate, self.up, self.down = (nn.Linear(*size, **FP64) for size in sizes)

    def forward(self, ids):
        x = self.table(ids)
        y = self.norm(x)
        return self.norm(x + self.down(torch.relu(self.gate(y)) * self.up(y)))


def _adapted(group, **options):
    """Adapters over a column and a row linear."""
    model = nn.Sequential(tp_ext.ParallelMLP(WIDTH, 24, activation="swiglu", group=group, **options, **FP64))
    tp_ext.add_lora(model, targets=["up", "down"], r=2, alpha=3)
    return model


MODELS = {
    "column": lambda group, **sp: tp_ext.ColumnParallelLinear(WIDTH, 10, group=group, gather_output=True, **sp, **FP64),
    "row": lambda group, **sp: tp_ext.RowParallelLinear(WIDTH, 10, group=group, **sp, **FP64),
    "mlp": lambda group, **sp: tp_ext.ParallelMLP(WIDTH, 24, group=group, **sp, **FP64),
    "attention": lambda group, **sp: tp_ext.ParallelAttention(
        WIDTH, 4, num_kv_heads=2, causal=True, group=group, **sp, **FP64
    ),
    "latent attention": lambda group, **sp: tp_ext.ParallelLatentAttention(
        WIDTH,
        4,
        kv_lora_rank=6,
        qk_nope_head_dim=4,
        qk_rope_head_dim=2,
        v_head_dim=4,
        group=group,
        **sp,
        **FP64,
    ),
    "experts": lambda group, **sp: tp_ext.ParallelMoE(WIDTH, 12, 3, 2, shared_experts=1, group=group, **sp, **FP64),
    "experts with biases": lambda group, **sp: tp_ext.ParallelMoE(
        WIDTH, 12, 3, 1, activation="gelu", bias=True, group=group, **sp, **FP64
    ),
    "head": lambda group, **sp: tp_ext.VocabParallelLMHead(WIDTH, 13, bias=True, group=group, **sp, **FP64),
    "adapters": _adapted,
    "into main_grad": lambda group, **sp: tp_ext.ParallelMoE(
        WIDTH, 12, 3, 2, shared_experts=1, grad_accumulation_fusion=group is not None, group=group, **sp, **FP64
    ),
}


def _formed(model):
    """Gives every layer of a model that has a form the new one; returns their names."""
    layers = {name: layer for name, layer in model.named_modules() if hasattr(layer, "form")}
    adapters = {id(part) for m in model.modules() if isinstance(m, tp_ext.LoRALinear) for part in (m.lora_A, m.lora_B)}
    layers = {name: layer for name, layer in layers.items() if id(layer) not in adapters}
    for layer in layers.values():
        layer.form = Rounded()
    return list(layers)


@torch.no_grad()
def _rounded(model, names):
    """Returns a copy of an unsharded model whose layers of these names have rounded weights."""
    model = copy.deepcopy(model)
    for name in names:
        for local, weight in model.get_submodule(name).named_parameters(recurse=False):
            if local.endswith("weight"):
                weight.copy_((weight * 64).round() / 64)
    return model


def _one_sequence(attention, x):
    return attention(x, batch_size=1) if attention.sequence_parallel else attention(x[None])[0]


def _compare(dense, sharded, x, call, local, gather):
    names = _formed(sharded)
    assert names
    peer = _rounded(dense, names)
    entering = [t.clone().requires_grad_(t.is_floating_point()) for t in (x, local(x))]
    fused = [
        layer.get_parameter(name)
        for layer in sharded.modules()
        if getattr(layer, "grad_accumulation_fusion", False)
        for name, _ in layer.named_parameters(recurse=False)
        if name.endswith("weight")
    ]
    for weight in fused:
        weight.main_grad = torch.zeros_like(weight)
    results = [call(peer, entering[0]), gather(call(sharded, entering[1]))]
    torch.testing.assert_close(*results, **close)
    assert not torch.allclose(call(dense, x), results[0], **close)  # rounding shows
    for y in results:
        (y * torch.linspace(-1, 1, y.shape[-1], **FP64)).square().sum().backward()
    if x.is_floating_point():
        torch.testing.assert_close(entering[1].grad, local(entering[0].grad), **close)
    for weight in fused:
        assert weight.grad is None
        weight.grad = weight.main_grad
    same_gradients(peer, sharded, **close)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("name", MODELS)
@on_ranks(2)
def test_a_new_form_in_layers(group, name, sequence_parallel):
    torch.manual_seed(0)
    dense = MODELS[name](None)
    with torch.no_grad():
        for param in dense.parameters():
            param.normal_(0, 0.3)
    sharded = MODELS[name](group, **({"sequence_parallel": True} if sequence_parallel else {}))
    tp_ext.load_full_state_dict(sharded, dense.state_dict())
    x = torch.randn(TOKENS, WIDTH, **FP64)
    size, rank = group.size(), group.rank()

    def local(full):
        full = full.detach()
        if name == "row":
            return full.tensor_split(size, -1)[rank]
        return full.tensor_split(size)[rank] if sequence_parallel else full

    def gather(y):
        if name == "head":
            sizes = tp_ext.Sharding(0, (13,)).local_sizes(size)
            return tp_ext.gather_from_region(y, group, -1, sizes=sizes)
        return tp_ext.gather_from_region(y, group, 0) if sequence_parallel and name != "column" else y

    call = _one_sequence if "attention" in name else lambda model, x: model(x)
    _compare(dense, sharded, x, call, local, gather)


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["", "sp"])
@on_ranks(2)
def test_a_new_form_in_models_of_auto(group, sequence_parallel):
    torch.manual_seed(0)
    dense, ids = Network(), torch.randint(11, (2, 6))
    plan = tp_ext.auto.plan(dense, {"ids": ids}, group.size(), sequence_parallel=sequence_parallel)
    sharded = tp_ext.auto.apply(plan, copy.deepcopy(dense), group)
    _compare(dense, sharded, ids, lambda model, x: model(x), lambda t: t, lambda y: y)
