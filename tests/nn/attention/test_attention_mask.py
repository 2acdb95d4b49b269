"""ParallelAttention(attn_mask=): against attention head by head (helpers/oracle.py) and torch's own function, with
all gradients, those of the mask among them. Bounds as in test_attention.py.
"""

import pytest
import torch
import torch.nn.functional as F
from torch.distributed.tensor.debug import CommDebugMode

import tp_ext
from tests.helpers import oracle, ranks
from tests.helpers.attention_cases import CASES, HEAD, HIDDEN, KNOWN, call, fits, make
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import counts_by_kind, gathered, local_grads

pytestmark = pytest.mark.core

BATCH, SEQ = 2, 5
LENGTHS = [SEQ] * BATCH


def blocked():
    """Bool, a mask for each sequence; one query of it may attend to nothing, and the fourth key is hidden from all."""
    mask = torch.rand(BATCH, 1, SEQ, SEQ) < 0.7
    mask[0, 0, 2] = False
    mask[..., 3] = False
    return mask


def alibi(heads):
    """A slope a head times the distance, as in ALiBi."""
    return -torch.rand(heads).double()[:, None, None] * (torch.arange(SEQ)[:, None] - torch.arange(SEQ)).abs()


MASKS = {  # of the number of heads; whether it requires grad
    "blocked": (lambda heads: blocked(), False),
    "alibi": (alibi, False),
    "learned": (lambda heads: torch.randn(BATCH, heads, SEQ, SEQ).double(), True),
    "learned_shared": (lambda heads: torch.randn(SEQ, SEQ).double(), True),
    "learned_per_key": (lambda heads: torch.randn(heads, 1, SEQ).double(), True),
    "learned_1d": (lambda heads: torch.randn(SEQ).double(), True),
    "learned_with_holes": (lambda heads: torch.randn(heads, SEQ, SEQ).double().where(blocked()[0], -torch.inf), True),
}
# Every mask with one layer, every kind of layer with one mask
EVERY = [(name, "all") for name in MASKS]
EVERY += [
    ("learned_with_holes", case) for case in ("mha", "mqa", "not_causal", "window", "window_not_causal", "softcap")
]


def _run(group, options, state, x, g, mask, learned, how, sp):
    module = make(options, group, sequence_parallel=sp)
    tp_ext.load_full_state_dict(module, state, group=group)
    mask = mask.clone().requires_grad_(learned)
    bound = module.forward
    module.forward = lambda *args, **kwargs: bound(*args, attn_mask=mask, **kwargs)
    y, x = call(module, x, LENGTHS, how)
    own = g.tensor_split(group.size())[group.rank()] if sp else g
    y.backward(own.view(y.shape))
    return y.flatten(0, -2), x.grad.flatten(0, -2), mask.grad, local_grads(module), dict(tp_ext.shardings(module))


def assert_near(a, b):
    assert a.shape == b.shape
    assert (a - b).abs().max() <= 1e-10 * b.abs().max()


@pytest.mark.parametrize(("name", "case"), EVERY)
@pytest.mark.parametrize(
    ("p", "how", "sp"), [(1, "batch", False), (2, "tokens", True), (3, "batch", False), (4, "tokens", True)]
)
def test_output_and_all_gradients_are_those_of_dense_attention(name, case, p, how, sp):
    options, (make_mask, learned) = CASES[case], MASKS[name]
    if not fits(options, p):
        return
    state, mask = oracle.random_state(make(options)), make_mask(options["num_heads"])
    x, g = torch.randn(2, BATCH * SEQ, HIDDEN, dtype=torch.float64)
    results = ranks.run(_run, p, options, state, x, g, mask, learned, how, sp)
    ys, dxs, dmasks, grads, tables = zip(*results, strict=True)

    leaves = [t.clone().requires_grad_() for t in (x, *state.values())]
    theirs = mask.clone().requires_grad_(learned)
    known = {k: v for k, v in options.items() if k in KNOWN}
    weights = dict(zip(state, leaves[1:], strict=True))
    want = oracle.attention(leaves[0], weights, LENGTHS, attn_mask=theirs, **known)
    want.backward(g)
    y, dx = (torch.cat(ts) if sp else ts[0] for ts in (ys, dxs))
    assert_near(y, want)
    assert_near(dx, leaves[0].grad)
    for key, grad in gathered(grads, tables[0]).items():
        assert_near(grad, weights[key].grad)
    for dmask in dmasks:  # the whole gradient, the same bits on all ranks
        assert dmask is None if not learned else torch.equal(dmask, dmasks[0])
    if learned:
        assert_near(dmasks[0], theirs.grad)


