"""Attention over a context group against torch's dense attention of the whole sequences: output and all gradients.

The function on q, k, v, for p = 1, 2, 3, 4, each way to exchange, every length and random packed sequences.
"""

import random

import pytest
import torch
import torch.nn.functional as F

import tp_ext
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tp_ext import ContextLayout
from tp_ext.nn.attention.context_attention import CONTEXTS, AttentionOptions, context_attention

pytestmark = pytest.mark.core

RINGS = [context for context in CONTEXTS if context != "ulysses"]


def dense(q, k, v, lengths, causal=True, scale=None, sliding_window=None, softcap=None):
    """Attention of packed sequences [tokens, heads, head_dim], the scores written out where torch has no option."""
    outputs = []
    for parts in zip(*(t.split(list(lengths)) for t in (q, k, v)), strict=True):
        a, b, c = (t.transpose(0, 1)[None] for t in parts)
        n = a.shape[2]
        if sliding_window is None and softcap is None:
            y = a + b.sum() + c.sum()  # without tokens
            if n:
                y = F.scaled_dot_product_attention(a, b, c, is_causal=causal, scale=scale, enable_gqa=True)
        else:
            b, c = (t.repeat_interleave(a.shape[1] // t.shape[1], 1) for t in (b, c))
            scores = a @ b.transpose(-1, -2) * (a.shape[-1] ** -0.5 if scale is None else scale)
            scores = scores if softcap is None else softcap * (scores / softcap).tanh()
            distance = torch.arange(n)[:, None] - torch.arange(n)
            hidden = (distance < 0) & causal
            if sliding_window is not None:
                hidden = hidden | (distance.abs() >= sliding_window)
            y = scores.masked_fill(hidden, float("-inf")).softmax(-1) @ c
        outputs.append(y[0].transpose(0, 1))
    return torch.cat(outputs) if outputs else q + k.sum() + v.sum()


def drawn(tokens, heads, head_dim, dtype):
    nq, nkv = heads
    shapes = [(tokens, nq, head_dim), (tokens, nkv, head_dim), (tokens, nkv, head_dim), (tokens, nq, head_dim)]
    return [torch.randn(shape, dtype=dtype) for shape in shapes]


def errors(group, context, lengths, heads=(4, 2), head_dim=8, dtype=torch.float64, balance=True, batch=None, **options):
    """The largest deviation from dense of the output and of the gradients of q, k, v, relative to the largest element
    of each, and at least 1."""
    lengths = [lengths] if isinstance(lengths, int) else lengths
    cut = {"batch": batch, "seq": lengths[0]} if batch else {"lengths": lengths}
    layout = ContextLayout(**cut, group=group, balance=balance)
    *inputs, g = drawn(layout.tokens, heads, head_dim, dtype)
    reference = [t.double().requires_grad_() for t in inputs]
    y = dense(*reference, layout.lengths, **options)
    wanted = [y.detach(), *torch.autograd.grad(y, reference, g.double())]
    own = [layout.shard(t).requires_grad_() for t in inputs]
    given = [t.view(batch, -1, *t.shape[1:]) for t in own] if batch and own[0].numel() else own
    y = context_attention(*given, layout, context, AttentionOptions(**options))
    assert y.shape == given[0].shape and y.dtype == dtype
    got = [y.detach().reshape(own[0].shape), *torch.autograd.grad(y, own, layout.shard(g).view(y.shape))]
    worst = []
    for a, b in zip(got, wanted, strict=True):
        full = layout.unshard(a).double()
        scale = max(b.abs().max().item(), 1.0) if b.numel() else 1.0
        worst.append((full - b).abs().max().item() / scale if b.numel() else 0.0)
    return max(worst)


def _worst(group, cases):
    return max((errors(group, **case), str(case)) for case in cases)


def assert_dense(p, cases, bound=1e-13):
    cases = list(cases)
    for worst, case in ranks.run(_worst, p, cases, timeout=120):
        assert worst <= bound, case


@pytest.mark.parametrize("longer", [False, pytest.param(True, marks=pytest.mark.exhaustive)], ids=["short", "longer"])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("context", CONTEXTS)
def test_every_length(p, context, longer):
    heads, short = (4, 4) if context == "ulysses" else (2, 1), 6 * p  # three tokens in each of 2 p chunks
    lengths = range(short + 1, 68) if longer else range(short + 1)
    assert_dense(p, [{"context": context, "lengths": n, "heads": heads} for n in lengths])


@pytest.mark.thinned
@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("balance", [True, False])
@pytest.mark.parametrize("causal", [True, False])
def test_random_packed_sequences(p, context, balance, causal):
    r, cases = random.Random(f"{p} {context} {balance} {causal}"), []
    for _ in range(12):
        lengths = [r.choice([0, 1, 2, r.randint(0, 9), r.randint(0, 67)]) for _ in range(r.randint(0, 8))]
        heads = r.choice([(4, 4), (8, 4), (6, 6)] if context == "ulysses" else [(4, 4), (4, 2), (3, 1), (6, 2)])
        scale = r.choice([None, 0.3])
        case = {"context": context, "lengths": lengths, "heads": heads, "balance": balance, "causal": causal}
        cases.append(case | {"scale": scale})
    assert_dense(p, cases)


def test_three_ranks_with_one_token_each():
    for context in CONTEXTS:
        heads = (3, 3) if context == "ulysses" else (2, 1)
        assert_dense(3, [{"context": context, "lengths": n, "heads": heads} for n in (3, [3], [1, 1, 1], [0, 3, 0])])


@pytest.mark.thinned(1)
@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("context", CONTEXTS)
def test_batches(p, context):
    cases = [
        {"context": context, "lengths": n, "batch": batch, "heads": (4, 4), "causal": causal}
        for n in (1, 2, 9, 16)
        for batch in (1, 3)
        for causal in (True, False)
    ]
    assert_dense(p, cases)


@pytest.mark.parametrize("p", [2, 4])
def test_ulysses_sends_kv_heads_to_all_ranks_that_need_them(p):
    assert_dense(p, [{"context": "ulysses", "lengths": [9, 4], "heads": heads} for heads in [(4, 1), (8, 2), (4, 2)]])


@pytest.mark.thinned
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("causal", [True, False])
def test_sliding_window_and_softcap(p, context, causal):
    shared = {"context": context, "causal": causal, "heads": (8, 4)}
    cases = [
        shared | {"lengths": lengths} | options
        for lengths in (13, [7, 0, 1, 30, 2])
        for options in ({"sliding_window": 3}, {"softcap": 1.5}, {"sliding_window": 1, "softcap": 0.7, "scale": 0.4})
    ]
    assert_dense(p, cases, 1e-12)


@pytest.mark.parametrize("context", RINGS)
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 2e-6), (torch.bfloat16, 2e-2)], ids=str)
def test_low_precision(context, dtype, bound):
    """Bounds: eight roundings of the dtype; parts are added in fp32."""
    cases = [{"context": context, "lengths": n, "dtype": dtype, "heads": (4, 2)} for n in (33, [20, 7, 40])]
    assert_dense(3, [*cases, cases[0] | {"softcap": 2.0}], bound)


