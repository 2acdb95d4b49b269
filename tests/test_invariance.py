"""tp_invariant: the same bits for every number of ranks and threads, with and without sequence parallelism; values of
ordinary layers; what has no such form is refused by name."""

import contextlib
import itertools
import math
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import nn

import tp_ext
from tests.helpers.invariant_model import Block, Model, batches, simulated, trained
from tests.helpers.on_ranks import on_ranks
from tests.helpers.ranks import run, run_fresh
from tp_ext import _ops
from tp_ext.invariance import block_sizes, blocks_of_rank, blocks_of_ranks
from tp_ext.nn.attention.scaled_dot_product import explicit_attention
from tp_ext.sharding import Sharding, head_parts

pytestmark = pytest.mark.core

# What differs from the default: grouped heads over ranks (2 KV heads), qk-norm, RoPE, SwiGLU, dropout by index
CASES = {
    "fp32": {},
    "fp32, KV heads and blocks cross": {"num_kv_heads": 4, "blocks": 6, "dropout": 0.0, "sliding_window": 5},
    "fp64": {"dtype": torch.float64, "num_kv_heads": 8, "softcap": 5.0, "activation": "gelu", "blocks": 5},
    "bf16": {"dtype": torch.bfloat16, "dropout": 0.0, "qk_norm": False},
    "autocast": {"autocast": True, "activation": "silu"},
    "experts": {"moe": {}, "layers": 1, "blocks": 7},
    "experts, sigmoid": {"moe": {"scores": "sigmoid"}, "autocast": True, "layers": 1, "activation": "gelu"},
    "latent attention": {"latent": {"q_lora_rank": 20}, "layers": 1, "dtype": torch.float64},
    "latent attention without dropout": {"latent": {}, "layers": 1, "dropout": 0.0, "blocks": 6},
    "muon": {"muon": True, "steps": 3},
    "loss": {"loss": {"label_smoothing": 0.1, "z_loss": 0.01, "ignore_index": 7, "reduction": "sum"}, "layers": 1},
}


def _same_bits(options):
    expected = simulated(1, **options)
    most = min(8, options.get("blocks", 8))
    for p in (2, 3, 4, most):
        for sequence_parallel in (False, True):
            found = simulated(p, sequence_parallel=sequence_parallel, **options)
            assert found == expected, (p, sequence_parallel)
    for p in (2, most):  # of several blocks a rank computes some at a time, of one each operator by itself
        assert simulated(p, threads=2, **options) == expected, ("two threads", p)


@pytest.mark.parametrize("case", CASES)
def test_the_same_bits_for_every_number_of_ranks_and_threads(case):
    run_fresh(_same_bits, CASES[case])


def _gradients_of_attention(threads):
    torch.set_num_threads(threads)
    generator = torch.Generator().manual_seed(0)
    # 33 keys: torch's softmax rounds the backward of a row by its place in a thread's share
    q, k, v, dy = (torch.randn(1, 8, 33, 8, generator=generator) for _ in range(4))
    leaves = [t.requires_grad_() for t in (q, k, v)]
    y = explicit_attention(*leaves, None, scale=None, softcap=None, blind=False, drop=torch.clone, by_head=True)
    return [y.detach(), *torch.autograd.grad(y, leaves, dy)]


def _attention_on_threads():
    first, *others = (_gradients_of_attention(threads) for threads in (1, 2, 3))
    assert all(all(map(torch.equal, first, other)) for other in others)


def test_attention_by_head_does_not_depend_on_threads():
    run_fresh(_attention_on_threads)


def _differ_without():
    assert len({simulated(p, blocks=None)[1] for p in (1, 2, 4)}) == 3


def test_the_bits_differ_without_the_context():
    run_fresh(_differ_without)


def _on_ranks(group, **options):
    return trained(group, **options)


def test_on_processes():
    one = run_fresh(_on_ranks, None)
    for p, sequence_parallel in ((2, False), (3, True)):
        assert run(_on_ranks, p, sequence_parallel=sequence_parallel) == [one] * p


