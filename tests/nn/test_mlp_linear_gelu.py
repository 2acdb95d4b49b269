"""ParallelMLP(gemm_epilogue=True): one operator gives what the three give; when it is taken, and when refused."""

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.helpers import oracle, ranks
from tests.nn.test_mlp import FFN, HIDDEN, DenseMLP, assert_as_dense, make_mlp
from tp_ext import ParallelMLP, add_lora, coalesce_gradients
from tp_ext._ops import parallel_mlp

pytestmark = pytest.mark.core

TOKENS = 7  # which no p > 1 divides
EVERY_P = pytest.mark.parametrize("p", [1, 2, 3, 4])
SP = pytest.mark.parametrize("sp", [False, True])


def _mlp(group, sp=False, gemm_epilogue=True, **options):
    options = {"activation": "gelu_tanh", "gemm_epilogue": gemm_epilogue, "dtype": torch.float64} | options
    return ParallelMLP(HIDDEN, FFN, group=group, sequence_parallel=sp, **options)


def _input(group, sp=False, dtype=torch.float64):
    torch.manual_seed(3)
    x = torch.randn(TOKENS, 2, HIDDEN, dtype=dtype)
    return (oracle.own_tokens(x, group).clone() if sp else x).requires_grad_()


def _step(layer, x, sp=False, call=None):
    """y and the gradients of its sines: of x and of all parameters."""
    return oracle.results(layer, x, lambda x: (layer if call is None else call)(x, TOKENS if sp else None))


def _close(got, want):
    torch.testing.assert_close(got, want, rtol=1e-12, atol=1e-12)


def _in_one(layer, x, sp=False):
    """True if a call of the layer is one operator: it runs no module inside."""
    with torch.profiler.profile() as profile:
        layer(x, TOKENS if sp else None)
    return any(event.name == "tp_ext::parallel_mlp" for event in profile.events())


# Values


@EVERY_P
@SP
def test_forward_and_every_gradient(sp, p):
    """Against plain torch, in fp64."""
    assert_as_dense(p, DenseMLP("gelu_tanh", True), sp, _close, gemm_epilogue=True)


def _half(group, unsharded, x):
    layer = make_mlp(group, unsharded, gemm_epilogue=True)
    return _step(layer, x.clone().requires_grad_())[:2]


def test_half_precision():
    """y and dx: errors of the plain block in bf16, as of three roundings of factors to 2^-8 of the largest value."""
    unsharded, x = DenseMLP("gelu_tanh", True, torch.bfloat16), torch.randn(TOKENS, HIDDEN, dtype=torch.bfloat16)
    wide = DenseMLP("gelu_tanh", True)
    wide.load_state_dict(unsharded.state_dict())
    wants = oracle.results(wide, x.double().requires_grad_())
    for results in ranks.run(_half, 2, unsharded, x):
        for got, want in zip(results, wants, strict=False):
            assert got.dtype == torch.bfloat16
            assert (got.double() - want).abs().max() <= 3 * 2**-8 * want.abs().max()


# In part, twice, frozen, main_grad


def _in_part(group, sp):
    layer, x = _mlp(group, sp=sp), _input(group, sp)
    want = dict(zip(["y", "x", *dict(layer.named_parameters())], _step(layer, x, sp), strict=True))
    inputs = {"x": x, **dict(layer.named_parameters())}
    y = layer(x, TOKENS if sp else None)
    dy = y.detach().cos()
    before = dy.clone(), x.detach().clone()
    for names in ([name] for name in inputs):  # backward of one input at a time, of the same graph
        got = torch.autograd.grad(y, [inputs[n] for n in names], dy, retain_graph=True)
        for name, grad in zip(names, got, strict=True):
            assert torch.equal(grad, want[name]), name
    for grad, name in zip(torch.autograd.grad(y, list(inputs.values()), dy), inputs, strict=True):
        assert torch.equal(grad, want[name]), f"{name} in the last backward"
    assert torch.equal(dy, before[0]) and torch.equal(x, before[1])
    for frozen in ([name] for name in inputs):
        for name, tensor in inputs.items():
            tensor.requires_grad_(name not in frozen)
        for name, grad in zip(["y", *inputs], _step(layer, x, sp), strict=True):
            assert grad is None if name in frozen else torch.equal(grad, want[name]), (frozen, name)
    with torch.no_grad():
        assert torch.equal(layer(x, TOKENS if sp else None), want["y"])


