"""LatentKVCache: latent attention step by step, absorbed or expanded, is that of the whole text from the formulas.

Bounds are relative to the largest element: 1e-12 in fp64.
"""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

import tp_ext
from tests.helpers import oracle, ranks
from tests.helpers.attention_cases import assert_near
from tests.helpers.cache_steps import in_steps, left_padded, loaded
from tests.helpers.latent_cases import CASES, HIDDEN, SIZES, known, make, reference
from tests.helpers.on_ranks import on_ranks

pytestmark = pytest.mark.core

SEQ = 6
SPLITS = [[6], [5, 1], [3, 1, 2], [1] * 6, [0, 2, 0, 4]]
# Absorbed are up to kv_lora_rank (nope + v) / (2 kv_lora_rank - nope - v) tokens: 12 with the sizes of the other cases,
# 1 with these
WIDE = {"num_heads": 4, "q_lora_rank": 7, "kv_lora_rank": 40, "qk_nope_head_dim": 1, "v_head_dim": 1}
CAUSAL = {name: case for name, case in CASES.items() if case.get("causal", True)} | {"wide_latent": WIDE}
STATIC = pytest.mark.parametrize("static", [False, True], ids=["", "static"])


def dense(options, state, x, **more):
    y = reference(x.flatten(0, 1), state, [x.shape[1]] * len(x), **known(options), **more)
    return y.view(x.shape)


def close(got, want):
    assert_near({"y": got}, {"y": want})


def _splits(group, options, state, x, splits, static, sp=False):
    module = loaded(make(options, group, sequence_parallel=sp), state)
    cache = module.new_cache(len(x), SEQ, static=static)
    with torch.inference_mode():
        return [in_steps(module, x, cache.reset(), split) for split in splits], cache.latent.clone()


@pytest.mark.thinned(1)
@STATIC
@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@pytest.mark.parametrize("name", CAUSAL)
def test_every_split_of_the_text_gives_the_full_forward(name, p, sp, static):
    """Under SP also with fewer tokens than ranks. All ranks hold the same latents."""
    options = CAUSAL[name]
    state, x = oracle.random_state(make(options)), torch.randn(2, SEQ, HIDDEN, dtype=torch.float64)
    want = dense(options, state, x)
    per_rank, held = zip(*ranks.run(_splits, p, options, state, x, SPLITS, static, sp), strict=True)
    assert held[0].shape == (2, 1, SEQ, (SIZES | options)["kv_lora_rank"] + SIZES["qk_rope_head_dim"])
    assert all(torch.equal(one, held[0]) for one in held)
    for got, *others in zip(*per_rank, strict=True):
        close(got, want)
        assert all(torch.equal(got, other) for other in others)


@STATIC
@pytest.mark.parametrize("options", [CASES["yarn"], WIDE], ids=["absorbed", "expanded"])
@on_ranks(2)
def test_left_padded_prompts_come_out_as_they_would_alone(group, options, static):
    state = oracle.random_state(make(options))
    texts = [torch.randn(n, HIDDEN, dtype=torch.float64) for n in (7, 3, 5)]
    got = left_padded(loaded(make(options, group), state), texts, static)
    for y, text in zip(got, texts, strict=True):
        close(y, dense(options, state, text[None])[0])


@pytest.mark.parametrize("options", [CASES["v3"], WIDE], ids=["absorbed", "expanded"])
def test_a_mask_over_the_cache(options):
    state = oracle.random_state(make(options))
    x, mask = torch.randn(2, SEQ, HIDDEN, dtype=torch.float64), torch.randn(4, SEQ, SEQ, dtype=torch.float64)
    module, ys = loaded(make(options), state), []
    cache = module.new_cache(2, SEQ)
    with torch.no_grad():
        for first, last in ((0, 2), (2, 3), (3, 6)):
            ys.append(module(x[:, first:last], cache=cache, attn_mask=mask[:, first:last, :last]))
    close(torch.cat(ys, 1), dense(options, state, x, attn_mask=mask))


