"""Bytes that forward saves for backward: the formulas of docs/reference/memory.md, and Korthikanti's 34 s b h / p.

The distinct storages that autograd saves are counted, whole, without those of the parameters. The rows of layers are in
tests/helpers/registry.
"""

import functools

import pytest
import torch
from torch.utils.checkpoint import checkpoint

import tp_ext
from tests.helpers import ranks, registry
from tests.helpers.models import Block
from tests.helpers.on_ranks import on_ranks
from tests.helpers.paths import ROOT
from tests.helpers.registry.bytes import BATCH, SEQ, F, H, N, Sizes, V

pytestmark = pytest.mark.core

CASES = [  # p, sequence parallelism, dtype
    pytest.param(p, sp, dtype, id=f"p{p}{'-sp' * sp}-{str(dtype)[6:]}")
    for p in (1, 2, 4)
    for sp in (False, True)
    for dtype in (torch.bfloat16, torch.float32)
]
EVERY = pytest.mark.parametrize(("p", "sp", "dtype"), CASES)


def saved_bytes(fn, module):
    """Bytes of the storages that autograd holds after fn(), but for the parameters'."""
    own = {param.untyped_storage().data_ptr() for param in module.parameters()}
    storages, alive = {}, []

    def pack(t):
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            storages[storage.data_ptr()] = storage.nbytes()
            alive.append(t)  # or a later tensor could take its place
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        y = fn()
    assert y.requires_grad
    return sum(storages.values())


def _input(takes, p, sp, dtype):
    if takes == "ids":
        return torch.randint(V, (N,))
    rows = N // p if sp and takes == "tokens" else N
    width = {"tokens": H, "features": F // p, "logits": V // p}[takes]
    return torch.randn(rows, width, dtype=dtype, requires_grad=True)


def _measure(group, name, sp, dtype, frozen=False, leaf=True):
    row = registry.SAVED[name]
    module = row.make(group=group, sequence_parallel=sp, dtype=dtype)
    module.requires_grad_(not frozen)
    x = _input(row.takes, group.size(), sp, dtype)
    if not leaf:
        x.requires_grad_(False)
    return saved_bytes(lambda: row.call(module, x), module)


@pytest.mark.thinned
@EVERY
@pytest.mark.parametrize("name", registry.SAVED)
def test_every_layer(name, p, sp, dtype):
    assert ranks.run(_measure, p, name, sp, dtype) == [registry.SAVED[name].bytes(Sizes(p, sp, dtype))] * p


def test_the_page_names_every_layer():
    page = (ROOT / "docs" / "reference" / "memory.md").read_text()
    assert not [row.name for row in registry.SAVED.values() if f"`{row.name}`" not in page]


LINEARS = ["column", "row", "head"]


@pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
@pytest.mark.parametrize("name", LINEARS)
def test_frozen_linears_save_no_activation(name, sp):
    assert ranks.run(_measure, 2, name, sp, torch.bfloat16, True) == [0, 0]


@pytest.mark.parametrize("name", LINEARS)
def test_a_linear_whose_input_needs_no_gradient_saves_its_input_alone(name):
    want = registry.SAVED[name].bytes(Sizes(2, False, torch.float32))
    assert ranks.run(_measure, 2, name, False, torch.float32, False, False) == [want] * 2


@pytest.mark.thinned
@EVERY
@pytest.mark.parametrize("name", [name for name, row in registry.SAVED.items() if row.name == "ParallelAttention"])
@on_ranks()
def test_two_layers_of_attention(group, name, p, sp, dtype):
    """They keep twice as much, but rotary tables that were made once for both are there once."""
    want = registry.SAVED[name].bytes(Sizes(p, sp, dtype))
    row = registry.SAVED[name]
    module = row.make(group=group, sequence_parallel=sp, dtype=dtype)
    x = _input(row.takes, group.size(), sp, dtype)
    options = {"batch_size": BATCH}
    if module.rope:
        options["cos_sin"] = module.rope.cos_sin(torch.arange(SEQ), dtype)
    shared = sum(t.untyped_storage().nbytes() for t in options.get("cos_sin", []))
    assert saved_bytes(lambda: module(module(x, **options), **options), module) == 2 * want - shared


def _autocast(group):
    module = tp_ext.ParallelMLP(H, F, group=group)
    x = torch.randn(N, H, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        return saved_bytes(lambda: module(x), module)


def test_autocast_adds_the_low_precision_copy_of_the_weights():
    """And of the bias that the activation adds; no backward reads the row bias."""
    weights, bias = 2 * H * F // 2, F // 2
    want = registry.SAVED["mlp gelu"].bytes(Sizes(2, False, torch.bfloat16)) + 2 * (weights + bias)
    assert ranks.run(_autocast, 2) == [want] * 2


# A transformer block as in Korthikanti et al. (arXiv:2205.05198), section 4


WIDE, WIDE_HEADS = 512, 4  # heads of 128 as in the large models: what is not s b h is under 1 %


def _block(group, sp, dtype, full):
    """LayerNorm, attention, dropout, residual; LayerNorm, GELU MLP 4h wide, dropout, residual; biases everywhere."""
    options = {"norm": tp_ext.LayerNorm, "dropout": 0.1, "group": group, "sequence_parallel": sp, "dtype": dtype}
    block = Block(WIDE, {"num_heads": WIDE_HEADS}, {"ffn_hidden_size": 4 * WIDE}, **options)
    x = torch.randn(N // group.size() if sp else N, WIDE, dtype=dtype, requires_grad=True)
    call = functools.partial(block, batch_size=BATCH)
    return saved_bytes(lambda: checkpoint(call, x, use_reentrant=False) if full else call(x), block)


@EVERY
def test_a_block_keeps_the_bytes_of_the_paper_less_the_dropout_masks(p, sp, dtype):
    z, a = Sizes(p, sp, dtype, WIDE), WIDE_HEADS // p
    between = z.n_sp * z.h * z.e  # inputs of: first norm, qkv, second norm, up
    within = z.n * z.h // p * z.e  # q, k, v, the input of out; the inputs (4 h wide) of the activation and of down
    small = 16 * z.n_sp + 4 * z.n * a + 2 * 8  # statistics of the norms, log-sum-exp, seeds
    for saved in ranks.run(_block, p, sp, dtype, False):
        assert saved == 4 * between + 12 * within + small
        if dtype != torch.bfloat16:
            continue
        sbh, t = z.n * z.h, z.p
        paper = 34 * sbh / t if sp else sbh * (10 + 24 / t)  # "with selective activation recomputation", table 2
        masks = 2 * (sbh / t if sp else sbh)  # a byte per element, where we keep a seed
        assert saved <= paper
        assert abs(saved + masks - paper) <= 0.01 * paper


@pytest.mark.parametrize("p", [1, 2])
def test_a_recomputed_block_keeps_its_input(p):
    """The paper's 2 s b h, under sequence parallelism over t."""
    saved = ranks.run(_block, p, True, torch.bfloat16, True)
    assert saved == [2 * N * WIDE // p] * p
