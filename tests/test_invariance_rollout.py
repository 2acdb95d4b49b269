"""tp_invariant: rows of attention and of whole models depend on themselves, so that log-probabilities of generated ids
are those of training at another p, bit by bit."""

import pytest
import torch
import torch.nn.functional as F

import tp_ext
from tests.helpers.invariant_model import SIZES, Model
from tests.helpers.ranks import run, run_fresh
from tp_ext import _ops

pytestmark = pytest.mark.core

ATTENTIONS = {
    "causal": {"causal": True},
    "all keys": {"causal": False, "scale": 0.3},
    "window": {"causal": True, "window": 50},
    "window to both sides": {"causal": False, "window": 30},
    "softcap": {"causal": True, "softcap": 3.0},
    "bool mask": {"causal": True, "mask": torch.bool},
    "added mask": {"causal": False, "mask": torch.float64, "softcap": 2.0},
}


def _formula(q, k, v, mask, causal, scale=None, window=None, softcap=None):
    n, m = q.shape[2], k.shape[2]
    i, j = torch.arange(m - n, m)[:, None], torch.arange(m)
    seen = j <= i if causal else torch.ones(n, m, dtype=torch.bool)
    if window is not None:
        seen = seen & (j > i - window) & (j < i + window)
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    if mask is not None and mask.dtype != torch.bool:
        scores = scores + mask
    elif mask is not None:
        seen = seen & mask
    weights = scores.masked_fill(~seen, float("-inf")).softmax(-1)
    return weights.nan_to_num() @ v


@pytest.mark.parametrize("case", ATTENTIONS)
def test_values_and_gradients(case):
    options = dict(ATTENTIONS[case])
    dtype = options.pop("mask", None)
    for n, m in ((300, 300), (5, 5), (129, 129), (40, 400)):
        q, k, v = (
            torch.randn(2, 3, t, d, dtype=torch.float64, requires_grad=True) for t, d in ((n, 20), (m, 20), (m, 24))
        )
        mask = None
        if dtype == torch.bool:
            mask = torch.rand(2, 1, n, m) > 0.3
            mask[0, 0, 1] = False  # a query without a key
        elif dtype is not None:
            mask = torch.randn(1, 3, 1, m, dtype=dtype)
        y = _ops.block_attention(
            q,
            k,
            v,
            mask,
            None,
            [],
            options["causal"],
            options.get("scale"),
            options.get("window"),
            options.get("softcap"),
        )
        expected = _formula(q, k, v, mask, **options)
        grads = [torch.autograd.grad(t, (q, k, v), torch.ones_like(y).cos().cumsum(2)) for t in (y, expected)]
        torch.testing.assert_close((y, grads[0]), (expected, grads[1]), rtol=1e-11, atol=1e-11)


def test_bad_arguments_are_refused_by_name():
    q, k = torch.randn(2, 4, 3, 8), torch.randn(2, 2, 5, 8)

    def call(q=q, k=k, v=k, mask=None, padding=None, kv_heads=(0, 0, 1, 1)):
        return _ops.block_attention(q, k, v, mask, padding, kv_heads, True, None, None, None)

    assert call().shape == q.shape
    for error, name, options in (
        (ValueError, "kv_heads", {"kv_heads": ()}),
        (ValueError, "kv_heads", {"kv_heads": (0, 1)}),
        (IndexError, "kv_heads: 2 must be in", {"kv_heads": (0, 0, 1, 2)}),
        (ValueError, "kv_heads: must not be given where gradients", {"q": q.clone().requires_grad_()}),
        (ValueError, "k: shapes", {"k": k[:, :, :2], "v": k[:, :, :2]}),
        (ValueError, "k: shapes", {"v": k[:, :, :4]}),
        (TypeError, "k: dtype", {"k": k.double()}),
        (ValueError, "mask: shape", {"mask": torch.ones(3, 5)}),
        (ValueError, "padding: shape", {"padding": torch.zeros(3, dtype=torch.int64)}),
    ):
        with pytest.raises(error, match=name):
            call(**options)


def _rows(dtype):
    """A query has the same bits in every call that has its keys: with fewer queries, later keys or padding."""
    for head_dim, n, window in ((16, 40, None), (20, 257, 70), (64, 600, None)):
        q, k, v = (torch.randn(1, 2, n, head_dim).to(dtype) for _ in range(3))

        def attend(q, k, v, padding=None, window=window):
            return _ops.block_attention(q, k, v, None, padding, [], True, None, window, None)

        full = attend(q, k, v)
        for last in range(1, n + 1, 23):
            for count in (1, 3, 20):
                first = max(0, last - count)
                y = attend(q[:, :, first:last], k[:, :, :last], v[:, :, :last])
                assert torch.equal(y, full[:, :, first:last]), (head_dim, n, first, last)
        padded = [F.pad(t, (0, 0, 9, 0), value=1.0) for t in (q, k, v)]
        assert torch.equal(attend(*padded, torch.tensor([9]))[:, :, 9:], full)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_row_of_attention_depends_on_itself(dtype):
    run_fresh(_rows, dtype)


