"""Shared experts of ParallelMoE, computed during the exchange of tokens: the operator, its overlap, the layer."""

import tempfile
import time
from pathlib import Path

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode

import tp_ext
from tests.helpers import ranks
from tests.helpers.meshes import mesh_of
from tests.helpers.on_ranks import on_ranks
from tests.shm.backends import both_backends, group_of
from tp_ext import ParallelMoE, RouterConfig, _ops
from tp_ext.group import parallel_group

FP64 = {"dtype": torch.float64}
SENT = {2: [[3, 2], [0, 4]], 3: [[1, 0, 2], [0, 0, 0], [2, 3, 1]]}  # rows from each rank to each


# The operator


def _operands(group, dtype=torch.float64):
    p, rank = group.size(), group.rank()
    sizes = SENT[p][rank], [line[rank] for line in SENT[p]]
    generator = torch.Generator().manual_seed(rank)
    shapes = [(sum(sizes[0]), 3), (5, 4), (6, 4)]
    tensors = [torch.randn(shape, **FP64, generator=generator).to(dtype).requires_grad_() for shape in shapes]
    return parallel_group(group).name, sizes, tensors


def _overlapped(name, sizes, rows, x, weight):
    return _ops.all_to_all_linear(rows, name, *sizes, x, weight)


def _in_turn(name, sizes, rows, x, weight):
    return _ops.all_to_all_region(rows, name, 0, 0, *sizes), x @ weight.T


def _derivatives(call, name, sizes, tensors):
    """Results, first and second derivatives."""
    results = call(name, sizes, *tensors)
    first = torch.autograd.grad(sum(y.sin().sum() for y in results), tensors, create_graph=True)
    second = torch.autograd.grad(sum(one.square().sum() for one in first), tensors)
    return [*results, *first, *second]


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("p", [2, 3])
@on_ranks()
def test_operator_is_exchange_and_linear(group, traced):
    """Uneven numbers of rows, a rank without rows; derivatives of first and second order."""
    name, sizes, tensors = _operands(group)
    want = _derivatives(_in_turn, name, sizes, tensors)
    if traced:
        with CommDebugMode():
            got = _derivatives(_overlapped, name, sizes, tensors)
    else:
        got = _derivatives(_overlapped, name, sizes, tensors)
    torch.testing.assert_close(got, want, rtol=1e-14, atol=1e-14)
    tensors[1].requires_grad_(False)
    (drows,) = torch.autograd.grad(_overlapped(name, sizes, *tensors)[0].sin().sum(), tensors[:1])
    torch.testing.assert_close(
        drows, torch.autograd.grad(_in_turn(name, sizes, *tensors)[0].sin().sum(), tensors[:1])[0]
    )


@on_ranks(2, backend="gloo")
def test_operator_under_compile_autocast_and_main_grad(group):
    name, sizes, tensors = _operands(group)
    torch._dynamo.reset()
    compiled = torch.compile(_overlapped, fullgraph=True, backend="aot_eager")(name, sizes, *tensors)
    torch.testing.assert_close(compiled, _overlapped(name, sizes, *tensors))
    low = [t.detach().bfloat16() for t in tensors]
    with torch.autocast("cpu", torch.bfloat16):
        rows, y = _overlapped(name, sizes, *(t.detach().float() for t in tensors))
    assert rows.dtype == torch.float32 and torch.equal(y, low[1] @ low[2].T)
    main_grad = torch.zeros(6, 4, **FP64)
    rows, y = _ops.all_to_all_linear(tensors[0], name, *sizes, tensors[1], tensors[2], main_grad)
    (y.sin().sum() + rows.sum()).backward()
    assert tensors[2].grad is None
    (want,) = torch.autograd.grad((tensors[1] @ tensors[2].T).sin().sum(), tensors[2])
    torch.testing.assert_close(main_grad, want)
    with pytest.raises(ValueError, match="split_sizes"):
        _ops.all_to_all_linear(tensors[0], name, [9, 9], sizes[1], *tensors[1:])
    with pytest.raises(ValueError, match="x: shape"):
        _ops.all_to_all_linear(tensors[0], name, *sizes, tensors[0], tensors[2])


class _Signal:
    """A file that one rank makes and another waits for."""

    def __init__(self, folder, name):
        self.path = Path(folder) / name

    def set(self):
        self.path.touch()

    def wait(self):
        end = time.monotonic() + 15
        while not self.path.exists():
            if time.monotonic() > end:
                raise TimeoutError(self.path.name)
            time.sleep(0.001)


def _during(world, backend, folder):
    """Rank 1 exchanges after rank 0's first GEMM began; and rank 0's GEMM ends after rank 1 has its rows."""
    name, sizes, tensors = _operands(group_of(backend), torch.float32)
    calls = []

    def mm(x, y):
        calls.append(1)
        if len(calls) == 1:
            begun.set()
            arrived.wait()
        return (x[:, :, None] * y[None]).sum(1)

    for phase in ("forward", "backward"):
        begun, arrived = _Signal(folder, f"begun {phase}"), _Signal(folder, f"arrived {phase}")
        calls.clear()
        library = torch.library.Library("aten", "IMPL")
        if world.rank() == 0:
            library.impl("mm", mm, "CPU")
        else:
            begun.wait()
        try:
            if phase == "forward":
                results = _overlapped(name, sizes, *tensors)
            else:
                sum(y.sum() for y in results).backward()
        finally:
            library._destroy()
        if world.rank():
            arrived.set()


@both_backends
def test_the_gemms_run_during_the_exchange(backend):
    """Forward and backward. Waiting for the exchange first would never let the other rank begin its own; computing
    first would never let it have its rows."""
    with tempfile.TemporaryDirectory() as folder:
        ranks.run(_during, 2, backend, folder)


