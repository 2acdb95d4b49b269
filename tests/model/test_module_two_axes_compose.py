"""Layers with ``weight_group`` and ``activations="hidden"`` under compile, checkpointing, autocast, derivatives of
derivatives, a backward in two halves, and coalesced gradients; and their errors."""

import pytest
import torch
from torch.autograd import forward_ad
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tests.helpers.on_ranks import on_ranks
from tests.model.test_module_two_axes import HIDDEN, SP, _model, _own_rows, batch

pytestmark = pytest.mark.core

KEPT = {"reshard_after_forward": False}
CLOSE = {"rtol": 1e-12, "atol": 1e-12}


def _mesh():
    return mesh_of(2, 2, names=("x", "y"))


def _linears(options, **others):
    """A column and a row linear on (2, 2), and x of this rank: 6 rows, 5 features, of which hidden has a shard."""
    mesh = _mesh()
    tp_ext.manual_seed(2)
    options = {"group": mesh["y"], "weight_group": mesh["x"], "dtype": torch.float64, **options, **others}
    column, row = tp_ext.ColumnParallelLinear(5, 7, **options), tp_ext.RowParallelLinear(7, 5, **options)
    x = _own_rows(torch.randn(12, 5, generator=torch.Generator().manual_seed(3), dtype=torch.float64), mesh)
    if "activations" in options:
        x = x.tensor_split(2, -1)[mesh["y"].get_local_rank()]
    elif options.get("sequence_parallel"):
        x = x.tensor_split(2)[mesh["y"].get_local_rank()]
    return column, row, x.clone().requires_grad_()


def _rows(mesh):
    return [_own_rows(tensor, mesh) for tensor in batch()]


def _loss(model, mesh):
    return model.loss(*_rows(mesh))


def _grads(model):
    grads = {name: p.grad for name, p in model.named_parameters()}
    model.zero_grad()
    return grads


@pytest.mark.parametrize("options", [HIDDEN, pytest.param(SP, marks=pytest.mark.exhaustive)], ids=["hidden", "tokens"])
@on_ranks(4, backend="gloo", timeout=300)
def test_compiled(group, options):
    model, mesh = _model(_mesh(), blocks=1, norm=tp_ext.LayerNorm, mlp=KEPT, **options), _mesh()
    want = _loss(model, mesh)
    want.backward()
    grads = _grads(model)
    loss = torch.compile(model.loss, fullgraph=True, backend="aot_eager")(*_rows(mesh))
    loss.backward()
    assert_close(loss, want, **CLOSE)
    assert_close(_grads(model), grads, **CLOSE)


@pytest.mark.parametrize("use_reentrant", [False, True])
@on_ranks(4)
def test_recomputed(group, use_reentrant):
    model, mesh = _model(_mesh(), **HIDDEN), _mesh()
    _loss(model, mesh).backward()
    want = _grads(model)
    for block in model.blocks:
        block.forward = lambda x, n, f=block.forward: checkpoint(f, x, n, use_reentrant=use_reentrant)
    for _ in range(2):
        _loss(model, mesh).backward()
        got = _grads(model)
        assert all(torch.equal(got[name], grad) for name, grad in want.items())


@pytest.mark.parametrize("options", [HIDDEN, SP | KEPT], ids=["hidden", "tokens"])
@on_ranks(4, backend="gloo")
def test_second_order(group, options):
    """Double backward and forward mode of both linears, against those of the full matrices."""
    column, row, x = _linears(options)
    parameters = [x, column.weight, row.weight]

    def both(x, up, down):
        return row(column(x, weight=up).sin(), weight=down).sin().square().sum()

    def everywhere(value):  # rows and features of the other ranks
        return tp_ext.reduce_from_region(tp_ext.reduce_from_region(value, _mesh()["x"]), _mesh()["y"])

    directions = [torch.cos(p.detach() * 9) for p in parameters]
    first = torch.autograd.grad(everywhere(both(*parameters)), parameters, create_graph=True)
    dot = sum((g * d).sum() for g, d in zip(first, directions, strict=True))
    second = torch.autograd.grad(dot, parameters)
    # By differences of the first derivatives along the directions
    step = 1e-5
    ahead, behind = (
        torch.autograd.grad(everywhere(both(*moved)), moved)
        for moved in (
            [(p + sign * step * d).detach().requires_grad_() for p, d in zip(parameters, directions, strict=True)]
            for sign in (1, -1)
        )
    )
    for got, a, b in zip(second, ahead, behind, strict=True):
        assert_close(got, (a - b) / (2 * step), rtol=1e-5, atol=1e-7)
    with forward_ad.dual_level():
        duals = [forward_ad.make_dual(p.detach(), d) for p, d in zip(parameters, directions, strict=True)]
        tangent = forward_ad.unpack_dual(row(column(duals[0], weight=duals[1]), weight=duals[2])).tangent
    a, b = (
        row(column(moved[0], weight=moved[1]), weight=moved[2])
        for moved in ([p.detach() + s * step * d for p, d in zip(parameters, directions, strict=True)] for s in (1, -1))
    )
    assert_close(tangent, ((a - b) / (2 * step)).detach(), rtol=1e-6, atol=1e-8)


