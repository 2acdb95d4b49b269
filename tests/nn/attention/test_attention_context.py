"""ParallelAttention over a context group, with tensor and sequence parallelism at once, against attention written out
head by head: output and all gradients; dropout, compile, checkpoints, a cache that is prefilled, a way of one's own.
"""

import itertools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tp_ext
from tests.helpers import oracle, ranks
from tests.helpers.attention_cases import CASES, HIDDEN, KNOWN, make
from tests.helpers.meshes import mesh_of
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import gathered, local_grads
from tp_ext import ContextLayout
from tp_ext.nn.attention.context_attention import CONTEXTS, context_attention
from tp_ext.parallel import sum_gradients

pytestmark = pytest.mark.core

PACKED = [5, 0, 13, 1, 2]


class Setting:
    """A rank's layer and layout on a mesh of cp x tp ranks."""

    def __init__(self, shape, options, state, lengths, batch=None, sp=False, **more):
        mesh = mesh_of(*shape, names=("cp", "tp"))
        self.cp, self.tp, self.sp, self.batch = mesh["cp"], mesh["tp"], sp, batch
        self.module = make(options, self.tp, sequence_parallel=sp, context_group=self.cp, **more)
        tp_ext.load_full_state_dict(self.module, state, group=self.tp)
        cut = {"batch": batch, "seq": lengths[0]} if batch else {"lengths": lengths}
        self.layout = ContextLayout(**cut, group=self.cp)

    def own(self, full):
        """This rank's rows of an activation."""
        own = self.layout.shard(full)
        if self.sp:
            return own.tensor_split(self.tp.size())[self.tp.get_local_rank()].clone()
        return own.view(self.batch, len(own) // self.batch, -1) if self.batch else own

    def full(self, own):
        if self.sp:
            tokens = torch.empty(self.layout.sizes[self.cp.get_local_rank()])
            sizes = [len(t) for t in tokens.tensor_split(self.tp.size())]
            own = tp_ext.gather_from_region(own, self.tp, 0, sizes)
        return self.layout.unshard(own.reshape(-1, own.shape[-1]))


def _run(group, shape, options, state, x, g, lengths, **more):
    s = Setting(shape, options, state, lengths, **more)
    own = s.own(x).requires_grad_()
    y = s.module(own, layout=s.layout)
    assert y.shape == own.shape
    y.backward(s.own(g))
    sum_gradients(s.module, s.cp)
    return s.full(y), s.full(own.grad), local_grads(s.module), dict(tp_ext.shardings(s.module))


def assert_dense(shape, name, context, lengths=PACKED, **more):
    options = dict(CASES[name])
    state = oracle.random_state(make(options))
    full_lengths = lengths * (more.get("batch") or 1)
    x, g = (torch.randn(sum(full_lengths), HIDDEN, dtype=torch.float64) for _ in range(2))
    x_ref, state_ref = x.clone().requires_grad_(), {k: v.clone().requires_grad_() for k, v in state.items()}
    y = oracle.attention(x_ref, state_ref, full_lengths, **{k: v for k, v in options.items() if k in KNOWN})
    y.backward(g)
    wanted = {"y": y, "dx": x_ref.grad} | {k: v.grad for k, v in state_ref.items()}
    cp, tp = shape
    results = ranks.run(_run, cp * tp, shape, options, state, x, g, lengths, context=context, **more)
    for row in range(cp):
        ys, dxs, grads, tables = zip(*results[row * tp : (row + 1) * tp], strict=True)
        for got in ({"y": y, "dx": dx} | gathered(grads, tables[0]) for y, dx in zip(ys, dxs, strict=True)):
            assert got.keys() == wanted.keys()
            for key, want in wanted.items():
                assert got[key].shape == want.shape
                if want.numel() == 0:
                    continue
                error, scale = (got[key] - want).abs().max(), want.abs().max()
                assert error <= 1e-10 * scale, f"{key}: {error:.3g} of {scale:.3g}"


@pytest.mark.thinned
@pytest.mark.parametrize("shape", [(2, 1), (3, 1), (4, 1), (1, 2), (2, 2)], ids=str)
@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("name", ["gqa", "all"])
def test_output_and_all_gradients_are_those_of_dense_attention(shape, context, name):
    if context == "ulysses" and name == "all" and shape in [(3, 1), (4, 1), (2, 2)]:
        name = "gqa"  # 6 heads and 2 KV heads do not fit
    for sp in (False, True):
        assert_dense(shape, name, context, sp=sp)
    assert_dense(shape, name, context, [7], batch=2)


@pytest.mark.parametrize("name", ["mha", "mqa", "window", "window_not_causal", "softcap", "not_causal", "rope_partial"])
@pytest.mark.parametrize("context", CONTEXTS)
def test_options(name, context):
    shape = (2, 1) if context == "ulysses" else (2, 2)
    if name == "window" and context == "ulysses":
        shape = (2, 1)
    assert_dense(shape, name, context, sp=True)


@pytest.mark.parametrize("context", CONTEXTS)
def test_sequences_shorter_than_the_group(context):
    for lengths in ([1], [1, 1, 1], [0], [0, 2, 0]):
        assert_dense((4, 1), "gqa", context, lengths)
        assert_dense((2, 2), "gqa", context, lengths, sp=True)


# Dropout of the attention weights


def _dropped(group, shape, options, state, x, context, batch):
    lengths = [9] if batch else [9, 0, 4]
    s = Setting(shape, options | {"dropout": 0.5}, state, lengths, batch=batch, context=context)
    torch.manual_seed(5)
    y = s.module(s.own(x), layout=s.layout)
    y.square().sum().backward()
    sum_gradients(s.module, s.cp)
    return s.full(y), local_grads(s.module), dict(tp_ext.shardings(s.module))


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("batch", [None, 2])
def test_dropout_masks_are_those_of_the_unsharded_layer(context, batch):
    options = CASES["gqa"]
    state = oracle.random_state(make(options))
    x = torch.randn(18 if batch else 13, HIDDEN, dtype=torch.float64)
    dense = make(options, dropout=0.5)
    dense.load_state_dict(state)
    torch.manual_seed(5)
    want = dense(x, batch_size=2) if batch else dense(x, cu_seqlens=[0, 9, 9, 13])
    want.square().sum().backward()
    for shape in [(2, 1), (2, 2)]:
        results = ranks.run(_dropped, shape[0] * shape[1], shape, options, state, x, context, batch)
        for y, _, _ in results:
            torch.testing.assert_close(y, want.detach(), rtol=1e-11, atol=1e-11)
        grads, tables = zip(*((grads, table) for _, grads, table in results[: shape[1]]), strict=True)
        torch.testing.assert_close(gathered(grads, tables[0]), local_grads(dense), rtol=1e-9, atol=1e-10)


# What of torch wraps a module


# test_context_attention.py compiles every context
DEFAULT = [("ring", True, True), ("ulysses", False, False)]


@pytest.mark.parametrize(
    ("context", "sp", "compiled"),
    [
        pytest.param(*case, marks=[pytest.mark.exhaustive] * (case not in DEFAULT))
        for case in itertools.product(CONTEXTS, (False, True), (False, True))
    ],
)
@on_ranks(4, backend="gloo", timeout=120)
def test_compiled_and_recomputed(group, context, sp, compiled):
    torch._dynamo.reset()
    options = CASES["gqa"] | {"rope": {}, "dropout": 0.3}
    lengths = [3, 0, 1] if compiled else PACKED  # a graph has the scores of every two chunks of every sequence
    s = Setting((2, 2), options, oracle.random_state(make(options)), lengths, sp=sp, context=context)
    # The fake of the flash kernel of torch 2.11 gives fp32 for the log-sum-exps of fp64
    dtype, bound = (torch.float32, 1e-4) if compiled and torch.__version__ < "2.12" else (torch.float64, 1e-10)
    s.module.to(dtype)
    x = torch.randn(sum(lengths), HIDDEN, dtype=dtype)
    if compiled:
        wrapped = torch.compile(s.module, fullgraph=True, backend="aot_eager")
    else:

        def wrapped(x, **options):
            return checkpoint(s.module, x, use_reentrant=False, **options)

    results = []
    for module in (s.module, wrapped):
        torch.manual_seed(3)
        own = s.own(x).requires_grad_()
        y = module(own, layout=s.layout)
        results.append([y, *torch.autograd.grad(y.square().sum(), [own, *s.module.parameters()])])
    torch.testing.assert_close(results[0], results[1], rtol=bound, atol=bound / 100)


@pytest.mark.parametrize("context", CONTEXTS)
@on_ranks(2)
def test_autocast(group, context):
    options = CASES["gqa"] | {"qk_norm": True}
    s = Setting((2, 1), options, oracle.random_state(make(options)), PACKED, context=context)
    s.module.float()
    x = s.own(torch.randn(sum(PACKED), HIDDEN))
    plain = s.module(x, layout=s.layout)
    with torch.autocast("cpu", torch.bfloat16):
        y = s.module(x, layout=s.layout)
    assert y.dtype == torch.bfloat16
    torch.testing.assert_close(y.float(), plain, rtol=0.05, atol=0.05)


# A cache that a context group has filled


def _prefilled(group, shape, context, static, state, x):
    s = Setting(shape, CASES["rope_interleaved"], state, [9], batch=2, context=context)
    rest = x.unflatten(0, (2, 12))
    prompt = rest[:, :9].reshape(18, -1)
    cache = s.module.new_cache(2, 12, static=static)
    with torch.no_grad():
        outputs = [s.full(s.module(s.own(prompt), layout=s.layout, cache=cache)).unflatten(0, (2, 9))]
        for i in range(9, 12):
            outputs.append(s.module(rest[:, i : i + 1], cache=cache))
    assert cache.length == 12
    return torch.cat(outputs, 1)


@pytest.mark.parametrize("context", CONTEXTS)
@pytest.mark.parametrize("static", [False, True])
def test_a_cache_that_a_context_group_has_filled(context, static):
    options = CASES["rope_interleaved"]
    state = oracle.random_state(make(options))
    x = torch.randn(24, HIDDEN, dtype=torch.float64)
    known = {k: v for k, v in options.items() if k in KNOWN}
    want = oracle.attention(x, state, [12, 12], **known).unflatten(0, (2, 12))
    for shape in [(2, 1), (2, 2)]:
        for got in ranks.run(_prefilled, shape[0] * shape[1], shape, context, static, state, x):
            torch.testing.assert_close(got, want, rtol=1e-11, atol=1e-11)


# A way of one's own


@on_ranks(2)
def test_attention_by_a_callable(group):
    seen = []

    def attend(q, k, v, layout):
        seen.append((q.shape, k.shape))
        return context_attention(q, k, v, layout, "all_gather")

    options = CASES["gqa"]
    state = oracle.random_state(make(options))
    x = torch.randn(sum(PACKED), HIDDEN, dtype=torch.float64)
    ring, own = (Setting((2, 1), options, state, PACKED, **more) for more in ({}, {"attend": attend}))
    a, b = (s.module(s.own(x), layout=s.layout) for s in (ring, own))
    torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
    n = ring.layout.sizes[group.rank()]
    assert seen == [((1, n, 8, 4), (1, n, 4, 4))]


# The sum of gradients


@pytest.mark.parametrize("p", [2, 3])
@pytest.mark.parametrize("bucket", [1, 64, 1 << 20])
@on_ranks(backend="gloo")  # it changes a constant
def test_sum_gradients(group, bucket):
    tp_ext.parallel.gradient_sum._BUCKET_BYTES = bucket
    rank, p = group.rank(), group.size()
    dtypes = (torch.float64, torch.float32)
    params = [torch.nn.Parameter(torch.zeros(n, dtype=dtype)) for n in (3, 5, 0, 4) for dtype in dtypes]
    nowhere, main = torch.nn.Parameter(torch.zeros(2)), torch.nn.Parameter(torch.zeros(2))
    main.main_grad = torch.full((2,), rank + 1.0, dtype=torch.float64)
    for i, param in enumerate(params):
        if i != 3 or rank == 1:  # one has a gradient on one rank only
            param.grad = torch.full_like(param, (i + 1) * (rank + 1.0))
    sum_gradients([*params, params[0], nowhere, main], group)
    total = p * (p + 1) / 2
    for i, param in enumerate(params):
        want = (i + 1) * (2.0 if i == 3 else total)
        assert param.grad.dtype == param.dtype and param.grad.eq(want).all()
    assert nowhere.grad is None and main.grad is None and main.main_grad.eq(total).all()
    return tp_ext.parallel.gradient_sum._BUCKET_BYTES


def test_sum_gradients_of_one_rank_is_nothing():
    layer = torch.nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    grad = layer.weight.grad.clone()
    sum_gradients(layer, None)
    assert layer.weight.grad.equal(grad)
