"""Muon of sharded parameters is that of the unsharded model: over one group and over two, with fused parts, copied
key-value heads, ties and stacks of experts, under FSDP2, across checkpoints at another p; and what it communicates.
"""

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from torch.nn.parallel import DistributedDataParallel

import tp_ext
from tests.helpers import ranks
from tests.helpers.dtypes import default_dtype
from tests.helpers.meshes import mesh_of
from tp_ext import Layout, Sharding
from tp_ext.optim import Muon, split_parameters

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
        if kind == "ddp":
            model = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
        else:
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
    ("kind", "p"), [("tp", 2), ("tp", 3), ("tp", 4), ("two axes", 4), ("fsdp2", 4), ("ddp", 4)], ids=str
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


def _parts(param, layout):
    """The matrices of a full tensor: its parts, of a stack each."""
    sizes = [part.size for part in layout[0][0].parts] if layout and layout[0][0].dim == 0 else [len(param)]
    return [one for part in param.split(sizes) for one in (part if part.dim() == 3 else [part])]


@pytest.mark.parametrize("adjust_lr_fn", [None, "match_rms_adamw", "spectral_unclamped"])
@pytest.mark.parametrize("nesterov", [True, False])
def test_one_process_has_the_bits_of_torch(adjust_lr_fn, nesterov):
    """Of each part as a parameter of its own, and of torch's AdamW for the others."""
    model = made(dtype=torch.float32)
    matrices, others = split_parameters(model)
    names = {param: name for name, param in model.named_parameters()}
    table = dict(tp_ext.layouts(model))
    plain = {
        param: [nn.Parameter(one.detach().clone()) for one in _parts(param.detach(), _table(table, names, param))]
        for param in matrices
    }
    theirs = {param: nn.Parameter(param.detach().clone()) for param in others}
    options = {"lr": 0.02, "weight_decay": 0.05, "adjust_lr_fn": adjust_lr_fn, "nesterov": nesterov}
    mine = Muon(matrices, **options, adamw_params=others)
    try:
        muon = torch.optim.Muon([one for parts in plain.values() for one in parts], **options)
    except ValueError as error:
        pytest.skip(f"this torch: {error}")
    adamw = torch.optim.AdamW(theirs.values(), lr=0.02, weight_decay=0.05)
    for step in range(3):
        give_gradients(model, step)
        for param, parts in plain.items():
            for one, grad in zip(parts, _parts(param.grad, _table(table, names, param)), strict=True):
                one.grad = grad.clone()
        for param, own in theirs.items():
            own.grad = param.grad.clone()
        for optimizer in (mine, muon, adamw):
            optimizer.step()
    for param, parts in plain.items():
        got = _parts(param.detach(), _table(table, names, param))
        assert all(torch.equal(a, b) for a, b in zip(got, parts, strict=True)), names[param]
    assert all(torch.equal(param, own) for param, own in theirs.items())


def _table(table, names, param):
    return table[names[param]]


def test_parameters_are_split_by_what_they_are():
    model = made()
    names = {param: name for name, param in model.named_parameters()}
    matrices, others = split_parameters(model)
    assert {names[param] for param in matrices} == {
        "attention.qkv.weight",
        "attention.out.weight",
        "mlp.up.weight",
        "mlp.down.weight",
        "down.weight",
        "router.weight",
        "experts.weight",
    }
    assert {names[param] for param in others} >= {"embedding.weight", "down.bias", "router.bias"}
    assert len(matrices) + len(others) == len(names)


def _communicated(group, form, ns_dtype):
    """The counts of a step of one SwiGLU MLP after the first, and the bytes of its matrices."""
    layer = tp_ext.ParallelMLP(8, 64, activation="swiglu", bias=False, group=group)
    optimizer = Muon(layer.parameters(), ns_dtype=ns_dtype, form=form)
    give_gradients(layer, 0)
    optimizer.step()
    with tp_ext.debug.count_collectives() as counts:
        optimizer.step()
    return counts.by_kind(), counts.wire_bytes


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("p", [2, 4])
def test_bytes_are_those_of_the_guide(p, dtype):
    """Over all ranks, of three matrices of 64 x 8: 2 (p - 1) / p of their bytes; 2 (p - 1) of their Gram matrices'."""
    for form, numel in (("gather", 64 * 8 / p), ("auto", 8 * 8)):
        found = ranks.run(_communicated, p, form, dtype)
        assert all(kinds == {"all_reduce": 1, "all_to_all": 2} for kinds, _ in found)
        agreement = 2 * (p - 1) * 16
        assert sum(wire for _, wire in found) == 3 * 2 * (p - 1) * numel * dtype.itemsize + agreement
    assert ranks.run(_communicated, 1, "auto", dtype) == [({}, 0)]


