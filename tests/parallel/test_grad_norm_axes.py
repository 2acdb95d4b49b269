"""The norm over several axes: FSDP2, DDP and pipelines with tensor parallelism, in fp64 within 1e-12 of the unsharded
model's, whatever is cut, copied, padded, replicated or tied.
"""

import functools
import itertools

import pytest
import torch
from torch import nn
from torch.distributed import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn.parallel import DistributedDataParallel

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tests.helpers.models import model_and_optimizer
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import counts_by_kind
from tp_ext.checkpoint.gather import gather_full, ranks_of
from tp_ext.model.census import census

pytestmark = pytest.mark.core

close = {"rtol": 1e-12, "atol": 1e-12}
NORMS = [1, 2, 3.5, float("inf")]
STAGES = (("embedding", "norm1", "attention"), ("norm2", "mlp", "column", "row", "last", "head", "scale"))
IDS = torch.arange(14).view(2, 7) * 5 % 13


def backward(model, group=None):
    tp_ext.vocab_parallel_cross_entropy(model(IDS), IDS.roll(1).flatten(), group, vocab_size=13).backward()


def dense():
    """The unsharded model after backward, and its gradients."""
    model, _ = model_and_optimizer(None)
    backward(model)
    return model, {name: param.grad.clone() for name, param in model.named_parameters()}


def full_grads(module, tp):
    ranks_ = ranks_of(census(module))
    table = dict(tp_ext.layouts(module))
    return {
        name: gather_full(param.grad, table[name], ranks_)
        for name, param in module.named_parameters()
        if param.grad is not None
    }


def _clipped(group, how, max_norm, kinds):
    """The norm and the clipped gradients of one backward for each (norm_type, foreach)."""
    shape = {"HSDP": (2, 2, 1), "FSDP2 over all": (1, 4, 1)}.get(how, (1, 2, 2))
    mesh = mesh_of(*shape, names=("replicas", "dp", "tp"))
    tp = mesh["tp"]
    model, _ = model_and_optimizer(tp, pad=4)
    if how == "DDP":
        wrapped = DistributedDataParallel(model, process_group=mesh["dp"].get_group())
    elif how == "partly":  # what FSDP2 does not hold the data ranks hold alike
        wrapped = model
        fully_shard(model.mlp, mesh=mesh["dp"])
    else:
        data = mesh["replicas", "dp"] if how == "HSDP" else mesh["dp"]
        wrapped = model
        for part in (model.mlp, model.attention, model):
            fully_shard(part, mesh=data)
    backward(wrapped, tp)
    if how == "DDP":  # padding must not count
        model.embedding.weight.grad[model.embedding.vocab_local :] = 1e9
    whole, results = {param: param.grad for param in wrapped.parameters() if param.grad is not None}, []
    for norm_type, foreach in kinds:
        for param, grad in whole.items():
            param.grad = grad.clone()
        norm = tp_ext.clip_grad_norm_(wrapped, max_norm, norm_type, foreach=foreach)
        results.append((norm, full_grads(model, tp)))
    return results


EVERY_KIND = list(itertools.product(NORMS, (None, False)))
HOWS = ["FSDP2", "HSDP", "FSDP2 over all", "partly", "DDP"]


@pytest.mark.parametrize(
    ("how", "kinds"),
    [
        # By default every norm with either implementation, the one in FSDP2 and the other elsewhere
        ("FSDP2", [(1, None), (2, False), (3.5, None), (float("inf"), False)]),
        *((how, [(1, False), (2, None), (3.5, False), (float("inf"), None)]) for how in ("HSDP", "partly", "DDP")),
        *(pytest.param(how, EVERY_KIND, marks=pytest.mark.exhaustive) for how in HOWS),
    ],
    ids=[*(how for how in HOWS if how != "FSDP2 over all"), *(f"{how}-every" for how in HOWS)],
)
def test_data_axes(how, kinds):
    for (norm_type, _), results in zip(kinds, zip(*ranks.run(_clipped, 4, how, 0.1, kinds), strict=True), strict=True):
        model, _ = dense()
        want = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
        assert len({float(norm) for norm, _ in results}) == 1
        for norm, grads in results:
            assert type(norm) is torch.Tensor
            torch.testing.assert_close(norm, want, **close)
            for name, param in model.named_parameters():
                torch.testing.assert_close(grads[name], param.grad, **close)


