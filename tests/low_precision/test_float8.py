"""float8: y, dx and dw of random layers against their products of quantised operands in fp64, on 1 to 4 ranks."""

import copy
import random
import re

import pytest
import torch
from torch import nn

import tp_ext
from tests.helpers import simulated
from tests.helpers.float8 import rounded
from tests.helpers.on_ranks import on_ranks
from tp_ext import ColumnParallelLinear, Part, RowParallelLinear, _ops
from tp_ext.low_precision import Float8, float8

pytestmark = pytest.mark.core

UNIT = {torch.float32: 0.0, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


def drawn(seed, p):
    """A layer's class and arguments, its call, and its recipe."""
    r = random.Random(seed)
    recipe = Float8(
        r.choice(["tensor", "row"]), r.choice(["e4m3", "e5m2"]), r.choice(["e4m3", "e5m2"]), r.random() < 0.6
    )
    dtype = r.choice([torch.float32, torch.float32, torch.bfloat16, torch.float16])
    column, sequence_parallel = r.random() < 0.5, r.random() < 0.5
    options = {"skip_bias_add": r.random() < 0.2, "sequence_parallel": sequence_parallel}
    size, other = r.randint(2, 40), r.randint(1, 30)
    options["parts"] = [size] if r.random() < 0.6 else [size, Part(3 * r.randint(0, 4), unit=3)]
    total = sum(part if isinstance(part, int) else part.size for part in options["parts"])
    if column:
        options["gather_output"] = r.random() < 0.3 and not options["skip_bias_add"]
    else:
        options["input_is_parallel"] = sequence_parallel or r.random() < 0.7
    sizes = (other, total) if column else (total, other)
    shape = (p * r.randint(0, 3),) if sequence_parallel else r.choice([(5,), (2, 3), (70,), ()])
    if sequence_parallel and r.random() < 0.3:
        shape += (2,)
    return (
        (ColumnParallelLinear if column else RowParallelLinear),
        sizes,
        options,
        shape,
        r.random() < 0.7,
        dtype,
        recipe,
    )


def run_layer(group, seed, p):
    cls, (inputs, outputs), options, shape, bias, dtype, recipe = drawn(seed, p)
    torch.manual_seed(seed)
    dense = nn.Linear(inputs, outputs, bias=bias)
    with torch.no_grad():
        dense.weight *= 10 ** torch.randn(outputs, 1)
    dense = dense.to(dtype)
    layer = cls.from_linear(dense, group=group, **options)
    assert float8(layer, recipe) == [""] and layer.float8 == recipe
    x, dy = (torch.randn(*shape, n).to(dtype) for n in (inputs, outputs))
    rank, sharded = (0, False) if group is None else (group.rank(), options["sequence_parallel"])
    p = 1 if group is None else p
    last = tp_ext.Sharding(-1, layer.weight_layout[0][0].parts)
    if cls is ColumnParallelLinear:
        x_own = x.tensor_split(p)[rank] if sharded else x
        dy_own = dy if options["gather_output"] else last.shard(dy, rank, p)
    else:
        x_own = last.shard(x, rank, p) if options["input_is_parallel"] else x
        dy_own = dy.tensor_split(p)[rank] if sharded else dy
    x_own = x_own.clone().requires_grad_()
    y = layer(x_own)
    y, left = y if options["skip_bias_add"] else (y, None)
    y.backward(dy_own)
    db = None if layer.bias is None or left is not None else layer.bias.grad
    results = {"y": y.detach(), "dx": x_own.grad, "dw": layer.weight.grad, "db": db, "x": x, "dy": dy}
    return results | {
        "weight": dense.weight.detach(),
        "bias": None if left is not None or not bias else dense.bias.detach(),
    }


def whole(results, key, seed, p):
    """The full tensor from those of the ranks."""
    cls, _, options, _, _, _, _ = drawn(seed, p)
    parts = [result[key] for result in results]
    column, sharded = cls is ColumnParallelLinear, options["sequence_parallel"]
    if key == "dw":
        return tp_ext.Sharding(0 if column else 1, options["parts"]).unshard(parts)
    by_features = {"y": column and not options.get("gather_output"), "db": column}
    by_features["dx"] = not column and options["input_is_parallel"]
    if by_features[key]:
        return tp_ext.Sharding(-1, options["parts"]).unshard(parts)
    by_tokens = {"y": not column and sharded, "dx": column and sharded, "db": False}
    return torch.cat(parts) if by_tokens[key] else parts[0]


@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_random_layers(p):
    for seed in range(50):
        _, (inputs, outputs), _, _, _, dtype, recipe = drawn(seed, p)
        results = [run_layer(None, seed, p)] if p == 1 else simulated.run(run_layer, p, seed, p)
        first, row = results[0], recipe.scaling == "row"
        x, dy, weight = first["x"].reshape(-1, inputs), first["dy"].reshape(-1, outputs), first["weight"]

        def of(tensor, format, dim, row=row):
            return rounded(tensor, format, dim if row else None)

        bias = 0 if first["bias"] is None else first["bias"].double()
        products = {
            "y": (of(x, recipe.forward, 1), of(weight, recipe.forward, 1).t(), bias),
            "dx": (of(dy, recipe.gradient, 1), of(weight, recipe.forward, 0), 0),
            "dw": (of(dy, recipe.gradient, 0).t(), of(x, recipe.forward, 0), 0),
        }
        # 16 roundings of fp32, and those of the dtype: of each rank's sum, of sums of them, and of the bias
        bound = 16 * 2.0**-24 + (2 * p + 1) * UNIT[dtype]
        for key, (a, b, added) in products.items():
            got = whole(results, key, seed, p)
            assert got.dtype == dtype
            error = (got.reshape(a.shape[0], b.shape[1]).double() - (a @ b + added)).abs()
            most = a.abs() @ b.abs() + abs(added)
            assert (error <= bound * most + 1e-7 * (UNIT[dtype] > 0)).all(), (seed, key, recipe, float(error.max()))
        if first["db"] is not None:
            error = (whole(results, "db", seed, p).double() - dy.double().sum(0)).abs()
            assert (error <= (64 * 2.0**-24 + (2 * p + 8) * UNIT[dtype]) * dy.double().abs().sum(0)).all(), seed


def drawn_experts(seed):
    r = random.Random(1000 + seed)
    counts = [r.choice([0, 1, 2, 7]) for _ in range(r.randint(1, 4))]
    recipe = Float8(r.choice(["tensor", "row"]), r.choice(["e4m3", "e5m2"]), r.choice(["e4m3", "e5m2"]))
    dtypes = r.choice([torch.float32, torch.float32, torch.bfloat16]), r.choice([torch.float32, torch.bfloat16])
    return counts, r.randint(1, 20), r.randint(1, 20), r.random() < 0.5, recipe, dtypes


def run_experts(group, seed):
    counts, inputs, outputs, by_inputs, recipe, (dtype, of_weight) = drawn_experts(seed)
    torch.manual_seed(seed)
    x, weight, dy = (
        torch.randn(*shape).to(of_tensor)
        for shape, of_tensor in (
            ((sum(counts), inputs), dtype),
            ((len(counts), outputs, inputs), of_weight),
            ((sum(counts), outputs), dtype),
        )
    )
    rank, p = group.rank(), group.size()

    def own(tensor, dim):
        return tensor.tensor_split(p, dim)[rank].clone()

    x_own = (own(x, 1) if by_inputs else x.clone()).requires_grad_()
    w_own = own(weight, 2 if by_inputs else 1).requires_grad_()
    name = tp_ext.group.parallel_group(group).name
    y = _ops.float8_grouped_linear(x_own, w_own, counts, name, by_inputs, *recipe.options[:3], 0.5)
    y.backward(dy if by_inputs else own(dy, 1))
    return y.detach(), x_own.grad, w_own.grad, x, weight, dy


@pytest.mark.parametrize("p", [1, 2, 3])
def test_random_experts(p):
    for seed in range(30):
        counts, _, _, by_inputs, recipe, dtypes = drawn_experts(seed)
        results = simulated.run(run_experts, p, seed)
        ys, dxs, dws = ([result[i] for result in results] for i in range(3))
        x, weight, dy = results[0][3:]
        y = sum(part.double() for part in ys) if by_inputs else torch.cat(ys, 1)
        dx = torch.cat(dxs, 1) if by_inputs else sum(part.double() for part in dxs)
        dw = torch.cat(dws, 2 if by_inputs else 1)
        row = recipe.scaling == "row"
        places = [slice(sum(counts[:e]), sum(counts[: e + 1])) for e in range(len(counts))]

        def of(tensor, format, dim, row=row):
            return rounded(tensor, format, dim if row else None)

        for e, rows in enumerate(places):
            for got, a, b, factor, dtype in (
                (y[rows], of(x[rows], recipe.forward, 1), of(weight[e], recipe.forward, 1).t(), 1, dtypes[0]),
                (dx[rows], of(dy[rows], recipe.gradient, 1), of(weight[e], recipe.forward, 0), 1, dtypes[0]),
                (dw[e], of(dy[rows], recipe.gradient, 0).t(), of(x[rows], recipe.forward, 0), 0.5, dtypes[1]),
            ):
                error = (got.double() - factor * (a @ b)).abs()
                bound = 16 * 2.0**-24 + (p + 2) * UNIT[dtype]
                assert (error <= bound * (a.abs() @ b.abs()) + 1e-7 * (UNIT[dtype] > 0)).all(), (seed, e, recipe)


def moe_step(group, axis, scaling):
    """y and dx of a block of experts, of this rank's tokens under expert parallelism."""
    torch.manual_seed(0)
    # Over data ranks the scales of shared experts would be those of a rank's tokens
    place = {"group": group, "shared_experts": 1} if axis == "tensor" else {"group": None, "expert_group": group}
    moe = tp_ext.ParallelMoE(16, 24, 4, 2, activation="swiglu", **place)
    float8(moe, Float8(scaling))
    x = torch.randn(12, 16)
    own = x.tensor_split(group.size())[group.rank()] if axis == "expert" else x
    own = own.clone().requires_grad_()
    y = moe(own)
    y.square().sum().backward()
    if moe.shared is not None:
        routed = copy.deepcopy(moe)
        routed.shared = None
        with torch.no_grad():
            torch.testing.assert_close(y, routed(own) + moe.shared(own), rtol=1e-5, atol=1e-5)
    return y.detach(), own.grad


@pytest.mark.parametrize("axis", ["tensor", "expert"])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
def test_experts_on_ranks(axis, scaling):
    alone = simulated.run(moe_step, 1, axis, scaling)[0]
    results = simulated.run(moe_step, 2, axis, scaling)
    for i, expected in enumerate(alone):
        got = torch.cat([result[i] for result in results]) if axis == "expert" else results[1][i]
        # An element between two numbers of 8 bits may fall to the other: 3 % where all scales are wrong
        assert (got - expected).norm() < 5e-3 * expected.norm()


@pytest.mark.parametrize("scaling", ["tensor", "row"])
@on_ranks(2)
def test_an_inf_is_nan_in_its_own_row_alone(group, scaling):
    torch.manual_seed(0)
    layer = RowParallelLinear(8, 6, group=group)
    float8(layer, Float8(scaling))
    x = torch.randn(4, 8)
    clean = layer(tp_ext.Sharding(-1, [8]).shard(x, group.rank(), group.size()))
    x[2, 5] = float("inf")
    bad = layer(tp_ext.Sharding(-1, [8]).shard(x, group.rank(), group.size()))
    assert bad[2].isnan().all()
    rows = [0, 1, 3]
    assert bad[rows].isfinite().all()
    if scaling == "row":
        assert torch.equal(bad[rows], clean[rows])


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@pytest.mark.parametrize("scaling", ["tensor", "row"])
@pytest.mark.parametrize("of_x, of_weight", [(3e38, 1e-5), (1e-5, 3e38), (3e38, 1e-3)])
def test_large_numbers_with_small_ones(of_x, of_weight, scaling, kind):
    torch.manual_seed(0)
    layer = kind(64, 48, group=None, bias=False)
    with torch.no_grad():
        layer.weight.uniform_(-1, 1).mul_(of_weight)
    float8(layer, Float8(scaling))
    x = (of_x * (2 * torch.rand(8, 64) - 1)).requires_grad_()
    y = layer(x)
    dy = 1e-3 * torch.randn(y.shape)
    y.backward(dy)
    want = [x.double() @ layer.weight.double().T, dy.double() @ layer.weight.double(), dy.double().T @ x.double()]
    for got, exact in zip((y, x.grad, layer.weight.grad), want, strict=True):
        assert exact.abs().max() < 1e38 and (got - exact).norm() < 0.1 * exact.norm()


def trained(group):
    torch.manual_seed(0)
    model = tp_ext.ParallelMLP(16, 32, activation="swiglu", group=group)
    before = tp_ext.full_state_dict(model)
    assert float8(model) == ["up", "down"]
    assert {name: value.tolist() for name, value in tp_ext.full_state_dict(model).items()} == {
        name: value.tolist() for name, value in before.items()
    }
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    x = torch.randn(24, 16)
    losses = []
    for _ in range(10):
        optimizer.zero_grad()
        loss = (model(x) - x.flip(1)).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_training_on_ranks_is_that_of_one():
    alone = trained(None)
    assert alone[-1] < 0.8 * alone[0]
    for p in (2, 4):
        for losses in simulated.run(trained, p):
            assert losses == pytest.approx(alone, rel=1e-3)


def test_filters_linears_of_torch_and_autocast():
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8), nn.Linear(8, 8))
    assert float8(model, filter=lambda name, module: name != "2") == ["0", "3"]
    assert getattr(model[2], "float8", None) is None and isinstance(model[0], nn.Linear)
    x = torch.randn(4, 8, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        y = model[0](x)
    assert y.dtype == torch.bfloat16
    y.sum().backward()
    assert x.grad.dtype == model[0].weight.grad.dtype == torch.float32


@on_ranks(2)
def test_constructors(group):
    """The constructors' float8 is the function's."""
    recipe = Float8("row")
    place = {"group": group, "float8": recipe}
    tokens = {"batch_size": 2}
    for make, call in (
        (lambda **o: tp_ext.ParallelMLP(16, 24, activation="swiglu", **o), {}),
        (lambda **o: tp_ext.ParallelAttention(16, 4, num_kv_heads=2, **o), tokens),
        (
            lambda **o: tp_ext.ParallelLatentAttention(
                16, 4, kv_lora_rank=8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8, **o
            ),
            tokens,
        ),
        (lambda **o: tp_ext.ParallelMoE(16, 24, 4, 2, shared_experts=1, **o), {}),
    ):
        outputs = []
        for options in (place, {"group": group}):
            torch.manual_seed(3)
            layer = make(**options)
            if options is not place:
                names = float8(layer, recipe)
            x = torch.randn(8, 16, generator=torch.Generator().manual_seed(4)).requires_grad_()
            y = layer(x, **call)
            y.square().sum().backward()
            outputs.append([y.detach(), x.grad, *(p.grad for p in layer.parameters())])
            converted = [name for name, module in layer.named_modules() if getattr(module, "float8", None) is not None]
            assert converted == (names if options is not place else converted) and converted
        assert all(map(torch.equal, *outputs))
    with pytest.raises(ValueError, match="float8: must not be combined with weight_group or activations='hidden'"):
        ColumnParallelLinear(8, 8, activations="hidden", **place)
    with pytest.raises(TypeError, match="float8: 'e4m3' must be a Float8"):
        ColumnParallelLinear(8, 8, group=group, float8="e4m3")


@on_ranks(2)
def test_wrong_arguments(group):
    layer = ColumnParallelLinear(8, 8, group=group)
    for kind, message, call in (
        (TypeError, "model: 3 must be a module", lambda: float8(3)),
        (TypeError, "recipe: 'row' must be a Float8", lambda: float8(layer, "row")),
        (ValueError, "model: must have a linear", lambda: float8(nn.ReLU())),
        (ValueError, "scaling: 'block' must be one of", lambda: Float8("block")),
        (ValueError, "forward: 'e3m4' must be one of", lambda: Float8(forward="e3m4")),
        (ValueError, "gradient: 'int8' must be one of", lambda: Float8(gradient="int8")),
        (
            ValueError,
            "model: float8: dtype torch.float64 must be",
            lambda: float8(ColumnParallelLinear(4, 4, group=group).double()),
        ),
        (
            ValueError,
            "model: float8: must not be combined with grad_accumulation_fusion",
            lambda: float8(ColumnParallelLinear(4, 4, group=group, grad_accumulation_fusion=True)),
        ),
    ):
        with pytest.raises(kind, match=re.escape(message)):
            call()
    float8(layer)
    with pytest.raises(ValueError, match="model: must not be converted or quantised already"):
        float8(layer)
    with pytest.raises(TypeError, match="x: dtype Double must be float32, bfloat16 or float16 with float8"):
        layer(torch.randn(3, 8, dtype=torch.float64))
