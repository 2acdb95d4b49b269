"""Collectives of each module and function, forward and backward, to the byte.

The table: docs/reference/communication.md, section "Modules and functions".
"""

from collections.abc import Callable
from fractions import Fraction
from typing import Any, NamedTuple

import pytest
import torch

import tp_ext
from tests.helpers.ranks import run
from tp_ext.debug import count_collectives

pytestmark = pytest.mark.core

N, H, F, V, R, HEAD, BATCH = 24, 12, 36, 48, 5, 4, 2  # tokens, hidden, ffn, vocabulary, rank of adapters
E = 4  # fp32
AR, AG, RS, A2A = "all_reduce", "all_gather", "reduce_scatter", "all_to_all"


class Case(NamedTuple):
    """One of the table: what each rank makes and then calls, and what that sends forward and backward."""

    make: Callable[[Any], Callable]
    forward: Any
    backward: Any = ()


def _module(kind, *args, width=H, cut=False, own=False, frozen=False, **options):
    """kind(*args, ..) called with [N, width]: with this rank's features if cut, with its tokens if own."""

    def make(g):
        module = kind(*args, group=g, **options)
        if frozen:
            module.requires_grad_(False)
        x = torch.randn(N // g.size() if own else N, width // g.size() if cut else width, requires_grad=True)
        return lambda: module(x)

    return make


def _adapted(kind, *args, **options):
    return _module(lambda *a, **o: tp_ext.LoRALinear(kind(*a, **o), R, alpha=1), *args, **options)


def _ids(kind, *args, **options):
    def make(g):
        module = kind(*args, group=g, **options)
        return lambda: module(torch.arange(N))

    return make


def _logits(fn, **options):
    def make(g):
        logits = torch.randn(N, V // g.size(), requires_grad=True)
        return lambda: fn(logits, group=g, **options)

    return make


def _loss(logits, group, **options):
    return tp_ext.vocab_parallel_cross_entropy(logits, torch.arange(N), group, **options)


def _region(name, *args, shape=(N, H)):
    def make(g):
        x = torch.randn(shape, requires_grad=True)
        return lambda: getattr(tp_ext, name)(x, g, *args)

    return make


def _decode(g):
    """One token more of each sequence."""
    module = tp_ext.ParallelAttention(H, 12, head_dim=HEAD, group=g)
    cache = tp_ext.KVCache(BATCH, 8, module.num_kv_heads_local, HEAD)
    x = torch.randn(BATCH, 1, H)
    return torch.no_grad()(lambda: module(x, cache=cache))


Q_RANK, KV_RANK, ROPE = 7, 6, 2  # of latent attention


class Latent(tp_ext.ParallelLatentAttention):
    def __init__(self, **options):
        widths = {"kv_lora_rank": KV_RANK, "qk_nope_head_dim": HEAD, "qk_rope_head_dim": ROPE, "v_head_dim": HEAD}
        super().__init__(H, 12, **widths, **options)

    def forward(self, x):
        return super().forward(x, batch_size=BATCH)


def _decode_latent(g):
    module, x = Latent(group=g), torch.randn(BATCH, H)
    cache = module.new_cache(BATCH, 8)
    return torch.no_grad()(lambda: tp_ext.ParallelLatentAttention.forward(module, x, batch_size=BATCH, cache=cache))


def _multi_token(**options):
    """One depth, without a block."""

    def make(g):
        layers = {
            "embedding": tp_ext.VocabParallelEmbedding(V, H, group=g, **options),
            "head": tp_ext.VocabParallelLMHead(H, V, group=g, **options),
        }
        module = tp_ext.MultiTokenPrediction(H, torch.nn.Identity(), **layers, group=g, **options)
        x = torch.randn(N // g.size() if options else N, H, requires_grad=True)
        return lambda: module(x, torch.arange(N)[:, None])[0]

    return make


EXPERTS, CHOICES = 12, 2  # over 2, 3 and 4 ranks as many


def _experts(shared=0, loss=0.0, capacity=None, axis="expert_group", **options):
    """Experts of which each has as many tokens: token t chooses t and t + 1."""

    def make(g):
        config = tp_ext.RouterConfig(balance_loss=loss)
        options.update({"group": None, axis: g}, router=config, shared_experts=shared, capacity=capacity)
        module = tp_ext.ParallelMoE(H, F, EXPERTS, CHOICES, **options)
        p = g.size() if options.get("sequence_parallel") else 1
        with torch.no_grad():
            module.router.weight.copy_(4 * torch.eye(EXPERTS) + 2 * torch.eye(EXPERTS).roll(1, 0))
        x = torch.eye(H).repeat(N // H, 1)[: N // p].requires_grad_()
        return lambda: module(x)

    return make


def _experts_tp(**options):
    return _experts(axis="group", **options)


EXCHANGE = [(A2A, N * CHOICES * H * E)] * 2
SP_EXPERTS = [(AG, N * H * E), (AG, N * CHOICES * 8), (RS, N * H * E)]
SP_EXPERTS_BACKWARD = [(RS, N * H * E), (RS, N * CHOICES * 8), (AG, N * H * E), (AR, EXPERTS * H * E)]


def _norm(g):
    model = tp_ext.ParallelMLP(H, F, group=g)
    model(torch.ones(2, H)).sum().backward()
    return lambda: tp_ext.clip_grad_norm_(model, 1.0)


def _full(g):
    model = tp_ext.ColumnParallelLinear(H, F, group=g)
    return lambda: tp_ext.full_state_dict(model)["weight"]


COLUMN, ROW = tp_ext.ColumnParallelLinear, tp_ext.RowParallelLinear
SP = {"sequence_parallel": True}
CASES = {
    "copy_to": Case(_region("copy_to_region"), [], [(AR, N * H * E)]),
    "reduce_from": Case(_region("reduce_from_region"), [(AR, N * H * E)]),
    "scatter_to": Case(_region("scatter_to_region"), [], [(AG, N * H * E)]),
    "gather_from": Case(_region("gather_from_region"), lambda p: [(AG, p * N * H * E)]),
    "all_gather": Case(_region("all_gather_region"), lambda p: [(AG, p * N * H * E)], lambda p: [(RS, p * N * H * E)]),
    "reduce_scatter": Case(_region("reduce_scatter_region"), [(RS, N * H * E)], [(AG, N * H * E)]),
    "all_to_all": Case(_region("all_to_all_region", 0, 1), [(A2A, N * H * E)], [(A2A, N * H * E)]),
    "column": Case(_module(COLUMN, H, F), [], [(AR, N * H * E)]),
    "column frozen": Case(_module(COLUMN, H, F, frozen=True), [], [(AR, N * H * E)]),
    "column gather_output": Case(_module(COLUMN, H, F, gather_output=True), [(AG, N * F * E)], [(AR, N * H * E)]),
    "column sp": Case(_module(COLUMN, H, F, own=True, **SP), [(AG, N * H * E)], [(AG, N * H * E), (RS, N * H * E)]),
    "column sp frozen": Case(_module(COLUMN, H, F, own=True, frozen=True, **SP), [(AG, N * H * E)], [(RS, N * H * E)]),
    "row": Case(_module(ROW, F, H, width=F, cut=True), [(AR, N * H * E)]),
    "row input not parallel": Case(
        _module(ROW, F, H, width=F, input_is_parallel=False), [(AR, N * H * E)], [(AG, N * F * E)]
    ),
    "row sp": Case(_module(ROW, F, H, width=F, cut=True, **SP), [(RS, N * H * E)], [(AG, N * H * E), (AR, H * E)]),
    "row sp no bias": Case(_module(ROW, F, H, False, width=F, cut=True, **SP), [(RS, N * H * E)], [(AG, N * H * E)]),
    "mlp": Case(_module(tp_ext.ParallelMLP, H, F, activation="swiglu"), [(AR, N * H * E)], [(AR, N * H * E)]),
    "embedding": Case(_ids(tp_ext.VocabParallelEmbedding, V, H), [(AR, N * H * E)]),
    "embedding sp": Case(_ids(tp_ext.VocabParallelEmbedding, V, H, **SP), [(RS, N * H * E)], [(AG, N * H * E)]),
    "head": Case(_module(tp_ext.VocabParallelLMHead, H, V), [], [(AR, N * H * E)]),
    "head sp": Case(
        _module(tp_ext.VocabParallelLMHead, H, V, own=True, **SP), [(AG, N * H * E)], [(AG, N * H * E), (RS, N * H * E)]
    ),
    "loss": Case(_logits(_loss), lambda p: [(AG, p * (N + 1) * 4 * E)]),
    "loss smoothed": Case(_logits(_loss, label_smoothing=0.1, z_loss=0.1), lambda p: [(AG, p * (N + 1) * 4 * E)]),
    "argmax": Case(_logits(tp_ext.vocab_parallel_argmax), lambda p: [(AG, p * (N + 1) * 2 * 8)]),
    "sample": Case(_logits(tp_ext.vocab_parallel_sample), lambda p: [(AG, p * (N + 1) * 2 * 8)]),
    "sample top_k": Case(
        _logits(tp_ext.vocab_parallel_sample, top_k=3), lambda p: [(AG, p * (N + 1) * 2 * 8), (AG, p * N * (3 + 1) * E)]
    ),
    "sample top_p": Case(
        _logits(tp_ext.vocab_parallel_sample, top_p=0.9),
        lambda p: [(AG, p * (N + 1) * 2 * 8), (AG, p * 2 * 8), (AG, N * V * E)],
    ),
    "rms norm": Case(_module(tp_ext.RMSNorm, H), []),
    "rms norm sp": Case(_module(tp_ext.RMSNorm, H, own=True, **SP), [], [(AR, H * E)]),
    "layer norm sp": Case(_module(tp_ext.LayerNorm, H, own=True, **SP), [], [(AR, H * E), (AR, H * E)]),
    "dropout sp": Case(_module(tp_ext.Dropout, 0.1, own=True, **SP), []),
    "multi-token prediction": Case(_multi_token(), [(AR, N * H * E)] * 2, [(AG, N * 2 * H * E)]),
    "multi-token prediction sp": Case(
        _multi_token(**SP),
        lambda p: [*[(RS, N * H * E)] * 2, (A2A, N // p * 2 * H * E)],
        lambda p: [*[(AG, N * H * E)] * 2, (A2A, N // p * 2 * H * E), *[(AR, H * E)] * 3],
    ),
    "latent attention": Case(
        _module(Latent, q_lora_rank=Q_RANK),
        [(AR, N * H * E)],
        [(AR, N * Q_RANK * E), (AR, N * KV_RANK * E), (AR, N * ROPE * E)],
    ),
    "latent attention without q_lora_rank": Case(
        _module(Latent), [(AR, N * H * E)], [(AR, N * H * E), (AR, N * KV_RANK * E), (AR, N * ROPE * E)]
    ),
    "latent attention sp": Case(
        _module(Latent, q_lora_rank=Q_RANK, own=True, **SP),
        [(RS, N * H * E), (AG, N * Q_RANK * E), (AG, N * KV_RANK * E), (AG, N * ROPE * E)],
        [
            *[(AG, N * H * E), (RS, N * Q_RANK * E), (RS, N * KV_RANK * E), (RS, N * ROPE * E)],
            *[(AG, N * Q_RANK * E), (AG, N * KV_RANK * E)],  # of the inputs again, for the gradients of the weights
            *[(AR, H * Q_RANK * E), (AR, H * (KV_RANK + ROPE) * E), (AR, Q_RANK * E), (AR, KV_RANK * E)],
        ],
    ),
    "decode latent": Case(_decode_latent, [(AR, BATCH * H * E)]),
    "decode": Case(_decode, [(AR, BATCH * H * E)]),
    "adapter column": Case(_adapted(COLUMN, H, F), [], [(AR, N * H * E), (AR, N * R * E)]),
    "adapter row": Case(_adapted(ROW, F, H, width=F, cut=True), [(AR, N * H * E), (AR, N * R * E)]),
    "experts": Case(_experts(), lambda p: [(AG, p * EXPERTS * 8), *EXCHANGE], EXCHANGE),
    "experts shared": Case(_experts(shared=2), lambda p: [(AG, p * EXPERTS * 8), *EXCHANGE], EXCHANGE),
    "experts loss": Case(
        _experts(loss=0.1), lambda p: [(AG, p * EXPERTS * 8), *EXCHANGE, (AR, 8 * (2 * EXPERTS + 2))], EXCHANGE
    ),
    "experts capacity": Case(_experts(capacity=1.0), lambda p: [(AG, p * EXPERTS * 8)] * 2 + EXCHANGE, EXCHANGE),
    "experts capacity by weight": Case(
        _experts(capacity=1.0, drop_order="weight"),
        lambda p: [*[(AG, p * EXPERTS * 8)] * 2, (AG, p * N * CHOICES * 16), *EXCHANGE],
        EXCHANGE,
    ),
    "experts tp": Case(_experts_tp(), [(AR, N * H * E)], [(AR, N * H * E), (AR, N * CHOICES * 4)]),
    "experts tp shared": Case(
        _experts_tp(shared=2, bias=True), [(AR, N * H * E)], [(AR, N * H * E), (AR, N * CHOICES * 4)]
    ),
    "experts sp": Case(_experts_tp(**SP), SP_EXPERTS, SP_EXPERTS_BACKWARD),
    "experts sp shared": Case(_experts_tp(shared=2, **SP), SP_EXPERTS, SP_EXPERTS_BACKWARD),
    "experts sp shared bias": Case(
        _experts_tp(shared=2, bias=True, **SP), SP_EXPERTS, [*SP_EXPERTS_BACKWARD, (AR, H * E)]
    ),
    "clip_grad_norm_": Case(_norm, [(AR, 8)]),
    "full_state_dict": Case(_full, [(AG, F * H * E), (AG, F * E), (AR, 16)]),
}


def _sent(group, name):
    call, found = CASES[name].make(group), []
    with count_collectives() as forward:
        y = call()
    with count_collectives() as backward:
        if y.requires_grad:
            y.sum().backward()
    for counts in (forward, backward):
        sizes = sorted((row.kind, row.payload) for row in counts.rows for _ in range(row.number))
        found.append((sizes, counts.wire_bytes))
    return found


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("p", [2, 3, *(pytest.param(p, marks=pytest.mark.exhaustive) for p in (1, 4))])
def test_communicated_bytes(p, name):
    case = CASES[name]
    for found in run(_sent, p, name):
        for (sent, on_wire), want in zip(found, (case.forward, case.backward), strict=True):
            want = sorted(want(p) if callable(want) else want) if p > 1 else []
            assert sent == want
            wire = sum(n * (2 if kind == AR else 1) for kind, n in want) * Fraction(p - 1, p)
            assert on_wire == float(wire)
