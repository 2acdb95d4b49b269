"""Full state dicts: the same for every number of ranks, loaded at any other, whole or not at all."""

import itertools

import pytest
import torch
from torch import nn
from torch.distributed.tensor.debug import CommDebugMode

import tp_ext
from tests.helpers import ranks
from tests.helpers.models import OPTIONS, assert_same, model_and_optimizer, train
from tests.helpers.oracle import counts_by_kind

pytestmark = pytest.mark.core

SIZES = (1, 2, 3, 4)


def _state(group, options, rank0_only):
    return tp_ext.full_state_dict(model_and_optimizer(group, **options)[0], rank0_only=rank0_only)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("p", SIZES)
def test_full_state_is_that_of_one_process_to_the_last_bit(p, options):
    want = tp_ext.full_state_dict(model_and_optimizer(None)[0])
    assert want["attention.qkv.weight"].shape == (12, 8) and want["embedding.weight"].shape == (13, 8)
    for state in ranks.run(_state, p, options, False):
        assert_same(state, want)
    first, *others = ranks.run(_state, p, options, True)
    assert_same(first, want)
    assert others == [{}] * (p - 1)


def _load_and_read(group, state, options):
    model, _ = model_and_optimizer(group, seed=8, **options)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(3e9)
    tp_ext.load_full_state_dict(model, state)
    if options.get("pad"):  # padding is zero
        assert not model.embedding.weight[model.embedding.vocab_local :].any()
    return tp_ext.full_state_dict(model)


@pytest.mark.thinned(1)
@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(("p", "q"), [(1, 4), (2, 3), (3, 2), (4, 1)])
def test_a_state_of_p_ranks_loads_on_q_ranks(p, q, options):
    saved = ranks.run(_state, p, {}, False)[0]
    for state in ranks.run(_load_and_read, q, saved, options):
        assert_same(state, saved)


@pytest.mark.smoke
def test_plain_modules_load_it():
    """Keys, shapes and layout are those of the unsharded module."""
    state = ranks.run(_state, 2, {}, False)[0]
    plain = nn.ModuleDict({"embedding": nn.Embedding(13, 8), "norm1": nn.LayerNorm(8), "row": nn.Linear(7, 8)})
    wanted = plain.state_dict().keys()
    plain.load_state_dict({k: v for k, v in state.items() if k in wanted})
    model_and_optimizer(None)[0].load_state_dict(state)


def _count(group):
    model = model_and_optimizer(group)[0]
    with CommDebugMode() as counts:
        tp_ext.full_state_dict(model)
    return counts_by_kind(counts), sum(sharding is not None for _, sharding in tp_ext.shardings(model))


def test_one_all_gather_per_sharded_entry():
    counts, sharded = ranks.run(_count, 2)[0]
    assert counts == {"all_gather": sharded, "all_reduce": 1}  # the tied weight is two entries


def _load_wrong(group, what, how):
    model, optimizer = model_and_optimizer(group)
    train(model, optimizer, group, 1)
    state = tp_ext.full_state_dict(model)
    whole = tp_ext.full_optimizer_state_dict(model, optimizer)
    before = [p.detach().clone() for p in model.parameters()]
    tp_ext.all_gather_region(torch.ones(1), group)
    state = {k: v + 1 for k, v in state.items()}
    if what == "shape":
        state["last.weight"] = torch.ones(9)
    elif what == "sharded shape":
        state["mlp.up.weight"] = torch.ones(24, 8)
    elif what == "optimizer":
        whole["state"]["mlp.up.weight"]["exp_avg"] = torch.ones(3, 8)
    else:
        del state["mlp.up.weight"]
        state["mlp.sideways.weight"] = torch.ones(1)
    try:
        if what == "optimizer":
            tp_ext.load_full_optimizer_state_dict(model, optimizer, whole)
        tp_ext.load_full_state_dict(model, state, strict=how != "loosely")
    finally:
        same = [torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True)]
        assert how == "loosely" or all(same)
    assert not all(same)  # what was there has been loaded


WRONG = {
    "shape": (ValueError, r"last.weight.*\(9,\).*\(8,\)"),
    "sharded shape": (ValueError, r"mlp.up.weight.*\(24, 8\).*\(22, 8\)"),
    "keys": (KeyError, "missing.*mlp.up.weight.*unexpected.*mlp.sideways.weight"),
    "optimizer": (ValueError, r"mlp.up.weight.exp_avg.*\(3, 8\).*\(22, 8\)"),
}


@pytest.mark.parametrize(("p", "what"), list(itertools.product([1, 2], WRONG)))
def test_entries_that_do_not_fit_are_named_and_nothing_is_loaded(p, what):
    ranks.run_raises(_load_wrong, p, WRONG[what][0], WRONG[what][1], what, "strictly", in_turns=False)


def test_loosely_the_keys_that_fit_are_loaded():
    ranks.run(_load_wrong, 2, "keys", "loosely")
