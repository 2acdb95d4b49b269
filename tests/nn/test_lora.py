"""Adapters against a LoRA in plain torch: outputs and every gradient in fp64 within 1e-12, for every p, SP or not."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import tp_ext
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import full_gradients, gradients, own_input, own_output
from tests.helpers.ranks import run
from tp_ext import ColumnParallelLinear, LoRALinear, Part, RowParallelLinear
from tp_ext.checkpoint.gather import gather_full, ranks_of
from tp_ext.model.census import census

pytestmark = pytest.mark.core

close = {"rtol": 1e-12, "atol": 1e-12}
IN, OUT, R, ALPHA, TOKENS = 10, 12, 3, 5.0, 7
COLUMN, ROW = ColumnParallelLinear, RowParallelLinear

CASES = {
    "column": (COLUMN, {}),
    "column uneven": (COLUMN, {"parts": (5, 7)}),
    "column gathered": (COLUMN, {"parts": (5, 7), "gather_output": True}),
    "column skip": (COLUMN, {"skip_bias_add": True}),
    "row": (ROW, {}),
    "row uneven": (ROW, {"parts": (7, 3)}),
    "row padded": (ROW, {"parts": (Part(7, padding=2), 3)}),
    "column padded": (COLUMN, {"parts": (5, Part(7, padding=3))}),
    "row scattered": (ROW, {"parts": (7, 3), "input_is_parallel": False}),
    "row skip": (ROW, {"skip_bias_add": True}),
}
CALLS = [
    pytest.param(case, sp, id=case + " sp" * sp)
    for case, (_, options) in CASES.items()
    for sp in (False, True)
    if not (sp and "input_is_parallel" in options)
]


def _state():
    generator = torch.Generator().manual_seed(3)
    shapes = {
        "base_layer.weight": (OUT, IN),
        "base_layer.bias": (OUT,),
        "lora_A.weight": (R, IN),
        "lora_B.weight": (OUT, R),
    }
    return {
        name: torch.randn(shape, generator=generator, dtype=torch.float64) / shape[-1] ** 0.5
        for name, shape in shapes.items()
    }


class Dense(nn.Module):
    """The formula of the paper, and nothing else."""

    def __init__(self):
        super().__init__()
        for name, value in _state().items():
            self.register_parameter(name.replace(".", "_"), nn.Parameter(value, "lora" in name))

    def forward(self, x, mask=1.0):
        low = F.linear(F.linear(x * mask, self.lora_A_weight), self.lora_B_weight)
        return F.linear(x, self.base_layer_weight, self.base_layer_bias) + ALPHA / R * low


def _layer(group, case, sp, **lora):
    kind, options = CASES[case]
    base = kind(IN, OUT, group=group, sequence_parallel=sp, dtype=torch.float64, **options)
    layer = LoRALinear(base, R, alpha=ALPHA, **lora)
    tp_ext.load_full_state_dict(layer, _state(), group=group)
    return layer


def _own(layer, case, group, x, dy):
    """This rank's shards of the dense layer's input and of its output's gradient."""
    x = x if layer.scatters else own_input(x, layer.base_layer, group)
    dy = dy if layer.gathers else own_output(dy, layer.base_layer, group)
    return x.clone().requires_grad_(), dy


def _run(group, case, sp, x, dy):
    layer = _layer(group, case, sp)
    x, dy = _own(layer, case, group, x, dy)
    y = layer(x, TOKENS)
    y = y[0] + y[1] if layer.base_layer.skip_bias_add else y
    (y * dy).sum().backward()
    assert layer.base_layer.weight.grad is None and layer.base_layer.bias.grad is None
    tp_ext.debug.check(layer, group=group)
    return y, x.grad, gradients(layer)


@pytest.mark.thinned
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize(("case", "sp"), CALLS)
def test_outputs_and_all_gradients_are_those_of_plain_torch(case, sp, p):
    kind, options = CASES[case]
    x = torch.randn(TOKENS, IN, dtype=torch.float64)
    dy = torch.randn(TOKENS, OUT, dtype=torch.float64)
    dense, dense_x = Dense(), x.clone().requires_grad_()
    want = dense(dense_x)
    (want * dy).sum().backward()
    ys, dxs, grads = zip(*run(_run, p, case, sp, x, dy), strict=True)
    table = COLUMN(IN, OUT, parts=options.get("parts")) if kind is COLUMN else ROW(IN, OUT, parts=options.get("parts"))
    parts = table.tp_shardings["weight"].parts
    last = tp_ext.Sharding(-1, parts)
    if options.get("gather_output") or (kind is ROW and not sp):
        ys = [torch.stack(ys)[0]] if all(torch.equal(y, ys[0]) for y in ys) else pytest.fail("not replicated")
        y = ys[0]
    else:
        y = torch.cat(ys) if kind is ROW else last.unshard(ys)
    torch.testing.assert_close(y, want, **close)
    if (kind is COLUMN and not sp) or not options.get("input_is_parallel", True):
        assert all(torch.equal(dx, dxs[0]) for dx in dxs)
        dx = dxs[0]
    else:
        dx = torch.cat(dxs) if kind is COLUMN else last.unshard(dxs)
    torch.testing.assert_close(dx, dense_x.grad, **close)
    full = full_gradients(grads)
    for name, param in dense.named_parameters():
        name = name.replace("_weight", ".weight").replace("_bias", ".bias")
        if param.grad is None:
            assert full[name] is None
        else:
            torch.testing.assert_close(full[name], param.grad, **close)


