"""Conformance cases 43 to 47: attention, its core, dropout and RoPE (docs/reference/correctness.md).

The core is torch's scaled_dot_product_attention, or, where dropout of the weights has to be the unsharded model's, an
explicit one. There is no mask argument: what a fully masked row stands for is an empty sequence among packed ones.
"""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tp_ext
from tests.helpers import oracle, ranks
from tests.helpers.attention_cases import CASES, HALF, HIDDEN, assert_dense, call, fits, make
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import gathered, own_tokens
from tp_ext import Dropout, RotaryEmbedding, dropout

pytestmark = pytest.mark.core

EVERY = pytest.mark.parametrize("p", [1, 2, 3, 4])
SP = pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])


@pytest.mark.thinned(1)
@EVERY
@SP
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)], ids=str)
def test_case_43_mha_of_256_tokens(dtype, bound, sp, p):
    """bf16: 1e-2 is 2.5 units in its last place."""
    options = {"num_heads": 4, "hidden_size": 128, "head_dim": 32}
    assert_dense(p, options, [256] * 4, "tokens" if sp else "batch", sp, bound, dtype)


GQA = CASES["gqa_2_kv"]


def _gqa(p):
    """8 query heads; two KV heads cannot be sharded over three ranks, one can."""
    return GQA if fits(GQA, p) else GQA | {"num_kv_heads": 1}


@pytest.mark.thinned(1)
@EVERY
@SP
def test_case_44_grouped_queries_with_fewer_kv_heads_than_ranks(sp, p):
    assert_dense(p, _gqa(p), [8], "tokens", sp)
    assert_dense(p, _gqa(p), [5, 5], "tokens", sp)


def _refused(group):
    make(GQA, group)


def test_case_44_two_kv_heads_cannot_be_sharded_over_three_ranks():
    ranks.run_raises(_refused, 3, ValueError, "num_heads = 8, num_kv_heads = 2, p = 3")


def _train(group, sp, steps):
    module = make(_gqa(group.size()) | {"qk_norm": True, "rope": HALF}, group, sequence_parallel=sp)
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


@pytest.mark.parametrize(
    ("p", "sp"),
    [
        pytest.param(p, sp, id=f"{p}-{'sp' * sp}", marks=[pytest.mark.exhaustive] * ((p, sp) != (3, True)))
        for p in (2, 3, 4)
        for sp in (False, True)
    ],
)
def test_case_44_replicated_kv_is_bitwise_equal_after_100_steps(p, sp):
    """`gathered` asserts it of the KV heads that several ranks hold, and of the norms' weights."""
    firsts, lasts, tables = zip(*ranks.run(_train, p, sp, 100), strict=True)
    assert tables[0]["qkv.weight"].parts[1].copies == {2: 1, 3: 3, 4: 2}[p]
    before, after = gathered(firsts, tables[0]), gathered(lasts, tables[0])
    for name in after:
        assert not torch.equal(before[name], after[name])


# The core. q and k are zero, so every token attends evenly to what it sees


def _even(group, options, seqs, device, explicit):
    """What enters the row linear, per head, for x = v; and x's gradient there for an upstream g."""
    seq, width, heads = sum(seqs), options["head_dim"], options["num_heads"]
    # exact dropout, of a probability that drops nothing, takes the explicit core
    module = make(options | {"bias": False}, group, dropout=1e-12 if explicit else 0.0)
    v = torch.eye(width, dtype=options["dtype"]).repeat(heads, 1)
    weight = torch.cat([torch.zeros(2 * heads * width, width, dtype=options["dtype"]), v])
    state = {"qkv.weight": weight, "out.weight": torch.zeros(width, heads * width, dtype=options["dtype"])}
    tp_ext.load_full_state_dict(module, state, group=group)
    module.to(device)
    seen = []
    module.out.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    x = torch.eye(seq, width) if seq == width else torch.randn(seq, width)
    x = x.to(device, options["dtype"]).requires_grad_()
    module(x, cu_seqlens=[sum(seqs[:i]) for i in range(len(seqs) + 1)])
    attended = seen[0].view(seq, -1, width)
    g = torch.randn(seq, 1, width).to(attended)
    # every head sees the same v: the gradient of the rank's heads, of which x is the sum over all ranks
    (dx,) = torch.autograd.grad(attended, x, g.expand_as(attended))
    return tuple(t.cpu() for t in (x, attended, g[:, 0], dx))


