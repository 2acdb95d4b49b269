"""Activation checkpointing, reentrant or not, selective or not: the same bits as without, masks included, and the
collectives that recomputation adds."""

import collections
import functools

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

from tests.helpers import ranks
from tests.helpers.makers import CASES, build, caller, outcome, same
from tests.helpers.on_ranks import on_ranks

pytestmark = pytest.mark.core

BOTH = pytest.mark.parametrize("sp", [False, True], ids=["", "sp"])
aten, c10d = torch.ops.aten, torch.ops._c10d_functional
KINDS = {
    "matmul": {aten.mm.default, aten.addmm.default, aten.linear.default},
    "attention": {aten._scaled_dot_product_flash_attention_for_cpu.default},
    "collective": {
        c10d.all_reduce.default,
        c10d.all_gather_into_tensor.default,
        c10d.reduce_scatter_tensor.default,
        c10d.wait_tensor.default,
    },
}


def _policy(saved, ctx, op, *args, **kwargs):
    hit = any(op in KINDS[kind] for kind in saved)
    return CheckpointPolicy.MUST_SAVE if hit else CheckpointPolicy.PREFER_RECOMPUTE


def _recomputed(call, how, saved=()):
    """call, recomputed in backward: "plain", "reentrant", "selective" (all but the kinds of operators in saved)."""
    if how == "reentrant":
        return lambda x: checkpoint(call, x, use_reentrant=True)
    contexts = {}
    if how == "selective":
        policy = functools.partial(_policy, saved)
        contexts = {"context_fn": functools.partial(create_selective_checkpoint_contexts, policy)}
    return lambda x: checkpoint(call, x, use_reentrant=False, **contexts)


@BOTH
@pytest.mark.parametrize("p", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
@on_ranks()
def test_the_same_bits_for_every_module(group, sp):
    for name, case in CASES.items():
        module = build(name, group, sp)
        call, want = caller(name, module), outcome(name, module, group, sp)
        hows = [("plain", ()), ("selective", ["matmul"]), ("selective", ["attention"]), ("selective", ())]
        if case.takes != "ids":  # reentrant: an input must need a gradient, says torch
            hows.append(("reentrant", ()))
        for how, saved in hows:
            got = outcome(name, module, group, sp, _recomputed(call, how, saved))
            assert same(got, want), f"{name}: {how}, saving {saved}"


@BOTH
@on_ranks(2)
def test_preserve_rng_state_replays_the_masks(group, sp):
    """preserve_rng_state=False: right without dropout; with it the masks of backward are others, as the user asked."""
    for name, case in CASES.items():
        module = build(name, group, sp)
        call, want = caller(name, module), outcome(name, module, group, sp)

        def once(x, call=call):
            return checkpoint(call, x, use_reentrant=False, preserve_rng_state=False)

        assert same(outcome(name, module, group, sp, once), want) == (not case.dropout), name


# What recomputation sends


class _Counter(TorchDispatchMode):
    """Calls of each operator of a kind. CommDebugMode of torch 2.11 cannot follow modules through checkpoints."""

    def __init__(self, kind):
        super().__init__()
        self.ops, self.times = KINDS[kind] - {c10d.wait_tensor.default}, collections.Counter()

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        if op in self.ops:
            self.times[op.overloadpacket.__name__] += 1
        return op(*args, **(kwargs or {}))


def _times(group, name, sp, kind, how="", saved=()):
    module = build(name, group, sp)
    call = caller(name, module)
    with _Counter(kind) as counter:
        outcome(name, module, group, sp, _recomputed(call, how, saved) if how else call)
    return dict(counter.times)


def _counts(name, sp, how="", saved=()):
    results = ranks.run(_times, 2, name, sp, "collective", how, saved)
    assert results[0] == results[1]
    return results[0]


def test_forward_is_sent_once_more():
    """The block's two all-reduces, under SP its two pairs of all-gather and reduce-scatter; nothing else."""
    plain, plain_sp = _counts("block", False), _counts("block", True)
    for how in ("plain", "reentrant", "selective"):
        assert _counts("block", False, how) == plain | {"all_reduce": plain["all_reduce"] + 2}
        more = {"all_gather_into_tensor": 2, "reduce_scatter_tensor": 2, "all_reduce": 0}
        assert _counts("block", True, how) == {kind: times + more[kind] for kind, times in plain_sp.items()}


@BOTH
def test_a_policy_that_saves_collectives_sends_nothing_twice(sp):
    assert _counts("block", sp, "selective", ["collective"]) == _counts("block", sp)
    assert _counts("block", sp, "selective", ["matmul"]) != _counts("block", sp)


@BOTH
def test_a_policy_that_saves_attention_computes_it_once(sp):
    for saved, times in (((), 2), (["attention"], 1)):
        for counts in ranks.run(_times, 2, "block", sp, "attention", "selective", saved):
            assert list(counts.values()) == [times]


@pytest.mark.thinned(1)
@BOTH
@pytest.mark.parametrize("name", ["column", "mlp_gated", "embedding", "head", "block", "gpt", "rich_block"])
@on_ranks(2)
def test_a_policy_that_saves_collectives_and_matmuls(group, name, sp):
    module = build(name, group, sp)
    want = outcome(name, module, group, sp)
    got = outcome(name, module, group, sp, _recomputed(caller(name, module), "selective", ["collective", "matmul"]))
    assert same(got, want)


@BOTH
@on_ranks(2)
def test_stacks_and_nested_checkpoints(group, sp):
    """checkpoint_sequential over a stack, and a checkpoint inside a checkpoint."""
    stack = torch.nn.Sequential(*(build("rich_block", group, sp) for _ in range(3)))
    x = torch.randn(6, 8, dtype=torch.float64)
    x = x.tensor_split(group.size())[group.rank()] if sp else x

    def nested(x):
        return checkpoint(lambda x: checkpoint(stack, x, use_reentrant=False), x, use_reentrant=False)

    results = []
    for call in (
        stack,
        lambda x: checkpoint_sequential(stack, 2, x, use_reentrant=False),
        nested,
    ):
        torch.manual_seed(5)
        leaf = x.clone().requires_grad_()
        stack.zero_grad()
        y = call(leaf)
        y.square().sum().backward()
        results.append([y.detach(), leaf.grad, *(q.grad for q in stack.parameters())])
    assert same(results[1], results[0]) and same(results[2], results[0])
