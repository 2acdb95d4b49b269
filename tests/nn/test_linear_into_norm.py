"""all_reduce_rms_norm, and layers that end in it: bits of the collective, the addition and the norm by themselves."""

import contextlib
import time

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tp_ext
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import count_collectives_of
from tests.shm.backends import group_of, launch, results, start, timed_error
from tp_ext import _ops, low_precision
from tp_ext.group import group_name

pytestmark = pytest.mark.core

EPS, HIDDEN = 1e-5, 12
SHAPES = [(1, 8), (3, 33), (2, 3, 512), (0, 8)]


def _composed(x, residual, weight, group):
    return _ops.rms_norm_residual(_ops.reduce_from_region(x, group), residual, weight, EPS)


def _operands(shape, dtype, weight_dtype, rank):
    torch.manual_seed(rank)
    x = torch.randn(shape, dtype=dtype)
    torch.manual_seed(9)
    return x, torch.randn(shape, dtype=dtype), torch.randn(shape[-1], dtype=weight_dtype)


@pytest.mark.thinned
@on_ranks(1, 2, 3, 4, backend="gloo")
@pytest.mark.parametrize("backend", ["gloo", "tp_shm"])
@pytest.mark.parametrize(
    "dtypes",
    [(torch.float32,) * 2, (torch.float64,) * 2, (torch.bfloat16,) * 2, (torch.float16, torch.float32)],
    ids=str,
)
def test_bits_of_the_two_operators(world, backend, dtypes):
    dtype, weight_dtype = dtypes
    group = group_name(group_of(backend))
    for shape in SHAPES:
        x, residual, weight = _operands(shape, dtype, weight_dtype, world.rank())
        for w in (weight, None):
            before = x.clone(), residual.clone()
            both = _ops.all_reduce_rms_norm(x, residual, w, EPS, group), _composed(x, residual, w, group)
            for got, want in zip(*both, strict=True):
                assert torch.equal(got, want) and got.dtype == dtype
            assert torch.equal(x, before[0]) and torch.equal(residual, before[1])


@pytest.mark.parametrize("needs", ["xrw", "x", "r", "w"])
@on_ranks(2)
def test_gradients_of_the_two_operators(world, needs):
    group = group_name(world)
    values_and_gradients = []
    for function in (_composed, lambda *args: _ops.all_reduce_rms_norm(*args[:3], EPS, args[3])):
        leaves = [
            t.requires_grad_(name in needs)
            for name, t in zip("xrw", _operands((3, 8), torch.float64, torch.float64, world.rank()), strict=True)
        ]
        outputs = function(*leaves, group)
        torch.manual_seed(3)
        dys = [torch.randn_like(t) for t in outputs]
        torch.autograd.backward(outputs, dys)
        values_and_gradients.append([*(t.detach() for t in outputs), *(t.grad for t in leaves)])
    for got, want in zip(*values_and_gradients, strict=True):
        assert (got is None) == (want is None) and (got is None or torch.equal(got, want))


@on_ranks(2, backend="gloo")
def test_modes_compile_and_autocast(world):
    group = group_name(world)
    x, residual, weight = _operands((3, 8), torch.float32, torch.float32, world.rank())

    def call():
        return _ops.all_reduce_rms_norm(x, residual, weight, EPS, group)

    want = call()
    assert count_collectives_of(call) == {"all_reduce": 1}
    with tp_ext.debug.count_collectives() as counts:  # which sees the calls of c10d
        call()
    assert counts.number == 1
    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert all(map(torch.equal, compiled(), want))
    with torch.autocast("cpu", torch.bfloat16):  # as torch's addition: the wider of both
        y, total = _ops.all_reduce_rms_norm(x.bfloat16(), residual, weight, EPS, group)
        assert y.dtype == total.dtype == torch.float32
        assert all(map(torch.equal, (y, total), _composed(x.bfloat16(), residual, weight, group)))


