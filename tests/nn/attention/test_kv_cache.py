"""KVCache: attention step by step is attention over the whole text, written out head by head (helpers/oracle.py).

Bounds are relative to the largest element: 1e-12 in fp64, a hundred times the rounding of sums this short.
"""

import itertools

import pytest
import torch

import tp_ext
from tests.helpers import oracle, ranks
from tests.helpers.attention_cases import CASES, HIDDEN, KNOWN, fits, make
from tests.helpers.cache_steps import in_steps, left_padded, loaded

pytestmark = pytest.mark.core

SEQ = 6
CAUSAL = [name for name, case in CASES.items() if case.get("causal", True)]
# Every way to cut the text into a prefill and steps; and for most layers some of them
ALL = [
    [b - a for a, b in itertools.pairwise((0, *cuts, SEQ))]
    for n in range(SEQ)
    for cuts in itertools.combinations(range(1, SEQ), n)
]
SOME = [[6], [5, 1], [3, 1, 2], [1] * 6, [0, 2, 0, 4]]


def close(a, b, relative=1e-12):
    assert a.shape == b.shape
    assert (a - b).abs().max() <= relative * b.abs().max()


def dense(options, state, x, attn_mask=None):
    """The reference on whole sequences x [batch, seq, hidden]."""
    known = {k: v for k, v in options.items() if k in KNOWN}
    y = oracle.attention(x.flatten(0, 1), state, [x.shape[1]] * len(x), attn_mask=attn_mask, **known)
    return y.view(x.shape)


def _splits(group, options, state, x, splits, static, sp=False):
    module = loaded(make(options, group, sequence_parallel=sp), state)
    cache = module.new_cache(len(x), SEQ, static=static)
    with torch.inference_mode():
        return [in_steps(module, x, cache.reset(), split) for split in splits]


@pytest.mark.thinned(1)
@pytest.mark.parametrize("static", [False, True], ids=["", "static"])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CAUSAL)
def test_every_split_of_the_text_gives_the_full_forward(name, p, static):
    options = CASES[name]
    if not fits(options, p):
        return
    state, x = oracle.random_state(make(options)), torch.randn(2, SEQ, HIDDEN, dtype=torch.float64)
    want = dense(options, state, x)
    splits = ALL if name == "all" else SOME
    per_rank = ranks.run(_splits, p, options, state, x, splits, static)
    for got, *others in zip(*per_rank, strict=True):
        close(got, want)
        assert all(torch.equal(got, other) for other in others)


@pytest.mark.parametrize("static", [False, True], ids=["", "static"])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_sequence_parallel_also_with_fewer_tokens_than_ranks(p, static):
    options = CASES["rope"]
    state, x = oracle.random_state(make(options)), torch.randn(1, SEQ, HIDDEN, dtype=torch.float64)
    want = dense(options, state, x)
    for results in ranks.run(_splits, p, options, state, x, SOME[:4], static, True):
        for got in results:
            close(got, want)


def _padded(group, options, state, texts, static):
    return left_padded(loaded(make(options, group), state), texts, static)


@pytest.mark.thinned
@pytest.mark.parametrize("static", [False, True], ids=["", "static"])
@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize("name", ["all", "rope_partial", "no_bias"])
def test_left_padded_prompts_come_out_as_they_would_alone(name, p, static):
    options = CASES[name]
    if not fits(options, p):
        return
    state = oracle.random_state(make(options))
    texts = [torch.randn(n, HIDDEN, dtype=torch.float64) for n in (7, 3, 5)]
    for got in ranks.run(_padded, p, options, state, texts, static):
        for y, text in zip(got, texts, strict=True):
            close(y, dense(options, state, text[None])[0])


