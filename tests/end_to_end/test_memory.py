"""Bytes that forward saves for backward: the formulas of docs/reference/memory.md, and Korthikanti's 34 s b h / p.

The distinct storages that autograd saves are counted, whole, without those of the parameters.
"""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tp_ext
from tests.helpers import ranks
from tests.helpers.models import Block

pytestmark = pytest.mark.core

B, S, H, F, V = 2, 8, 32, 48, 64
N = B * S
CASES = [  # p, sequence parallelism, dtype
    pytest.param(p, sp, dtype, id=f"p{p}{'-sp' * sp}-{str(dtype)[6:]}")
    for p in (1, 2, 4)
    for sp in (False, True)
    for dtype in (torch.bfloat16, torch.float32)
]
EVERY = pytest.mark.parametrize(("p", "sp", "dtype"), CASES)


def saved_bytes(fn, module):
    """Bytes of the storages that autograd holds after fn(), but for the parameters'."""
    own = {param.untyped_storage().data_ptr() for param in module.parameters()}
    storages, alive = {}, []

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(t)  # or a later tensor could take its place
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = fn()
    assert y.requires_grad
    return sum(storages.values())


class Sizes:
    """The letters of the formulas: e bytes an element, n tokens, n_sp those of a rank between the blocks."""

    def __init__(self, p, sp, dtype, h=H, n=N):
        self.e, self.p, self.n, self.n_sp, self.h = dtype.itemsize, p, n, n // p if sp else n, h


# One module each: how it is made and called, and its formula