def _even_weights(seqs, causal, dtype):
    seen = torch.block_diag(*(torch.ones(n, n, dtype=dtype) for n in seqs))
    seen = seen.tril() if causal else seen
    return seen / seen.sum(-1, keepdim=True)


def _assert_even(p, seqs, heads, width, causal=True, dtype=torch.float64, bound=1e-8, device="cpu", explicit=False):
    options = {"num_heads": heads, "head_dim": width, "hidden_size": width, "causal": causal, "dtype": dtype}
    for x, attended, g, dx in ranks.run(_even, p, options, seqs, torch.device(device), explicit):
        if sum(seqs) <= 64:
            weights = _even_weights(seqs, causal, dtype)
            want, back = weights @ x, weights.T @ g
        else:  # of one long causal sequence, by running sums
            count = torch.arange(1, len(x) + 1, dtype=torch.float64)[:, None]
            want = (x.double().cumsum(0) / count).to(dtype)
            back = (g.double() / count).flip(0).cumsum(0).flip(0).to(dtype)
        for head in attended.unbind(1):
            torch.testing.assert_close(head, want, rtol=bound, atol=bound)
        torch.testing.assert_close(dx, heads * back, rtol=heads * bound, atol=heads * bound)


@pytest.mark.thinned(1)
@EVERY
@pytest.mark.parametrize("explicit", [False, True], ids=["fused", "explicit"])
def test_case_45_softmax_of_zeros(p, explicit, device):
    """x = v = the unit vectors: what comes out are the weights, 1 / (i + 1) in row i."""
    _assert_even(p, [32], max(p, 2), 32, device=device, explicit=explicit)
    _assert_even(p, [32], max(p, 2), 32, causal=False, device=device, explicit=explicit)


@pytest.mark.thinned(1)
@EVERY
@pytest.mark.parametrize("explicit", [False, True], ids=["fused", "explicit"])
def test_case_45_odd_lengths_and_empty_sequences(p, explicit, device):
    for seqs in ([1], [17], [5, 0, 3, 1, 0], [0, 13]):
        _assert_even(p, seqs, 4, 6, device=device, explicit=explicit)
        _assert_even(p, seqs, 4, 6, causal=False, device=device, explicit=explicit)


@pytest.mark.parametrize(
    ("seq", "p", "device"),
    [
        pytest.param(seq, p, device, id=f"{device}-{seq}-{p}", marks=marks)
        for seq, p, slow in ((4096, 2, False), (4097, 2, True), (4097, 3, False), (16385, 1, True))
        for device, marks in (
            ("cpu", [pytest.mark.exhaustive] * slow),  # 4097 on three ranks has more than one block, too, and a rest
            ("cuda", pytest.mark.cuda),
        )
    ],
    indirect=["device"],
)
def test_case_45_long_sequences(seq, p, device):
    """fp32, sums of thousands of numbers."""
    _assert_even(p, [seq], p, 8, dtype=torch.float32, bound=1e-5, device=device)


# Dropout

P = 0.375


def _masks(group):
    torch.manual_seed(9)
    x = torch.ones(64)
    drawn = [dropout(x, P, group=group), Dropout(P, group=group)(x), dropout(x, P, group=group, dim=0)]
    rows = own_tokens(torch.ones(7, 9), group) if group is not None else torch.ones(7, 9)
    return *drawn, Dropout(P, group=group, sequence_parallel=True)(rows, total_tokens=7), torch.rand(())