@on_ranks(3, backend="gloo")
def test_ranks_may_differ_in_what_watches_them(world):
    """Under a profiler the operator calls c10d; to the other rank that is the same call."""
    group = group_name(group_of("tp_shm"))
    x, residual, weight = _operands((3, 8), torch.float32, torch.float32, world.rank())
    want = _ops.all_reduce_rms_norm(x, residual, weight, EPS, group)
    with tp_ext.debug.count_collectives() if world.rank() else contextlib.nullcontext():
        got = _ops.all_reduce_rms_norm(x, residual, weight, EPS, group)
    assert all(map(torch.equal, got, want))


def _late(rank, p, folder):
    start(rank, p, folder, "cpu:tp_shm", seconds=1)
    x = torch.full((2, 64), float(rank))
    group = group_name(dist.group.WORLD)
    over = folder / "over"
    if rank == 0:
        seconds, message = timed_error(lambda: _ops.all_reduce_rms_norm(x, x, None, EPS, group))
        over.touch()
        assert seconds > 0.5 and "rank 1" in message, message
    # Rank 1 looks for the file, and lives until rank 0 has given up: its death would be another error
    while not over.exists():
        time.sleep(0.05)
    return True


def test_a_rank_that_does_not_come_is_an_error():
    assert all(results(launch(_late, 2)))


@on_ranks(2)
def test_bad_input_before_the_collective(world):
    group = group_name(world)
    x, residual, weight = _operands((3, 8), torch.float32, torch.float32, 0)
    bad = [
        ((x, residual[:2], weight), ValueError, "residual: shape"),
        ((x, residual.double(), weight), TypeError, "residual: dtype"),
        ((x, residual, weight[:5]), ValueError, "weight: shape"),
        ((x.long(), residual, weight), TypeError, "x: dtype"),
    ]
    for args, kind, message in bad:
        with tp_ext.debug.count_collectives() as counts, pytest.raises(kind, match=message):
            _ops.all_reduce_rms_norm(*args, EPS, group)
        assert not counts.number


# The layers


def _layer(kind, group, **options):
    make = {
        "row": lambda: tp_ext.RowParallelLinear(HIDDEN, HIDDEN, group=group, input_is_parallel=False, **options),
        "mlp": lambda: tp_ext.ParallelMLP(HIDDEN, 20, activation="swiglu", group=group, **options),
        "attention": lambda: tp_ext.ParallelAttention(HIDDEN, 4, head_dim=4, rope=1e4, group=group, **options),
        "latent": lambda: tp_ext.ParallelLatentAttention(
            HIDDEN,
            4,
            kv_lora_rank=6,
            qk_nope_head_dim=4,
            qk_rope_head_dim=2,
            v_head_dim=4,
            group=group,
            **options,
        ),
    }
    return make[kind]()


def _norm(kind, group, **options):
    if kind == "layer":
        return tp_ext.LayerNorm(HIDDEN, group=group, **options)
    norm = tp_ext.RMSNorm(HIDDEN, elementwise_affine=kind != "no weight", group=group, **options)
    if kind == "hook":
        norm.register_forward_hook(lambda module, args, output: tuple(2 * t for t in output))
    if kind == "parametrized":
        nn.utils.parametrize.register_parametrization(norm, "weight", _Twice())
    return norm


class _Twice(nn.Module):
    def forward(self, weight):
        return 2 * weight


def _call(layer, x, **ending):
    if isinstance(layer, tp_ext.ParallelAttention | tp_ext.ParallelLatentAttention) and x.dim() == 2:
        return layer(x, batch_size=1, **ending)
    return layer(x, **ending)