def _half_of_the_gradients(group, drop):
    model = made(group)
    optimizer = optimizer_of(model)
    for step, left in enumerate(("mlp", "attention", "")):
        give_gradients(model, step)
        if group is not None and drop and group.rank():
            left = "down"
        for name, param in model.named_parameters():
            if left and name.startswith(left):
                param.grad = None
        optimizer.step()
    return tp_ext.full_state_dict(model)


def test_parameters_without_a_gradient_stay():
    want = _half_of_the_gradients(None, False)
    for got in ranks.run(_half_of_the_gradients, 2, False):
        torch.testing.assert_close(got, want, **CLOSE)
    message = "params: the parameters with gradients must be the same on all ranks"
    ranks.run_raises(_half_of_the_gradients, 2, ValueError, message, True, in_turns=False)


def _loses_a_gradient(group, lost):
    layer = tp_ext.ParallelMLP(8, 16, activation="swiglu", bias=False, group=group)
    optimizer = Muon(layer.parameters())
    for step in range(3):
        give_gradients(layer, step)
        if step == 2 and group.rank() == 1:
            (layer.down if lost == "one" else layer).zero_grad()
        optimizer.step()


@pytest.mark.parametrize("lost", ["one", "all"])
def test_a_rank_that_loses_a_gradient_after_the_first_step(lost):
    """Its other matrices had the exchanges of the first steps, where the other rank would exchange shapes anew."""
    number = 1 if lost == "one" else 0
    message = rf"must be the same on all ranks; parameter {number} has one on \[0\] alone of the 2 ranks"
    ranks.run_raises(_loses_a_gradient, 2, ValueError, message, lost, in_turns=False)


