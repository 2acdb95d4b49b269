"""float8 with the rest: bytes on the wire, copies of KV heads, torch.compile, dispatch modes, torchao."""

import copy
import dataclasses

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

import tp_ext
from tests.helpers import simulated
from tests.helpers.float8 import rounded
from tests.helpers.on_ranks import on_ranks
from tp_ext import ColumnParallelLinear, ParallelMLP, RowParallelLinear, _ops
from tp_ext.debug import count_collectives
from tp_ext.low_precision import Float8, float8, quantize_

SCALINGS = ("tensor", "row")
pytestmark = pytest.mark.core


def traffic(group, recipe, sequence_parallel):
    """Bytes of all-gathers, those of all-reduces and the number of collectives of each kind in a step of an MLP."""
    model = ParallelMLP(64, 96, bias=False, group=group, sequence_parallel=sequence_parallel, dtype=torch.bfloat16)
    if recipe is not None:
        float8(model, recipe)
    x = torch.randn(8, 64, dtype=torch.bfloat16, requires_grad=True)
    with count_collectives() as counts:
        model(x).sum().backward()
    payload = {row.kind: 0 for row in counts.rows}
    for row in counts.rows:
        payload[row.kind] += row.payload_bytes
    return payload, counts.by_kind()


@pytest.mark.parametrize("scaling", SCALINGS)
def test_gathers_move_8_bits_and_scales(scaling):
    tokens, hidden = 16, 64
    plain = simulated.run(traffic, 2, None, True)[0][0]["all_gather"]
    assert plain == 3 * tokens * hidden * 2  # x, x again, dy
    wide, _ = simulated.run(traffic, 2, Float8(scaling, communicate=False), True)[0]
    assert wide["all_gather"] == plain
    narrow, _ = simulated.run(traffic, 2, Float8(scaling), True)[0]
    # By row dy is gathered twice, and x and dy bring a scale per row
    assert narrow["all_gather"] == (plain / 2 if scaling == "tensor" else 4 * tokens * hidden + 2 * 4 * tokens)


def test_a_max_reduce_each_way_is_all_that_is_added():
    _, plain = simulated.run(traffic, 2, None, False)[0]
    assert plain == {"all_reduce": 2}
    tensor, numbers = simulated.run(traffic, 2, Float8("tensor"), False)[0]
    # up: amax of W, of dy; down: of x and W
    assert numbers == {"all_reduce": 2 + 3} and tensor["all_reduce"] == 2 * 8 * 64 * 2 + 4 * (1 + 1 + 2)
    row, numbers = simulated.run(traffic, 2, Float8("row"), False)[0]
    # up: of each row of dy and input of W; down: of each row of x and of W
    assert numbers == {"all_reduce": 2 + 2} and row["all_reduce"] == 2 * 8 * 64 * 2 + 4 * (8 + 64 + 8 + 64)


@pytest.mark.parametrize("scaling", SCALINGS)
@on_ranks(2, 4)
def test_copied_heads_quantise_each_part_of_their_sum(group, scaling):
    torch.manual_seed(0)
    attention = tp_ext.ParallelAttention(16, 4, num_kv_heads=1, group=group)
    layer = attention.qkv
    full = tp_ext.full_state_dict(attention)
    weight, bias = full["qkv.weight"], full["qkv.bias"]
    float8(layer, Float8(scaling, gradient="e4m3"))
    x, dy = torch.randn(7, 16, requires_grad=True), torch.randn(7, len(weight))
    y = layer(x)
    q_rows = 16 // group.size()
    own = slice(group.rank() * q_rows, (group.rank() + 1) * q_rows)
    rows = torch.cat([weight[own], weight[16:]])
    dim = 1 if scaling == "row" else None
    # With the other rows the scale is that of the full weight
    w8 = rounded(torch.cat([rows, weight]), "e4m3", dim)[: len(rows)]
    expected = rounded(x.detach(), "e4m3", dim) @ w8.t() + torch.cat([bias[own], bias[16:]])
    torch.testing.assert_close(y.double(), expected, rtol=0, atol=1e-5)
    # dy of k and v: what each rank has of a sum
    share = torch.cat([dy[:, own], dy[:, 16:] * (torch.arange(group.size()) + 1.0)[group.rank()]], 1)
    y.backward(share)
    total = dy.clone()
    total[:, 16:] *= sum(range(1, group.size() + 1))
    with torch.no_grad():
        for param in attention.parameters():
            param.copy_(torch.zeros_like(param) if param.grad is None else param.grad)
    grads = tp_ext.full_state_dict(attention)
    for got, exact in ((x.grad, total @ weight), (grads["qkv.weight"], total.t() @ x.detach())):
        assert (got - exact).norm() < 0.06 * exact.norm()
    torch.testing.assert_close(grads["qkv.bias"], total.sum(0))


