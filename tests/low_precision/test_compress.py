"""compress_gradients: means and residuals by the formula bit for bit, by average() and under DDP; resumed; refused."""

import contextlib
import io

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import tp_ext
from tests.helpers import ranks, simulated
from tests.helpers.compression import Exchange
from tests.helpers.on_ranks import on_ranks
from tp_ext.low_precision import compress_gradients

pytestmark = pytest.mark.core

SHAPES = {"table": (41, 24), "small": (3, 5), "cube": (2, 3, 70), "none": (0, 4), "bias": (24,), "scale": ()}
COMPRESSED = ["table", "small", "cube", "none"]


def grad_of(name, rank, step, dtype=torch.float32):
    number = list(SHAPES).index(name)
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + number)
    return (torch.randn(SHAPES[name], generator=generator) * 10.0 ** (number - 2)).to(dtype)


def model_of(dtype=torch.float32):
    model = nn.Module()
    for name, shape in SHAPES.items():
        setattr(model, name, nn.Parameter(torch.zeros(shape, dtype=dtype)))
    return model


def averaged(group, compress, block, feedback, dtype, steps=3):
    model = model_of(dtype)
    handle = compress_gradients(model, compress, block=block, feedback=feedback, group=group)
    assert handle.names == COMPRESSED
    means = []
    for step in range(steps):
        for name, param in model.named_parameters():
            param.grad = grad_of(name, group.rank(), step, dtype)
        if step == 1:  # in another layout in memory, and none on one rank
            model.table.grad = model.table.grad.t().contiguous().t()
            if group.rank() == 0 and group.size() > 1:
                model.small.grad = None
        handle.average()
        means.append({name: param.grad.clone() for name, param in model.named_parameters()})
    return means, {name: handle.residual(name) for name in handle.names}


@pytest.mark.parametrize("compress", ["int8", "float8"])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_means_and_residuals_by_the_formula(p, compress):
    for block, feedback, dtype in ((64, True, torch.float32), (16, False, torch.bfloat16), (6, True, torch.float16)):
        results = simulated.run(averaged, p, compress, block, feedback, dtype)
        for name in SHAPES:
            exchange = Exchange(p, block, compress == "float8", feedback)
            applied = torch.zeros(SHAPES[name], dtype=torch.float64)
            total = torch.zeros(SHAPES[name], dtype=torch.float64)
            for step in range(3):
                grads = [grad_of(name, rank, step, dtype) for rank in range(p)]
                if step == 1 and name == "small" and p > 1:
                    grads[0] = torch.zeros_like(grads[0])
                compressed = name in COMPRESSED
                expected = exchange(grads) if compressed else torch.stack(grads).double().mean(0)
                for rank, (found, _) in enumerate(results):
                    if compressed:
                        assert torch.equal(found[step][name], expected), (name, step, rank)
                    else:
                        torch.testing.assert_close(found[step][name].double(), expected, rtol=5e-2, atol=5e-2)
                        assert torch.equal(found[step][name], results[0][0][step][name])
                applied += expected.double() * p
                total += sum(grad.double() for grad in grads)
            if name not in COMPRESSED:
                continue
            left = sum(residuals[name].double() for _, residuals in results)
            if not feedback or p == 1:
                assert left.eq(0).all()
                continue
            expected = sum(error.double() for error in exchange.errors) + exchange.share_error
            largest = float(total.abs().max()) if total.numel() else 0
            torch.testing.assert_close(left.flatten(), expected, rtol=0, atol=1e-7 * largest)
            if dtype == torch.float32:  # nothing is lost
                torch.testing.assert_close(applied + left, total, rtol=0, atol=1e-5 * largest)


class Sum(nn.Module):
    """Gives each parameter the gradient of a step."""

    def __init__(self):
        super().__init__()
        self.inner = model_of()
        del self.inner.none

    def forward(self, rank, step):
        return sum((param * grad_of(name, rank, step)).sum() for name, param in self.inner.named_parameters())