@pytest.mark.parametrize("given", [torch.tensor, list, tuple])
@pytest.mark.parametrize("static", [False, True], ids=["", "static"])
def test_truncate_forgets_and_reorder_shuffles(static, given):
    module = loaded(make(CASES["all"]), oracle.random_state(make(CASES["all"])))
    x = torch.randn(3, SEQ, HIDDEN, dtype=torch.float64)
    order = torch.tensor([2, 0, 0])
    cache = module.new_cache(3, SEQ, static=static).reset(padding=given([0, 1, 2]))
    with torch.inference_mode():
        module(x[:, :4], cache=cache)
        assert cache.length == 4
        for drafts in (torch.randn(3, 2, HIDDEN).double(), x[:, 4:5]):  # the first two are rejected
            cache.truncate(4)
            y = module(drafts, cache=cache)
        shuffled = module(x[order, 5:], cache=cache.reorder(given([2, 0, 0])))
        again = module.new_cache(3, SEQ).reset(padding=torch.tensor([0, 1, 2])[order])
        want = in_steps(module, x[order], again, [4, 1, 1])
    close(y[order], want[:, 4:5])
    close(shuffled, want[:, 5:])


@pytest.mark.parametrize("static", [False, True], ids=["", "static"])
def test_positions_are_counted_from_the_end_of_the_padding(static):
    """Attention with RoPE depends on distances alone, and does not show it."""
    cache = tp_ext.KVCache(2, 8, 1, 4, static=static).reset(padding=torch.tensor([0, 3]))
    assert cache.positions(5).tolist() == [[0, 1, 2, 3, 4], [0, 0, 0, 0, 1]]


def test_switching_to_static_after_the_prefill_keeps_the_text():
    module = loaded(make(CASES["all"]), oracle.random_state(make(CASES["all"])))
    x = torch.randn(2, SEQ, HIDDEN, dtype=torch.float64)
    cache = module.new_cache(2, SEQ)
    with torch.no_grad():
        prefill = module(x[:, :4], cache=cache)
        cache.static = True
        fifth = module(x[:, 4:5], cache=cache)
        cache.static = False
        y = torch.cat([prefill, fifth, module(x[:, 5:], cache=cache)], 1)
        close(y, module(x))
    assert cache.length == SEQ


def test_a_nan_of_the_last_text_does_not_get_through_the_mask():
    module = loaded(make(CASES["mha"]), oracle.random_state(make(CASES["mha"])))
    x = torch.randn(1, 3, HIDDEN, dtype=torch.float64)
    cache = module.new_cache(1, 3, static=True)
    with torch.no_grad():
        module(torch.full_like(x, float("nan")), cache=cache)
        assert module(x[:, :1], cache=cache.reset()).isfinite().all()


def test_nothing_is_saved_and_the_buffers_are_in_no_state_dict():
    module = make(CASES["all"])
    cache = module.new_cache(2, 4)
    saved = []
    with torch.inference_mode(), torch.autograd.graph.saved_tensors_hooks(saved.append, lambda t: t):
        y = module(torch.randn(2, 3, HIDDEN, dtype=torch.float64), cache=cache)
    assert not saved and y.is_inference() and not cache.k.is_inference() and not cache.state_dict()
    with torch.no_grad():  # what inference_mode wrote goes on outside of it
        assert module(torch.randn(2, 1, HIDDEN, dtype=torch.float64), cache=cache).grad_fn is None


def test_half_precision_and_autocast():
    x = torch.randn(2, 5, HIDDEN)
    for dtype, low in ((torch.bfloat16, False), (torch.float32, True)):
        module = make(CASES["all"], dtype=dtype)
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16, enabled=low):
            cache = module.new_cache(2, 5, dtype=torch.bfloat16)
            y = in_steps(module, x.to(dtype), cache, [3, 1, 1])
            want = module(x.to(dtype))
        assert y.dtype == want.dtype == cache.v.dtype == torch.bfloat16
        close(y, want, 0.02)  # five units in bf16's last place


def test_tables_made_once_for_all_layers_are_those_made_in_each():
    module = make(CASES["all"])
    x = torch.randn(2, 5, HIDDEN, dtype=torch.float64)
    for positions in (torch.arange(5), torch.arange(5).repeat(2)):
        assert torch.equal(module(x, cos_sin=module.rope.cos_sin(positions, x.dtype)), module(x))
    tables = module.rope.cos_sin(torch.arange(7), x.dtype)
    with pytest.raises(ValueError, match="cos_sin: 7 rows must be one for each of 5 positions or 10 tokens"):
        module(x, cos_sin=tables)
    with pytest.raises(ValueError, match="cos_sin: must not be given to a layer without rope"):
        make(CASES["mha"])(x, cos_sin=tables)


