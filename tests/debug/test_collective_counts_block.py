"""Collectives of a transformer block, to the byte: the table of docs/reference/communication.md, section "A block".

S is an activation [b s, h]. An all-gather or a reduce-scatter has (p - 1) / p of it on the wire, an
all-reduce twice that.
"""

import functools
from fractions import Fraction

import pytest
import torch
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import tp_ext
from tests.helpers.models import Block
from tests.helpers.ranks import run
from tp_ext.debug import count_collectives

pytestmark = pytest.mark.core

HEADS, LORA = 12, 3
AR, AG, RS = "all_reduce", "all_gather", "reduce_scatter"
functional = torch.ops._c10d_functional


def _policy(saved, ctx, op, *args, **kwargs):
    return CheckpointPolicy.MUST_SAVE if op in saved else CheckpointPolicy.PREFER_RECOMPUTE


def selective(*ops):
    return functools.partial(create_selective_checkpoint_contexts, functools.partial(_policy, ops))


COLLECTIVES = (
    functional.all_reduce.default,
    functional.all_gather_into_tensor.default,
    functional.reduce_scatter_tensor.default,
    functional.wait_tensor.default,
)
RECOMPUTED = {
    "full": {},
    "reentrant": {"use_reentrant": True},
    "but collectives": {"context_fn": selective(*COLLECTIVES)},
    "but matmuls": {"context_fn": selective(torch.ops.aten.mm.default, torch.ops.aten.addmm.default)},
}


def _sent(group, sp, b, s, h, dtype, recomputed=None, training=True, lora=False, attention=(), **options):
    """{(kind, bytes of each): number}, and the bytes on the wire, of one forward and backward."""
    p, tokens = group.size(), b * s
    attention, mlp = {"num_heads": HEADS, **dict(attention)}, {"ffn_hidden_size": 2 * h}
    block = Block(h, attention, mlp, group=group, sequence_parallel=sp, dtype=dtype, **options)
    if lora:
        tp_ext.add_lora(block, targets=["qkv", "out", "up", "down"], r=LORA, alpha=1)
    own = torch.empty(tokens, 0).tensor_split(p)[group.rank()].shape[0] if sp else tokens
    x = torch.randn(own, h, dtype=dtype, requires_grad=True)

    def forward():
        if recomputed is None:
            return block(x, total_tokens=tokens, batch_size=b)
        call = functools.partial(block, total_tokens=tokens, batch_size=b)
        return checkpoint(call, x, **{"use_reentrant": False} | RECOMPUTED[recomputed])

    with torch.set_grad_enabled(training), count_collectives() as counts:
        y = forward()
        if training:
            y.sum().backward()
    assert all(row.group == group.group_name for row in counts.rows)
    return {(row.kind, row.payload): row.number for row in counts.rows}, counts.wire_bytes


def check(p, want, *args, **options):
    """want: {(kind, bytes): number}; zeros, and everything at p = 1, are not sent."""
    want = {key: number for key, number in want.items() if number and p > 1}
    wire = sum(number * n * (2 if kind == AR else 1) for (kind, n), number in want.items()) * Fraction(p - 1, p)
    for sent, on_wire in run(_sent, p, *args, **options):
        assert sent == want
        assert on_wire == float(wire)
    return wire


SHAPES = [(2, 6, 24, torch.float32), (1, 12, 48, torch.bfloat16)]
EVERY = pytest.mark.parametrize("shape", SHAPES, ids=["fp32", "bf16"])
EVERY_P = pytest.mark.parametrize("p", [4, 3, 2, 1])
BOTH = pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])


def size(b, s, h, dtype):
    return b * s * h * dtype.itemsize


def small(sp, h, dtype, norm_parameters=1):
    """Under SP: a sum for each parameter of the two norms, and for the biases of the two row linears."""
    return {(AR, h * dtype.itemsize): 2 * norm_parameters + 2} if sp else {}


@pytest.mark.thinned(1)
@EVERY
@EVERY_P
def test_tensor_parallel_four_all_reduces(p, shape):
    S = size(*shape)
    assert check(p, {(AR, S): 4}, False, *shape) == Fraction(8 * (p - 1), p) * S


