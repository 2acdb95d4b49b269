"""grad_accumulation_fusion: the gradient of the weight is added to weight.main_grad, and autograd sees none."""

import pytest
import torch
from torch import nn

from tests.helpers import oracle, ranks
from tests.helpers.on_ranks import on_ranks
from tp_ext import (
    ColumnParallelLinear,
    ParallelAttention,
    ParallelMLP,
    RowParallelLinear,
    VocabParallelLMHead,
    shardings,
)

pytestmark = pytest.mark.core

FUSED = {"grad_accumulation_fusion": True}


def _microbatches(layer, group, xs, grads):
    """Backward of each microbatch; the weight's gradients afterwards, wherever they are."""
    for x, dy in zip(xs, grads, strict=True):
        x = oracle.own_input(x, layer, group)
        y = layer(x, dy.shape[0])
        y.backward(oracle.own_output(dy, layer, group))
    return layer.weight


@on_ranks(1, 2, 3, 4)
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
def test_two_microbatches_add_up(group, kind, sp):
    dtype = torch.float64
    torch.manual_seed(1)
    plain = kind(7, 10, group=group, sequence_parallel=sp, dtype=dtype)
    fused = kind(7, 10, group=group, sequence_parallel=sp, dtype=dtype, **FUSED)
    fused.load_state_dict(plain.state_dict())
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    start = torch.randn(fused.weight.shape, generator=torch.Generator().manual_seed(group.rank()), dtype=wide)
    fused.weight.main_grad = start.clone()
    xs = torch.randn(2, 9, 7, dtype=dtype)
    grads = torch.randn(2, 9, 10, dtype=dtype)
    plain_grad = _microbatches(plain, group, xs, grads).grad
    weight = _microbatches(fused, group, xs, grads)
    assert weight.grad is None and torch.equal(fused.bias.grad, plain.bias.grad)
    assert weight.main_grad.dtype == wide
    added = weight.main_grad - start
    torch.testing.assert_close(added, plain_grad, rtol=1e-12, atol=1e-12)


@on_ranks(1, 2)
def test_half_precision_adds_up_in_fp32(group):
    """257 ones are 256 in bf16: only a sum in fp32, from GEMM to main_grad, gives 514."""
    layer = ColumnParallelLinear(5, 4, False, group=group, dtype=torch.bfloat16, **FUSED)
    layer.weight.main_grad = torch.zeros(layer.weight.shape)
    x, dy = torch.full((257, 5), 1.0, dtype=torch.bfloat16), torch.full((257, 4), 1.0, dtype=torch.bfloat16)
    for _ in range(2):
        layer(x).backward(oracle.own_output(dy, layer, group))
    main_grad = layer.weight.main_grad
    assert torch.equal(main_grad, torch.full_like(main_grad, 514.0))


MODULES = {
    "mlp": lambda group, **options: ParallelMLP(6, 10, activation="swiglu", group=group, **options),
    "attention": lambda group, **options: ParallelAttention(8, 4, num_kv_heads=2, group=group, **options),
    "head": lambda group, **options: VocabParallelLMHead(6, 11, group=group, **options),
}


def _module(group, name, sp):
    options = {"sequence_parallel": sp, "dtype": torch.float64}
    torch.manual_seed(2)
    plain, fused = MODULES[name](group, **options), MODULES[name](group, **options, **FUSED)
    fused.load_state_dict(plain.state_dict())
    for weight in (p for p in fused.parameters() if p.dim() == 2):
        weight.main_grad = torch.zeros_like(weight)
    x = torch.randn(12, 8 if name == "attention" else 6, dtype=torch.float64)
    call = {"batch_size": 2} if name == "attention" else {}
    for module in (plain, fused):
        own = oracle.own_tokens(x, group) if sp else x
        module(own, **call).square().sum().backward()
    wants = dict(plain.named_parameters())
    for key, param in fused.named_parameters():
        got = param.main_grad if param.dim() == 2 else param.grad
        torch.testing.assert_close(got, wants[key].grad, rtol=1e-12, atol=1e-12, msg=key)
        assert (param.grad is None) == (param.dim() == 2)
    matrices = {name: param for name, param in fused.named_parameters() if param.dim() == 2}
    return {name: (matrices[name].main_grad, cut) for name, cut in shardings(fused) if name in matrices}


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("name", MODULES)
def test_blocks_pass_it_on(name, sp, p):
    """With 4 ranks and 2 KV heads, too: the copies end with the same bits."""
    oracle.full_gradients(ranks.run(_module, p, name, sp))