@pytest.mark.parametrize("p", [1, 2, 3])
@SP
def test_backward_in_part_twice_and_frozen(sp, p):
    """Each gradient alone, all together, and with each input frozen in turn: the same bits."""
    ranks.run(_in_part, p, sp)


def _saved(group, sp):
    """Bytes kept for backward, parameters aside, with the option and without, and with frozen weights."""
    sizes = []
    for gemm_epilogue, frozen in ((True, ""), (False, ""), (True, "down.weight"), (True, "up")):
        layer, x = _mlp(group, sp=sp, gemm_epilogue=gemm_epilogue), _input(group, sp)
        for name, param in layer.named_parameters():
            param.requires_grad_(not (frozen and name.startswith(frozen)))
        x.requires_grad_(frozen != "up")
        own, kept = {p.untyped_storage().data_ptr() for p in layer.parameters()}, {}

        def pack(t, own=own, kept=kept):
            if (pointer := t.untyped_storage().data_ptr()) not in own:
                kept[pointer] = t.untyped_storage().nbytes()
            return t

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            layer(x, TOKENS if sp else None)
        sizes.append(sum(kept.values()))
    tokens, ffn = x.shape[0], layer.up.weight.shape[0]
    return sizes, [16 * tokens * HIDDEN, 16 * TOKENS * ffn]


@SP
def test_bytes_saved(sp):
    """x, and the activation before and after gelu (docs/reference/memory.md); only the latter if down alone trains."""
    for sizes, (x, activation) in ranks.run(_saved, 2, sp):
        assert sizes == [x + 2 * activation, x + 2 * activation, x + activation, activation]


def _main_grad(group, sp):
    plain, fused = _mlp(group, sp=sp), _mlp(group, sp=sp, grad_accumulation_fusion=True)
    fused.load_state_dict(plain.state_dict())
    x = _input(group, sp)
    for param in fused.parameters():
        if param.dim() == 2:
            param.main_grad = torch.full_like(param, 2.0)
    want = _step(plain, x, sp)[:2]
    _close(_step(fused, x, sp)[:2], want)
    for (name, param), own in zip(fused.named_parameters(), plain.parameters(), strict=True):
        assert (param.grad is None) == (param.dim() == 2), name
        _close(param.main_grad - 2 if param.dim() == 2 else param.grad, own.grad)
    assert _in_one(fused, x, sp)
    del fused.down.weight.main_grad
    with pytest.raises(ValueError, match=r"weight\.main_grad: None must be a tensor"):
        fused(x, TOKENS if sp else None)


@pytest.mark.parametrize("p", [1, 2, 4])
@SP
def test_main_grad(sp, p):
    ranks.run(_main_grad, p, sp)


# Communication, other uses


def _communicate(group, sp):
    counts = []
    for gemm_epilogue in (True, False):
        layer, x, y = _mlp(group, sp=sp, gemm_epilogue=gemm_epilogue), _input(group, sp), []
        counts.append(oracle.count_collectives_of(lambda: y.append(layer(x, TOKENS if sp else None))))  # noqa: B023
        counts.append(oracle.count_collectives_of(lambda: y[0].sum().backward()))  # noqa: B023
    return counts


@SP
def test_collectives(sp):
    """Those of the two linears, forward and backward."""
    for counts in ranks.run(_communicate, 2, sp):
        assert counts[:2] == counts[2:] and all(counts)