@pytest.mark.parametrize(
    "options", [{}, {"causal": False, "scale": 0.9}, {"num_kv_heads": 2, "causal": False}], ids=str
)
@pytest.mark.parametrize("name", ["blocked", "learned"])
def test_equals_torchs_function(name, options):
    module = make({"num_heads": 4} | options)
    x, mask = torch.randn(BATCH, SEQ, HIDDEN, dtype=torch.float64), MASKS[name][0](4)
    kv = module.num_kv_heads
    q, k, v = module.qkv(x).unflatten(-1, (-1, HEAD)).transpose(1, 2).split([4, kv, kv], 1)
    if module.causal:
        past = torch.ones(SEQ, SEQ, dtype=torch.bool).tril()
        seen = mask & past if name == "blocked" else mask.where(past, -torch.inf)
    else:
        seen = mask
    attended = F.scaled_dot_product_attention(q, k, v, seen, scale=module.scale, enable_gqa=True)
    assert_near(module(x, attn_mask=mask), module.out(attended.transpose(1, 2).flatten(2)))


def _count(group, learned):
    module, mask = make(CASES["rope"], group), torch.zeros(4, SEQ, SEQ, dtype=torch.float64, requires_grad=learned)
    with CommDebugMode() as forward:
        y = module(torch.randn(1, SEQ, HIDDEN, dtype=torch.float64, requires_grad=True), attn_mask=mask)
    with CommDebugMode() as backward:
        y.sum().backward()
    return counts_by_kind(forward), counts_by_kind(backward)


def test_a_learned_mask_adds_one_all_reduce_to_backward_and_a_fixed_one_nothing():
    for learned in (False, True):
        assert ranks.run(_count, 2, learned) == [({"all_reduce": 1}, {"all_reduce": 1 + learned})] * 2


# With a cache


@pytest.mark.thinned
@pytest.mark.parametrize("static", [False, True], ids=["", "static"])
@pytest.mark.parametrize("name", ["blocked", "alibi", "learned_per_key"])
@pytest.mark.parametrize("case", ["all", "softcap", "window"])
@on_ranks(2)
def test_a_mask_over_the_cache_gives_the_full_forward(group, case, name, static):
    options = CASES[case]
    state, mask = oracle.random_state(make(options)), MASKS[name][0](options["num_heads"])
    x = torch.randn(BATCH, SEQ, HIDDEN, dtype=torch.float64)
    known = {k: v for k, v in options.items() if k in KNOWN}
    want = oracle.attention(x.flatten(0, 1), state, LENGTHS, attn_mask=mask, **known).view(x.shape)
    module = make(options, group).eval()
    tp_ext.load_full_state_dict(module, state, group=group)
    cache, ys, done = module.new_cache(BATCH, SEQ + 2, static=static), [], 0
    with torch.inference_mode():
        for n in (2, 1, 2):
            now = mask[..., done : done + n, :] if mask.shape[-2] > 1 else mask
            keys = SEQ + 2 if static else done + n
            now = F.pad(now, (0, 2))[..., :keys]  # of a static cache: all slots
            ys.append(module(x[:, done : done + n], cache=cache, attn_mask=now))
            done += n
    assert_near(torch.cat(ys, 1), want)