@pytest.mark.parametrize(
    ("options", "error", "match"),
    [
        ({"nesterov": "yes"}, TypeError, "nesterov: 'yes' must be True or False"),
        ({"lr": "fast"}, TypeError, "lr: 'fast' must be a number"),
        ({"lr": float("nan")}, ValueError, "lr: nan must be finite"),
        ({"bucket_cap_mb": "3"}, TypeError, "bucket_cap_mb: '3' must be a number"),
        ({"ns_coefficients": 3.0}, TypeError, "ns_coefficients: 3.0 must be a tuple of numbers"),
        ({"betas": 0.9}, TypeError, "betas: 0.9 must be a tuple of numbers"),
        ({"betas": (0.9, "b")}, TypeError, r"betas\[1\]: 'b' must be a number"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) else None,
)
def test_options_of_another_type_are_named(options, error, match):
    with pytest.raises(error, match=match):
        Muon([torch.nn.Parameter(torch.ones(2, 2))], **options)


def test_split_parameters_names_its_argument():
    with pytest.raises(TypeError, match="model: 3 must be a module"):
        tp_ext.optim.split_parameters(3)


def _small_buckets(group):
    """One matrix at a time."""
    model = made(group)
    optimizer = optimizer_of(model, bucket_cap_mb=1e-6)
    train(model, optimizer, 2)
    return tp_ext.full_state_dict(model)


def test_buckets_do_not_change_the_update():
    for got in ranks.run(_small_buckets, 2):
        torch.testing.assert_close(got, trained(None, "unsharded", 2)[0], **CLOSE)


def _stages(group, microsteps=3):
    """A model in two stages of two tensor-parallel ranks; without a group both stages in one process."""
    mesh = None if group is None else mesh_of(2, 1, 1, 2)
    tp = None if group is None else mesh["tp"]
    tp_ext.manual_seed(3)
    with default_dtype(torch.float64):
        whole = nn.ModuleDict({f"{i}": tp_ext.ParallelMLP(HIDDEN, FFN, group=tp) for i in range(4)})
    held = range(4) if group is None else range(2 * mesh["pp"].get_local_rank(), 2 * mesh["pp"].get_local_rank() + 2)
    stage = nn.ModuleDict({f"{i}": whole[f"{i}"] for i in held})
    optimizer = Muon(*(split := split_parameters(stage))[:1], adamw_params=split[1], ns_dtype=torch.float64)
    for step in range(microsteps):
        give_gradients(whole, step)
        optimizer.step()
    where = {} if mesh is None else {"mesh": mesh}
    return (
        tp_ext.full_state_dict(stage, **where),
        tp_ext.full_optimizer_state_dict(stage, optimizer, **where)["state"],
    )


def test_stages_of_a_pipeline():
    want = _stages(None)
    for got in ranks.run(_stages, 4):
        torch.testing.assert_close(got, want, **CLOSE)


def _saved(group, path):
    model = made(group)
    optimizer = optimizer_of(model)
    train(model, optimizer, 2)
    tp_ext.save_checkpoint(path, model, optimizer)


def _resumed(group, path):
    model = made(group)
    optimizer = optimizer_of(model)
    tp_ext.load_checkpoint(path, model, optimizer)
    train(model, optimizer, 2, first=2)
    return tp_ext.full_state_dict(model)


def test_a_checkpoint_of_two_ranks_goes_on_at_three(tmp_path):
    ranks.run(_saved, 2, tmp_path / "step")
    want = trained(None, "unsharded", 4)[0]
    for got in ranks.run(_resumed, 3, tmp_path / "step"):
        torch.testing.assert_close(got, want, **CLOSE)


def _each_shard(group):
    """The wrong recipe: torch's optimizer over local tensors."""
    layer = tp_ext.ColumnParallelLinear(8, 12, bias=False, group=group, dtype=torch.float64)
    with torch.no_grad():
        layer.weight.zero_()
    give_gradients(layer, 0)
    updates = []
    for kind, options in ((Muon, {"ns_dtype": torch.bfloat16}), (torch.optim.Muon, {})):
        own = nn.Parameter(layer.weight.detach().clone())
        own.grad = layer.weight.grad
        if kind is Muon:
            own.tp_layout = layer.weight.tp_layout
        kind([own], lr=1.0, **options).step()
        updates.append(own.detach())
    return layer.weight.tp_layout.unshard([updates[0]]) if group is None else None, updates


def test_orthogonalizing_each_shard_is_another_update():
    whole, (ours, theirs) = _each_shard(None)
    assert torch.equal(ours, theirs)
    for rank, (_, (ours, theirs)) in enumerate(ranks.run(_each_shard, 2)):
        want = whole.tensor_split(2)[rank]
        assert (ours - want).abs().max() < 0.02 < 0.1 < (theirs - want).abs().max()  # bf16


PARAM = torch.ones(4, 4, requires_grad=True)


@pytest.mark.parametrize(
    ("options", "exception", "match"),
    [
        ({"lr": -1.0}, ValueError, "lr: -1.0 must be at least 0"),
        ({"weight_decay": -0.1}, ValueError, "weight_decay: -0.1 must be at least 0"),
        ({"momentum": -0.1}, ValueError, "momentum: -0.1 must be at least 0"),
        ({"eps": float("nan")}, ValueError, "eps: nan must be finite"),
        ({"ns_steps": 100}, ValueError, "ns_steps: 100 must be an integer of at least 0 and less than 100"),
        ({"ns_coefficients": (1.0, 2.0)}, ValueError, r"ns_coefficients: \(1.0, 2.0\) must be three numbers"),
        ({"adjust_lr_fn": "best"}, ValueError, "adjust_lr_fn: 'best' must be one of"),
        ({"betas": (0.9, 1.0)}, ValueError, r"betas: \(0.9, 1.0\) must be two numbers in"),
        ({"ns_dtype": torch.int32}, TypeError, "ns_dtype: torch.int32 must be a floating dtype"),
        ({"form": "star"}, ValueError, "form: 'star' must be one of auto, gather, gram"),
        ({"bucket_cap_mb": 0}, ValueError, "bucket_cap_mb: 0 must be a finite number above 0"),
        ({"mesh": 3}, ValueError, "mesh: must be given together with model"),
        ({"params": PARAM}, TypeError, r"params: a tensor of shape \(4, 4\) must be an iterable"),
        ({"params": [torch.ones(4)]}, ValueError, r"params: parameter 0, of shape \(4,\), must have 2 or 3 dims"),
        ({"params": [torch.ones(4, 4).cfloat()]}, TypeError, "params: parameter 0 is torch.complex64 and must be"),
        ({"model": nn.Linear(4, 4)}, ValueError, r"params: parameter 0, of shape \(4, 4\), must be one of the model's"),
        ({"model": 3}, TypeError, "module: 3 must be a module, or a list of the stages"),
    ],
    ids=lambda value: str(value) if isinstance(value, dict) and "params" not in value else "",
)
def test_bad_input(options, exception, match):
    with pytest.raises(exception, match=match):
        Muon(**{"params": [PARAM]} | options)


def _without_model(group):
    layer = tp_ext.ParallelMLP(4, 8, group=None)
    fully_shard(layer, mesh=mesh_of(1, 2, 1, 1)["dp"])
    Muon([layer.up.weight])


def _with_sharding_alone(group):
    param = nn.Parameter(torch.ones(2, 4))
    param.tp_sharding = Sharding(0, [4])
    Muon([param])


def test_layouts_that_are_not_known():
    ranks.run_raises(_without_model, 2, ValueError, "model: must be given for parameter 0, a DTensor", in_turns=False)
    ranks.run_raises(_with_sharding_alone, 2, ValueError, "group: must be given for parameter 0, of shape")


def test_sparse_gradients():
    param = nn.Parameter(torch.ones(4, 4))
    param.grad = torch.ones(4, 4).to_sparse()
    with pytest.raises(RuntimeError, match=r"params: a gradient of shape \(4, 4\) is sparse and must be dense"):
        Muon([param]).step()
