"""``norm(x, residual)`` of RMSNorm and LayerNorm is ``norm(x + residual), x + residual``, sharded and wrapped."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import tp_ext
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import count_collectives_of, full_gradients, gradients, own_tokens

pytestmark = pytest.mark.core

RMS, LAYER = "RMSNorm", "LayerNorm"
CASES = [
    (RMS, (8,), {}),
    (RMS, (3, 4), {"elementwise_affine": False}),
    (LAYER, (3, 4), {}),
    (LAYER, (8,), {"bias": False}),
]
IDS = [f"{name}-{shape}-{options}" for name, shape, options in CASES]


def _pair(name, shape, options, group=None, sp=False):
    """torch's module and ours, with the same random weights."""
    torch.manual_seed(4)
    dense = getattr(nn, name)(shape, dtype=torch.float64, **options)
    for param in dense.parameters():
        nn.init.normal_(param, 1.0)
    ours = getattr(tp_ext, name)(shape, dtype=torch.float64, group=group, sequence_parallel=sp, **options)
    tp_ext.load_full_state_dict(ours, dense.state_dict(), group=group)
    return dense, ours


def _sharded(group, name, shape, options, tensors, sp):
    _, ours = _pair(name, shape, options, group, sp)
    x, residual, *dys = (own_tokens(t, group) if sp else t.clone() for t in tensors)
    outputs = ours(x.requires_grad_(), residual.requires_grad_())
    assert torch.equal(outputs[1], x + residual) and torch.equal(outputs[0], ours(outputs[1].detach()))
    torch.autograd.backward(outputs, dys)
    return [*outputs, x.grad, residual.grad], gradients(ours)


@pytest.mark.thinned
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize(("name", "shape", "options"), CASES, ids=IDS)
def test_unsharded_composition(name, shape, options, sp, p):
    """7 tokens, which no p > 1 divides. Sums of at most 14 fp64 numbers in another order."""
    dense, _ = _pair(name, shape, options)
    tensors = [torch.randn(7, 2, *shape, dtype=torch.float64) for _ in range(4)]
    x, residual = (t.clone().requires_grad_() for t in tensors[:2])
    outputs = dense(x + residual), x + residual
    torch.autograd.backward(outputs, tensors[2:])
    results = ranks.run(_sharded, p, name, shape, options, tensors, sp)
    for i, want in enumerate((*outputs, x.grad, residual.grad)):
        for rank, (got, _) in enumerate(results):
            own = want.tensor_split(p)[rank] if sp else want
            torch.testing.assert_close(got[i], own.detach(), rtol=1e-12, atol=1e-12)
    full = full_gradients([r[1] for r in results])
    assert full.keys() == dict(dense.named_parameters()).keys()
    for key, param in dense.named_parameters():
        torch.testing.assert_close(full[key], param.grad, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(("name", "sums"), [(RMS, 1), (LAYER, 2)])
@on_ranks(2, backend="gloo")
def test_collectives_are_those_of_the_plain_form(group, name, sums):
    _, ours = _pair(name, (8,), {}, group, True)
    x, residual = (torch.randn(3, 8, dtype=torch.float64, requires_grad=True) for _ in range(2))
    outputs = []
    forward = count_collectives_of(lambda: outputs.extend(ours(x, residual)))
    assert forward == {}
    assert count_collectives_of(lambda: sum(o.sum() for o in outputs).backward()) == {"all_reduce": sums}


class Stack(nn.Module):
    """Two sublayers with norms behind their sums, fused or one after the other."""

    def __init__(self, name, fused, group=None, sp=False):
        super().__init__()
        torch.manual_seed(5)
        norm = getattr(tp_ext, name)
        self.fused = fused
        self.norms = nn.ModuleList(norm(6, group=group, sequence_parallel=sp, dtype=torch.float64) for _ in range(2))
        self.linears = nn.ModuleList(nn.Linear(6, 6, dtype=torch.float64) for _ in range(2))

    def step(self, i, y, residual):
        x = self.linears[i](y).sin()
        if self.fused:
            return self.norms[i](x, residual)
        return self.norms[i](x + residual), x + residual

    def forward(self, x, use_checkpoint=False):
        y = residual = x
        for i in range(2):
            args = (i, y, residual)
            y, residual = checkpoint(self.step, *args, use_reentrant=False) if use_checkpoint else self.step(*args)
        return y + residual


def _gradients_of(model, x, **options):
    for _ in range(2):  # the second adds to the gradients of the first
        leaf = x.clone().requires_grad_()
        y = model(leaf, **options)
        y.square().sum().backward()
    full = (p.grad.full_tensor() if hasattr(p.grad, "full_tensor") else p.grad for p in model.parameters())
    return [y.detach(), leaf.grad, *full]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("how", ["plain", "sp", "checkpoint", "hooks", "ddp", "fsdp", "compile"])
@pytest.mark.parametrize("name", [RMS, LAYER])
@on_ranks(2, backend="gloo", timeout=120)
def test_a_model_is_that_of_add_and_norm(group, name, how):
    torch._dynamo.reset()
    results, calls = [], []
    for fused in (False, True):
        model = Stack(name, fused, group, how == "sp")
        x = torch.arange(30.0, dtype=torch.float64).view(5, 6).cos() + (how == "sp") * group.rank()
        options = {"use_checkpoint": how == "checkpoint"}
        if how == "ddp":
            model = DistributedDataParallel(model)
        elif how == "fsdp":
            mesh = init_device_mesh("cpu", (group.size(),))
            for norm in model.norms:
                fully_shard(norm, mesh=mesh)
            fully_shard(model, mesh=mesh)
        elif how == "compile":
            model = torch.compile(model, fullgraph=True, backend="aot_eager")
        elif how == "hooks":
            for norm in model.norms:
                norm.register_forward_hook(lambda module, args, out: calls.append(len(args)))
                norm.register_full_backward_hook(lambda module, grads_in, grads_out: calls.append(len(grads_out)))
        results.append(_gradients_of(model, x, **options))
    torch.testing.assert_close(*results, rtol=1e-12, atol=1e-12)
    if how == "hooks":  # forward, forward, backward, backward; twice
        assert calls == [1] * 8 + [2] * 8


@pytest.mark.parametrize("name", [RMS, LAYER])
def test_copies_and_keywords(name):
    ours = copy.deepcopy(getattr(tp_ext, name)(4))
    x, residual = torch.randn(3, 4), torch.randn(3, 4)
    for a, b in zip(ours(x, residual=residual), ours(x, residual), strict=True):
        assert torch.equal(a, b)
    assert torch.equal(ours(x, residual=None), ours(x))


@pytest.mark.parametrize("name", [RMS, LAYER])
def test_autocast_as_torch(name):
    """On CPU torch's norms stay in the dtype of x, and a sum of two dtypes has their common one."""
    ours, x = getattr(tp_ext, name)(4), torch.randn(3, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y, total = ours(x.bfloat16(), x)
    want = ours(x.bfloat16().float(), x)
    assert torch.equal(y, want[0]) and torch.equal(total, want[1])
    with pytest.raises(TypeError, match="residual: dtype Float must be that of x, BFloat16"):
        ours(x.bfloat16(), x)