@pytest.mark.parametrize("p", [1, 2, 3])
@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@on_ranks()
def test_a_weight_of_the_callers(group, kind):
    layer = kind(6, 8, group=group, dtype=torch.float64, device="meta")
    weight = nn.Parameter(torch.randn(layer.weight.shape, dtype=torch.float64))
    layer.bias = None
    layer.to_empty(device="cpu")
    x = oracle.own_input(torch.randn(5, 6, dtype=torch.float64), layer, group)
    layer(x, weight=weight).sum().backward()
    own = kind(6, 8, False, group=group, dtype=torch.float64)
    own.load_state_dict({"weight": weight.detach()})
    own(x).sum().backward()
    assert torch.equal(weight.grad, own.weight.grad)
    with pytest.raises(ValueError, match=rf"weight: shape \(3, 3\) must be \({own.weight.shape[0]}, "):
        layer(x, weight=torch.zeros(3, 3, dtype=torch.float64))
    own.weight = nn.Parameter(torch.zeros(3, 3, dtype=torch.float64))
    with pytest.raises(ValueError, match=r"weight: shape \(3, 3\) must be"):
        own(x)


@pytest.mark.parametrize("p", [1, 2])
@on_ranks()
def test_backward_twice_in_part_and_frozen(group):
    layer = ColumnParallelLinear(3, 4, group=group, dtype=torch.float64, **FUSED)
    x = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
    with torch.no_grad():
        layer(x)  # asks for no main_grad
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    y = layer(x)
    y.sum().backward(retain_graph=True)
    once = layer.weight.main_grad.clone()
    y.sum().backward()
    torch.testing.assert_close(layer.weight.main_grad, 2 * once, rtol=1e-14, atol=1e-14)  # the GEMM adds term by term
    before = layer.weight.main_grad.clone()
    torch.autograd.grad(layer(x).sum(), x)  # the weight is not asked for
    assert torch.equal(layer.weight.main_grad, before)
    with pytest.raises(NotImplementedError, match="grad_accumulation_fusion has no second derivative"):
        torch.autograd.grad(layer(x).square().sum(), x, create_graph=True)
    layer.weight.requires_grad_(False)
    del layer.weight.main_grad
    layer(x).sum().backward()  # a frozen weight needs none either


@pytest.mark.parametrize("p", [1, 2])
@on_ranks()
def test_autocast(group):
    layer = ColumnParallelLinear(8, 4, group=group, **FUSED)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    x, dy = torch.randn(16, 8), torch.randn(16, 4)
    with torch.autocast("cpu", torch.bfloat16):
        y = layer(x)
    assert y.dtype == torch.bfloat16
    y.backward(oracle.own_output(dy.bfloat16(), layer, group))
    want = oracle.own_output(dy.bfloat16(), layer, group).float().T @ x.bfloat16().float()
    torch.testing.assert_close(layer.weight.main_grad, want)  # in fp32, of bf16 factors


@pytest.mark.parametrize("kind", [ColumnParallelLinear, RowParallelLinear])
@on_ranks(2, backend="gloo")
def test_compiled(group, kind):
    layer = kind(4, 4, group=group, **FUSED)
    layer.weight.main_grad = torch.zeros_like(layer.weight)
    x = oracle.own_input(torch.randn(6, 4), layer, group)
    layer(x).sin().sum().backward()
    want = layer.weight.main_grad.clone()
    layer.weight.main_grad.zero_()
    torch.compile(layer, backend="aot_eager", fullgraph=True)(x).sin().sum().backward()
    torch.testing.assert_close(layer.weight.main_grad, want)
    assert layer.weight.grad is None


def _refused(group, make):
    layer = ColumnParallelLinear(4, 6, group=group, **FUSED)
    layer.weight.main_grad = make(layer.weight)
    layer(torch.randn(2, 4))


@pytest.mark.parametrize(
    ("make", "error", "match"),
    [
        ("none", ValueError, "weight.main_grad: None must be a tensor"),
        ("shape", ValueError, "main_grad: shape .* must be that of weight"),
        ("integers", TypeError, "main_grad: dtype"),
        ("graph", ValueError, "main_grad: must not require a gradient"),
    ],
)
def test_refused(make, error, match):
    ranks.run_raises(_refused, 2, error, match, MAKE[make])


def _none(weight):
    return None


def _shape(weight):
    return torch.zeros(1, 1)


def _integers(weight):
    return torch.zeros(weight.shape, dtype=torch.int64)


def _graph(weight):
    return torch.zeros_like(weight).requires_grad_()


MAKE = {"none": _none, "shape": _shape, "integers": _integers, "graph": _graph}


def test_a_second_gradient_is_added_to_main_grad():
    """By the operator alone: layers with copied heads call it in every microbatch."""
    x, main_grad = torch.ones(2, requires_grad=True), torch.ones(2)
    for _ in range(2):
        torch.ops.tp_ext.accumulate_grad_into(x, main_grad).sum().backward()
    assert main_grad.tolist() == [3, 3] and x.grad is None