def _as_composed(world, kind, norm_kind, options, backend="gloo", change=None):
    group, sp = group_of(backend), options.get("sequence_parallel", False)
    blocks = tp_ext.tp_invariant(4) if change == "blocks" else torch.enable_grad()
    with blocks:
        torch.manual_seed(0)
        layer = _layer(kind, group, **options)
        norm = _norm(norm_kind, group, sequence_parallel=sp)
    for param in norm.parameters():
        nn.init.normal_(param, 1.0)
    torch.manual_seed(5 + (world.rank() if sp else 0))
    x, residual = (torch.randn(*((4,) if sp else (2, 3)), HIDDEN) for _ in range(2))
    if change == "few bits":
        low_precision.quantize_(layer, "int8")
    grads, decoded = [], []  # decoded: the outputs where no gradients are recorded
    for ending in (False, True):
        leaves = [t.clone().requires_grad_() for t in (x, residual)]

        def ended(a, b, ending=ending):
            return _call(layer, a, residual=b, norm=norm) if ending else norm(_call(layer, a), b)

        outputs = ended(*leaves)
        parameters = [param for module in (layer, norm) for param in module.parameters() if param.requires_grad]
        dys = [torch.full_like(t, 0.5) for t in outputs]
        grads.append(torch.autograd.grad(outputs, [*leaves, *parameters], dys, allow_unused=True))
        with torch.no_grad():
            decoded.append(ended(x, residual))
        assert all(map(torch.equal, outputs, decoded[-1]))
    assert all(map(torch.equal, *decoded))
    for got, want in zip(*grads, strict=True):
        assert (got is None) == (want is None) and (got is None or torch.equal(got, want))


PLAIN = {"bias": False}
CASES = [
    *((kind, "rms", PLAIN, None) for kind in ("row", "mlp", "attention", "latent")),
    *((kind, "rms", {"bias": True}, None) for kind in ("row", "latent")),
    *((kind, "rms", PLAIN | {"sequence_parallel": True}, None) for kind in ("mlp", "attention")),
    *(("mlp", norm, PLAIN, None) for norm in ("layer", "no weight", "hook", "parametrized")),
    ("mlp", "rms", PLAIN | {"overlap_chunks": 2}, None),
    ("mlp", "rms", PLAIN, "few bits"),
    ("mlp", "rms", PLAIN, "blocks"),
]


@pytest.mark.parametrize(("kind", "norm", "options", "change"), CASES, ids=str)
def test_layers_end_in_the_norm(kind, norm, options, change):
    ranks.run(_as_composed, 2, kind, norm, options, "tp_shm", change)


@pytest.mark.thinned
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("backend", ["gloo", "tp_shm"])
def test_rank_counts(backend, p):
    ranks.run(_as_composed, p, "mlp", "rms", PLAIN, backend)


@on_ranks(2, backend="gloo")
def test_decoding_calls_the_one_operator(world):
    mlp, norm = _layer("mlp", world, bias=False), _norm("rms", world)
    x = torch.randn(2, HIDDEN)
    with torch.no_grad(), tp_ext.debug.count_collectives() as counts:
        mlp(x, residual=x, norm=norm)
    with torch.no_grad(), torch.profiler.profile() as profile:
        mlp(x, residual=x, norm=norm)
    assert counts.number == 1
    assert "tp_ext::all_reduce_rms_norm" in {event.key for event in profile.key_averages()}


@on_ranks(2)
def test_bad_arguments(world):
    row, norm = _layer("row", world, bias=False), _norm("rms", world)
    x = torch.randn(2, HIDDEN)
    with pytest.raises(ValueError, match="norm: None must be given with residual"):
        row(x, residual=x)
    with pytest.raises(ValueError, match="residual: None must be given with norm"):
        row(x, norm=norm)
    with pytest.raises(ValueError, match="residual: shape"):
        row(x, residual=x[:1], norm=norm)
    with pytest.raises(TypeError, match="norm: 3 must be an RMSNorm or LayerNorm"):
        row(x, residual=x, norm=3)
    skipping = _layer("row", world, skip_bias_add=True)
    with pytest.raises(ValueError, match="skip_bias_add"):
        skipping(x, residual=x, norm=norm)
    dist.barrier()