@EVERY
def test_case_46_masks_are_equal_where_replicated_and_differ_where_sharded(p):
    results, alone = ranks.run(_masks, p), _masks(None)
    assert not torch.equal(alone[0], alone[1]), "each call draws anew"
    for i, (function, module, sharded, _, draw) in enumerate(results):
        assert torch.equal(function, alone[0]) and torch.equal(module, alone[1])
        assert not any(torch.equal(sharded, other[2]) for other in results[:i])
        assert draw == alone[4], "the generators go on as one does alone"
    assert torch.equal(torch.cat([rows for *_, rows, _ in results]), alone[3])


@pytest.mark.thinned(1)
@EVERY
@SP
@pytest.mark.parametrize("nested", [False, True], ids=["", "nested"])
@on_ranks()
def test_case_46_recomputing_gives_the_same_mask(group, sp, nested):
    torch.manual_seed(9)
    layer = Dropout(P, group=group, sequence_parallel=sp)
    x = own_tokens(torch.ones(9, 4), group) if sp else torch.ones(9, 4)
    x.requires_grad_()
    masks = []

    def inner(x):
        y = layer(layer(x.clone(), total_tokens=9) + 1, total_tokens=9)
        masks.append(y.detach())
        return y.sin().exp()

    def block(x):
        return checkpoint(inner, x, use_reentrant=False) * layer(x, total_tokens=9) if nested else inner(x)

    checkpoint(block, x, use_reentrant=False).sum().backward()
    got, x.grad, after = x.grad, None, torch.rand(())
    assert len(masks) == (3 if nested else 2)
    assert all(torch.equal(mask, masks[0]) for mask in masks)
    torch.manual_seed(9)
    (inner(x) * layer(x, total_tokens=9) if nested else inner(x)).sum().backward()
    assert torch.equal(got, x.grad)
    assert after == torch.rand(()), "recomputing leaves the generator where it was"


@pytest.mark.thinned(1)
@EVERY
@SP
@on_ranks()
def test_case_46_nested_forks_of_the_generator(group, sp):
    torch.manual_seed(9)
    layer, x, masks = Dropout(P, group=group, sequence_parallel=sp), torch.ones(8, 4), []
    with torch.random.fork_rng([]):
        masks.append(layer(x))
        with torch.random.fork_rng([]):
            torch.manual_seed(9)
            masks.append(layer(x))
        masks.append(layer(x))
    masks.append(layer(x))
    assert all(torch.equal(masks[i], masks[0]) for i in (1, 3)) and not torch.equal(masks[2], masks[0])


# RoPE


def _rotate(group, x, g, positions, options, device):
    r, p = group.rank(), group.size()
    x = x.tensor_split(p, 1)[r].to(device).requires_grad_()
    y = RotaryEmbedding(8, **options)(x, positions.to(device))
    y.backward(g.tensor_split(p, 1)[r].to(device))
    return y, x.grad


@pytest.mark.thinned
@EVERY
@pytest.mark.parametrize("options", [{}, {"interleaved": True}, {"rotary_dim": 4}], ids=str)
@pytest.mark.parametrize("which", ["from_0", "offset", "packed"])
def test_case_47_rope_and_the_inverse_rotation(which, options, p, device):
    """On each rank its own heads. The gradient is the rotation by the negative angles."""
    lengths = [5, 0, 3, 1, 2]
    packed = torch.cat([torch.arange(n) for n in lengths])
    positions = {"from_0": torch.arange(11), "offset": torch.arange(4091, 4102), "packed": packed}[which]
    x, g = torch.randn(2, 11, 5, 8, dtype=torch.float64)
    ys, dxs = (torch.cat(ts, 1) for ts in zip(*ranks.run(_rotate, p, x, g, positions, options, device), strict=True))
    torch.testing.assert_close(ys, oracle.rotate(x, positions, **options), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(dxs, oracle.rotate(g, -positions, **options), rtol=1e-12, atol=1e-12)