def under_ddp(group, view, cap):
    inner = Sum()
    inner.inner.cube = nn.Parameter(inner.inner.cube.data.transpose(0, 2).contiguous().transpose(0, 2))
    model = DistributedDataParallel(inner, process_group=group, bucket_cap_mb=cap, gradient_as_bucket_view=view)
    handle = compress_gradients(model, "int8")
    assert handle.names == ["inner.table", "inner.small", "inner.cube"]
    means = []
    for step in range(3):  # DDP makes its buckets anew after the first
        model.zero_grad()
        with model.no_sync() if step == 1 else contextlib.nullcontext():
            model(group.rank(), step).backward()
        if step == 1:
            model(group.rank(), step + 10).backward()
        means.append({name: param.grad.clone() for name, param in model.module.inner.named_parameters()})
    with pytest.raises(RuntimeError, match="average: must not be called under DDP"):
        handle.average()
    return means, {name: handle.residual("inner." + name) for name in COMPRESSED[:3]}


@pytest.mark.parametrize("view", [False, True])
@pytest.mark.parametrize("p", [1, 2, 3])
def test_ddp_gives_the_same_means_in_any_buckets(p, view):
    for cap in (25, 0.003):
        results = ranks.run(under_ddp, p, view, cap)
        for name in ("table", "small", "cube", "bias"):
            exchange = Exchange(p, 64, False, True)
            for step in range(3):
                grads = [grad_of(name, rank, step) for rank in range(p)]
                if step == 1:
                    grads = [grad + grad_of(name, rank, step + 10) for rank, grad in enumerate(grads)]
                compressed = name != "bias"
                expected = exchange(grads) if compressed else torch.stack(grads).mean(0)
                for found, _ in results:
                    if compressed:
                        assert torch.equal(found[step][name], expected), (name, step, cap)
                    else:
                        torch.testing.assert_close(found[step][name], expected)
            if p > 1 and name != "bias":
                left = sum(residuals[name].flatten().double() for _, residuals in results)
                expected = sum(error.double() for error in exchange.errors) + exchange.share_error
                torch.testing.assert_close(left, expected, rtol=0, atol=1e-6 * float(exchange.errors[0].abs().max()))