def _exchanged(group, context, batch):
    """Bytes of forward and of backward, by kind, and those of k and v of all ranks together."""
    layout = ContextLayout(batch=batch, seq=26, group=group)
    q, k, v, _ = (layout.shard(t) for t in drawn(layout.tokens, (8, 2), 4, torch.float32))
    inputs = [t.requires_grad_() for t in (q, k, v)]
    with tp_ext.debug.count_collectives() as forward:
        y = context_attention(*inputs, layout, context)
    with tp_ext.debug.count_collectives() as backward:
        y.sum().backward()
    own = [n * 2 * 2 * 4 * 4 for n in layout.sizes]  # k and v, 2 heads of 4 elements of 4 bytes
    return [(c.by_kind(), c.wire_bytes) for c in (forward, backward)], own, layout.group.rank


@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("batch", [1, 2])
def test_the_ring_moves_kv_heads_to_the_byte(p, batch):
    """Forward each rank passes on every block but the one that ends with it; backward, too, and the gradients of all
    blocks but its own. Query heads do not count: 8 of them share 2."""
    for (forward, backward), own, rank in ranks.run(_exchanged, p, "ring", batch):
        blocks = sum(own) - own[(rank + 1) % p]
        gradients = sum(own) - own[rank]
        steps = {"all_to_all": p - 1} if p > 1 else {}
        assert forward == (steps, blocks if p > 1 else 0)
        twice = {kind: 2 * n for kind, n in steps.items()}
        assert backward == (twice, blocks + gradients if p > 1 else 0)


@pytest.mark.parametrize("p", [2, 3, 4])
def test_the_gather_moves_kv_heads_to_the_byte(p):
    for (forward, backward), own, _ in ranks.run(_exchanged, p, "all_gather", 1):
        wire = (p - 1) * max(own)  # blocks are padded to the longest
        assert forward == ({"all_gather": 1}, wire)
        assert backward == ({"all_gather": 1, "reduce_scatter": 1}, 2 * wire)


@on_ranks(3, backend="gloo")
def test_each_exchange_begins_before_the_attention_to_the_block_at_hand(group):
    layout = ContextLayout([4 * 64 * group.size()], group=group)
    q, k, v, _ = (layout.shard(t) for t in drawn(layout.tokens, (2, 1), 16, torch.float32))
    with torch.profiler.profile() as profile:
        context_attention(q, k, v, layout)
    names = {"c10d::alltoall_base_": "exchange", "aten::_scaled_dot_product_flash_attention_for_cpu": "attend"}
    events = [names[e.name] for e in sorted(profile.events(), key=lambda e: e.time_range.start) if e.name in names]
    assert events == ["exchange", "attend", "exchange", "attend", "attend"]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("options", [{}, {"softcap": 2.0, "sliding_window": 3}], ids=str)
