"""A call that is not recorded may take another path: kernels of few rows, of few queries, of weights of few bits.
Whatever it is given, it gives what the recorded call does: shape, dtype, values, or an error of the same type."""

import contextlib
import itertools

import pytest
import torch
from torch import nn

import tp_ext
from tp_ext import _ops, low_precision

FP64, FP32, BF16, FP16 = torch.float64, torch.float32, torch.bfloat16, torch.float16
DTYPES = (FP64, FP32, BF16, FP16)


def inputs(features, dtype):
    """Tensors of all forms, [.., features]."""
    base = torch.randn(5, features).to(dtype)
    return {
        "rows": base,
        "one dim": base[0].clone(),
        "no rows": base[:0],
        "an empty dim": torch.randn(2, 0, features).to(dtype),
        "transposed": torch.randn(features, 5).to(dtype).t(),
        "expanded": base[:1].expand(4, features),
        "four dims": torch.randn(2, 1, 3, features).to(dtype),
        "every second": torch.randn(3, 2 * features).to(dtype)[:, ::2],
        "NaN": base * float("nan"),
        "more rows": torch.randn(9, features).to(dtype),
    }


def outcome(call, context):
    try:
        with context():
            y = call()
    except Exception as error:
        return type(error), str(error).split("\n")[0]
    return [t.detach() for t in (y if isinstance(y, tuple) else (y,)) if isinstance(t, torch.Tensor)]


def difference(call, recorded, autocast=False):
    """What differs between a call and a recorded one; None if nothing does. Under autocast an output may be fp32."""
    want = outcome(recorded, contextlib.nullcontext)
    for context in (torch.no_grad, torch.inference_mode):
        got = outcome(call, context)
        if isinstance(want, tuple) or isinstance(got, tuple):
            if not (isinstance(want, tuple) and isinstance(got, tuple) and want[0] is got[0]):
                return want, got
            continue
        for a, b in zip(want, got, strict=True):
            bound = 3e-2 if autocast or a.dtype in (BF16, FP16) else 1e-4
            alike = a.shape == b.shape and a.dtype == b.dtype
            if not alike or not torch.allclose(a.double(), b.double(), bound, bound, equal_nan=True):
                return a, b
    return None


def linears(group):
    for kind, (fan_in, fan_out) in itertools.product(
        (tp_ext.ColumnParallelLinear, tp_ext.RowParallelLinear), ((256, 512), (512, 256))
    ):
        for dtype, of_x, bias in itertools.product(DTYPES, DTYPES, (True, False)):
            if of_x in (dtype, FP32):
                layer = kind(fan_in, fan_out, bias=bias, group=group, dtype=dtype)
                yield (kind.__name__, dtype, of_x, bias), layer, layer.weight.shape[1], of_x
        other = kind(fan_in, fan_out, group=group)
        other.bias = nn.Parameter(other.bias.detach().double())
        yield (kind.__name__, "bias fp64"), other, other.weight.shape[1], FP32


def few_bits(group):
    for kind, weights, dtype, of_x in itertools.product(
        (tp_ext.ColumnParallelLinear, tp_ext.RowParallelLinear), ("int8", "int4"), (FP32, BF16), (FP32, BF16, FP16)
    ):
        layer = kind(256, 512, group=group, dtype=dtype)
        features = layer.weight.shape[1]
        low_precision.quantize_(nn.Sequential(layer), weights, block=32)
        yield (kind.__name__, weights, dtype, of_x), layer, features, of_x


def experts(group):
    for dtype, activation in itertools.product(DTYPES, ("gelu", "swiglu")):
        # All of them, since rounding chooses between two of nearly equal scores
        layer = tp_ext.ParallelMoE(256, 512, 3, 3, activation=activation, group=group, dtype=dtype).eval()
        yield ("experts", dtype, activation), layer, 256, dtype


def _compare(rank, group, kind):
    torch.manual_seed(0)
    wrong = {}
    for name, layer, features, dtype in globals()[kind](group):
        for (form, x), autocast in itertools.product(inputs(features, dtype).items(), (False, True)):

            def call(x=x, layer=layer, autocast=autocast):
                with torch.autocast("cpu", BF16, enabled=autocast):
                    return layer(x)

            if found := difference(call, lambda x=x, call=call: call(x.clone().requires_grad_()), autocast):
                wrong[*name, form, autocast] = found
    assert not wrong, wrong


@pytest.mark.parametrize("p", [1, 2])
@pytest.mark.parametrize("kind", ["linears", "few_bits", "experts"])
def test_layers(kind, p):
    tp_ext.debug.simulate(_compare, p, kind)


