"""Initial weights and seeds: torch's distributions, any callable, seeds per mesh axis. That weights are the same bits
for every number of ranks: conformance case 31."""

import contextlib
import math
from unittest import mock

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import tp_ext
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tp_ext import Part, Sharding
from tp_ext.random import Constant, Normal, OwnRandomNumbers, TruncatedNormal, Uniform, initialise_, torch_linear_init

pytestmark = pytest.mark.core

DTYPES = [torch.float64, torch.float32, torch.bfloat16]


def one_of_each(group, dtype=None, device=None, init=None):
    """One of each layer with parameters, in odd sizes; 2 KV heads, fewer than ranks at p = 4; a padded vocabulary."""
    o = {"group": group, "dtype": dtype, "device": device}
    heads = (Part(8, groups=2), Part(2, copies=2)) if group is not None and group.size() == 4 else (8, 2)
    return nn.ModuleDict(
        {
            "column": tp_ext.ColumnParallelLinear(5, 13, init=init, **o),
            "units": tp_ext.ColumnParallelLinear(7, 12, unit=3, bias=False, **o),
            "parts": tp_ext.ColumnParallelLinear(3, 10, parts=heads, init=init, **o),
            "row": tp_ext.RowParallelLinear(11, 5, init=init, **o),
            "row_parts": tp_ext.RowParallelLinear(11, 5, parts=(4, 7), **o),
            "mlp": tp_ext.ParallelMLP(6, 9, activation="swiglu", init=init, **o),
            "attention": tp_ext.ParallelAttention(
                16, 4, num_kv_heads=2 if group is None or group.size() != 3 else 1, qk_norm=True, **o
            ),
            "norm": tp_ext.LayerNorm(6, **o),
            "embedding": tp_ext.VocabParallelEmbedding(29, 3, pad_to_multiple_of=4, **o),
            "head": tp_ext.VocabParallelLMHead(3, 30, bias=True, init=init, **o),
        }
    )


def full_state(group, seed, **options):
    """The full state dict, and the next draw of the generator."""
    torch.manual_seed(seed)
    model = one_of_each(group, **options)
    return tp_ext.full_state_dict(model, group=group), torch.rand(())


def comparable(state, p):
    """The entries that p leaves as they are: two KV heads cannot be sharded over three ranks, which have a smaller
    qkv."""
    return {k: v for k, v in state.items() if p != 3 or not k.startswith("attention.qkv")}


def test_another_seed_gives_other_weights():
    want, other = full_state(None, 7)[0], full_state(None, 8)[0]
    for name, value in other.items():
        assert torch.equal(value, want[name]) == ("norm" in name), f"{name} and the seed"


def test_no_two_parameters_are_alike():
    state, _ = full_state(None, 0)
    drawn = [v.flatten()[:3].tolist() for k, v in state.items() if "norm" not in k]
    assert len({tuple(v) for v in drawn}) == len(drawn)


# Distributions

LARGE = {
    "column": (lambda: tp_ext.ColumnParallelLinear(300, 400), lambda: nn.Linear(300, 400)),
    "row": (lambda: tp_ext.RowParallelLinear(300, 400), lambda: nn.Linear(300, 400)),
    "head": (lambda: tp_ext.VocabParallelLMHead(300, 400, bias=True), lambda: nn.Linear(300, 400)),
    "embedding": (lambda: tp_ext.VocabParallelEmbedding(300, 400), lambda: nn.Embedding(300, 400)),
}