def stage_of(group, axes):
    """This rank's stage of two, under FSDP2; the stages hold each a copy of the tied weight."""
    mesh = mesh_of(*axes, names=("dp", "pp", "tp"))
    tp, stage = mesh["tp"], mesh["pp"].get_local_rank()
    whole, _ = model_and_optimizer(tp)
    whole.head.weight = nn.Parameter(whole.embedding.weight.detach().clone())
    model = nn.ModuleDict({name: getattr(whole, name) for name in STAGES[stage]})
    for part in model.values():
        fully_shard(part, mesh=mesh["dp"])
    return mesh, model, stage


def give_gradients(mesh, model, grads):
    """The stage's shards of `grads`; of the tied weight both stages have the same, as once it is summed over both."""
    tp, table = mesh["tp"], dict(tp_ext.shardings(model))
    for name, param in model.named_parameters():
        full = grads["embedding.weight" if name == "head.weight" else name]
        local = full if table[name] is None else table[name].shard(full, tp.get_local_rank(), tp.size())
        param.grad = distribute_tensor(local.clone(), param.device_mesh, param.placements, src_data_rank=None)


def _pipelined(group, grads, axes, norm_types):
    mesh, model, stage = stage_of(group, axes)
    exclude = [model["head"].weight] if stage else []
    results, options = [], {"group": mesh["tp"], "exclude": exclude}
    for norm_type in norm_types:
        give_gradients(mesh, model, grads)
        norm = tp_ext.clip_grad_norm_(model, 0.1, norm_type, extra_groups=mesh["pp"], **options)
        twice = tp_ext.grad_norm(model, norm_type, extra_groups=[mesh["pp"]])
        again = tp_ext.grad_norm(model, norm_type, extra_groups=(mesh["dp"].get_group(), mesh["pp"]), **options)
        results.append((norm, twice, again, full_grads(model, mesh["tp"])))
    return results


@pytest.mark.parametrize("axes", [pytest.param((2, 2, 2), marks=pytest.mark.exhaustive), (1, 2, 2), (2, 2, 1)], ids=str)
def test_pipelines(axes):
    """The second copy of a tied weight counts unless it is excluded, and is scaled either way."""
    p = axes[0] * axes[1] * axes[2]
    _, grads = dense()
    per_type = zip(*ranks.run(_pipelined, p, grads, axes, NORMS[1:]), strict=True)
    for norm_type, results in zip(NORMS[1:], per_type, strict=True):
        model, _ = dense()
        want = nn.utils.clip_grad_norm_(model.parameters(), 0.1, norm_type)
        clipped = {name: param.grad for name, param in model.named_parameters()}
        clipped["head.weight"] = clipped["embedding.weight"]
        tied = grads["embedding.weight"]
        ends = torch.cat([*(g.flatten() for g in grads.values()), tied.flatten()])
        for norm, twice, again, stage in results:
            torch.testing.assert_close(norm, want, **close)
            torch.testing.assert_close(again, torch.clamp(want, max=0.1), rtol=1e-4, atol=0)
            scale = torch.clamp(0.1 / (want + 1e-6), max=1)
            torch.testing.assert_close(twice, torch.linalg.vector_norm(ends, norm_type) * scale, **close)
            for name, grad in stage.items():
                torch.testing.assert_close(grad, clipped[name], **close)


@on_ranks(4)
def test_one_number_per_axis_is_sent(group):
    mesh = mesh_of(2, 2, names=("dp", "tp"))
    model, _ = model_and_optimizer(mesh["tp"])
    fully_shard(model, mesh=mesh["dp"])
    backward(model, mesh["tp"])
    with CommDebugMode() as counts:
        tp_ext.clip_grad_norm_(model, 1.0)
    assert counts_by_kind(counts) == {"all_reduce": 2}


