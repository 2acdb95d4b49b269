"""Tokens from sharded logits: those of torch on the full logits, and the same for every number of ranks."""

import math

import pytest
import torch

import tp_ext
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import count_collectives_of
from tp_ext.random import draw_seed

pytestmark = pytest.mark.core

V = 23
# As tensor_split, of equal width with padding, of sizes; with width 8 one of 4 ranks has padding alone
WIDTHS = {1: (None, 24), 2: (None, 12, 22, [20, 3]), 3: (None, 8, 11, [0, 20, 3]), 4: (None, 6, 8, [5, 5, 0, 13])}
FLOATS = [torch.float64, torch.float32, torch.bfloat16, torch.float16]
OPTIONS = {
    "plain": {},
    "cold": {"temperature": 0.3},
    "greedy": {"temperature": 0},
    "top_k": {"top_k": 3},
    "top_k_1": {"top_k": 1},
    "top_k_of_a_rank": {"top_k": 7, "temperature": 2.0},
    "top_p": {"top_p": 0.7},
    "top_p_tiny": {"top_p": 1e-9},
    "top_k_top_p": {"top_k": 9, "top_p": 0.8, "temperature": 0.7},
    "all": {"top_k": 100, "top_p": 1.0},
}


def columns(logits, group, width=None):
    """This rank's columns: like tensor_split, of sizes, or of equal width, the rest being padding larger than any
    logit."""
    p, rank = (1, 0) if group is None else (group.size(), group.rank())
    if width is None:
        return logits.tensor_split(p, -1)[rank]
    if isinstance(width, list):
        return logits.split(width, -1)[rank]
    padding = logits.new_full((*logits.shape[:-1], p * width - logits.shape[-1]), 1e4)
    return torch.cat([logits, padding], -1).split(width, -1)[rank]


def vocabulary(width):
    return {"sizes": width} if isinstance(width, list) else {"vocab_size": V}


def ties(dtype, rows=40):
    """Few values, so that the largest, and the k-th largest, occur on several ranks."""
    logits = torch.randint(0, 4, (rows, V)).to(dtype)
    logits[1] = 0
    logits[2, :-1] = float("-inf")
    return logits


# Greedy


def _argmax(group, logits, width):
    return tp_ext.vocab_parallel_argmax(columns(logits, group, width), group, **vocabulary(width))


@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("p", [1, 2, 3, 4])
def test_argmax_is_that_of_torch_of_equal_logits_the_first(p, dtype):
    logits = torch.cat([ties(dtype), torch.randn(20, V).to(dtype)])
    logits[3, [4, 17]] = float("nan")
    logits[4] = float("-inf")
    want = logits.argmax(-1)
    assert want[3] == 4 and want[4] == 0
    for width in WIDTHS[p]:
        for got in ranks.run(_argmax, p, logits, width):
            assert got.dtype == torch.int64 and torch.equal(got, want)


# Sampled


def reference(logits, temperature=1.0, top_k=None, top_p=None):
    """The distribution, from sorted full logits: ties at the end of a cut stay in."""
    if temperature == 0:
        return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
    logits = logits.double()
    if top_k is not None:
        least = logits.sort(-1, descending=True).values[..., min(top_k, logits.shape[-1]) - 1, None]
        logits = logits.masked_fill(logits < least, float("-inf"))
    probabilities = (logits / temperature).softmax(-1)
    if top_p is not None and top_p < 1:
        for row, one in zip(probabilities, logits, strict=True):
            ordered, order = row.sort(descending=True)
            last = next(i for i in range(len(row)) if ordered[: i + 1].sum() >= top_p - 1e-12 or i == len(row) - 1)
            row[one < one[order[last]]] = 0
    return probabilities / probabilities.sum(-1, keepdim=True)


def _draw(group, logits, width, options, times=1):
    torch.manual_seed(11)
    own = columns(logits, group, width)
    drawn = [tp_ext.vocab_parallel_sample(own, group, **vocabulary(width), **options) for _ in range(times)]
    return torch.stack(drawn), torch.get_rng_state()


