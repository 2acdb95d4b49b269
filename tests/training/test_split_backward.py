"""Backward in two halves, as torch's pipeline schedules without bubbles run it: first the gradient of the input, later
those of the weights. Every module: the same bits as of one backward, and nothing is computed or communicated twice."""

from collections import Counter

import pytest
import torch
from torch.distributed.pipelining._backward import stage_backward_input, stage_backward_weight

import tp_ext
from tests.helpers.makers import CASES, build, caller, own_input, own_upstream, same
from tests.helpers.on_ranks import on_ranks

NAMES = [name for name, case in CASES.items() if case.takes != "ids" and name != "dropout"]
NORMS = {"tp_ext::_rms_norm_bwd", "tp_ext::_layer_norm_bwd"}  # each call computes the gradients that are asked for
FUSED = {"grad_accumulation_fusion": True}


def _forward(name, module, group, sp, dtype=torch.float64):
    x = own_input(name, module, group, sp, dtype)
    torch.manual_seed(14)
    return x, caller(name, module)(x), own_upstream(name, module, group, sp, dtype)


def _whole(module, x, y, dy):
    y.backward(dy)


def _halves(module, x, y, dy):
    before = [p.grad for p in module.parameters()]
    _, groups = stage_backward_input((y,), [dy], [x], module.parameters())
    assert all(p.grad is grad for p, grad in zip(module.parameters(), before, strict=True))
    stage_backward_weight(module.parameters(), groups)


def _backward(name, module, group, sp, run):
    """dx and all gradients; how often each GEMM, fused kernel and collective ran."""
    x, y, dy = _forward(name, module, group, sp)
    module.zero_grad()
    with tp_ext.debug.count_collectives() as counts, torch.profiler.profile() as profile:
        run(module, x, y, dy)
    ran = Counter(event.name for event in profile.events() if event.name.startswith(("tp_ext::_", "aten::mm")))
    ran += Counter({(row.kind, row.payload): row.number for row in counts.rows})
    return [x.grad, *(p.grad for p in module.parameters())], ran


@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("p", [1, 2])
@on_ranks(backend="gloo")
def test_gradients_and_work_are_those_of_one_backward(group, sp):
    for name in NAMES:
        module = build(name, group, sp)
        tp_ext.uncoalesce_gradients(module)
        want, once = _backward(name, module, group, sp, _whole)
        got, ran = _backward(name, module, group, sp, _halves)
        assert same(got, want), name
        assert {k: n for k, n in ran.items() if k not in NORMS} == {k: n for k, n in once.items() if k not in NORMS}, (
            name
        )


@on_ranks(2)
def test_only_the_same_gradient_is_taken(group):
    """The second half with another dy, or with dy modified since, uses that one."""
    module = build("row", group, True)
    weight, grads = module.weight, []
    for change in ("none", "another", "modified"):
        x, y, dy = _forward("row", module, group, True)
        torch.autograd.grad(y, x, dy, retain_graph=True)
        used = {"none": dy, "another": dy * 2, "modified": dy.mul_(2) if change == "modified" else dy}[change]
        grads.append(torch.autograd.grad(y, weight, used)[0])
    once, *twice = grads
    assert all(torch.equal(one, 2 * once) for one in twice)


@pytest.mark.parametrize("low_precision", [False, True])
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("name", ["column", "row"])
@on_ranks(2)
def test_gradients_accumulated_into_main_grad(group, name, sp, low_precision):
    """The second half, torch.autograd.grad, gets zeros for these weights, since it takes no missing gradient."""
    modules = {}
    for fused in (False, True):
        torch.manual_seed(3)
        options = {"group": group, "sequence_parallel": sp, "dtype": torch.float32} | (FUSED if fused else {})
        modules[fused] = {
            "column": lambda o: tp_ext.ColumnParallelLinear(8, 10, **o),
            "row": lambda o: tp_ext.RowParallelLinear(10, 8, **o),
        }[name](options)
    plain, fused = modules[False], modules[True]
    weights = [param for param in fused.parameters() if param.dim() == 2]
    for weight in weights:
        weight.main_grad = torch.zeros_like(weight)
    for module in (plain, fused):
        for _ in range(2):  # microbatches
            with torch.autocast("cpu", torch.bfloat16, enabled=low_precision):
                x, y, dy = _forward(name, module, group, sp, torch.float32)
            _halves(module, x, y, dy.to(y.dtype))
    for key, param in plain.named_parameters():
        got = fused.get_parameter(key)
        if param.dim() == 2:
            assert not got.grad.any() and got.grad.dtype == got.dtype
        close = (
            {"rtol": 1e-5, "atol": 1e-5}
            if not low_precision
            else {"rtol": 0, "atol": 0.02 * float(param.grad.abs().max())}
        )
        torch.testing.assert_close(got.main_grad if param.dim() == 2 else got.grad, param.grad, **close)


@on_ranks(2)
def test_coalesced_gradients_are_refused_by_torch(group):
    module = build("block", group, True)
    x, y, dy = _forward("block", module, group, True)
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        _halves(module, x, y, dy)
    assert True