DTYPES = {
    "none": [torch.float64, None],
    "first has none": [None, torch.float64],
    "wider": [torch.bfloat16, torch.float32],
    "neither is wider": [torch.float16, torch.bfloat16],
    "of three": [torch.float16, None, torch.float64],
    "nowhere": [None, None],
}


@pytest.mark.parametrize("dtypes", DTYPES.values(), ids=list(DTYPES))
@pytest.mark.parametrize("norm_type", [0, 1, *NORMS])
def test_stages_without_gradients_and_of_other_dtypes(dtypes, norm_type):
    """All stages have the same norm, in the widest dtype of all of them, from one message."""

    def norm_of(rank, group):
        dtype = dtypes[rank]
        weight = nn.Parameter(torch.full((3, 2), 1 / 3 + rank, dtype=dtype or torch.float32))
        if dtype is not None:
            weight.grad = weight.detach().clone()
        with tp_ext.debug.count_collectives() as counts:
            norm = tp_ext.grad_norm([weight], norm_type, group=None, extra_groups=group)
        return norm, counts.number, tp_ext.clip_grad_norm_([weight], 1.0, norm_type, group=None, extra_groups=group)

    (first, sent, _), *_ = results = tp_ext.debug.simulate(norm_of, len(dtypes))
    known = [torch.full((3, 2), 1 / 3 + i, dtype=d) for i, d in enumerate(dtypes) if d is not None]
    wide = functools.reduce(torch.promote_types, [t.dtype for t in known] or [torch.float32])
    want = nn.utils.get_total_norm([t.double() for t in known], norm_type).to(wide)
    is_half = any(t.element_size() == 2 for t in known)  # of these torch rounds the norm of each rank, unless it is 2
    torch.testing.assert_close(first, want, **({"rtol": 1e-2, "atol": 0} if is_half else {}))
    for norm, count, before in results:
        assert norm.dtype == before.dtype == wide and torch.equal(norm, first) and torch.equal(before, first)
        assert count == sent == 1


@on_ranks(2)
def test_dtensors_over_the_tensor_parallel_group_itself(group):
    """A DTensor of torch's own tensor parallelism next to our layers."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = nn.ModuleDict({"ours": tp_ext.ColumnParallelLinear(3, 4, False, group=mesh), "cut": nn.Linear(3, 4)})
    weight, bias = model["cut"].weight.detach(), model["cut"].bias.detach()
    model["cut"].weight = nn.Parameter(distribute_tensor(weight, mesh, [Shard(0)]))
    model["cut"].bias = nn.Parameter(distribute_tensor(bias, mesh, [Replicate()]))
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    norm = tp_ext.grad_norm(model, 2, group=mesh)
    torch.testing.assert_close(norm, torch.tensor((12 + 12 + 4) ** 0.5))


@on_ranks(2)
def test_main_grad(group):
    layer = tp_ext.ColumnParallelLinear(3, 4, group=group, grad_accumulation_fusion=True)
    layer.weight.main_grad = torch.zeros(layer.weight.shape, dtype=torch.float64)
    layer(torch.ones(1, 3)).sum().backward()
    norm = tp_ext.clip_grad_norm_(layer, 1.0)
    grad = layer.weight.main_grad
    assert norm.dtype == torch.float64
    torch.testing.assert_close(norm, torch.tensor(4.0).double())  # 12 weights and 4 biases, ones
    torch.testing.assert_close(grad, torch.full((2, 3), 0.25).double(), rtol=1e-5, atol=0)


@on_ranks(2)
def test_a_grad_next_to_main_grad_is_added(group):
    layer = tp_ext.ColumnParallelLinear(3, 4, False, group=group)
    layer.weight.grad, layer.weight.main_grad = torch.ones(2, 3), torch.ones(2, 3)  # of a tied weight's two layers
    norm = tp_ext.clip_grad_norm_(layer, 1.0)
    grad = layer.weight.grad + layer.weight.main_grad
    torch.testing.assert_close(norm, torch.tensor(48.0).sqrt())
    torch.testing.assert_close(grad, torch.full((2, 3), 2 / 48**0.5), rtol=1e-5, atol=0)
