"""ParallelAttention against attention written out head by head (helpers/oracle.py): output and all gradients; dropout
of the attention weights, what it communicates, and under what of torch wraps modules.

Bounds are relative to the largest element; in fp64 1e-10, thousands of times the rounding of sums this short and far
below any real error.
"""

import pytest
import torch
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils.checkpoint import checkpoint

import tp_ext
from tests.helpers import oracle, ranks
from tests.helpers.attention_cases import CASES, HEAD, HIDDEN, LAYOUTS, assert_dense, call, fits, make
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import counts_by_kind, gathered, local_grads
from tp_ext.nn.attention.attention import head_parts

pytestmark = pytest.mark.core

EVERY = [
    pytest.param(p, name, layout, id=f"{name}-p{p}-{layout}")
    for name, case in CASES.items()
    for p in (1, 2, 3, 4)
    if fits(case, p)
    for layout in (LAYOUTS if name in ("all", "mha") else ("batch", "sp_packed_uneven"))
]


@pytest.mark.thinned
@pytest.mark.parametrize(("p", "name", "layout"), EVERY)
def test_output_and_all_gradients_are_those_of_dense_attention(p, name, layout):
    assert_dense(p, CASES[name], *LAYOUTS[layout])


@pytest.mark.parametrize("p", range(1, 9))
def test_query_heads_stay_with_their_kv_head(p):
    for heads, kv in [(8, 8), (8, 4), (8, 2), (8, 1), (9, 3), (12, 2)]:
        if not fits({"num_heads": heads, "num_kv_heads": kv}, p):
            continue
        q, k = head_parts(heads, kv, 1, p)
        seen = []
        for rank in range(p):
            own, (first, last) = range(*q.span(rank, p)), k.span(rank, p)
            assert len(own) and {head // (heads // kv) for head in own} == set(range(first, last))
            seen += own
        assert seen == list(range(heads))


# Dropout, communication, wrappers of torch


# Dropout of the attention weights


def _dropped(group, options, state, x, sp=False):
    module = make(options, group, dropout=0.5, sequence_parallel=sp)
    tp_ext.load_full_state_dict(module, state, group=group)
    torch.manual_seed(5)
    y, _ = call(module, x, [5, 5], "tokens")
    y.square().sum().backward()
    total = tp_ext.reduce_from_region(y.square().sum(), group if sp else None)
    module.eval()
    with torch.no_grad():
        plain, _ = call(module, x, [5, 5], "tokens")
    return total, plain.square().sum(), local_grads(module), dict(tp_ext.shardings(module)), torch.get_rng_state()


@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("name", ["mha", "gqa_6_heads_2_kv", "mqa", "softcap", "window_not_causal"])
def test_exact_dropout_is_the_same_for_every_p(name, sp):
    state, x = oracle.random_state(make(CASES[name])), torch.randn(10, HIDDEN, dtype=torch.float64)
    (want, plain, want_grads, *_) = _dropped(None, CASES[name], state, x)
    assert abs(want - plain) > 1e-3
    for p in [p for p in (1, 2, 3, 4) if fits(CASES[name], p)]:
        totals, _, grads, tables, states = zip(*ranks.run(_dropped, p, CASES[name], state, x, sp), strict=True)
        for total, generator in zip(totals, states, strict=True):
            torch.testing.assert_close(total, want, rtol=1e-12, atol=0)
            assert torch.equal(generator, states[0])
        got = gathered(grads, tables[0])
        torch.testing.assert_close(got, want_grads, rtol=1e-9, atol=1e-11)


def _masks(group, exact):
    """v = 1 and all scores equal: the input of the row linear shows, per head and query, how many keys were kept."""
    module = make({"num_heads": 4, "causal": False}, group, dropout=0.5, exact_dropout=exact)
    with torch.no_grad():
        module.qkv.weight.zero_()
        module.qkv.bias.fill_(1)
    seen = []
    module.out.register_forward_pre_hook(lambda _, args: seen.append(args[0].detach()))
    y, x = call(module, torch.randn(64, HIDDEN, dtype=torch.float64), [64], "tokens")
    y.sum().backward()
    assert x.grad.isfinite().all()
    return seen[0].view(64, -1, HEAD)[..., 0], torch.get_rng_state()


@pytest.mark.parametrize("exact", [True, False])
def test_dropout_of_each_rank_is_its_own_and_the_generators_stay_together(exact):
    kept, states = zip(*ranks.run(_masks, 2, exact), strict=True)
    assert not torch.equal(*kept)
    assert torch.equal(*states)
    assert abs(torch.cat(kept).mean() - 1) < 0.05  # 16384 draws: six standard deviations
    if exact:
        assert torch.equal(torch.cat(kept, 1), ranks.run(_masks, 1, True)[0][0])


# Communication, and what of torch wraps a module


def _count(group, sp, options):
    module = make(options, group, sequence_parallel=sp)
    x = torch.randn(8, HIDDEN, dtype=torch.float64)
    with CommDebugMode() as forward:
        y, _ = call(module, x, [4, 4], "tokens")
    with CommDebugMode() as backward:
        y.sum().backward()
    return counts_by_kind(forward), counts_by_kind(backward)


def test_one_all_reduce_forward_and_one_backward():
    for p, want in ((2, {"all_reduce": 1}), (1, {})):
        assert ranks.run(_count, p, False, CASES["all"] | {"qk_norm": False}) == [(want, want)] * p


def test_sequence_parallel_one_all_gather_and_one_reduce_scatter():
    forward, backward = ranks.run(_count, 2, True, {"num_heads": 4, "bias": False})[0]
    assert forward == {"all_gather": 1, "reduce_scatter": 1}
    assert backward == {"all_gather": 2, "reduce_scatter": 1}  # of dy, of x again (kept as a shard); of dx


def _compile(module):
    return torch.compile(module, fullgraph=True, backend="aot_eager")


def _checkpoint(module):
    return lambda *args, **kwargs: checkpoint(module, *args, use_reentrant=False, **kwargs)


# Other options of the registry's: tests/training
@pytest.mark.parametrize(
    ("options", "sp"),
    [({"sliding_window": 2, "scale": 0.3}, True), ({"softcap": 1.5}, False)],
    ids=["window_mask-sp", "softcap_mask"],
)
@pytest.mark.parametrize("wrap", [_compile, _checkpoint], ids=["compile", "checkpoint"])
@on_ranks(2, backend="gloo", timeout=120)
def test_compiled_and_recomputed_as_eager(group, wrap, options, sp):
    torch._dynamo.reset()
    module = make(CASES["all"] | options, group, sequence_parallel=sp)
    mask = {"attn_mask": torch.randn(6, 5, 5).double().requires_grad_()}
    x = torch.randn(10, HIDDEN, dtype=torch.float64)
    results = []
    for fn in (module, wrap(module)):
        torch.manual_seed(3)
        own = (x.tensor_split(group.size())[group.rank()] if sp else x).clone().requires_grad_()
        y = fn(own, batch_size=2, **mask)
        results.append((y, *torch.autograd.grad(y.square().sum(), [own, *mask.values(), *module.parameters()])))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize(
    "options", [{}, {"dropout": 1e-9}, {"softcap": 3.0}], ids=["fused", "exact_dropout", "softcap"]
)
@on_ranks(1, 2)
def test_autocast_gives_the_low_precision(group, options):
    module = make(CASES["all"] | options, group, dtype=torch.float32)
    x, mask = torch.randn(2, 5, HIDDEN, requires_grad=True), torch.randn(6, 5, 5, requires_grad=True)
    want = module(x, attn_mask=mask)
    with torch.autocast("cpu", torch.bfloat16):
        y = module(x, attn_mask=mask)
    y.float().square().sum().backward()
    assert all(p.grad.dtype == torch.float32 for p in (mask, *module.parameters()))
    assert y.dtype == torch.bfloat16
    assert (y - want).abs().max() <= 0.03 * want.abs().max()  # eight units in bf16's last place