# What is refused


def _call(group, options, how, static=False, sp=False):
    module = make(options, group, sequence_parallel=sp)
    if "dropout" not in options:
        module.eval()
    cache = module.new_cache(2, 4, static=static)
    x = torch.zeros(2, 3, HIDDEN, dtype=torch.float64)
    if how == "grad":
        return module(x, cache=cache)
    with torch.no_grad():
        return {
            "plain": lambda: module(x, cache=cache),
            "overflow": lambda: (module(x, cache=cache), module(x[:, :2], cache=cache)),
            "batch": lambda: module(x[:1], cache=cache),
            "packed": lambda: module(x[0], cu_seqlens=[0, 3], cache=cache),
            "layer": lambda: module(x, cache=make(CASES["mqa"] | {"head_dim": 2}).new_cache(2, 4)),
            "dtype": lambda: module(x, cache=module.new_cache(2, 4, dtype=torch.float32)),
            "truncate": lambda: cache.truncate(1),
            "padding shape": lambda: cache.reset(padding=torch.zeros(3, dtype=torch.long)),
            "padding range": lambda: cache.reset(padding=torch.tensor([0, 4])),
            "padding dtype": lambda: cache.reset(padding=torch.tensor([0.0, 1])),
            "padding list": lambda: cache.reset(padding=[0, 1.5]),
            "padding number": lambda: cache.reset(padding=1),
            "reorder": lambda: cache.reorder(torch.tensor([0])),
            "reorder list": lambda: cache.reorder([0, True]),
            "max_seq": lambda: module.new_cache(2, 0),
        }[how]()


@pytest.mark.parametrize(
    ("how", "options", "error", "match"),
    [
        ("grad", {}, RuntimeError, r"cache: .*torch.inference_mode\(\) or torch.no_grad\(\)"),
        ("overflow", {}, ValueError, "cache: 3 tokens and 2 more must not exceed max_seq = 4"),
        ("batch", {}, ValueError, "cache: made for batch_size = 2, but x has 1 sequences"),
        ("packed", {}, ValueError, "cache: must not be combined with cu_seqlens"),
        ("plain", {"causal": False}, ValueError, "cache: causal=False"),
        ("plain", {"dropout": 0.5}, ValueError, r"cache: must not be combined with dropout = 0.5.*eval\(\)"),
        ("layer", {}, ValueError, "cache: 1 heads of 2 must be this layer's 2 of 4"),
        ("dtype", {}, TypeError, "cache: dtype torch.float32 must be that of the keys, torch.float64"),
        ("truncate", {}, ValueError, r"length: 1 must be in \[0, 0\]"),
        ("padding shape", {}, ValueError, r"padding: shape \(3,\) must be \[batch_size = 2\]"),
        ("padding range", {}, ValueError, r"padding: \[0, 4\] must be in \[0, max_seq = 4\)"),
        ("padding dtype", {}, TypeError, "padding: dtype torch.float32"),
        ("padding list", {}, TypeError, "padding: 1.5 must be an integer"),
        ("padding number", {}, TypeError, "padding: int must be a tensor"),
        ("reorder list", {}, TypeError, "index: True must be an integer"),
        ("reorder", {}, ValueError, r"index: shape \(1,\) must be \[batch_size = 2\]"),
        ("max_seq", {}, ValueError, "max_seq: 0 must be"),
    ],
)
def test_errors(how, options, error, match):
    if how in ("overflow", "dtype"):  # behind collectives of the calls before
        ranks.run_raises(_call, 2, error, match, CASES["mha"] | options, how, in_turns=False)
    else:
        ranks.run_raises(_call, 2, error, match, CASES["mha"] | options, how)
    with pytest.raises(error, match=match.replace("layer's 2", "layer's 4")):
        _call(None, CASES["mha"] | options, how, static=True)