# The layer


def _made(groups, sp, **options):
    torch.manual_seed(0)
    ep, tp = groups
    layer = ParallelMoE(
        4, 6, 5, 2, group=tp, expert_group=ep, router=RouterConfig(balance_loss=0.5), shared_experts=2, bias=True,
        sequence_parallel=sp, **{**FP64, **options},
    )  # fmt: skip
    generator = torch.Generator().manual_seed(0 if ep is None else ep.rank())
    x = torch.randn(6, 4, generator=generator, **FP64)
    if sp:
        x = x.tensor_split(tp.size())[tp.rank()]
    return layer, x.to(layer.router.weight.dtype)


def _step(layer, x):
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x)
    (y.float() if y.dtype == torch.bfloat16 else y).sin().sum().add(layer.losses.total).backward()
    return {"y": y.detach(), "dx": x.grad, **{name: param.grad for name, param in layer.named_parameters()}}


def _counts(call):
    with tp_ext.debug.count_collectives() as counts:
        call()
    return counts.by_kind()


@pytest.mark.parametrize("sp", [False, True])
@on_ranks(4)
def test_layer_with_the_shared_block_during_the_exchange_and_after_it(world, sp):
    """The same numbers, also under autocast; without the collectives of the block."""
    kinds = ("all_gather", "reduce_scatter") if sp else ("all_reduce",)
    mesh = mesh_of(2, 2, names=("ep", "tp"))
    layer, x = _made((mesh["ep"].get_group(), mesh["tp"].get_group()), sp)
    found = [_step(layer, x)]
    counts = [_counts(lambda: _step(layer, x))]
    hook = layer.shared.register_forward_hook(lambda module, x, y: None)  # the block is called as it is
    found.append(_step(layer, x))
    counts.append(_counts(lambda: _step(layer, x)))
    hook.remove()
    for name, want in found[1].items():
        torch.testing.assert_close(found[0][name], want, rtol=1e-12, atol=1e-12, msg=name)
    with torch.autocast("cpu", torch.bfloat16):
        low, _ = _made((mesh["ep"].get_group(), mesh["tp"].get_group()), sp, dtype=torch.float32)
        for name, got in _step(low, x.float()).items():
            torch.testing.assert_close(got.double(), found[0][name], rtol=0.1, atol=0.1, msg=name)
    tp_ext.add_lora(layer, targets="shared.up", r=2, alpha=1)
    layer(x)
    during, after = counts
    saved = {kind: after[kind] - during[kind] for kind in kinds}
    assert saved == ({"all_gather": 3, "reduce_scatter": 2} if sp else {"all_reduce": 2})


FUSED = ["experts.up_weight", "experts.down_weight", "shared.up.weight", "shared.down.weight"]


@pytest.mark.parametrize("sp", [False, True])
@on_ranks(4)
def test_gradients_add_up_in_main_grad(world, sp):
    """Two microbatches; and the gradient of the input alone, then those of the weights, as pipelines ask for them."""
    mesh = mesh_of(2, 2, names=("ep", "tp"))
    groups = mesh["ep"].get_group(), mesh["tp"].get_group()
    plain, x = _made(groups, sp)
    fused, _ = _made(groups, sp, grad_accumulation_fusion=True)
    weights = [fused.get_parameter(name) for name in FUSED]
    for weight in weights:
        weight.main_grad = torch.ones_like(weight)
    want = _step(plain, x)
    for got in (_step(fused, x), _step(fused, x)):
        for name, grad in got.items():
            assert grad is None if name in FUSED else torch.equal(grad, want[name]), name
    for name, weight in zip(FUSED, weights, strict=True):
        torch.testing.assert_close(weight.main_grad, 1 + 2 * want[name], rtol=1e-12, atol=1e-12, msg=name)
        weight.main_grad.zero_()
    x = x.clone().requires_grad_()
    loss = fused(x).sin().sum() + fused.losses.total
    (dx,) = torch.autograd.grad(loss, [x], retain_graph=True)
    assert torch.equal(dx, want["dx"]) and not any(weight.main_grad.any() for weight in weights)
    loss.backward(inputs=weights)
    for name, weight in zip(FUSED, weights, strict=True):
        torch.testing.assert_close(weight.main_grad, want[name], rtol=1e-12, atol=1e-12, msg=name)
    del weights[0].main_grad
    with pytest.raises(ValueError, match=r"weight\.main_grad: None must be a tensor"):
        fused(x)


def test_main_grad_of_half_precision_adds_up_in_fp32():
    """257 ones are 256 in bf16; experts without rows keep what they have."""
    weight = torch.zeros(2, 4, 5, dtype=torch.bfloat16, requires_grad=True)
    main_grad = torch.zeros(2, 4, 5)
    for _ in range(2):
        y = _ops.grouped_linear(torch.ones(257, 5, dtype=torch.bfloat16), weight, [0, 257], main_grad)
        y.backward(torch.ones_like(y))
    assert weight.grad is None and torch.equal(main_grad, torch.tensor([0.0, 514.0])[:, None, None].expand(2, 4, 5))


@on_ranks(2, backend="gloo")
def test_both_backends_give_the_same_bits(world):
    found = []
    for backend in ("gloo", "tp_shm"):
        group = group_of(backend)
        for groups in ((group, None), (None, group)):
            found.append(_step(*_made(groups, sp=groups[1] is not None)))
    gloo_ep, gloo_tp, shm_ep, shm_tp = found
    for want, got in ((gloo_ep, shm_ep), (gloo_tp, shm_tp)):
        assert want.keys() == got.keys()
        for name in want:
            assert torch.equal(want[name], got[name]), name