def _linear_rows(dtype):
    for k, n in ((48, 101), (256, 1), (300, 130), (37, 5)):
        x, w = torch.randn(200, k).to(dtype), torch.randn(n, k).to(dtype)
        calls = [
            lambda x, w=w: _ops.block_column_linear(x, w, None, "", False, None, [1], [0, 0, w.shape[0]]),
            lambda x, w=w: _ops.block_row_linear(x, w, None, "", False, [1], [0, 0, w.shape[1]]),
        ]
        for call in calls:
            full = call(x)
            for rows in (*range(1, 20), 63, 199):
                assert torch.equal(call(x[1 : 1 + rows]), full[1 : 1 + rows]), (k, n, rows)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_a_row_of_a_linear_depends_on_itself(dtype):
    run_fresh(_linear_rows, dtype)


MODELS = {
    "fp32": {},
    "fp64, KV heads and blocks cross": {"dtype": torch.float64, "num_kv_heads": 4, "blocks": 6, "sliding_window": 5},
    "bf16": {"dtype": torch.bfloat16, "qk_norm": False, "activation": "gelu"},
    "autocast": {"autocast": True, "softcap": 5.0},
    "experts": {"moe": {}, "layers": 1},
    "latent attention": {"latent": {"q_lora_rank": 20}, "layers": 1},
    "latent attention, autocast": {"latent": {}, "layers": 1, "autocast": True, "blocks": 5},
}


def _model(group, blocks=8, dtype=torch.float32, **options):
    torch.manual_seed(0)
    with tp_ext.tp_invariant(blocks):
        model = Model(group, dropout=0.0, **options)
    with torch.no_grad():
        model.head.weight.mul_(0.1)  # or one id has all the probability
    return model.to(dtype)


def _generated(options, autocast):
    """Texts and log-probabilities on one rank, by a cache; and those of the whole texts on other numbers of ranks."""
    prompt = torch.randint(SIZES["vocab"], (2, 7), generator=torch.Generator().manual_seed(1))
    low = {"dtype": torch.bfloat16} if autocast else {}

    def of_whole_texts(rank, group, **place):
        model = _model(group, **place, **options)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            return model.log_probabilities(ids[:, :-1], ids[:, 1:])[:, 6:].detach()

    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        ids, sampled = _model(None, **options).rollout(prompt, 20, **low)
        static = _model(None, **options).rollout(prompt, 20, static=True, **low)
        padding = torch.tensor([5, 0])
        shifted = torch.cat([F.pad(ids[:1, :-5], (5, 0)), ids[1:]])  # the same text, after padding
        padded = _model(None, **options)
        caches = [b.attention.new_cache(2, 32, **low) for b in padded.blocks]
        for cache in caches:
            cache.reset(padding)
        with torch.no_grad():
            of_padded = padded.log_probabilities(shifted[:, :-1], shifted[:, 1:], caches)
    assert torch.equal(static[0], ids) and torch.equal(static[1], sampled)
    assert torch.equal(of_padded[0, 11:], sampled[0, :-5])
    assert torch.equal(of_whole_texts(0, None), sampled)
    for p, sequence_parallel in ((2, False), (3, True), (4, False), (5, True)):
        place = {"sequence_parallel": sequence_parallel}
        for result in tp_ext.debug.simulate(lambda rank, group, place=place: of_whole_texts(rank, group, **place), p):
            assert torch.equal(result, sampled), (p, sequence_parallel)


@pytest.mark.parametrize("case", MODELS)
def test_log_probabilities_of_generated_ids_are_those_of_training(case):
    options = dict(MODELS[case])
    run_fresh(_generated, options, options.pop("autocast", False))


def _improved(group, updates):
    """Policy gradient: in each update every rank rolls out by itself, and all of them train together on that."""
    generator = _model(None, layers=1)
    trainer = _model(group, layers=1, sequence_parallel=group.size() == 3)
    optimizer = torch.optim.AdamW(trainer.parameters(), lr=3e-3)
    prompt = torch.randint(SIZES["vocab"], (8, 4), generator=torch.Generator().manual_seed(2))
    rewarded, rewards = torch.arange(SIZES["vocab"]) % 7 == 0, []
    for step in range(updates):
        torch.manual_seed(step)
        ids, sampled = generator.rollout(prompt, 6)
        reward = rewarded[ids[:, 4:]].float()
        rewards.append(reward.mean().item())
        own = trainer.log_probabilities(ids[:, :-1], ids[:, 1:])[:, 3:]
        assert torch.equal(own.detach(), sampled), step
        (-(own * (reward - reward.mean())).mean()).backward()
        tp_ext.clip_grad_norm_(trainer, 1.0)
        optimizer.step()
        optimizer.zero_grad()
        tp_ext.load_full_state_dict(generator, tp_ext.full_state_dict(trainer))
    return rewards, tp_ext.debug.sha256(trainer, optimizer)


@pytest.mark.parametrize("updates", [2, pytest.param(50, marks=pytest.mark.exhaustive)])
def test_a_policy_is_trained_on_the_probabilities_of_its_rollouts(updates):
    (rewards, digest), *others = run(_improved, 4, updates) + run(_improved, 3, updates)
    assert others == [(rewards, digest)] * 6
    if updates == 50:
        assert sum(rewards[-5:]) > 2 * sum(rewards[:5])
