"""Frozen weights save no activation: what autograd keeps of each module, counted by saved_tensors_hooks."""

import pytest
import torch

from tests.helpers import ranks
from tests.helpers.makers import BATCH, CASES, FFN, HIDDEN, SEQ, TOKENS, build, caller, outcome, own_input, same
from tests.helpers.on_ranks import on_ranks

pytestmark = pytest.mark.core

BOTH = pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
P = 2
MODULES = [name for name in CASES if name not in ("block", "rich_block", "gpt")]


def _saved(module, name, x):
    """Elements that forward keeps for backward, without the parameters (and views of them)."""
    parameters = {q.untyped_storage().data_ptr() for q in module.parameters()}
    kept = []

    def pack(t):
        if t.untyped_storage().data_ptr() not in parameters:
            kept.append(t.numel())
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        caller(name, module)(x)
    return sum(kept)


def _counts(group, sp):
    """For each module: all trained; all frozen; only biases trained; all frozen and no gradient of x wanted; biases
    alone, without x."""
    counts = {}
    for name in MODULES:
        module = build(name, group, sp)
        x = own_input(name, module, group, sp)
        row = []
        for trained, wants_x in (
            ("", True),
            (None, True),
            ("bias", True),
            (None, False),
            ("bias", False),
        ):
            for key, param in module.named_parameters():
                param.requires_grad_(trained is not None and key.endswith(trained))
            row.append(_saved(module, name, x.detach().requires_grad_(wants_x) if x.is_floating_point() else x))
        counts[name] = row
    return counts


def _want(sp):
    """By module, what it keeps when all is frozen but x, and how much more when all is trained."""
    own = TOKENS // P if sp else TOKENS  # rows of x on a rank
    x, ffn, heads = own * HIDDEN, TOKENS * FFN // P, TOKENS * HIDDEN // P
    qkv = 3 * heads
    statistics = BATCH * SEQ * 4 // P  # of the attention's rows: log-sum-exp per query and head
    tables = 2 * SEQ  # cosine and sine of each position, a pair of features per head
    # The multi-query one has 1 KV head, q and k are normed apart, each with x of its norm, a number per row, its tables
    mqa_kv = TOKENS * 2
    mqa = (heads + 2 * mqa_kv + heads + statistics) + (heads + TOKENS * 2) + (mqa_kv + TOKENS) + 2 * tables
    fused = qkv + heads + statistics + tables  # q, k, v, y
    return {
        "column": (0, x),
        "row": (0, TOKENS * FFN // P),
        "head": (0, x),
        "embedding": (0, TOKENS),  # the ids
        "mlp": (ffn, x + ffn),  # what the activation takes, and its result
        "mlp_gated": (2 * ffn, x + ffn),
        "rms_norm": (x + own, 0),
        "layer_norm": (x + 2 * own, 0),
        "dropout": (1, 0),  # the seed
        "attention": (fused, x + heads),
        "attention_mqa": (mqa, x + heads),
    }


@BOTH
def test_frozen_weights_save_no_activation(sp):
    counts = ranks.run(_counts, P, sp)
    assert counts[0] == counts[1]
    for name, (frozen, more) in _want(sp).items():
        trained, only_x, biases, *_ = counts[0][name]
        assert only_x == frozen, (name, only_x, frozen)
        assert trained - only_x == more, (name, trained, only_x, more)
        assert biases == only_x, f"{name}: trained biases need no activation of their own"


@pytest.mark.thinned(1)
@BOTH
@pytest.mark.parametrize("p", [1, 2])
def test_nothing_is_saved_where_nothing_is_wanted(p, sp):
    for name, (*_, nothing, biases) in ranks.run(_counts, p, sp)[0].items():
        assert nothing == 0, name
        if name in ("column", "row", "head"):
            assert biases == 0, name


@BOTH
@on_ranks(2)
def test_requires_grad_may_change_between_steps(group, sp):
    """requires_grad_(False) after a step: the others' gradients stay the same bits, the frozen ones' stay away."""
    for name in sorted(CASES.keys() - {"embedding"}):  # which has one parameter only
        module = build(name, group, sp)
        want = outcome(name, module, group, sp)
        params = list(module.parameters())
        for i, param in enumerate(params):
            param.requires_grad_(bool(i % 2))
        got = outcome(name, module, group, sp)
        assert same(got[:2], want[:2]), name
        for i, (a, b) in enumerate(zip(got[2:], want[2:], strict=True)):
            assert torch.equal(a, b) if i % 2 else a is None, (name, i)
        module.requires_grad_(True)
        assert same(outcome(name, module, group, sp), want), name