def _wrapped(group, sp, how):
    layer, x = _mlp(group, sp=sp), _input(group, sp)
    want = _step(layer, x, sp)
    if how == "checkpoint":
        _close(_step(layer, x, sp, lambda *args: checkpoint(layer, *args, use_reentrant=False)), want)
    elif how == "compile":
        torch._dynamo.reset()
        _close(_step(layer, x, sp, torch.compile(layer, fullgraph=True, backend="aot_eager")), want)
    elif how == "coalesce":
        handle = coalesce_gradients(layer)
        _close(_step(layer, x, sp), want)
        handle.remove()
    else:
        low = layer.float()
        with torch.autocast("cpu", torch.bfloat16):
            y = low(x.float(), TOKENS if sp else None)
        y.float().sin().sum().backward()
        assert y.dtype == torch.bfloat16 and all(p.grad.dtype == torch.float32 for p in low.parameters())


@pytest.mark.parametrize("how", ["checkpoint", "compile", "coalesce", "autocast"])
@SP
def test_wrapped(sp, how):
    ranks.run(_wrapped, 2, sp, how, timeout=120)


def _called(layer):
    return lambda *args: layer.calls.append(1)


def _hooked(group):
    layer, x = _mlp(group), _input(group)
    want = _step(layer, x)
    layer.calls = []
    for part in (layer.up, layer.down):
        for register in (part.register_forward_pre_hook, part.register_forward_hook, part.register_full_backward_hook):
            assert _in_one(layer, x)
            handle = register(_called(layer))
            assert not _in_one(layer, x)
            before = len(layer.calls)
            _close(_step(layer, x), want)
            assert len(layer.calls) == before + 1
            handle.remove()
    handle = nn.modules.module.register_module_forward_hook(_called(layer))
    assert not _in_one(layer, x)
    handle.remove()
    bias, layer.up.bias = layer.up.bias, None
    assert not _in_one(layer, x)
    layer.up.bias = bias
    assert _in_one(layer, x)
    add_lora(layer, r=2, alpha=2.0, targets=["up"])
    assert not _in_one(layer, x)
    _close(layer(x), want[0])  # adapters start as nothing


def test_parts_with_hooks_are_called():
    """With a hook of any kind on a linear, without its bias, or with another module there: as without the option."""
    ranks.run(_hooked, 2)


# Errors


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"activation": "gelu"}, "activation='gelu': it must be 'gelu_tanh'"),
        ({"activation": "swiglu"}, "activation='swiglu': it must be 'gelu_tanh'"),
        ({"bias": False}, "bias=False: it must be True"),
        ({"overlap_chunks": 2}, "overlap_chunks=2: it must be 1"),
    ],
)
def test_options_that_cannot_be_combined(options, match):
    with pytest.raises(ValueError, match=f"gemm_epilogue: True must not be combined with {match}"):
        ParallelMLP(4, 8, **({"activation": "gelu_tanh", "gemm_epilogue": True} | options))
    assert "gemm_epilogue=True" in repr(ParallelMLP(4, 8, activation="gelu_tanh", gemm_epilogue=True))


def test_errors_of_the_operator():
    x, up, down = torch.ones(3, 4), torch.ones(8, 4), torch.ones(4, 8)

    def call(x=x, up=up, up_bias=up[:, 0], down=down, down_bias=down[:, 0], main_grad=None):
        return parallel_mlp(x, up, up_bias, down, down_bias, "", False, None, None, main_grad, True)

    for options, error, match in (
        ({"x": x[:, 1:]}, ValueError, r"x: shape \[3, 3\] must end in the 4 input features"),
        ({"up_bias": up[1:, 0]}, ValueError, r"bias: shape \[7\] must be the 8"),
        ({"down": down[:, 1:]}, ValueError, r"down_weight: shape \[4, 7\] must have as many columns as up_weight .* 8"),
        ({"down": down.double()}, TypeError, "down_weight: dtype Double must be that of x, Float"),
        ({"down_bias": down[1:, 0]}, ValueError, r"down_bias: shape \[3\] must be the 4"),
        ({"main_grad": up}, ValueError, r"main_grad: shape \[8, 4\] must be that of weight, \[4, 8\]"),
    ):
        with pytest.raises(error, match=match):
            call(**options)
    with pytest.raises(NotImplementedError, match=r"gemm_epilogue.* has no second derivative"):
        torch.autograd.grad(call(x.requires_grad_()).sum(), x, create_graph=True)