@on_ranks(2, backend="gloo", timeout=120)
def test_compiles_whole(group, context, options):
    layout = ContextLayout([4, 0, 1], group=group)  # a graph has the scores of every two chunks
    # The fake of the flash kernel of torch 2.11 gives fp32 for the log-sum-exps of fp64
    dtype, bound = (torch.float64, 1e-13) if torch.__version__ >= "2.12" else (torch.float32, 1e-6)
    inputs = [layout.shard(t).requires_grad_() for t in drawn(5, (4, 4), 8, dtype)[:3]]

    def f(q, k, v):
        return context_attention(q, k, v, layout, context, AttentionOptions(**options))

    def results(f):
        y = f(*inputs)
        return [y, *torch.autograd.grad(y.sin().sum(), inputs)]

    compiled = torch.compile(f, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(results(compiled), results(f), rtol=bound, atol=bound)


@pytest.mark.parametrize("context", CONTEXTS)
@on_ranks(2)
def test_recomputed_by_a_checkpoint(group, context):
    layout = ContextLayout([9, 0, 5], group=group)
    inputs = [layout.shard(t).requires_grad_() for t in drawn(14, (4, 4), 8, torch.float64)[:3]]

    def f(q, k, v):
        return context_attention(q.sin(), k, v, layout, context, AttentionOptions(dropout=0.2))

    torch.manual_seed(3)
    plain = torch.autograd.grad(f(*inputs).sin().sum(), inputs)
    torch.manual_seed(3)
    y = torch.utils.checkpoint.checkpoint(f, *inputs, use_reentrant=False)
    again = torch.autograd.grad(y.sin().sum(), inputs)
    assert all(map(torch.equal, plain, again))


def _with_dropout(group, context, batch, lengths, options):
    """Output and gradients for masks that are drawn from one seed, put together."""
    cut = {"batch": batch, "seq": lengths[0]} if batch else {"lengths": lengths}
    layout = ContextLayout(**cut, group=group)
    inputs = [layout.shard(t).requires_grad_() for t in drawn(layout.tokens, (8, 4), 4, torch.float64)[:3]]
    torch.manual_seed(7)
    y = context_attention(*inputs, layout, context, AttentionOptions(dropout=0.4, **options))
    return [layout.unshard(t) for t in (y, *torch.autograd.grad(y.sin().sum(), inputs))]


@pytest.mark.thinned
@pytest.mark.parametrize("p", [2, 3, 4])
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize(("batch", "lengths"), [(None, [9, 0, 5, 1]), (3, [7])], ids=str)
@pytest.mark.parametrize("options", [{}, {"num_heads": 12, "first_head": 2, "sliding_window": 4}], ids=str)
def test_dropout_masks_are_those_of_one_rank(p, context, batch, lengths, options):
    wanted = ranks.run(_with_dropout, 1, "ulysses", batch, lengths, options)[0]
    assert (wanted[0] == 0).any() or batch != 3
    for got in ranks.run(_with_dropout, p, context, batch, lengths, options):
        torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)


def _refused(group, case):
    layout = ContextLayout([4, 2], group=group)
    q, k = torch.ones(3, 4, 8), torch.ones(3, 2, 8)
    calls = {
        "context": lambda: context_attention(q, k, k, layout, "star"),
        "tokens": lambda: context_attention(q[:2], k[:2], k[:2], layout),
        "keys": lambda: context_attention(q, k[:2], k, layout),
        "heads": lambda: context_attention(q, torch.ones(3, 3, 8), torch.ones(3, 3, 8), layout),
        "dtype": lambda: context_attention(q, k.double(), k, layout),
        "ulysses": lambda: context_attention(q[:, :1], k[:, :1], k[:, :1], layout, "ulysses"),
        "twice": lambda: torch.autograd.grad(
            context_attention(q.requires_grad_(), k, k, layout).sum(), q, create_graph=True
        ),
    }
    calls[case]()


@pytest.mark.parametrize(
    ("case", "exception", "match"),
    [
        ("context", ValueError, "context: 'star' must be one of ring, all_gather, ulysses"),
        ("tokens", ValueError, r"q, k, v: leading dims .*\(2,\).* must be .* \(1, 3\) or \(3,\)"),
        ("keys", ValueError, r"q, k, v: leading dims \[\(3,\), \(2,\), \(3,\)\] must be"),
        ("heads", ValueError, "k: 3 heads must be .*, and divide the 4 of q"),
        ("dtype", TypeError, "k: dtype Double must be that of q, Float"),
        ("ulysses", ValueError, "num_heads: must be at least the number of ranks; num_heads = 1"),
    ],
)
def test_refuses_before_anything_is_sent(case, exception, match):
    ranks.run_raises(_refused, 2, exception, match, case)


def test_has_no_second_derivative():
    ranks.run_raises(_refused, 2, NotImplementedError, "no second derivative", "twice", in_turns=False)