@pytest.mark.thinned(1)
@pytest.mark.parametrize("dtype", FLOATS, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_tokens_are_the_same_for_every_p_and_every_cut(options, dtype):
    logits = torch.cat([ties(dtype), torch.randn(40, V).to(dtype)]).view(8, 10, V)
    want, state = _draw(None, logits, None, options, 3)
    if options.get("temperature") != 0 and options.get("top_k") != 1:
        assert not torch.equal(want[0], want[1])
    allowed = reference(logits.flatten(0, 1), **options) > 0
    assert allowed.gather(1, want.flatten(1).T).all()
    for p in (1, 2, 3, 4):
        for width in WIDTHS[p]:
            for got, generator in ranks.run(_draw, p, logits, width, options, 3):
                assert torch.equal(got, want)
                assert torch.equal(generator, state)


@pytest.mark.parametrize("name", ["plain", "cold", "top_k", "top_k_of_a_rank", "top_p", "top_k_top_p"])
def test_distribution(name):
    """Chi-square over 60,000 draws of one row with ties; a wrong weight of one id in 50 would be 24 of its deviations
    away. Bound: the mean of the statistic plus six of its standard deviations."""
    row = torch.randn(V).mul(1.5).round(decimals=0)
    count, wanted = 60_000, reference(row[None], **OPTIONS[name])[0]
    drawn, _ = ranks.run(_draw, 2, row.expand(count, V).contiguous(), None, OPTIONS[name])[0]
    seen, likely = drawn[0].bincount(minlength=V).double(), wanted > 0
    assert not seen[~likely].any()
    expected = wanted[likely] * count
    freedom = likely.sum() - 1
    assert freedom > 0
    assert ((seen[likely] - expected).square() / expected).sum() <= freedom + 6 * (2 * freedom) ** 0.5


@pytest.mark.parametrize("p", [1, 2, 4])
@pytest.mark.parametrize(
    ("values", "options", "allowed"),
    [
        ({0: 3, 20: 3, 5: 2}, {"top_k": 1}, {0, 20}),
        ({3: 0, 4: math.log(0.5), 22: math.log(0.5)}, {"top_p": 0.5}, {3}),  # exactly half is enough
        ({3: 0, 4: math.log(0.5), 22: math.log(0.5)}, {"top_p": 0.51}, {3, 4, 22}),
        # Ten ids share the second place: they are most of what top_k leaves, and count for top_p
        ({2: 1} | dict.fromkeys(range(3, 13), 0.0), {"top_k": 2, "top_p": 0.5}, set(range(2, 13))),
        ({2: 1} | dict.fromkeys(range(3, 13), 0.0), {"top_k": 2, "top_p": 0.2}, {2}),
    ],
    ids=["ties", "exactly", "more", "ties_count", "first_is_enough"],
)
def test_every_option_is_drawn(values, options, allowed, p):
    row = torch.full((V,), -50.0, dtype=torch.float64)
    for index, value in values.items():
        row[index] = value
    drawn, _ = ranks.run(_draw, p, row.expand(300, V).contiguous(), None, options)[0]
    assert set(drawn.flatten().tolist()) == allowed


def test_rows_and_draws_are_independent():
    """Every pair of equal rows and of repeated draws agrees as often as two dice do: 0.25, 40,000 pairs."""
    drawn, _ = _draw(None, torch.cat([torch.zeros(40_000, 4), torch.full((40_000, V - 4), -99.0)], 1), None, {}, 2)
    for a, b in ((drawn[0], drawn[1]), (drawn[0, :-1], drawn[0, 1:]), (drawn[0, :-4], drawn[0, 4:])):
        assert abs((a == b).double().mean() - 0.25) < 6 * (0.25 * 0.75 / len(a)) ** 0.5


def test_the_noise_is_a_function_of_seed_row_and_id():
    """Rows that come alone draw what row 0 does; the seed is one draw of torch's generator."""
    logits = torch.randn(3, V)
    first, _ = _draw(None, logits, None, {})
    alone, _ = _draw(None, logits[:1], None, {})
    assert torch.equal(first[0, 0], alone[0, 0])
    torch.manual_seed(11)
    seed = draw_seed(logits.device)
    noise = torch.empty(3, V, dtype=torch.float64)
    tp_ext._ops.philox_uniform_(noise, seed, 0.0, 1.0, V, V, 0)
    assert torch.equal(first[0], (logits.double() - noise.log().neg().log()).argmax(-1))


# Communication, modes, errors


def _count(group, options):
    own = columns(torch.randn(5, V), group)
    return count_collectives_of(lambda: tp_ext.vocab_parallel_sample(own, group, vocab_size=V, **options))


@pytest.mark.parametrize(("name", "gathers"), [("greedy", 1), ("plain", 1), ("top_k", 2), ("top_p", 3), ("all", 1)])
def test_communication(name, gathers):
    assert ranks.run(_count, 2, OPTIONS[name]) == [{"all_gather": gathers}] * 2
    assert _count(None, OPTIONS[name]) == {}


@on_ranks(2, backend="gloo", timeout=120)
def test_compiled_as_eager(group):
    torch._dynamo.reset()
    own = columns(torch.randn(5, V), group)
    sample = torch.compile(tp_ext.vocab_parallel_sample, fullgraph=True, backend="aot_eager")
    results = []
    for fn in (tp_ext.vocab_parallel_sample, sample):
        torch.manual_seed(3)
        with torch.inference_mode():
            results.append(fn(own, group.group_name, vocab_size=V, **OPTIONS["top_k_top_p"]))
    got, want = results
    assert torch.equal(got, want)


def test_no_rows_and_gradients_do_not_matter():
    assert tp_ext.vocab_parallel_sample(torch.randn(0, V), None, top_p=0.5).shape == (0,)
    assert not tp_ext.vocab_parallel_sample(torch.randn(3, V, requires_grad=True), None, top_k=2).requires_grad


def _sample(group, width, options, dtype=torch.float32):
    tp_ext.vocab_parallel_sample(torch.zeros(2, width, dtype=dtype), group, vocab_size=V, **options)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"temperature": -0.5}, "temperature: -0.5 must be a finite number of at least 0"),
        ({"temperature": float("nan")}, "temperature: nan"),
        ({"top_k": 0}, "top_k: 0 must be an integer of at least 1"),
        ({"top_p": 0.0}, r"top_p: 0.0 must be in \(0, 1\]"),
        ({"top_p": 1.5}, r"top_p: 1.5 must be in \(0, 1\]"),
    ],
)
def test_wrong_arguments(options, match):
    ranks.run_raises(_sample, 2, ValueError, match, 12, options)


def test_wrong_logits():
    ranks.run_raises(_sample, 2, ValueError, f"logits_local: {V} columns must be this rank's shard", V, {})
    ranks.run_raises(_sample, 2, TypeError, "logits_local: dtype torch.int64", 12, {}, torch.int64)