# Copied KV heads, inside the model's own blocks


def _block(group, sp, kv_heads, state, x):
    options = {"group": group, "sequence_parallel": sp, "dtype": torch.float64}
    model = nn.ModuleDict(
        {
            "attention": tp_ext.ParallelAttention(8, 4, num_kv_heads=kv_heads, rope=1e4, **options),
            "mlp": tp_ext.ParallelMLP(8, 13, activation="swiglu", **options),
            "plain": tp_ext.ParallelMLP(8, 13, **options),
        }
    )
    names = tp_ext.add_lora(model, targets=["qkv", "out", "mlp.*"], r=2, alpha=1)
    names += tp_ext.add_lora(model, targets="plain.up", r=2, alpha=1)
    assert sorted(names) == ["attention.out", "attention.qkv", "mlp.down", "mlp.up", "plain.up"]
    if state is None:
        return {name: torch.randn_like(value) / 3 for name, value in model.state_dict().items()}
    tp_ext.load_full_state_dict(model, state, group=group)
    p, rank = (1, 0) if group is None else (group.size(), group.rank())
    x = (x.tensor_split(p)[rank] if sp else x).clone().requires_grad_()
    y = x + model["attention"](x, batch_size=2, total_tokens=len(x) if not sp else 10)
    y = y + model["mlp"](y, 10)
    y = y + model["plain"](y, 10)
    y.sin().sum().backward()
    table, full = dict(tp_ext.layouts(model)), {}
    for name, param in model.named_parameters():
        assert (param.grad is None) == ("lora" not in name)
        if param.grad is not None:
            full[name] = gather_full(param.grad, table[name], ranks_of(census(model)))
    if group is not None:
        tp_ext.debug.check(model, group=group)
    return y, x.grad, full


@pytest.mark.thinned
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize(("p", "kv_heads"), [(2, 4), (2, 1), (3, 4), (4, 2), (4, 1)])
def test_drop_in_for_the_linears_of_attention_and_mlp(p, kv_heads, sp):
    """The MLP takes its bias apart (skip_bias_add) and gives both linears the number of tokens; with fewer KV heads
    than ranks B's rows of k and v are on several ranks, whose gradients check() compares bit by bit."""
    x = torch.randn(10, 8, dtype=torch.float64)
    state = _block(None, False, kv_heads, None, x)
    y, dx, full = _block(None, False, kv_heads, state, x)
    for y_local, dx_local, full_local in (results := run(_block, p, sp, kv_heads, state, x)):
        torch.testing.assert_close(full_local, full, **close)
        if not sp:
            torch.testing.assert_close(y_local, y, **close)
            torch.testing.assert_close(dx_local, dx, **close)
    if sp:
        torch.testing.assert_close(torch.cat([r[0] for r in results]), y, **close)
        torch.testing.assert_close(torch.cat([r[1] for r in results]), dx, **close)


# Merging


def _merged(group, case):
    layer = _layer(group, case, False)
    x, _ = _own(layer, case, group, torch.randn(TOKENS, IN, dtype=torch.float64), torch.zeros(TOKENS, OUT))
    before, unmerged = layer(x), layer.base_layer.weight.clone()
    layer.merge()
    torch.testing.assert_close(layer(x), before, **close)
    tp_ext.debug.check(layer, group=group)
    full = tp_ext.full_state_dict(layer.base_layer, group=group)["weight"]  # the merged layer itself has no state
    layer.unmerge()
    torch.testing.assert_close(layer.base_layer.weight, unmerged, **close)
    torch.testing.assert_close(layer(x), before, **close)
    holder = nn.ModuleDict({"linear": layer})
    assert tp_ext.merge_lora(holder) == ["linear"]
    assert type(holder["linear"]) is CASES[case][0]
    torch.testing.assert_close(holder["linear"](x), before, **close)  # gathers and scatters again as it did
    assert list(tp_ext.full_state_dict(holder, group=group)) == ["linear.weight", "linear.bias"]
    return full


@pytest.mark.parametrize("case", CASES)
def test_merged_weights_are_the_dense_ones(case):
    state = _state()
    want = state["base_layer.weight"] + ALPHA / R * state["lora_B.weight"] @ state["lora_A.weight"]
    for p in (1, 3):
        for full in run(_merged, p, case):
            torch.testing.assert_close(full, want, **close)


@on_ranks(4)
def test_merged_copies_are_the_same_bits(group):
    """The ranks' rows of k and v stand behind those of 2, 1, 2 and 1 heads of q."""
    attention = tp_ext.ParallelAttention(64, 6, head_dim=16, num_kv_heads=2, group=group)
    tp_ext.add_lora(attention, targets="qkv", r=8, alpha=1)
    for module in attention.modules():
        if hasattr(module, "_inits"):
            module._inits = {name: (shape, tp_ext.random.Normal()) for name, (shape, _) in module._inits.items()}
            module.reset_parameters()
    tp_ext.merge_lora(attention)
    tp_ext.debug.assert_replicated(attention, group=group)