def test_truncate_forgets_and_reorder_shuffles():
    state, x = oracle.random_state(make(CASES["v3"])), torch.randn(3, SEQ, HIDDEN, dtype=torch.float64)
    module, order = loaded(make(CASES["v3"]), state), torch.tensor([2, 0, 0])
    cache = module.new_cache(3, SEQ)
    with torch.inference_mode():
        module(x[:, :4], cache=cache)
        module(torch.randn(3, 2, HIDDEN).double(), cache=cache)  # rejected
        y = module(x[order, 4:], cache=cache.truncate(4).reorder(order))
    close(y, dense(CASES["v3"], state, x)[order, 4:])


def _flops(module, x, length):
    cache = module.new_cache(len(x), length + 1)
    with torch.no_grad():
        module(torch.randn(len(x), length, HIDDEN, dtype=torch.float64), cache=cache)
        with FlopCounterMode(display=False) as counted:
            module(x, cache=cache)
    return counted.get_total_flops()


def test_a_token_in_the_cache_costs_a_dot_product_of_its_width_per_head():
    """Absorbed, not expanded: 2 (kv_lora_rank + rope) for a score and 2 kv_lora_rank for the sum, in each head."""
    module, x = make(CASES["v3"]).eval(), torch.randn(3, 1, HIDDEN, dtype=torch.float64)
    rank, rope = SIZES["kv_lora_rank"], SIZES["qk_rope_head_dim"]
    assert _flops(module, x, 30) - _flops(module, x, 10) == 20 * 3 * 4 * 2 * (2 * rank + rope)


@on_ranks(2, backend="gloo", timeout=120)
def test_a_decode_step_is_compiled_once_for_all_positions(group):
    state, x = oracle.random_state(make(CASES["yarn"])), torch.randn(2, SEQ, HIDDEN, dtype=torch.float64)
    torch._dynamo.reset()
    module, graphs = loaded(make(CASES["yarn"], group), state), []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    compiled = torch.compile(module, fullgraph=True, backend=backend, dynamic=False)
    cache = module.new_cache(len(x), SEQ)
    with torch.no_grad():
        ys = [module(x[:, :3], cache=cache)]
        cache.static = True
        ys += [compiled(x[:, i : i + 1].contiguous(), cache=cache) for i in range(3, SEQ)]
    close(torch.cat(ys, 1), dense(CASES["yarn"], state, x))
    assert len(graphs) == 1


# What is refused


def _call(group, how):
    module = make(CASES["v3"] | ({"causal": False} if how == "not causal" else {}), group).eval()
    x, cache = torch.zeros(2, 3, HIDDEN, dtype=torch.float64), module.new_cache(2, 4)
    if how == "grad":
        return module(x, cache=cache)
    with torch.no_grad():
        return {
            "not causal": lambda: module(x, cache=cache),
            "overflow": lambda: module(torch.cat([x, x], 1), cache=cache),
            "packed": lambda: module(x[0], cu_seqlens=[0, 3], cache=cache),
            "width": lambda: module(x, cache=tp_ext.LatentKVCache(2, 4, 6, 2)),
            "kind": lambda: module(x, cache=tp_ext.KVCache(2, 4, 1, 10)),
            "rank": lambda: tp_ext.LatentKVCache(2, 4, 0, 2),
        }[how]()


@pytest.mark.parametrize(
    ("how", "error", "match"),
    [
        ("grad", RuntimeError, r"cache: .*torch.inference_mode\(\) or torch.no_grad\(\)"),
        ("not causal", ValueError, "cache: causal=False"),
        ("overflow", ValueError, "cache: 0 tokens and 6 more must not exceed max_seq = 4"),
        ("packed", ValueError, "cache: must not be combined with cu_seqlens"),
        ("width", ValueError, r"cache: LatentKVCache\(.*must be a LatentKVCache of 10 numbers a token"),
        ("kind", ValueError, r"cache: KVCache\(.*must be a LatentKVCache of 10 numbers a token"),
        ("rank", ValueError, "kv_lora_rank: 0 must be"),
    ],
)
def test_errors(how, error, match):
    ranks.run_raises(_call, 2, error, match, how)