@pytest.mark.parametrize("name", LARGE)
def test_distributions_are_those_of_torch(name):
    """For n draws: mean and standard deviation within 5 sigma / sqrt(n), quantiles within 5 / (2 sqrt(n))."""
    ours, torchs = (dict(make().named_parameters()) for make in LARGE[name])
    assert ours.keys() == torchs.keys()
    for key, want in torchs.items():
        got, n = ours[key].detach().flatten(), want.numel()
        assert got.shape == want.flatten().shape
        bound = 1 / math.sqrt(300)
        uniform = name != "embedding"
        sigma = bound / math.sqrt(3) if uniform else 1.0
        assert abs(float(got.mean())) < 5 * sigma / math.sqrt(n)
        assert abs(float(got.std()) - sigma) < 5 * sigma / math.sqrt(n)
        if uniform:
            assert bound * (1 - 20 / n) < float(got.abs().max()) <= bound  # e^-20 for the largest to be smaller
            share = (got + bound) / (2 * bound)
        else:
            share = torch.special.ndtr(got)
        distance = (share.sort().values - (torch.arange(n) + 0.5) / n).abs().max()
        assert float(distance) < 5 / (2 * math.sqrt(n))


@on_ranks(4)
def test_fan_in_is_that_of_the_full_weight(group):
    layer = tp_ext.RowParallelLinear(400, 300, group=group)
    bias = float(layer.bias.abs().max())
    assert 0.99 / 20 < float(layer.weight.abs().max()) <= 1 / 20
    assert 0.9 / 20 < bias <= 1 / 20


def test_initialisers():
    local = torch.empty(200, 300)
    initialise_(local, Uniform(2, 5), None, local.shape, 0, 1)
    assert local.min() >= 2 and local.max() <= 5 and abs(float(local.mean()) - 3.5) < 0.02
    initialise_(local, Normal(3.0, 0.5), None, local.shape, 0, 1)
    assert abs(float(local.mean()) - 3) < 0.02 and abs(float(local.std()) - 0.5) < 0.02
    initialise_(local, TruncatedNormal(3.0, 0.5, 2.5, 4.5), None, local.shape, 0, 1)
    assert local.min() >= 2.5 and local.max() <= 4.5 and local.min() < 2.51 and local.max() > 4.4
    # scipy.stats.truncnorm(-1, 3)
    assert abs(float(local.mean()) - (3 + 0.5 * 0.282786)) < 0.02
    before = torch.random.get_rng_state()
    initialise_(local, Constant(2.5), None, local.shape, 0, 1)
    assert torch.equal(local, torch.full_like(local, 2.5))
    assert torch.equal(torch.random.get_rng_state(), before), "a constant draws nothing"
    assert torch_linear_init(16) == Uniform(-0.25, 0.25)