@on_ranks(4)
def test_autocast(group):
    mesh = _mesh()
    model = _model(mesh, **HIDDEN).float()
    want = _loss(model, mesh)
    with torch.autocast("cpu", torch.bfloat16):
        loss = _loss(model, mesh)
        y = model.blocks[0].mlp(torch.randn(2, 4, 6))
    loss.backward()
    assert y.dtype == torch.bfloat16
    assert_close(loss, want, rtol=2e-2, atol=0)
    assert all(p.grad.dtype == torch.float32 and p.grad.isfinite().all() for p in model.parameters())


@on_ranks(4)
def test_a_backward_in_two_halves_gathers_dy_once(group):
    column, row, x = _linears(HIDDEN)
    h = column(x).detach().requires_grad_()
    y = row(h)
    dy = torch.cos(y.detach())
    parameters = [*row.parameters()]
    wants = torch.autograd.grad(y, [h, *parameters], dy, retain_graph=True)
    with tp_ext.debug.count_collectives() as counts:
        dh = torch.autograd.grad(y, [h], dy, retain_graph=True)
        weights = torch.autograd.grad(y, parameters, dy)
    assert all(map(torch.equal, (*dh, *weights), wants))
    assert counts.select(group=_mesh()["y"], kind="all_gather").number == 1


@on_ranks(4)
def test_coalesced_gradients(group):
    """One all-reduce over y for all gradients of replicated and copied parameters."""
    mesh = _mesh()
    model = _model(mesh, **SP, kv_heads=1)
    _loss(model, mesh).backward()
    want = _grads(model)
    tp_ext.coalesce_gradients(model)
    with tp_ext.debug.count_collectives() as counts:
        _loss(model, mesh).backward()
    assert_close(_grads(model), want, **CLOSE)
    assert counts.select(group=mesh["y"], kind="all_reduce").number == 1


def _make_mesh(group):
    _mesh()  # a collective, which the ranks do not make in turns below


def _options_of_one_axis(group, name, value, layer):
    mesh = _mesh()
    options = {"group": mesh["y"], "weight_group": mesh["x"], name: value}
    if layer == "mlp":
        tp_ext.ParallelMLP(4, 4, activation="gelu_tanh", **options)
    else:
        tp_ext.ColumnParallelLinear(4, 4, **options)


@pytest.mark.parametrize(
    ("name", "value", "layer", "message"),
    [
        ("overlap_chunks", 2, "linear", "overlap_chunks: 2 must not be combined with weight_group"),
        ("grad_accumulation_fusion", True, "linear", "grad_accumulation_fusion: True must not be combined"),
        ("activations", "rows", "linear", "activations: 'rows' must be 'replicated' or 'hidden'"),
    ],
)
def test_options_that_two_axes_do_not_have(name, value, layer, message):
    ranks.run(_make_mesh, 4)
    ranks.run_raises(_options_of_one_axis, 4, ValueError, message, name, value, layer)


def _misused(group, case):
    mesh = _mesh()
    options = {"group": mesh["y"], "weight_group": mesh["x"], **HIDDEN}
    if case == "one group":
        tp_ext.RMSNorm(4, group=mesh["y"], weight_group=mesh["y"])
    if case == "tokens and hidden":
        tp_ext.RowParallelLinear(4, 4, **options, sequence_parallel=True)
    if case == "replicated x":
        tp_ext.ColumnParallelLinear(4, 4, **options)(torch.ones(2, 4))
    if case == "replicated x of a norm":
        tp_ext.LayerNorm(4, **options)(torch.ones(2, 4))
    if case == "norm of two dims":
        tp_ext.RMSNorm((4, 4), **options)
    if case == "scattered x":
        tp_ext.RowParallelLinear(4, 4, **options, input_is_parallel=False)
    if case == "lora":
        tp_ext.LoRALinear(tp_ext.RowParallelLinear(4, 4, **options), 2, alpha=1)


@pytest.mark.parametrize(
    ("case", "message"),
    [
        ("one group", "weight_group: .* must be another group than group"),
        ("tokens and hidden", "activations: 'hidden' must not be combined with sequence_parallel=True"),
        ("replicated x", "x: 4 elements in the last dim must be 2, this rank's share"),
        ("replicated x of a norm", "x: shape .2, 4. must end in normalized_shape = .4,., of which this rank"),
        ("norm of two dims", "normalized_shape: .4, 4. must be one dim"),
        ("scattered x", "input_is_parallel: False must not be combined with activations='hidden'"),
        ("lora", "base: must not have a weight_group"),
    ],
)
def test_misuse(case, message):
    ranks.run(_make_mesh, 4)
    ranks.run_raises(_misused, 4, ValueError, message, case)
