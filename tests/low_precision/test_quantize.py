"""quantize_: values by the formula bit for bit and the same for every p, products within roundings, adapters above."""

import copy
import random
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import tp_ext
from tests.helpers import simulated
from tests.helpers.on_ranks import on_ranks
from tp_ext import ColumnParallelLinear, Part, RowParallelLinear
from tp_ext.low_precision import dequantize, quantize_

pytestmark = pytest.mark.core

UNIT = {torch.float32: 0.0, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


def formula(weight, kind, block):
    """Scale, q as integers, and the weight that they stand for, in fp32."""
    most, blocks = (127, weight[:, None]) if kind == "int8" else (7, weight.unflatten(-1, (-1, block)))
    scale = (blocks.float().abs().amax(-1) / most).to(weight.dtype)
    scale = torch.where(scale == 0, torch.ones_like(scale), scale)
    q = torch.round(blocks.float() / scale.float()[..., None]).clamp(-most, most)
    return scale, q.reshape(weight.shape), (q * scale.float()[..., None]).reshape(weight.shape)


def packed_bytes(q, kind):
    if kind == "int8":
        return q.to(torch.int8)
    pairs = (q + 8).int().unflatten(-1, (-1, 2))
    return (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8)


def drawn(seed, p):
    """A layer's class and arguments, its call, and how it is quantised."""
    r = random.Random(seed)
    kind, dtype = r.choice(["int8", "int4"]), r.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    block, column = r.choice([2, 4, 8]), r.random() < 0.5
    options = {"bias": r.random() < 0.7, "skip_bias_add": r.random() < 0.2}
    sequence_parallel = r.random() < 0.4
    free, shared = r.randint(2, 40), block * r.randint(1, 6)
    if column:
        parts = [free] if r.random() < 0.6 else [free, r.randint(0, 9)]
        options["parts"] = parts
        options["gather_output"] = r.random() < 0.3 and not options["skip_bias_add"]
        sizes = shared, sum(parts)
    else:
        unit = block if kind == "int4" else 1
        parts = [Part(shared, unit=unit)] if r.random() < 0.6 else [Part(shared, unit=unit), Part(3 * block, unit=unit)]
        options["parts"] = parts
        options["input_is_parallel"] = sequence_parallel or r.random() < 0.7
        sizes = sum(part.size for part in parts), free
    options["sequence_parallel"] = sequence_parallel
    shape = (p * r.randint(0, 3),) if sequence_parallel else r.choice([(5,), (2, 3), (70,), ()])
    return (ColumnParallelLinear if column else RowParallelLinear), sizes, options, shape, kind, block, dtype


def run_layer(group, seed, p):
    cls, (inputs, outputs), options, shape, kind, block, dtype = drawn(seed, p)
    torch.manual_seed(seed)
    dense = nn.Linear(inputs, outputs, bias=options["bias"])
    with torch.no_grad():
        dense.weight *= 10 ** torch.randn(outputs, 1)
        dense.weight[0] = 0
    dense = dense.to(dtype)
    layer = cls.from_linear(dense, group=group, **{k: v for k, v in options.items() if k != "bias"})
    assert quantize_(layer, kind, block=block) == [""]
    state = tp_ext.full_state_dict(layer)
    sharded = options["sequence_parallel"] and group is not None
    x = torch.randn(*shape, inputs).to(dtype)
    dy = torch.randn(*shape, outputs).to(dtype)
    rank = group.rank() if group is not None else 0
    layout = layer.weight_layout[0][0]
    column = cls is ColumnParallelLinear
    last = tp_ext.Sharding(-1, layout.parts)
    p = p if group is not None else 1
    x_own, dy_own = x, dy
    if column:
        x_own = x.tensor_split(p)[rank] if sharded else x
        dy_own = dy if options["gather_output"] else last.shard(dy, rank, p)
    else:
        x_own = last.shard(x, rank, p) if options["input_is_parallel"] else x
        dy_own = dy.tensor_split(p)[rank] if sharded else dy
    x_own = x_own.clone().requires_grad_()
    y = layer(x_own)
    y, bias = y if options["skip_bias_add"] else (y, None)
    assert y.dtype == dtype and y.shape == dy_own.shape
    y.backward(dy_own)
    grads = None if layer.bias is None or bias is not None else layer.bias.grad
    local = dequantize(layer)
    return {"state": state, "y": y.detach(), "dx": x_own.grad, "x": x, "dy": dy, "local": local, "bias": grads}


def whole(results, key, seed, p):
    """The full y, dx or gradient of the bias from those of the ranks."""
    cls, _, options, _, _, _, _ = drawn(seed, p)
    parts = [result[key] for result in results]
    column, sharded = cls is ColumnParallelLinear, options["sequence_parallel"]
    last = tp_ext.Sharding(-1, options["parts"])
    by_features = {"y": column and not options.get("gather_output"), "bias": column}
    by_features["dx"] = not column and options["input_is_parallel"]
    by_tokens = {"y": not column and sharded, "dx": column and sharded, "bias": False}
    if by_features[key]:
        return last.unshard(parts)
    return torch.cat(parts) if by_tokens[key] else parts[0]


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_random_layers(p):
    for seed in range(50):
        cls, (inputs, outputs), options, _, kind, block, dtype = drawn(seed, p)
        results = [run_layer(None, seed, p)] if p == 1 else simulated.run(run_layer, p, seed, p)
        torch.manual_seed(seed)
        weight = nn.Linear(inputs, outputs, bias=options["bias"]).weight.detach()
        weight *= 10 ** torch.randn(outputs, 1)
        weight[0] = 0
        scale, q, value = formula(weight.to(dtype), kind, block)
        state = results[0]["state"]
        assert "weight" not in state, seed
        assert torch.equal(state["weight_packed"], packed_bytes(q, kind)), seed
        assert torch.equal(state["weight_scale"], scale if kind == "int4" else scale[:, 0]), seed
        dim = 0 if cls is ColumnParallelLinear else 1
        assert torch.equal(tp_ext.Sharding(dim, options["parts"]).unshard([r["local"] for r in results]), value), seed
        x, dy = results[0]["x"].double(), results[0]["dy"].double()
        bias = 0 if not options["bias"] or options["skip_bias_add"] else state["bias"].double()
        # 16 roundings of fp32, and those of the dtype: of each rank's sum, of sums of them, and of the bias
        bound = 16 * 2.0**-24 + (2 * p + 1) * UNIT[dtype]
        for key, expected, most in (
            ("y", x @ value.double().t() + bias, x.abs() @ value.double().abs().t() + abs(bias)),
            ("dx", dy @ value.double(), dy.abs() @ value.double().abs()),
        ):
            error = (whole(results, key, seed, p).double() - expected).abs()
            assert (error <= bound * most + 1e-7 * (UNIT[dtype] > 0)).all(), (seed, key)
        if options["bias"] and not options["skip_bias_add"]:
            expected = dy.reshape(-1, outputs).sum(0)
            most = dy.reshape(-1, outputs).abs().sum(0)
            error = (whole(results, "bias", seed, p).double() - expected).abs()
            assert (error <= (64 * 2.0**-24 + (2 * p + 8) * UNIT[dtype]) * most).all(), seed


class Block(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.embedding = tp_ext.VocabParallelEmbedding(32, 32, group=group)
        self.attention = tp_ext.ParallelAttention(32, 4, num_kv_heads=2, group=group)
        self.mlp = tp_ext.ParallelMLP(32, 64, activation="swiglu", group=group)
        self.norm = nn.LayerNorm(32)
        self.plain = nn.Linear(32, 32)
        self.head = tp_ext.VocabParallelLMHead(32, 32, group=group)

    def forward(self, ids):
        x = self.embedding(ids)
        return self.head.loss(self.plain(self.norm(x + self.mlp(x + self.attention(x)))), ids)


NAMES = ["attention.qkv", "attention.out", "mlp.up", "mlp.down", "plain"]
IDS = torch.arange(24).view(2, 12) % 32


def block(group):
    torch.manual_seed(0)
    return Block(group)


def trained(group, kind, order, folder=None):
    """Adapters on a quantised model, or the reverse, and a step of training."""
    model = block(group)
    base = ["qkv", "up", "down"]
    if order == "adapters first":
        tp_ext.add_lora(model, targets=base, r=2, alpha=4.0)
        names = quantize_(model, kind, block=8)
    else:
        names = quantize_(model, kind, block=8)
        tp_ext.add_lora(model, targets=base, r=2, alpha=4.0)
    for name, param in model.named_parameters():
        if "lora_B" in name:
            layout = dict(tp_ext.layouts(model))[name]
            full = torch.randn(layout.full_shape(param.shape), generator=torch.Generator().manual_seed(len(name)))
            param.data.copy_(layout.shard(full) * 0.1)
    frozen = {key: value.clone() for key, value in model.state_dict().items() if "lora" not in key}
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    losses = []
    for _ in range(2):
        losses.append(model(IDS).item())
        model(IDS).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert all(torch.equal(value, frozen[key]) for key, value in model.state_dict().items() if key in frozen)
    with pytest.raises(ValueError, match="its weight was quantised, and merging would round it again"):
        tp_ext.merge_lora(model)
    if folder is not None:
        tp_ext.save_checkpoint(folder, model)
    return names, losses, tp_ext.full_state_dict(model)


@pytest.mark.parametrize("kind", ["int8", "int4"])
@pytest.mark.parametrize("order", ["adapters first", "quantised first"])
def test_adapters_train_above(kind, order):
    names, losses, state = trained(None, kind, order)
    bases = {name.removesuffix(".base_layer") for name in names}
    assert bases == set(NAMES) and losses[1] < losses[0]
    for p in (2, 4):
        for other_names, other_losses, other in simulated.run(trained, p, kind, order):
            assert other_names == names
            torch.testing.assert_close(other_losses, losses, rtol=1e-5, atol=0)
            assert all(torch.equal(other[k], v) for k, v in state.items() if "packed" in k or "scale" in k)
            torch.testing.assert_close(other, state, rtol=1e-4, atol=1e-6)


def loaded(group, folder):
    model = block(group)
    quantize_(model, "int4", block=8)
    for tensor in model.state_dict().values():
        tensor.zero_()
    tp_ext.load_checkpoint(folder, model)
    return tp_ext.full_state_dict(model)


def saved(group, folder):
    model = block(group)
    quantize_(model, "int4", block=8)
    tp_ext.save_checkpoint(folder, model)
    return tp_ext.full_state_dict(model)


def test_checkpoints_of_another_number_of_ranks(tmp_path):
    expected = simulated.run(saved, 4, str(tmp_path / "a"))[0]
    for p in (1, 2):
        state = loaded(None, str(tmp_path / "a")) if p == 1 else simulated.run(loaded, p, str(tmp_path / "a"))[0]
        assert state.keys() == expected.keys() and all(torch.equal(state[k], v) for k, v in expected.items())


def test_memory_copies_and_filters():
    for dtype, most in ((torch.bfloat16, 0.30), (torch.float32, 0.32)):
        layer = nn.Linear(256, 128, bias=False, dtype=dtype)
        quantize_(layer, "int4")
        assert sum(t.nbytes for t in layer.state_dict().values()) <= most * 2 * 256 * 128
        assert not list(layer.parameters()) and layer.weight_scale.dtype == dtype
    layer = nn.Linear(256, 128, bias=False)
    quantize_(layer, "int8")
    assert sum(t.nbytes for t in layer.state_dict().values()) <= 0.52 * 2 * 256 * 128
    tied = nn.ModuleDict({"table": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False), "up": nn.Linear(4, 4)})
    tied["head"].weight = tied["table"].weight
    assert quantize_(tied, "int8") == ["up"]
    model = block(None)
    assert quantize_(model, "int4", 16, lambda name, module: "mlp" in name) == ["mlp.up", "mlp.down"]
    copied = copy.deepcopy(model)
    assert torch.equal(copied(IDS), model(IDS))
    with torch.autocast("cpu", torch.bfloat16):
        y = copied.mlp(torch.randn(3, 32))
    assert y.dtype == torch.bfloat16


@on_ranks(2)
def test_shared_experts(group):
    """Their products run during the exchange of tokens, by operators that layers of few bits do not have."""
    torch.manual_seed(0)
    moe = tp_ext.ParallelMoE(32, 64, 4, 2, shared_experts=1, group=None, expert_group=group)
    x = torch.randn(8, 32).requires_grad_()
    expected = moe(x)
    (dx,) = torch.autograd.grad(expected.square().sum(), x)
    assert quantize_(moe, "int8") == ["shared.up", "shared.down"]
    y = moe(x)
    (got,) = torch.autograd.grad(y.square().sum(), x)
    for value, like in ((y, expected), (got, dx)):
        assert 0 < (value - like).norm() < 0.02 * like.norm()


@on_ranks(1, 2)
def test_latent_attention_with_a_cache(group):
    torch.manual_seed(0)
    sizes = {"kv_lora_rank": 16, "q_lora_rank": 12, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 8}
    attention = tp_ext.ParallelLatentAttention(32, 4, group=group, **sizes)
    assert quantize_(attention, "int8") == ["q_b_proj", "kv_b_proj", "o_proj"]
    x = torch.randn(2, 6, 32)
    with torch.no_grad():
        expected = attention(x.flatten(0, 1), batch_size=2).view(2, 6, 32)
        cache = attention.new_cache(2, 8)
        steps = [attention(part.flatten(0, 1), batch_size=2, cache=cache) for part in x.split([4, 1, 1], 1)]
    got = torch.cat([step.view(2, -1, 32) for step in steps], 1)
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def _nan(group):
    layer = RowParallelLinear(8, 4, group=group)
    if group.rank() == 1:
        layer.weight.data[0, 0] = float("nan")
    return quantize_(layer, "int8")


def _twice(group):
    layer = ColumnParallelLinear(8, 4, group=group)
    quantize_(layer, "int8")
    return quantize_(layer, "int4", block=2)


def _weight(group):
    layer = ColumnParallelLinear(8, 4, group=group)
    quantize_(layer, "int8")
    return layer(torch.ones(8), weight=torch.ones(2, 8))


def _distributed(group):
    layer = nn.Linear(4, 4)
    mesh = DeviceMesh("cpu", torch.arange(dist.get_world_size()))
    layer.weight = nn.Parameter(DTensor.from_local(torch.ones(2, 4), mesh, [Shard(0)]))
    return quantize_(layer, "int8")


WRONG = {
    "module": (lambda g: quantize_(3, "int8"), "model: 3 must be a module"),
    "DTensor": (_distributed, "weight: a DTensor must not be quantised; quantise before FSDP2"),
    "bits": (lambda g: quantize_(nn.Linear(4, 4), "int3"), "weights: 'int3' must be one of int8, int4"),
    "zero": (lambda g: quantize_(nn.Linear(4, 4), "int4", 0), "block: 0 must be an integer of at least 2"),
    "odd": (lambda g: quantize_(nn.Linear(9, 4), "int4", 3), "block: 3 must be even"),
    "divides": (lambda g: quantize_(nn.Linear(6, 4), "int4", 4), "block: 4 must divide the 6 inputs"),
    "bounds": (
        lambda g: quantize_(RowParallelLinear(24, 4, group=g), "int4", 8),
        r"weight: block: 8 must divide the numbers of inputs that the ranks hold, \[12, 12\]",
    ),
    "fp64": (lambda g: quantize_(nn.Linear(4, 4).double(), "int8"), "weight: dtype torch.float64 must be one of"),
    "nan": (_nan, "weight: must be finite, and has a NaN or an Inf"),
    "none": (lambda g: quantize_(nn.LayerNorm(4), "int8"), "model: must have a linear to quantise"),
    "twice": (_twice, "weight: must not be quantised already"),
    "weight": (_weight, "weight: must not be given to a layer whose own weight was quantised"),
    "two axes": (
        lambda g: quantize_(ColumnParallelLinear(8, 4, group=g, activations="hidden"), "int8"),
        "on two axes, or built in tp_invariant, must not be quantised",
    ),
    "not quantised": (lambda g: dequantize(nn.Linear(4, 4)), "layer: Linear must be a linear that quantize_ has"),
}


def _message(group, name):
    try:
        WRONG[name][0](group)
    except (ValueError, TypeError) as error:
        dist.barrier()  # the group is usable
        return str(error)
    return "nothing"


@pytest.mark.parametrize("name", WRONG)
def test_refuses(name):
    messages = simulated.run(_message, 2, name)
    assert len(set(messages)) == 1 and re.search(WRONG[name][1], messages[0]), messages