@on_ranks(3)
def test_a_resumed_run_has_the_same_bits(group):
    def run(handle, model, steps):
        for step in steps:
            for name, param in model.named_parameters():
                param.grad = grad_of(name, group.rank(), step)
            handle.average()

    whole, first, second = model_of(), model_of(), model_of()
    handles = [compress_gradients(model, "float8", group=group) for model in (whole, first, second)]
    run(handles[0], whole, range(4))
    run(handles[1], first, range(2))
    file = io.BytesIO()
    torch.save(handles[1].state_dict(), file)
    file.seek(0)
    state = torch.load(file, weights_only=True)
    handles[2].load_state_dict(state)
    kept = {name: error.clone() for name, error in state["errors"].items()}
    run(handles[2], second, range(2, 4))
    assert all(torch.equal(state["errors"][name], error) for name, error in kept.items())
    for name in COMPRESSED:
        assert torch.equal(second.get_parameter(name).grad, whole.get_parameter(name).grad), name
        assert torch.equal(handles[2].residual(name), handles[0].residual(name)), name
    other = compress_gradients(model_of(), "float8", block=32, group=group)
    with pytest.raises(ValueError, match=r"state: rank, ranks, block and feedback \[\d, 3, 64, 1\] must be"):
        other.load_state_dict(state)
    fewer = compress_gradients(model_of(), "float8", exempt=lambda name, param: name != "small", group=group)
    with pytest.raises(ValueError, match="state: 'table' must be a compressed parameter of the same shape and place"):
        fewer.load_state_dict(state)
    state["errors"]["gone"] = torch.zeros(3)
    with pytest.raises(ValueError, match="state: 'gone' must be a compressed parameter"):
        handles[2].load_state_dict(state)
    with pytest.raises(ValueError, match="name: 'bias' must be one of names"):
        other.residual("bias")


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@on_ranks(2)
def test_a_block_that_is_not_finite_is_nan_on_all_ranks(group, bad):
    model = model_of()
    handle = compress_gradients(model, "int8", group=group)
    for name, param in model.named_parameters():
        param.grad = grad_of(name, group.rank(), 0)
    if group.rank() == 1:
        model.table.grad[3, 5] = bad
    handle.average()
    at = 3 * 24 + 5
    block = slice(at // 64 * 64, at // 64 * 64 + 64)
    grad = model.table.grad.flatten()
    assert grad[block].isnan().all() and grad.isnan().sum() == 64
    assert handle.residual("table").flatten()[block].eq(0).all() == (group.rank() == 1)
    assert handle.residual("table").isfinite().all()


def counted(group, dtype, small):
    if small:  # of 3 blocks each, which no two ranks share equally
        model = nn.ModuleList(nn.Linear(8, 24) for _ in range(20)).to(dtype)
    else:
        model = nn.ModuleList([nn.Linear(96, 200), nn.Linear(200, 70), nn.Linear(70, 31)]).to(dtype)
    handle = compress_gradients(model, "int8", group=group)
    for param in model.parameters():
        param.grad = torch.ones_like(param)
    with tp_ext.debug.count_collectives() as counts:
        handle.average()
    wire_bytes = sum(row.wire_bytes for row in counts.rows if row.kind in ("all_to_all", "all_gather"))
    elements = sum(param.numel() for param in model.parameters() if param.dim() == 2)
    p = group.size()
    return wire_bytes / (2 * (p - 1) / p * elements * dtype.itemsize)


@pytest.mark.parametrize("p", [2, 3, 4])
def test_bytes_on_the_wire(p):
    for dtype, most in ((torch.float32, 0.27), (torch.bfloat16, 0.54)):
        for small in (False, True):
            shares = simulated.run(counted, p, dtype, small)
            assert all(0.9 * most < share <= most for share in shares), (small, shares)


@on_ranks(4)
def test_shards_of_tensor_parallelism(group):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = tp_ext.ParallelMLP(24, 36, group=mesh["tp"])
    handle = compress_gradients(model, "int8", group=mesh["dp"])
    x = torch.randn(4, 24, generator=torch.Generator().manual_seed(mesh["dp"].get_local_rank()))
    model(x).square().sum().backward()
    own = {name: param.grad.clone() for name, param in model.named_parameters()}
    handle.average()
    for name in handle.names:
        both = [torch.empty_like(own[name]) for _ in range(2)]
        dist.all_gather(both, own[name], group=mesh["dp"].get_group())
        assert torch.equal(model.get_parameter(name).grad, Exchange(2, 64, False, True)(both)), name


@on_ranks(2)
def test_wrong_arguments(group):
    model = model_of()
    for message, options in (
        (r"compress: 'int4' must be one of", {"compress": "int4"}),
        (r"block: 7 must be even", {"block": 7}),
        (r"block: 0 must be", {"block": 0}),
        (r"group: None must be given without DDP", {"group": None}),
        (r"model: must have a parameter to compress", {"exempt": lambda name, param: True}),
    ):
        with pytest.raises(ValueError, match=message):
            compress_gradients(model, **{"compress": "int8", "group": group} | options)
    with pytest.raises(TypeError, match=r"model: 3 must be a module"):
        compress_gradients(3, "int8", group=group)
    with pytest.raises(TypeError, match=r"exempt: 3 must be a function"):
        compress_gradients(model, "int8", exempt=3, group=group)
    with pytest.raises(ValueError, match=r"table: dtype torch.float64 must be one of"):
        compress_gradients(model_of(torch.float64), "int8", group=group)
    uneven = model_of()
    if group.rank() == 1:  # alone
        uneven.small = nn.Parameter(torch.zeros(3, 6))
    with pytest.raises(ValueError, match=r"model: parameters and options of rank 1 must be those of rank 0"):
        compress_gradients(uneven, "int8", group=group)
    words = nn.ModuleList([nn.Embedding(8, 8, sparse=True)])
    with pytest.raises(ValueError, match=r"0: gradients of sparse=True must not be compressed"):
        compress_gradients(words, "int8", group=group)
    with pytest.raises(ValueError, match=r"block: 7 must be even"):  # on one rank alone
        compress_gradients(model, "int8", block=7 if group.rank() == 1 else 64, group=group)
    model.cube.requires_grad = False
    handle = compress_gradients(model, "int8", exempt=lambda name, param: name != "small", group=group)
    model.cube.grad = torch.zeros_like(model.cube)
    with pytest.raises(ValueError, match=r"model: a parameter that was frozen at compress_gradients must have no"):
        handle.average()
    assert handle.names == ["small"]
    with pytest.raises(ValueError, match=r"model: its gradients must not be compressed already"):
        compress_gradients(model, "int8", group=group)


@on_ranks(2, backend="gloo")
def test_wrappers_that_are_refused(group):
    ddp = DistributedDataParallel(Sum(), process_group=group)
    with pytest.raises(ValueError, match=r"group: .* must not be given with DDP"):
        compress_gradients(ddp, "int8", group=group)
    outer = nn.ModuleList([ddp])
    with pytest.raises(ValueError, match=r"model: 0 must not be wrapped by DDP"):
        compress_gradients(outer, "int8", group=group)
    compress_gradients(ddp, "int8")
    with pytest.raises(ValueError, match=r"model: its gradients must not be compressed already"):
        compress_gradients(ddp, "int8")
    with pytest.raises(ValueError, match=r"model: its gradients must not be compressed already"):
        compress_gradients(ddp.module, "int8", group=group)
    unused = DistributedDataParallel(Sum(), process_group=group, find_unused_parameters=True)
    with pytest.raises(ValueError, match=r"model: DDP's find_unused_parameters must be False"):
        compress_gradients(unused, "int8")
    hooked = DistributedDataParallel(Sum(), process_group=group)
    if group.rank() == 0:
        hooked.register_comm_hook(None, lambda state, bucket: None)
    with pytest.raises(ValueError, match=r"model: must not have another communication hook"):
        compress_gradients(hooked, "int8")
    sharded = nn.Linear(8, 8)
    fully_shard(sharded, mesh=init_device_mesh("cpu", (2,)))
    with pytest.raises(ValueError, match=r"weight: a DTensor must not be compressed: FSDP2"):
        compress_gradients(sharded, "int8", group=group)


def copies(group, head_dim):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    torch.manual_seed(0)
    model = tp_ext.ParallelAttention(4 * head_dim, 4, num_kv_heads=1, bias=False, group=mesh["tp"])
    handle = compress_gradients(model, "int8", group=mesh["dp"])
    return handle.names


def test_copies_of_kv_heads_are_not_in_blocks_with_other_heads():
    """The blocks of a shard of 2 heads of 5 times 20 would cross from q to k; those of 16 times 64 do not."""
    assert set(map(tuple, ranks.run(copies, 4, 5))) == {("out.weight",)}
    assert set(map(tuple, ranks.run(copies, 4, 16))) == {("qkv.weight", "out.weight")}


class Experts(nn.Module):
    def __init__(self, group):
        super().__init__()
        self.moe = tp_ext.ParallelMoE(8, 16, num_experts=4, top_k=1, expert_group=group)
        self.out = nn.Linear(8, 8)


def of_experts(group):
    model = Experts(group)
    handle = compress_gradients(model, "int8", group=group)
    return handle.names


def test_experts_that_the_axis_shards_are_left_alone():
    (names, _) = ranks.run(of_experts, 2)
    assert "out.weight" in names and not any("experts" in name for name in names), names