@pytest.mark.parametrize("shape", [(0, 4), (1,), (7,), (3, 5, 2)], ids=str)
@pytest.mark.parametrize("init", [Uniform(-1, 1), Normal(), TruncatedNormal()], ids=["uniform", "normal", "truncated"])
def test_any_dim_of_any_tensor(init, shape):
    def draw(sharding, rank, p):
        torch.manual_seed(3)
        local = torch.empty(shape if sharding is None else sharding.local_shape(shape, rank, p), dtype=torch.float64)
        initialise_(local, init, sharding, torch.Size(shape), rank, p)
        return local

    full = draw(None, 0, 1)
    assert full.flatten().unique().numel() == full.numel()
    for dim in range(-len(shape), len(shape)):
        n = shape[dim]
        for parts in ((n,), (n - n // 2, n // 2), (Part(n, copies=3, padding=4),)):
            sharding = Sharding(dim, parts)
            for rank in range(3):
                assert torch.equal(draw(sharding, rank, 3), sharding.shard(full, rank, 3)), sharding


def _with(group, init):
    return full_state(group, 5, init=init)


def _unsharded(group, init):
    want, draw = full_state(None, 5, init=init)
    weight = torch.empty(13, 5)
    torch.manual_seed(5)
    if init not in OURS:
        init(weight)
        assert torch.equal(want["column.weight"], weight)
    return want, draw


def _recording_init(t):
    assert t.device.type == "cpu"
    with torch.no_grad():
        t.copy_(torch.arange(t.numel()).view(t.shape) + 100 * t.dim())


OURS = [Normal(0, 0.02), TruncatedNormal(0.0, 0.02, -0.03, 0.05)]


@pytest.mark.parametrize("init", [nn.init.orthogonal_, nn.init.xavier_uniform_, _recording_init, *OURS])
def test_any_callable_sees_the_full_tensor(init):
    ((want, draw),) = ranks.run(_unsharded, 1, init)  # a rank's products have other bits than this process's
    for p in (2, 3, 4):
        for state, next_draw in ranks.run(_with, p, init):
            for name, value in comparable(state, p).items():
                assert torch.equal(value, want[name]), f"{name} at p = {p}"
            assert next_draw == draw


@pytest.mark.parametrize(
    "options, match",
    [
        ({"std": 0.0}, "std: 0.0 must be positive"),
        ({"std": -1.0}, "std: -1.0 must be positive"),
        ({"std": math.inf}, "std: inf must be positive and finite"),
        ({"mean": math.nan}, "mean: nan must be finite"),
        ({"low": 2.0}, "low: 2.0 must be below high = 2.0"),
        ({"high": -3.0}, "low: -2.0 must be below high = -3.0"),
    ],
)
def test_a_truncation_that_cannot_be(options, match):
    with pytest.raises(ValueError, match=match):
        TruncatedNormal(**options)


# Meta device


def _late(group, dtype):
    torch.manual_seed(7)
    before = torch.random.get_rng_state()
    model = one_of_each(group, dtype=dtype, device="meta")
    assert torch.equal(torch.random.get_rng_state(), before), "nothing is drawn for a meta tensor"
    assert all(p.is_meta for p in model.parameters())
    model.to_empty(device="cpu")
    for module in model.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    for name, sharding in tp_ext.shardings(model):
        assert model.get_parameter(name).tp_sharding == sharding
    return tp_ext.full_state_dict(model, group=group), torch.rand(())


@pytest.mark.parametrize("p", [1, 2, 4])
def test_meta_device_then_reset_parameters(p):
    want, draw = full_state(None, 7, dtype=torch.bfloat16)
    for state, next_draw in ranks.run(_late, p, torch.bfloat16):
        assert next_draw == draw
        assert all(torch.equal(state[name], value) for name, value in want.items())


# Seeds


def _seeded(group, seed, axes, tp_axis):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=axes)
    tp_ext.manual_seed(seed, mesh, tp_axis)
    return torch.rand(4), mesh.get_coordinate()


@pytest.mark.thinned(1)
@pytest.mark.parametrize("axes", [("dp", "tp"), ("tp", "dp"), ("dp", "model")])
@pytest.mark.parametrize("seed", [0, -1, 1 << 70])
def test_seed_is_shared_along_tp_only(axes, seed):
    tp_axis = "model" if "model" in axes else "tp"
    dp = 1 - axes.index(tp_axis)
    draws = ranks.run(_seeded, 4, seed, axes, tp_axis)
    for draw, place in draws:
        for other, elsewhere in draws:
            assert torch.equal(draw, other) == (place[dp] == elsewhere[dp])
    assert not any(torch.equal(a[0], b[0]) for a in draws for b in ranks.run(_seeded, 4, seed + 1, axes, tp_axis))


def _seeded_on_two_axes(group):
    mesh = init_device_mesh("cpu", (2, 2, 1), mesh_dim_names=("dp", "pp", "tp"))
    tp_ext.manual_seed(5, mesh)
    return torch.rand(4)


def test_every_position_of_two_data_axes_has_its_own_seed():
    draws = ranks.run(_seeded_on_two_axes, 4)
    assert len({tuple(draw.tolist()) for draw in draws}) == 4


def _build(group=None, masks=True):
    options = {"group": group, "dtype": torch.float64}
    first = tp_ext.ColumnParallelLinear(4, 6, **options)
    mask = tp_ext.dropout(torch.ones(64)) if masks else None
    return nn.Sequential(first, tp_ext.RowParallelLinear(6, 4, init=nn.init.xavier_uniform_, **options)), mask


def _replicas(group, fsdp, again):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    tp_ext.manual_seed(5, mesh)
    if again:
        _build(mesh["tp"])
        torch.manual_seed(5)  # the same number, too
    model, mask = _build(mesh["tp"])
    if fsdp:
        fully_shard(model, mesh=mesh["dp"])
    return tp_ext.full_state_dict(model), mask, torch.rand(4)


@pytest.mark.parametrize("fsdp", [False, True])
def test_replicas_start_with_the_weights_of_one_process_and_draw_other_masks(fsdp):
    results = ranks.run(_replicas, 4, fsdp, False)
    tp_ext.manual_seed(5)
    want = _build(masks=False)[0].state_dict()
    for weights, *_ in results:
        assert all(torch.equal(weights[name], want[name]) for name in want)
    (_, *one), (_, *same), (_, *other), _ = results
    assert all(map(torch.equal, one, same)) and not any(map(torch.equal, one, other))


def test_torchs_own_seed_holds_for_weights_too():
    """As ever: after torch.manual_seed the weights are drawn between the masks, from one generator."""
    results = ranks.run(_replicas, 4, False, True)
    torch.manual_seed(5)
    model, mask = _build()
    for weights, theirs, _ in results:
        assert torch.equal(mask, theirs)
        assert all(torch.equal(weights[name], value) for name, value in model.state_dict().items())


def test_seed_without_a_mesh_is_torchs():
    tp_ext.manual_seed(3)
    ours = torch.rand(3)
    torch.manual_seed(3)
    assert torch.equal(ours, torch.rand(3))


def _bad_axis(group, axes):
    tp_ext.manual_seed(0, init_device_mesh("cpu", (2,), mesh_dim_names=axes))


@pytest.mark.parametrize("axes", [None, ("data",)])
def test_mesh_without_that_axis(axes):
    ranks.run_raises(_bad_axis, 2, ValueError, "tp_axis: 'tp' must be an axis of the mesh", axes, in_turns=False)


def _other_mesh(group):
    """Masks of one step and seed, on one mesh after the other."""
    layer, x = tp_ext.Dropout(0.4, group=None), torch.ones(2, 4, 8)
    tp_ext.name_modules(layer)

    def draw(axes):
        tp_ext.manual_seed(5, init_device_mesh("cpu", (2,), mesh_dim_names=(axes,)) if axes else None)
        with tp_ext.random.at(0):
            return layer(x)

    one = draw(None)
    with pytest.raises(ValueError, match=r"layout: must be given .* with cp = 2"):
        draw("cp")
    assert torch.equal(draw("pp"), one)
    return draw("dp"), torch.equal(draw(None), one)


def test_meshes_without_tensor_parallelism():
    (first, same), (second, same_too) = ranks.run(_other_mesh, 2)
    assert same and same_too and not torch.equal(first, second)


def test_own_random_numbers_seed_no_other_device():
    """Seeds device 1 alone of two CUDA devices, here replaced; on a CPU none."""
    seeded, current = [], [0]

    @contextlib.contextmanager
    def on_device(device):
        current[0] = device.index
        yield
        current[0] = 0

    changes = {
        "torch.random.fork_rng": lambda devices: contextlib.nullcontext(),
        "torch.cuda.device": on_device,
        "torch.cuda.manual_seed": lambda seed: seeded.append(current[0]),
        "torch.cuda.manual_seed_all": lambda seed: seeded.append("all"),
    }
    with contextlib.ExitStack() as stack:
        for name, change in changes.items():
            stack.enter_context(mock.patch(name, change))
        with OwnRandomNumbers(1, torch.device("cuda", 1)):
            first = torch.rand(4)
        assert seeded == [1]
        with OwnRandomNumbers(1, torch.device("cpu")):
            assert not torch.equal(first, torch.rand(4))
        assert seeded == [1]