def _resumed(group, folder, first, last):
    torch.manual_seed(0)
    with tp_ext.tp_invariant():
        model = Model(group, sequence_parallel=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    if first:
        tp_ext.load_checkpoint(folder / "checkpoint", model, optimizer)
    for i, (ids, target) in enumerate(batches(last)):
        if i >= first:
            torch.manual_seed(i)  # masks of dropout by the step, not by what was drawn before
            optimizer.zero_grad()
            model(ids, target).backward()
            tp_ext.clip_grad_norm_(model, 0.5)
            optimizer.step()
    tp_ext.save_checkpoint(folder / "checkpoint", model, optimizer)
    return tp_ext.debug.sha256(model, optimizer)


def test_resumed_on_other_numbers_of_ranks(tmp_path):
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    for folder in (whole, parts):
        folder.mkdir()
    expected = run(_resumed, 2, whole, 0, 3)[0]
    run(_resumed, 4, parts, 0, 1)
    run(_resumed, 1, parts, 1, 2)
    assert run(_resumed, 3, parts, 2, 3) == [expected] * 3


def _values():
    """Outputs and all gradients of each layer against the ordinary one, in fp64."""
    torch.set_default_dtype(torch.float64)
    x = torch.randn(12, 48)

    def attend(layer):
        return layer(x_in, batch_size=2)

    layers = [
        (lambda: tp_ext.ColumnParallelLinear(48, 20, group=None, parts=(12, 8)), None),
        (lambda: tp_ext.RowParallelLinear(48, 20, group=None), None),
        (lambda: tp_ext.ParallelMLP(48, 100, activation="geglu", group=None), None),
        (
            lambda: tp_ext.ParallelAttention(48, 8, num_kv_heads=2, head_dim=16, qk_norm=True, rope=1e4, group=None),
            attend,
        ),
        (lambda: tp_ext.LayerNorm(48, group=None), None),
        (
            lambda: tp_ext.ParallelMoE(
                48,
                20,
                6,
                2,
                bias=True,
                shared_experts=1,
                attach_loss=1.0,
                group=None,
                router=tp_ext.RouterConfig(balance_loss=0.1, z_loss=0.01),
            ),
            None,
        ),
        (
            lambda: tp_ext.ParallelLatentAttention(
                48, 8, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6, kv_lora_rank=12, group=None
            ),
            attend,
        ),
        (lambda: tp_ext.RMSNorm(48, group=None), lambda layer: sum(layer(x_in, 2 * x_in))),
        (lambda: Block(None, dropout=0.0), lambda layer: layer(x_in, 2, 12)),
    ]
    for make, call in layers:
        torch.manual_seed(0)
        plain = make()
        torch.manual_seed(0)
        with tp_ext.tp_invariant(5):
            layer = make()
        results = []
        for each in (plain, layer):
            x_in = x.clone().requires_grad_()
            y = call(each) if call else each(x_in)
            (y * y.detach().cos()).sum().backward()
            results.append([y, x_in.grad, *(param.grad for param in each.parameters())])
        for a, b in zip(*results, strict=True):
            torch.testing.assert_close(b, a, rtol=1e-10, atol=1e-10)


def test_values_and_gradients_are_those_of_the_ordinary_layers():
    run_fresh(_values)


def _tree(leaves):
    while len(leaves) > 1:
        pairs = [leaves[i : i + 2] for i in range(0, len(leaves), 2)]
        leaves = [pair[0] + pair[1] if len(pair) == 2 else pair[0] for pair in pairs]
    return leaves[0]


def _sums(rank, blocks, group=None, n=7):
    """Yields a gradient that was summed over the ranks, and the tree of all leaves, in each dtype."""
    x, generator = torch.randn(n), torch.Generator().manual_seed(blocks)
    gradients = torch.randn(blocks, n, generator=generator) * 10 ** torch.rand(blocks, 1, generator=generator)
    held = blocks_of_rank(blocks, rank, dist.get_world_size())
    group = tp_ext.group.group_name(group or dist.group.WORLD)
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        leaf = x.to(dtype, copy=True).requires_grad_()
        copies = _ops.block_copies(leaf, group, blocks_of_ranks(blocks, dist.get_world_size()))
        assert len(copies) == len(held)
        torch.autograd.backward(copies, [gradients[b].to(dtype) for b in held])
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        yield leaf.grad, _tree([g.to(dtype).to(wide) for g in gradients]).to(dtype)


@pytest.mark.parametrize("p", [1, 2, 3, 5])
def test_the_tree(p):
    for blocks in (5, 6, 7, 8, 16, 23):
        for rank, sums in enumerate(tp_ext.debug.simulate(lambda rank, _, n=blocks: list(_sums(rank, n)), p)):
            for gradient, expected in sums:
                assert gradient.equal(expected), (blocks, rank, gradient.dtype)


@on_ranks(2, 3, 4, 6, backend="gloo")
def test_the_tree_of_shared_memory(world):
    """tp_shm adds where each rank has one node: of 6 blocks on 6 ranks, of 8 on 4. On 3 of 8 it does not."""
    p, rank, group = world.size(), world.rank(), dist.new_group(backend="tp_shm")
    for blocks, n in itertools.product((5, 6, 8, 16), (7, 40_001)):  # in one step, and in several
        for gradient, expected in _sums(rank, blocks, group, n) if blocks >= p else ():
            assert gradient.equal(expected), (blocks, n, gradient.dtype)
    for dtype, n in itertools.product((torch.float32, torch.float64), (7, 40_001)):
        leaves = (torch.randn(p, n, generator=torch.Generator().manual_seed(n)) * 10 ** torch.arange(p)[:, None]).to(
            dtype
        )
        own, root = leaves[rank : rank + 1].clone(), _tree(list(leaves))
        name = tp_ext.group.group_name(group)
        assert _ops.block_sum(own, name, [1] * p).equal(root)
        assert _ops.block_sum(own, name, [1] * p, True).equal(root.tensor_split(p)[rank])
        assert own[0].equal(leaves[rank])


def _bytes(group, blocks, backend="gloo"):
    """The bytes of each kind of collective of a row linear in bf16, forward and backward."""
    group = group if backend == "gloo" else dist.new_group(backend=backend)
    with tp_ext.tp_invariant(blocks):
        layer = tp_ext.RowParallelLinear(64, 32, group=group, dtype=torch.bfloat16)
    x = torch.randn(6, layer.weight.shape[1], dtype=torch.bfloat16, requires_grad=True)
    with tp_ext.debug.count_collectives() as counts:
        layer(x).sum().backward()
    return {row.kind: row.payload_bytes for row in counts.rows}


@pytest.mark.parametrize("p, blocks", [(2, 8), (4, 4), (3, 8)])
def test_bytes_on_the_wire(p, blocks):
    elements = 6 * 32
    for rank, counted in enumerate(run(_bytes, p, blocks)):
        nodes = {3: (2, 2, 1)}.get(p, (1,) * p)[rank]  # of 8 blocks: 0 and 1, 2; 3, 4 and 5; 6 and 7
        assert counted == {"all_to_all": nodes * 4 * elements, "all_gather": 2 * elements}


def test_bytes_of_shared_memory():
    elements = 6 * 32
    for counted in run(_bytes, 2, 8, "tp_shm"):
        assert counted == {"reduce_scatter": 4 * elements, "all_gather": 2 * elements}


@pytest.mark.parametrize("heads, kv_heads", [(8, 2), (8, 4), (12, 3), (12, 6), (9, 3), (8, 8), (7, 1)])
def test_heads_in_blocks(heads, kv_heads):
    for blocks in (5, 8, 12):
        for p in range(1, min(blocks, heads) + 1):
            q, kv = head_parts(heads, kv_heads, 2, p, blocks)
            full = torch.arange(2 * (heads + 2 * kv_heads))
            sharding = Sharding(0, (q, kv, kv))
            locals_ = [sharding.shard(full, rank, p) for rank in range(p)]
            assert sharding.unshard(locals_).equal(full)
            owned = torch.cat([t for r, local in enumerate(locals_) for t in sharding.owned(local, r, p)])
            assert owned.sort().values.equal(full), "each element is counted once"
            counted = []
            for rank, local in enumerate(locals_):
                held = blocks_of_rank(blocks, rank, p)
                assert len(held) <= math.ceil(blocks / p)
                flat = iter(sharding.segments(rank, p))
                segments = list(zip(flat, flat, flat, strict=True))
                assert sum(length for _, _, length in segments) == len(local)
                counted += [local[s : s + n] for block, s, n in segments if block >= 0]
                assert all(block in held for block, _, _ in segments if block >= 0)
                (q0, q1), (k0, k1) = ((start // 2, stop // 2) for start, stop in (q.span(rank, p), kv.span(rank, p)))
                used = {head // (heads // kv_heads) for head in range(q0, q1)}
                assert set(range(k0, k1)) == used
            assert torch.cat(counted).sort().values.equal(full)


def test_sizes_of_blocks():
    assert block_sizes(4, 8, 2) == [2, 2]  # not 4 and 0, as by tensor_split
    assert block_sizes(12, 8, 3) == [5, 4, 3] and block_sizes(0, 8, 3) == [0, 0, 0]
    for n in (1, 5, 50257):
        assert sum(block_sizes(n, 8, 3)) == n


def _layers():
    linear, target = {"group": None}, torch.ones(2).long()
    whole = nn.Sequential(nn.Linear(4, 4))
    plan = tp_ext.auto.plan(whole, (torch.ones(2, 4),), 1)
    return [
        (lambda: tp_ext.ColumnParallelLinear(8, 8, overlap_chunks=2, **linear), "overlap_chunks: 2"),
        (lambda: tp_ext.RowParallelLinear(8, 8, grad_accumulation_fusion=True, **linear), "grad_accumulation_fusion"),
        (lambda: tp_ext.ColumnParallelLinear(8, 8, activations="hidden", **linear), "activations: 'hidden'"),
        (lambda: tp_ext.ParallelAttention(16, 2, exact_dropout=False, **linear), "exact_dropout: "),
        (lambda: tp_ext.ParallelAttention(16, 2, attend=print, **linear), "attend: "),
        (lambda: tp_ext.VocabParallelEmbedding(16, 4, pad_to_multiple_of=8, **linear), "pad_to_multiple_of: 8"),
        (lambda: tp_ext.VocabParallelEmbedding(4, 4, **linear), "vocab_size: 4"),
        (lambda: tp_ext.ParallelMoE(8, 8, 4, 2, capacity=1.0, **linear), "capacity: 1.0"),
        (lambda: tp_ext.LoRALinear(tp_ext.ColumnParallelLinear(8, 8, **linear), 2, alpha=1), "base: a layer"),
        (lambda: tp_ext.coalesce_gradients(tp_ext.LayerNorm(8, group=None)), "module: "),
        (lambda: tp_ext.linear_cross_entropy(torch.ones(2, 4), torch.ones(8, 4), target, None), "linear_cross_entropy"),
        (lambda: tp_ext.reduce_from_region(torch.ones(2), None), "reduce_from_region: "),
        (lambda: tp_ext.lax.psum(torch.ones(2), "x"), "psum: "),
        (lambda: tp_ext.lax.pmean(torch.ones(2), "x"), "pmean: "),
        (lambda: tp_ext.lax.psum_scatter(torch.ones(2), "x"), "psum_scatter: "),
        (lambda: tp_ext.matmul_2d(torch.ones(2, 2), torch.ones(2, 2), None, None), "matmul_2d: "),
        (lambda: tp_ext.auto.apply(plan, whole, None), "auto.apply: "),
        (lambda: tp_ext.reduce_scatter_region(torch.ones(2), None), "reduce_scatter_region: "),
        (lambda: tp_ext.copy_to_region(torch.ones(2, requires_grad=True), None), "copy_to_region: "),
        (lambda: tp_ext.all_gather_region(torch.ones(2, requires_grad=True), None), "all_gather_region: "),
        (lambda: tp_ext.vocab_parallel_cross_entropy(torch.ones(2, 4), target, None, vocab_size=9), "logits_local: 4"),
    ]  # fmt: skip


def _refused():
    for blocks in (0, -1, 2.0, True, "8"):
        with pytest.raises(ValueError, match="blocks: "), tp_ext.tp_invariant(blocks):
            pass
    for make, message in _layers():
        with contextlib.suppress(ValueError):
            make()  # possible outside, or refused for another reason
        with pytest.raises(ValueError, match=message), tp_ext.tp_invariant():
            make()
    with tp_ext.tp_invariant(4):
        with tp_ext.tp_invariant(2):
            inner = tp_ext.ParallelMLP(8, 8, group=None)
        outer = tp_ext.ParallelMLP(8, 8, group=None)
        assert tp_ext.copy_to_region(torch.ones(2), None).equal(torch.ones(2))  # no gradient
    assert (inner.invariant_blocks, inner.up.invariant_blocks, outer.down.invariant_blocks) == (2, 2, 4)
    assert tp_ext.ParallelMLP(8, 8, group=None).invariant_blocks is None
    x = torch.randn(4, 8, requires_grad=True)
    with pytest.raises(NotImplementedError, match="second derivative"):
        torch.autograd.grad(outer(x).sum(), x, create_graph=True)
    with (
        mock.patch.object(torch.compiler, "is_compiling", return_value=True),
        pytest.raises(NotImplementedError, match="cannot be compiled"),
    ):
        outer(x)
    with tp_ext.tp_invariant():
        attention = tp_ext.ParallelAttention(16, 2, group=None, device="meta").eval()
    with torch.no_grad(), pytest.raises(ValueError, match="cache: must not be given on meta"):
        attention(torch.ones(1, 2, 16, device="meta"), cache=attention.new_cache(1, 4))
    too_many = "blocks: 2 of tp_invariant must be at least the number of ranks, p = 3"

    def build(rank, group):
        with tp_ext.tp_invariant(2):
            tp_ext.ParallelMLP(8, 8, group=dist.group.WORLD)

    with pytest.raises(RuntimeError, match=too_many):
        tp_ext.debug.simulate(build, 3)

    def in_shares(rank, group):
        with tp_ext.tp_invariant(2), tp_ext.shares([1, 2], tokens=False):
            tp_ext.ParallelMLP(8, 8, group=group)

    with pytest.raises(RuntimeError, match=r"tokens: 'False' must not be given in tp_ext\.shares"):
        tp_ext.debug.simulate(in_shares, 2)


def test_refused():
    run_fresh(_refused)


def _without_the_variable(value):
    os.environ.pop("MKL_CBWR")
    if value == "late":
        torch.randn(64, 64) @ torch.randn(64, 64)
        os.environ["MKL_CBWR"] = "AVX512,STRICT"
    elif value:
        os.environ["MKL_CBWR"] = value
    with pytest.raises(RuntimeError, match=r"MKL_CBWR: .* 'AVX512,STRICT'"), tp_ext.tp_invariant():
        pass


@pytest.mark.parametrize("value", [None, "AVX2", "late"])
def test_products_must_be_reproducible(value):
    run_fresh(_without_the_variable, value)


def _layouts_of(x):
    """The same values, row by row and column by column in memory."""
    return [x.clone(), x.transpose(-1, -2).contiguous().transpose(-1, -2)]


def _strides():
    """A view of one head is laid out otherwise than a copy of several: products must not notice. torch's do."""
    torch.set_num_threads(1)

    def calls(x, y, dy):
        weight = torch.ones(6, 13).sin()
        for product in (_ops.block_bmm, torch.bmm):
            a, b = (t.detach().requires_grad_() for t in (x, y))
            out = product(a, b)
            yield product is torch.bmm, [out, *torch.autograd.grad(out, [a, b], dy)]
        for linear in (_ops.block_column_linear, _ops.block_row_linear):
            a = x[0].detach().requires_grad_()
            rest = (None,) if linear is _ops.block_column_linear else ()
            segments = [0, 0, 6] if rest else [0, 0, 13]
            out = linear(a, weight, None, "", False, *rest, [1], segments)
            yield False, [out, *torch.autograd.grad(out, [a], dy[0])]

    noticed = False
    for seed in range(20):
        torch.manual_seed(seed)
        x, y, dy = torch.randn(2, 13, 13), torch.randn(2, 13, 6), torch.randn(2, 13, 6)
        expected = list(calls(x, y, dy))
        for a, b, c in itertools.product(*map(_layouts_of, (x, y, dy))):
            for (is_torch, want), (_, got) in zip(expected, calls(a, b, c), strict=True):
                same = all(one.equal(other) for one, other in zip(want, got, strict=True))
                assert same or is_torch
                noticed |= not same
    return noticed


def test_products_do_not_depend_on_strides():
    # _strides has asserted that ours are equal. Where torch's own are equal, too, that does not show that it can fail
    if not run_fresh(_strides):
        pytest.skip("this processor's products do not depend on strides")


def _sampled(rank, group):
    torch.manual_seed(0)
    with tp_ext.tp_invariant():
        head = tp_ext.VocabParallelLMHead(16, 37, group=group)
    x = torch.randn(5, 16)
    return head.argmax(x).tolist(), head.sample(x, top_k=9).tolist(), head.sample(x, top_p=0.7).tolist()


def _samples():
    found = {str(sample) for p in (2, 3, 5) for sample in tp_ext.debug.simulate(_sampled, p)}
    assert found == {str(_sampled(0, None))}


def test_samples():
    run_fresh(_samples)


@on_ranks(3, backend="gloo")
def test_debug_check_knows_shared_heads(group):
    torch.manual_seed(0)
    with tp_ext.tp_invariant(8):
        model = Block(group)
    tp_ext.debug.check(model)
    assert isinstance(model, nn.Module)