def _compare_attention(rank, group):
    torch.manual_seed(0)
    wrong = {}
    options = itertools.product((False, True), (8, 4, 2), (16, 20), DTYPES, (0, 1, 5, 9), ({}, {"sliding_window": 3}))
    more = itertools.product(
        (False,), (8, 2), (16,), (FP32,), (5,), ({"softcap": 5.0}, {"qk_norm": True}, {"rope": 1e4})
    )
    for causal, kv_heads, width, dtype, tokens, others in (*options, *more):
        layer = tp_ext.ParallelAttention(
            8 * width, 8, num_kv_heads=kv_heads, causal=causal, group=group, dtype=dtype, **others
        ).eval()
        x = torch.randn(2, tokens, 8 * width).to(dtype)
        masks = [None] if tokens != 5 or others else [None, torch.rand(2, 1, 5, 5).tril() + torch.eye(5) > 0.3]
        for mask in masks:

            def call(layer=layer, x=x, mask=mask):
                return layer(x) if mask is None else layer(x, attn_mask=mask)

            if found := difference(call, call):
                wrong[causal, kv_heads, width, dtype, tokens, str(others), mask is None] = found
    assert not wrong, wrong


@pytest.mark.parametrize("p", [1, 2])
def test_attention_layers(p):
    tp_ext.debug.simulate(_compare_attention, p)


def test_attention_of_tensors():
    torch.manual_seed(0)
    wrong, cases = {}, {}
    for dtype, kv_heads, queries, keys, width, of_v, batch in itertools.product(
        DTYPES, (4, 2, 3), (1, 5, 0), (7, 0), (16, 20), (16, 32, 20), (2, 1)
    ):
        q = torch.randn(2, 4, queries, width).to(dtype)
        k, v = (torch.randn(batch, kv_heads, keys, n).to(dtype) for n in (width, of_v))
        cases[dtype, kv_heads, queries, keys, width, of_v, batch] = q, k, v
    q, k, v = (torch.randn(2, 5, 4, 16).transpose(1, 2) for _ in range(3))
    of_one = torch.randn(2, 1, 5, 16).expand(2, 4, 5, 16)
    cases |= {
        "transposed": (q, k, v),
        "features first": (q, torch.randn(2, 4, 16, 5).transpose(2, 3), v),
        "expanded": (q, of_one, of_one),
        "another dtype": (q, k.double(), v.double()),
        "another dtype of v": (q, k, v.double()),
        "a shorter v": (q, k, v[:, :, :4]),
        "fewer heads of v": (q, k, v[:, :2]),
    }
    for name, (q, k, v) in cases.items():
        for causal in (False, True):

            def call(q=q, k=k, v=v, causal=causal):
                return _ops.attention(q, k, v, None, causal)

            if found := difference(call, lambda q=q, call=call: call(q.detach().requires_grad_())):
                wrong[name, causal] = found
    assert not wrong, wrong
    with pytest.raises(ValueError, match="v: 4 tokens must be the 5 of k"):
        _ops.attention(q.detach(), k, torch.randn(2, 4, 4, 16), None, False)


def _compare_norms(rank, group):
    name, wrong = group.group_name if group.size() > 1 else "", {}
    for dtype, of_residual, of_weight in itertools.product((FP32, BF16, FP16), (FP32, BF16), (FP32, BF16, None)):
        for form, x in inputs(64, dtype).items():
            residual = torch.randn(x.shape).to(of_residual)
            weight = None if of_weight is None else torch.rand(64).to(of_weight)

            def call(x=x, residual=residual, weight=weight):
                return _ops.all_reduce_rms_norm(x, residual, weight, 1e-5, name)

            if found := difference(call, lambda x=x, call=call: call(x.clone().requires_grad_())):
                wrong[form, dtype, of_residual, of_weight] = found
    assert not wrong, wrong


@pytest.mark.parametrize("p", [1, 2])
def test_the_end_of_a_row_linear(p):
    tp_ext.debug.simulate(_compare_norms, p)


def _compare_losses(rank, group):
    wrong = {}
    options = ({}, {"label_smoothing": 0.1, "ignore_index": 3}, {"z_loss": 0.1})
    for dtype, tokens, reduction, given in itertools.product(DTYPES, (0, 1, 3, 300), ("mean", "sum", "none"), options):
        head = tp_ext.VocabParallelLMHead(64, 101, group=group, dtype=dtype)
        x, targets = torch.randn(tokens, 64).to(dtype), torch.randint(101, (tokens,))

        def call(head=head, x=x, targets=targets, reduction=reduction, given=given):
            return head.loss(x, targets, reduction=reduction, **given)

        if found := difference(call, call):
            wrong[dtype, tokens, reduction, str(given)] = found
    assert not wrong, wrong


@pytest.mark.parametrize("p", [1, 2])
def test_losses(p):
    tp_ext.debug.simulate(_compare_losses, p)
