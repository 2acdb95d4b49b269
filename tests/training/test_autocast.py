"""Autocast on CPU: dtypes and values of every module as those of its torch counterpart under the same autocast."""

import pytest
import torch

import tp_ext
from tests.fuzz import plain
from tests.helpers import registry
from tests.helpers.makers import (
    CASES,
    FFN,
    HIDDEN,
    assert_parity,
    build,
    caller,
    gathered,
    outcome,
    own_input,
    own_upstream,
    same,
    step,
)
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import gradients

pytestmark = pytest.mark.core

LOW = {torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # and their units in the last place
BOTH = pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
WITH_REFERENCE = [name for name, case in registry.CASES.items() if not case.dropout]


def _reference_step(name, low):
    """The layer in plain torch, with the case's weights."""
    module = build(name, None, False, torch.float32)
    reference = CASES[name].make(plain, dtype=torch.float32)
    reference.load_state_dict(tp_ext.full_state_dict(module))
    x = own_input(name, module, None, False, torch.float32)
    with torch.autocast("cpu", low):
        y = caller(name, reference)(x)
    y.backward(own_upstream(name, module, None, False, torch.float32).to(y.dtype))
    return {**{key: value.grad for key, value in reference.named_parameters()}, "y": y.detach(), "dx": x.grad}


def _autocast_step(group, name, sp, low):
    module = build(name, group, sp, torch.float32)
    with torch.autocast("cpu", low):
        y, dx, *_ = outcome(name, module, group, sp)
    return y, dx, gradients(module)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("low", LOW, ids=str)
@BOTH
@pytest.mark.parametrize("p", [1, 2, 4])
def test_dtypes_and_values_of_torchs_modules(p, sp, low):
    """Inputs, weights, each of the p partial sums and every result in between are rounded once to the low precision,
    here and there at other places: at most (p + 12) half units of the largest value."""
    for name in WITH_REFERENCE:
        bound = (p + 12) * LOW[low] / 2
        assert_parity(_autocast_step, name, p, sp, _reference_step(name, low), bound, low)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("low", LOW, ids=str)
@pytest.mark.parametrize("p", [1, 2, 4])
def test_blocks_and_the_gpt(p, low):
    """Composed, with dropout, against themselves in fp32 at p = 1: the masks are the same, whatever the dtype."""
    for name in ("attention_dropout", "dropout", "block", "rich_block", "gpt"):
        want = gathered(name, False, [step(None, name, False, torch.float32)])
        low_y = _autocast_step(None, name, False, low)[0].dtype
        want["y"] = want["y"].to(low_y)
        assert_parity(_autocast_step, name, p, True, want, (p + 24) * LOW[low], low)


@pytest.mark.parametrize("sp", [pytest.param(False, marks=pytest.mark.exhaustive), True], ids=["", "sp"])
@on_ranks(2)
def test_nested_disabled_and_uncached(group, sp):
    for name in CASES:
        module = build(name, group, sp, torch.float32)
        want = outcome(name, module, group, sp)
        with torch.autocast("cpu", torch.bfloat16):
            bf16 = outcome(name, module, group, sp)
            with torch.autocast("cpu", enabled=False):
                assert same(outcome(name, module, group, sp), want), f"{name}: disabled inside"
            with torch.autocast("cpu", torch.float16, cache_enabled=False):  # torch's cache forgets the dtype
                fp16 = outcome(name, module, group, sp)
            assert same(outcome(name, module, group, sp), bf16), f"{name}: after the inner ones"
        with torch.autocast("cpu", torch.float16):
            assert same(outcome(name, module, group, sp), fp16), f"{name}: nested"
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            assert same(outcome(name, module, group, sp), bf16), f"{name}: without the cache of casts"
        assert same(outcome(name, module, group, sp), want), f"{name}: after all"
        dtypes = (torch.float32,) * 2 if CASES[name].keeps_dtype else tuple(LOW)
        assert (bf16[0].dtype, fp16[0].dtype) == dtypes, name


def _low_module(group, name, sp, low):
    module = build(name, group, sp, low)
    assert all(q.dtype == low for q in module.parameters())
    y, dx, *_ = outcome(name, module, group, sp)
    assert y.dtype == low and (dx is None or dx.dtype == low)
    return y.float(), None if dx is None else dx.float(), {k: (g.float(), s) for k, (g, s) in gradients(module).items()}


@pytest.mark.thinned(1)
@pytest.mark.parametrize("low", LOW, ids=str)
@BOTH
@pytest.mark.parametrize("p", [1, 2, 4])
def test_modules_that_are_low_themselves(p, sp, low):
    """module.bfloat16(), module.half(): weights rounded, too, so blocks are a few units further off."""
    for name in CASES:
        want = gathered(name, False, [step(None, name, False, torch.float32)])
        assert_parity(_low_module, name, p, sp, want, (p + 30) * LOW[low], low)


@pytest.mark.parametrize("low", [*LOW, torch.float32], ids=str)
@on_ranks(2)
def test_dtype_at_construction(group, low):
    """dtype= at construction is the rounded fp32 weight, and what .to(dtype) gives."""
    for make in (
        lambda **k: tp_ext.ColumnParallelLinear(HIDDEN, FFN, **k),
        lambda **k: tp_ext.RowParallelLinear(FFN, HIDDEN, **k),
        lambda **k: tp_ext.ParallelMLP(HIDDEN, FFN, **k),
        lambda **k: tp_ext.ParallelAttention(HIDDEN, 4, num_kv_heads=1, qk_norm=True, **k),
        lambda **k: tp_ext.VocabParallelEmbedding(13, HIDDEN, **k),
        lambda **k: tp_ext.VocabParallelLMHead(HIDDEN, 13, bias=True, **k),
        lambda **k: tp_ext.RMSNorm(HIDDEN, **k),
        lambda **k: tp_ext.LayerNorm(HIDDEN, **k),
    ):
        torch.manual_seed(3)
        made = make(group=group, dtype=low)
        torch.manual_seed(3)
        cast = make(group=group).to(low)
        for (name, a), b in zip(made.named_parameters(), cast.parameters(), strict=True):
            assert a.dtype == low and torch.equal(a, b), (type(made).__name__, name)