LINEARS = {
    "column": (lambda **o: tp_ext.ColumnParallelLinear(H, F, **o), H, lambda z: z.n_sp * z.h * z.e),
    "row": (lambda **o: tp_ext.RowParallelLinear(F, H, **o), F, lambda z: z.n * F // z.p * z.e),
    "head": (lambda **o: tp_ext.VocabParallelLMHead(H, V, **o), H, lambda z: z.n_sp * z.h * z.e),
}
NORMS = {
    "rms": (lambda **o: tp_ext.RMSNorm(H, **o), H, lambda z: z.n_sp * (z.h * z.e + 4)),
    "layer": (lambda **o: tp_ext.LayerNorm(H, **o), H, lambda z: z.n_sp * (z.h * z.e + 8)),
}
MLPS = {
    name: (
        lambda name=name, **o: tp_ext.ParallelMLP(H, F, activation=name, **o),
        H,
        lambda z, wide=wide: z.n_sp * z.h * z.e + wide * z.n * F // z.p * z.e,
    )
    for name, wide in {"gelu": 2, "gelu_tanh": 2, "relu": 2, "silu": 2, "swiglu": 3, "geglu": 3}.items()
}


def _measure(group, name, sp, dtype, frozen=False, leaf=True):
    table = LINEARS | NORMS | MLPS
    make, width, _ = table[name]
    module = make(group=group, sequence_parallel=sp, dtype=dtype)
    for param in module.parameters():
        param.requires_grad_(not frozen)
    p = group.size()
    sharded = name == "row"
    x = torch.randn(N // p if sp and not sharded else N, width // p if sharded else width, dtype=dtype)
    x.requires_grad_(leaf)
    return saved_bytes(lambda: module(x), module)


@pytest.mark.thinned
@EVERY
@pytest.mark.parametrize("name", LINEARS | NORMS | MLPS)
def test_linears_norms_and_mlp(name, p, sp, dtype):
    formula = (LINEARS | NORMS | MLPS)[name][2]
    assert ranks.run(_measure, p, name, sp, dtype) == [formula(Sizes(p, sp, dtype))] * p


@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("name", LINEARS)
def test_frozen_linears_save_no_activation(name, sp):
    assert ranks.run(_measure, 2, name, sp, torch.bfloat16, True) == [0, 0]


@pytest.mark.parametrize("name", LINEARS)
def test_a_linear_whose_input_needs_no_gradient_saves_its_input_alone(name):
    want = LINEARS[name][2](Sizes(2, False, torch.float32))
    assert ranks.run(_measure, 2, name, False, torch.float32, False, False) == [want] * 2


def _measure_multi_token(group, sp, dtype):
    options = {"group": group, "sequence_parallel": sp, "dtype": dtype}
    embedding = tp_ext.VocabParallelEmbedding(V, H, **options)
    head = tp_ext.VocabParallelLMHead(H, V, **options)
    module = tp_ext.MultiTokenPrediction(H, torch.nn.Identity(), embedding=embedding, head=head, **options)
    x = torch.randn(N // group.size() if sp else N, H, dtype=dtype, requires_grad=True)
    next_ids = torch.arange(N)[:, None] % V
    return saved_bytes(lambda: module(x, next_ids)[0], module)


@pytest.mark.thinned
@EVERY
def test_multi_token_prediction(p, sp, dtype):
    z = Sizes(p, sp, dtype)
    want = z.n_sp * (3 * z.h * z.e + 12) + z.n * 2 * z.h // z.p * z.e + 8 * z.n
    assert ranks.run(_measure_multi_token, p, sp, dtype) == [want] * p


# Attention: a heads, k KV heads, of d features; all local

HEADS, HEAD = 4, 8
ATTENTIONS = {
    "fused": {},
    "gqa": {"num_kv_heads": 2},
    "mqa": {"num_kv_heads": 1},
    "rope": {"rope": 1e4},
    "gqa_rope": {"num_kv_heads": 2, "rope": 1e4},
    "qk_norm": {"num_kv_heads": 2, "qk_norm": True},
    "qk_norm_rope": {"num_kv_heads": 2, "qk_norm": True, "rope": 1e4},
    "window": {"sliding_window": 3},
    "window_gqa": {"num_kv_heads": 2, "sliding_window": 3},
    "softcap": {"softcap": 2.0},
    "softcap_gqa_dropout": {"num_kv_heads": 2, "softcap": 2.0, "dropout": 0.1},
    "exact_dropout": {"dropout": 0.1},
    "exact_dropout_gqa": {"num_kv_heads": 2, "dropout": 0.1},
    "exact_dropout_rope": {"dropout": 0.1, "rope": 1e4},
}


def attention_bytes(z, options, d=HEAD, heads=HEADS, seq=S):
    a = heads // z.p
    k = max(options.get("num_kv_heads", heads) // z.p, 1)
    total = z.n_sp * z.h * z.e  # the input of qkv
    total += z.n * (a + 2 * k) * d * z.e  # q, k, v: one storage; behind RoPE, q|k and v
    total += z.n * a * d * z.e  # the input of out
    if options.get("softcap"):
        total += z.n * a * seq * z.e  # tanh
    if options.get("dropout"):
        total += z.n * a * seq * z.e + 8  # what dropout leaves of the softmax, seed
    if options.get("softcap") or options.get("dropout"):
        total += z.n * a * seq * z.e + seq * seq  # softmax, bool mask
    else:
        total += 4 * z.n * a  # log-sum-exp, fp32
        total += seq * seq * z.e if options.get("sliding_window") else 0  # mask, as torch adds it
    if options.get("qk_norm"):
        total += z.n * (a + k) * (d * z.e + 4)  # q and k before and after their norm; a number per row
    if options.get("rope"):
        total += 4 * seq * d  # cos and sin, fp32, d / 2 each, of one sequence
    return total


def _attention(group, options, sp, dtype):
    module = tp_ext.ParallelAttention(
        H, HEADS, head_dim=HEAD, **options, group=group, sequence_parallel=sp, dtype=dtype
    )
    x = torch.randn(N // group.size() if sp else N, H, dtype=dtype, requires_grad=True)
    tables = {"cos_sin": module.rope.cos_sin(torch.arange(S), dtype)} if module.rope else {}
    shared = sum(t.untyped_storage().nbytes() for t in tables.get("cos_sin", []))
    own = saved_bytes(lambda: module(x, batch_size=B), module)
    return own, saved_bytes(lambda: module(module(x, batch_size=B, **tables), batch_size=B, **tables), module), shared


@pytest.mark.thinned
@EVERY
@pytest.mark.parametrize("name", ATTENTIONS)
def test_attention(name, p, sp, dtype):
    """Two layers keep twice as much, but rotary tables that were made once for both are there once."""
    want = attention_bytes(Sizes(p, sp, dtype), ATTENTIONS[name])
    for own, two_layers, shared in ranks.run(_attention, p, ATTENTIONS[name], sp, dtype):
        assert own == want
        assert two_layers == 2 * want - shared


# Latent attention: latents of widths q and c, r shared features of the key


LATENTS = {
    "plain": {"rope": None},
    "q_lora_rank": {"q_lora_rank": 12},
    "exact_dropout": {"q_lora_rank": 12, "dropout": 0.1},
}
C, NOPE, ROPE, V_HEAD, LATENT_HEADS = 16, 8, 4, 6, 8  # 2 or more on each rank: of one the padded result is no copy


def latent_bytes(z, options, seq=S):
    a, q, key = LATENT_HEADS // z.p, options.get("q_lora_rank", 0), NOPE + ROPE
    total = z.n_sp * (z.h + 2 * q + 2 * C + ROPE) * z.e  # x; before and after their norms the latents, with k_rope
    total += 4 * z.n_sp * (2 if q else 1)  # a number per row of each norm
    total += z.n * a * (2 * key + 2 * V_HEAD) * z.e  # q, k, v; the input of o_proj
    if options.get("dropout"):
        total += 2 * z.n * a * seq * z.e + seq * seq + 8
    else:
        total += 4 * z.n * a  # log-sum-exp, fp32
        total += z.n * a * (2 * key - V_HEAD) * z.e  # on a CPU: v and the result as wide as the keys
    return total + (0 if "rope" in options else 4 * seq * ROPE)  # cos and sin, fp32


def _latent(group, options, sp, dtype):
    widths = {"kv_lora_rank": C, "qk_nope_head_dim": NOPE, "qk_rope_head_dim": ROPE, "v_head_dim": V_HEAD}
    options = widths | options | {"group": group, "sequence_parallel": sp, "dtype": dtype}
    module = tp_ext.ParallelLatentAttention(H, LATENT_HEADS, **options)
    x = torch.randn(N // group.size() if sp else N, H, dtype=dtype, requires_grad=True)
    return saved_bytes(lambda: module(x, batch_size=B), module)


@pytest.mark.thinned
@EVERY
@pytest.mark.parametrize("name", LATENTS)
def test_latent_attention(name, p, sp, dtype):
    want = latent_bytes(Sizes(p, sp, dtype), LATENTS[name])
    assert ranks.run(_latent, p, LATENTS[name], sp, dtype) == [want] * p


# The rest


def _ends(group, sp, dtype):
    options = {"group": group, "sequence_parallel": sp}
    p = group.size()
    embedding = tp_ext.VocabParallelEmbedding(V, H, dtype=dtype, **options)
    ids = torch.randint(V, (N,))
    x = torch.randn(N // p if sp else N, H, dtype=dtype, requires_grad=True)
    dropout = tp_ext.Dropout(0.1, **options)
    logits = torch.randn(N, V // p, dtype=dtype, requires_grad=True)
    loss = tp_ext.VocabParallelCrossEntropy(group=group)
    return (
        saved_bytes(lambda: embedding(ids), embedding),
        saved_bytes(lambda: dropout(x, residual=x), dropout),
        saved_bytes(lambda: loss(logits, ids), loss),
    )


@EVERY
def test_embedding_dropout_and_loss(p, sp, dtype):
    want = 8 * N, 8, N * V // p * dtype.itemsize + 16 * N  # ids; a seed; logits, targets, two numbers a row
    assert ranks.run(_ends, p, sp, dtype) == [want] * p


def _autocast(group):
    module = tp_ext.ParallelMLP(H, F, group=group)
    x = torch.randn(N, H, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        return saved_bytes(lambda: module(x), module)


def test_autocast_adds_the_low_precision_copy_of_the_weights():
    """And of the bias that the activation adds; no backward reads the row bias."""
    weights, bias = 2 * H * F // 2, F // 2
    want = MLPS["gelu"][2](Sizes(2, False, torch.bfloat16)) + 2 * (weights + bias)
    assert ranks.run(_autocast, 2) == [want] * 2


# A transformer block as in Korthikanti et al. (arXiv:2205.05198), section 4


WIDE, WIDE_HEADS = 512, 4  # heads of 128 as in the large models: what is not s b h is under 1 %


def _block(group, sp, dtype, full):
    """LayerNorm, attention, dropout, residual; LayerNorm, GELU MLP 4h wide, dropout, residual; biases everywhere."""
    options = {"norm": tp_ext.LayerNorm, "dropout": 0.1, "group": group, "sequence_parallel": sp, "dtype": dtype}
    block = Block(WIDE, {"num_heads": WIDE_HEADS}, {"ffn_hidden_size": 4 * WIDE}, **options)
    x = torch.randn(N // group.size() if sp else N, WIDE, dtype=dtype, requires_grad=True)
    call = functools.partial(block, batch_size=B)
    return saved_bytes(lambda: checkpoint(call, x, use_reentrant=False) if full else call(x), block)


@EVERY
def test_a_block_keeps_the_bytes_of_the_paper_less_the_dropout_masks(p, sp, dtype):
    z, a = Sizes(p, sp, dtype, WIDE), WIDE_HEADS // p
    between = z.n_sp * z.h * z.e  # inputs of: first norm, qkv, second norm, up
    within = z.n * z.h // p * z.e  # q, k, v, the input of out; the inputs (4 h wide) of the activation and of down
    small = 16 * z.n_sp + 4 * z.n * a + 2 * 8  # statistics of the norms, log-sum-exp, seeds
    for saved in ranks.run(_block, p, sp, dtype, False):
        assert saved == 4 * between + 12 * within + small
        if dtype != torch.bfloat16:
            continue
        sbh, t = z.n * z.h, z.p
        paper = 34 * sbh / t if sp else sbh * (10 + 24 / t)  # "with selective activation recomputation", table 2
        masks = 2 * (sbh / t if sp else sbh)  # a byte per element, where we keep a seed
        assert saved <= paper
        assert abs(saved + masks - paper) <= 0.01 * paper


@pytest.mark.parametrize("p", [1, 2])
def test_a_recomputed_block_keeps_its_input(p):
    """The paper's 2 s b h, under sequence parallelism over t."""
    saved = ranks.run(_block, p, True, torch.bfloat16, True)
    assert saved == [2 * N * WIDE // p] * p
