"""ParallelAttention against attention written out head by head (reference.py): output and all gradients.

Bounds are relative to the largest element; in fp64 1e-10, thousands of times the rounding of sums this short and far
below any real error.
"""

import pytest
import ranks
import reference
import torch
from attention_cases import CASES, HALF, HIDDEN, LAYOUTS, call, fits, make
from reference import gathered, local_grads

import tp_ext
from tp_ext.attention import head_parts

pytestmark = pytest.mark.core

EVERY = [
    pytest.param(p, name, layout, id=f"{name}-p{p}-{layout}")
    for name, case in CASES.items()
    for p in (1, 2, 3, 4)
    if fits(case, p)
    for layout in (LAYOUTS if name in ("all", "mha") else ("batch", "sp_packed_uneven"))
]


def _run(group, options, state, x, g, lengths, how, sp):
    module = make(options, group, sequence_parallel=sp)
    tp_ext.load_full_state_dict(module, state, group=group)
    y, x = call(module, x, lengths, how)
    own = g.tensor_split(group.size())[group.rank()] if sp else g
    y.backward(own.view(y.shape))
    return y.flatten(0, -2), x.grad.flatten(0, -2), local_grads(module), dict(tp_ext.shardings(module))


def _dense(options, state, x, g, lengths):
    """Output and gradients of the reference: y, dx, {name: gradient}."""
    x, state = x.double().requires_grad_(), {k: v.double().requires_grad_() for k, v in state.items()}
    known = ("num_heads", "num_kv_heads", "causal", "rope")
    y = reference.attention(x, state, lengths, **{k: v for k, v in options.items() if k in known})
    y.backward(g.double())
    return y, x.grad, {k: v.grad for k, v in state.items()}


def _whole(results, sp):
    """From what `_run` returned on each rank: y, dx, {name: gradient}, all full."""
    ys, dxs, grads, tables = zip(*results, strict=True)
    if not sp:
        assert all(torch.equal(y, ys[0]) and torch.equal(dx, dxs[0]) for y, dx in zip(ys, dxs, strict=True))
    y, dx = (torch.cat(ts) if sp else ts[0] for ts in (ys, dxs))
    return y, dx, gathered(grads, tables[0])


def _assert_dense(p, options, lengths, how, sp, relative=1e-10, dtype=torch.float64):
    options = options | {"dtype": dtype}
    state = reference.random_state(make(options))
    x, g = (torch.randn(sum(lengths), options.get("hidden_size", HIDDEN), dtype=dtype) for _ in range(2))
    got = _whole(ranks.run(_run, p, options, state, x, g, lengths, how, sp), sp)
    want = _dense(options, state, x, g, lengths)
    assert got[2].keys() == want[2].keys()
    pairs = [("y", got[0], want[0]), ("dx", got[1], want[1])] + [(k, got[2][k], want[2][k]) for k in want[2]]
    for name, a, b in pairs:
        assert a.dtype == dtype and a.shape == b.shape
        error, scale = (a.double() - b).abs().max(), b.abs().max()
        assert error <= relative * scale, f"{name}: {error:.3g} of {scale:.3g}"


@pytest.mark.parametrize(("p", "name", "layout"), EVERY)
def test_output_and_all_gradients_are_those_of_dense_attention(p, name, layout):
    _assert_dense(p, CASES[name], *LAYOUTS[layout])


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
def test_case_43_mha_of_256_tokens(p, dtype, bound):
    """bf16: 1e-2 is 2.5 units in its last place."""
    options = {"num_heads": 4, "hidden_size": 128, "head_dim": 32}
    _assert_dense(p, options, [256] * 4, "batch", False, bound, dtype)


@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
def test_case_44_gqa_with_two_kv_heads_on_four_ranks(sp):
    _assert_dense(4, CASES["gqa_2_kv"], [8], "tokens", sp)


def _train(group, sp, steps):
    module = make(CASES["gqa_2_kv"] | {"qk_norm": True, "rope": HALF}, group, sequence_parallel=sp)
    optimizer = torch.optim.AdamW(module.parameters(), lr=0.01)
    first = {k: v.detach().clone() for k, v in module.named_parameters()}
    x = torch.randn(8, HIDDEN, dtype=torch.float64)
    for _ in range(steps):
        optimizer.zero_grad()
        y, _ = call(module, x, [4, 4], "tokens")
        y.square().sum().backward()
        optimizer.step()
    last = {k: v.detach().clone() for k, v in module.named_parameters()}
    return first, last, dict(tp_ext.shardings(module))


@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
def test_case_44_replicated_kv_is_bitwise_equal_after_100_steps(sp):
    firsts, lasts, tables = zip(*ranks.run(_train, 4, sp, 100), strict=True)
    assert tables[0]["qkv.weight"].parts[1].copies == 2
    before, after = gathered(firsts, tables[0]), gathered(lasts, tables[0])
    for name in after:
        assert not torch.equal(before[name], after[name])


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