def compiled(group, scaling):
    torch.manual_seed(0)
    results = []
    model = ParallelMLP(16, 24, activation="swiglu", sequence_parallel=True, group=group)
    float8(model, Float8(scaling))
    x = torch.randn(6, 16)
    for run in (model, torch.compile(model, fullgraph=True, backend="aot_eager")):
        model.zero_grad()
        own = x.clone().requires_grad_()
        y = run(own)
        y.square().sum().backward()
        results.append([y.detach(), own.grad, *(param.grad.clone() for param in model.parameters())])
    torch.testing.assert_close(*results, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_compiles_in_one_graph(scaling):
    simulated.run(compiled, 1, scaling)
    simulated.run(compiled, 2, scaling)


class Products(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.formats = []

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op is torch.ops.aten._scaled_mm.default:
            self.formats.append((args[0].dtype, args[1].dtype))
        return op(*args, **(kwargs or {}))


def test_a_dispatch_mode_sees_three_products():
    layer = nn.Linear(16, 16)
    float8(layer)
    x = torch.randn(4, 16, requires_grad=True)
    with Products() as mode:
        layer(x).sum().backward()
    e4m3, e5m2 = torch.float8_e4m3fn, torch.float8_e5m2
    assert mode.formats == [(e4m3, e4m3), (e5m2, e4m3), (e5m2, e4m3)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_values_are_those_of_torchao(scaling, dtype):
    config = pytest.importorskip("torchao.float8").Float8LinearConfig
    convert = pytest.importorskip("torchao.float8.float8_linear").Float8Linear.from_float
    if scaling == "tensor":
        recipe, options = Float8("tensor"), config()
    else:
        recipe = Float8("row", gradient="e4m3")
        options = dataclasses.replace(config.from_recipe_name("rowwise"), round_scales_to_power_of_2=False)
    torch.manual_seed(0)
    ours = nn.Linear(32, 48, dtype=dtype)
    peer = convert(copy.deepcopy(ours), options)
    float8(ours, recipe)
    x, dy = torch.randn(64, 32), torch.randn(64, 48).to(dtype)
    results = []
    for layer in (ours, peer):
        own = x.to(dtype).requires_grad_()
        try:
            y = layer(own)
        except RuntimeError as error:
            if layer is peer and "scale_a.numel() == 1" in str(error):
                pytest.skip("torch's product has no scales per row on the CPU")
            raise
        y.backward(dy)
        results.append([y.detach(), own.grad, layer.weight.grad, layer.bias.grad])
    for got, expected in zip(*results, strict=True):
        # Roundings of the sum and of the bias alone: the values are equal. Products by row of torchao are bf16
        rounded_to = torch.bfloat16 if scaling == "row" else dtype
        tolerance = float(4 * torch.finfo(rounded_to).eps * expected.abs().max())
        torch.testing.assert_close(got, expected, rtol=0, atol=tolerance)


@pytest.mark.parametrize("shape", [(5, 8), (2, 3, 8)])
@pytest.mark.parametrize("scaling", SCALINGS)
def test_an_input_that_changes_before_backward(shape, scaling):
    """By row x is saved, which autograd must see; by tensor its values in 8 bits are."""
    layer, x = nn.Linear(8, 8, bias=False), torch.randn(shape)
    float8(layer, Float8(scaling))
    y = layer(x)
    expected = torch.autograd.grad(y, layer.weight, y.detach(), retain_graph=True)[0]
    x.zero_()
    if scaling == "row":
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            y.backward(y.detach())
    else:
        y.backward(y.detach())
        assert torch.equal(layer.weight.grad, expected)


@pytest.mark.parametrize("scaling", SCALINGS)
def test_autocast_around_backward_rounds_nothing(scaling):
    layer, x = nn.Linear(40, 24), torch.randn(9, 40, requires_grad=True)
    float8(layer, Float8(scaling))
    results = []
    for around in (False, True):
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(x)
        with torch.autocast("cpu", torch.bfloat16, enabled=around):
            results.append(torch.autograd.grad(y, (x, layer.weight, layer.bias), torch.ones_like(y)))
    assert all(map(torch.equal, *results))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("scaling", SCALINGS)
def test_products_fit_the_rules_of_cuda(scaling, dtype):
    """By torch's fakes: one output or input, no tokens, sizes that 16 does not divide; the same on meta."""
    for device in ("cuda", "meta"):
        for tokens, inputs, outputs in [(4, 256, 1), (3, 1, 5), (0, 16, 16), (17, 33, 20), (1, 64, 48)]:
            with FakeTensorMode():
                x = torch.randn(tokens, inputs, dtype=dtype, device=device)
                weight = torch.randn(outputs, inputs, device=device)
                recipe = Float8(scaling).options
                y = _ops.float8_column_linear(x, weight, None, "", False, None, *recipe)
                assert y.shape == (tokens, outputs) and y.dtype == dtype and y.device.type == device
                # The other two products
                _ops.float8_row_linear(y, weight.t(), None, "", False, None, *recipe)
                _ops.float8_row_linear(y.t(), x.t(), None, "", False, None, *recipe)


@pytest.mark.slow
@pytest.mark.parametrize("scaling", [pytest.param("tensor", marks=pytest.mark.exhaustive), "row"])
def test_inductor(scaling):
    layer, x = nn.Linear(32, 48), torch.randn(5, 32, requires_grad=True)
    float8(layer, Float8(scaling))
    results = []
    for run in (layer, torch.compile(layer)):
        y = run(x)
        results.append([y, *torch.autograd.grad(y.square().sum(), (x, layer.weight, layer.bias))])
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-5)


def test_results_can_be_changed_in_place_under_a_mode():
    layer = nn.Linear(16, 16, bias=False)
    float8(layer)
    with Products():
        layer(torch.randn(2, 4, 16)).relu_().sum().backward()
    assert layer.weight.grad is not None


class Headed(nn.Module):
    def __init__(self):
        super().__init__()
        self.body, self.head = nn.Linear(8, 8), nn.Linear(8, 11)

    def get_output_embeddings(self):
        return self.head


def test_names_of_layers_and_those_that_are_none():
    assert float8(nn.ModuleDict({"inner": Headed()})) == ["inner.body"]
    mlp = ParallelMLP(8, 8, group=None)
    float8(mlp)
    assert mlp.float8 is None and mlp.up.float8 == Float8() and "float8=tensor" in repr(mlp.up)
    dense = nn.Linear(8, 8)
    float8(dense, Float8("row"))
    assert ColumnParallelLinear.from_linear(dense, group=None).float8 == Float8("row") and "float8=row" in repr(dense)


@pytest.mark.parametrize("convert", [float8, lambda model: quantize_(model, "int8")], ids=["float8", "int8"])
def test_fused_paths_of_torch_are_not_taken(convert):
    layer = nn.TransformerEncoderLayer(16, 2, 32, dropout=0.0, batch_first=True)
    convert(layer)
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        torch.testing.assert_close(layer.eval()(x), layer.train()(x))


@pytest.mark.parametrize("scaling", SCALINGS)
@on_ranks(2)
def test_latent_attention_with_a_cache(group, scaling):
    attention = tp_ext.ParallelLatentAttention(
        16, 4, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, group=group
    )
    float8(attention, Float8(scaling))
    x = torch.randn(2, 6, 16, generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        expected = attention(x)
        torch.testing.assert_close(attention(x, cache=attention.new_cache(2, 8)), expected, rtol=1e-5, atol=1e-5)


def double_of_a_constructor(group):
    ColumnParallelLinear(8, 8, group=group, float8=Float8(), dtype=torch.float64)


def low_bits_after(group):
    layer = ColumnParallelLinear(8, 8, group=group)
    float8(layer)
    quantize_(layer, "int8")


def again(group):
    model = nn.Sequential(nn.Linear(8, 8))
    float8(model)
    float8(model)


def after_low_bits(group):
    layer = RowParallelLinear(8, 8, group=group)
    quantize_(layer, "int8")
    float8(layer)


def on_two_axes(group):
    float8(ColumnParallelLinear(8, 8, group=group, activations="hidden"))


def in_blocks(group):
    layer = ColumnParallelLinear(8, 8, group=group)
    layer.invariant_blocks = 2  # as built in tp_invariant, which needs an environment
    float8(layer)


@pytest.mark.parametrize(
    "call, message",
    [
        (low_bits_after, "model.weight: a layer that was converted to float8 must not be quantised"),
        (again, "0: must not be converted or quantised already"),
        (after_low_bits, "model: must not be converted or quantised already"),
        (on_two_axes, "model: float8: must not be combined with weight_group or activations='hidden'"),
        (in_blocks, "model: float8: must not be combined with tp_invariant"),
        (double_of_a_constructor, "float8: dtype torch.float64 must be one of float32, bfloat16, float16"),
    ],
)
def test_refuses(call, message):
    def on_rank(group):
        with pytest.raises(ValueError) as caught:
            call(group)
        return str(caught.value)

    assert set(simulated.run(on_rank, 2)) == {message}