@pytest.mark.thinned(1)
@EVERY
@EVERY_P
def test_sequence_parallel_the_same_bytes_and_two_gathers_more(p, shape):
    S, sums = size(*shape), small(True, *shape[2:])
    wire = check(p, {(AG, S): 4 + 2, (RS, S): 4} | sums, True, *shape)
    sums_on_wire = 2 * sum(n * number for (_, n), number in sums.items())
    assert wire == Fraction(p - 1, p) * (8 * S + 2 * S + sums_on_wire)


@EVERY_P
def test_layer_norm_has_two_small_sums(p):
    shape = SHAPES[0]
    want = {(AG, size(*shape)): 6, (RS, size(*shape)): 4} | small(True, *shape[2:], norm_parameters=2)
    check(p, want, True, *shape, norm=tp_ext.LayerNorm)


@pytest.mark.thinned
@pytest.mark.parametrize("how", RECOMPUTED)
@BOTH
@EVERY_P
def test_recomputation(p, sp, how):
    """Forward once more, six all-reduces; four where the policy keeps what collectives gave."""
    shape, more = SHAPES[0], 0 if how == "but collectives" else 2
    S, sums = size(*shape), small(sp, *SHAPES[0][2:])
    want = {(AG, S): 6 + more, (RS, S): 4 + more} | sums if sp else {(AR, S): 4 + more}
    wire = check(p, want, sp, *shape, recomputed=how)
    if not sp:
        assert wire == Fraction((8 + 2 * more) * (p - 1), p) * S


@pytest.mark.thinned
@EVERY
@BOTH
@EVERY_P
def test_inference_half(p, sp, shape):
    S = size(*shape)
    wire = check(p, {(AG, S): 2, (RS, S): 2} if sp else {(AR, S): 2}, sp, *shape, training=False)
    assert wire == Fraction(4 * (p - 1), p) * S


@pytest.mark.thinned(1)
@pytest.mark.parametrize("s", [13, 7, 2])
@pytest.mark.parametrize("p", [2, 3, 4])
def test_uneven_tokens_send_their_padding(p, s):
    """Every rank's share is padded to the longest: p ceil(b s / p) rows travel in place of b s."""
    shape, padded = (1, s, 24, torch.float32), p * -(-s // p)
    S, sums = padded * 24 * 4, small(True, 24, torch.float32)
    check(p, {(AG, S): 6, (RS, S): 4} | sums, True, *shape)
    check(p, {(AR, size(*shape)): 4}, False, *shape)


@BOTH
@pytest.mark.parametrize(("p", "kv"), [(1, 1), (2, 1), (3, 1), (4, 1), (4, 2), (2, 2), (3, 3), (2, 4)])
def test_copied_kv_heads_and_head_norms_are_summed(p, kv, sp):
    """Fewer KV heads than ranks: the gradient of all k|v rows of qkv, weight and bias."""
    _, _, h, dtype = SHAPES[0]
    S, d, e = size(*SHAPES[0]), h // HEADS, dtype.itemsize
    want = {(AG, S): 6, (RS, S): 4} if sp else {(AR, S): 4}
    sums = [(h * e, 4 * sp), (2 * kv * d * h * e, kv < p), (2 * kv * d * e, kv < p), (d * e, 2)]
    for n, number in sums:
        want[AR, n] = want.get((AR, n), 0) + number
    check(p, want, sp, *SHAPES[0], attention={"num_kv_heads": kv, "qk_norm": True})


@pytest.mark.thinned(1)
@BOTH
@EVERY_P
def test_adapters_are_r_wide_and_frozen_layers_gather_no_more(p, sp):
    b, s, h, dtype = SHAPES[0]
    S, low, factor = size(*SHAPES[0]), b * s * LORA * dtype.itemsize, h * LORA * dtype.itemsize
    if sp:  # of A of the two columns and B of the two rows a sum each
        want = {(AG, S): 4, (RS, S): 4, (AG, low): 6, (RS, low): 4, (AR, factor): 4}
    else:
        want = {(AR, S): 4, (AR, low): 4}
    check(p, want, sp, *SHAPES[0], lora=True)
