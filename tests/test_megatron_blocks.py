"""Megatron-core's MLP and self-attention and ours, from the same weights: equal outputs and gradients, in fp64 within
1e-12, at every p. Their weights are those of tp_ext/megatron.py, their activations [seq, batch, hidden].
"""

import pytest
import torch

import tp_ext
from tests.helpers.megatron_on_cpu import MISSING, block, megatron, run
from tests.helpers.oracle import full_gradients, gradients, own_tokens
from tp_ext.megatron import from_megatron_gated, from_megatron_qkv, to_megatron_qkv

pytestmark = pytest.mark.skipif(MISSING, reason="needs megatron-core")

# The first use of Megatron takes each rank seconds: by default on one number of ranks, of which two share a KV head
EVERY = pytest.mark.parametrize("p", [4, *(pytest.param(p, marks=pytest.mark.exhaustive) for p in (1, 2))])
HIDDEN, FFN, SEQ, BATCH = 6, 8, 4, 2


def close(got, want, bound=1e-12):
    torch.testing.assert_close(got, want, rtol=bound, atol=bound)


def _simple(*shape):
    """Normal numbers that fp32 holds, too."""
    return torch.randn(shape).double()


def _mlp(group, gated, sp, state, x, dy):
    with megatron(group):
        options = {"hidden_size": HIDDEN, "ffn_hidden_size": FFN, "gated": gated}
        weights = (state["up.weight"], state["down.weight"])
        theirs = block(group, "mlp", weights, sp=sp, **options)
        ours = tp_ext.ParallelMLP(
            HIDDEN,
            FFN,
            activation="swiglu" if gated else "gelu",
            group=group,
            sequence_parallel=sp,
            dtype=torch.float64,
        )
        tp_ext.load_full_state_dict(ours, state, group=group)
        theirs.linear_fc1.bias.data.copy_(ours.up.bias)
        results = []
        for layer in (theirs, ours):
            one = (own_tokens(x, group) if sp else x.clone()).requires_grad_()
            y = layer(one)
            y = y[0] + state["down.bias"] if isinstance(y, tuple) else y  # theirs leaves its last bias to the caller
            y.backward(own_tokens(dy, group) if sp else dy)
            results.append((y, one.grad))
        grads = {"up.weight": theirs.linear_fc1.weight.grad, "up.bias": theirs.linear_fc1.bias.grad}
        return results, grads | {"down.weight": theirs.linear_fc2.weight.grad}, gradients(ours)


@EVERY
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("gated", [False, True])
def test_mlp(gated, sp, p):
    rows = FFN * (1 + gated)
    state = {"up.weight": _simple(rows, HIDDEN), "up.bias": _simple(rows)}
    state |= {"down.weight": _simple(HIDDEN, FFN), "down.bias": _simple(HIDDEN)}
    got = run(_mlp, p, gated, sp, state, _simple(SEQ, BATCH, HIDDEN), _simple(SEQ, BATCH, HIDDEN))
    for (theirs, ours), _, _ in got:
        close(theirs, ours)
    full = full_gradients([g[2] for g in got])
    for name in ("up.weight", "up.bias"):
        together = torch.cat([g[1][name] for g in got])
        close(from_megatron_gated(together, p) if gated else together, full[name])
    close(torch.cat([g[1]["down.weight"] for g in got], 1), full["down.weight"])


ATTENTIONS = {"mha": (4, 4, 2), "gqa": (8, 4, 2), "gqa with 2 kv heads": (8, 2, 4)}


def _attention(group, heads, sp, state, x, dy, rope):
    p, rank = group.size(), group.rank()
    num_heads, num_kv_heads, head_dim = heads
    with megatron(group):
        qkv, bias = (to_megatron_qkv(state[f"qkv.{name}"], *heads) for name in ("weight", "bias"))
        theirs = block(group, "self_attention", (qkv, state["out.weight"]), sp=sp, hidden_size=HIDDEN, heads=heads)
        theirs.linear_qkv.bias.data.copy_(bias.chunk(p)[rank])
        ours = tp_ext.ParallelAttention(
            HIDDEN,
            num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            rope=10000.0 if rope else None,
            group=group,
            sequence_parallel=sp,
            dtype=torch.float64,
        )
        tp_ext.load_full_state_dict(ours, state, group=group)
        more = {"rotary_pos_emb": _their_angles(head_dim)} if rope else {}
        one = (own_tokens(x, group) if sp else x.clone()).requires_grad_()
        y, _ = theirs(one, attention_mask=torch.ones(1, 1, SEQ, SEQ, dtype=torch.bool).triu(1), **more)
        (y + state["out.bias"]).backward(own_tokens(dy, group) if sp else dy)
        results = [(y + state["out.bias"], one.grad)]
        x, dy = (t.transpose(0, 1).flatten(0, 1) for t in (x, dy))  # to our order: one sequence after the other
        one = (own_tokens(x, group) if sp else x.clone()).requires_grad_()
        y = ours(one, batch_size=BATCH)
        y.backward(own_tokens(dy, group) if sp else dy)
        results.append((y, one.grad))
        grads = {f"qkv.{name}": getattr(theirs.linear_qkv, name).grad for name in ("weight", "bias")}
        return results, grads | {"out.weight": theirs.linear_proj.weight.grad}, gradients(ours)


def _their_angles(head_dim):
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding

    angles = RotaryEmbedding(head_dim, rotary_percent=1.0, use_cpu_initialization=True)(SEQ)
    return angles, angles


def _check_attention(p, heads, sp, rope, bound):
    rows = (heads[0] + 2 * heads[1]) * heads[2]
    state = {"qkv.weight": _simple(rows, HIDDEN), "qkv.bias": _simple(rows)}
    state |= {"out.weight": _simple(HIDDEN, heads[0] * heads[2]), "out.bias": _simple(HIDDEN)}
    x, dy = _simple(SEQ, BATCH, HIDDEN), _simple(SEQ, BATCH, HIDDEN)
    got = run(_attention, p, heads, sp, state, x, dy, rope)
    for i in range(2):  # y, dx
        theirs, ours = (([g[0][j][i] for g in got]) for j in range(2))
        theirs = torch.cat(theirs) if sp else theirs[0]
        ours = torch.cat(ours) if sp else ours[0]
        close(theirs.transpose(0, 1).flatten(0, 1), ours, bound)
    full = full_gradients([g[2] for g in got])
    for name in ("qkv.weight", "qkv.bias"):
        close(from_megatron_qkv(torch.cat([g[1][name] for g in got]), *heads), full[name], bound)
    close(torch.cat([g[1]["out.weight"] for g in got], 1), full["out.weight"], bound)


@EVERY
@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name, sp, p):
    _check_attention(p, ATTENTIONS[name], sp, rope=False, bound=1e-12)


def test_attention_with_rope():
    """Their angles are fp32."""
    _check_attention(4, ATTENTIONS["gqa"], False, rope=True, bound=1e-5)
