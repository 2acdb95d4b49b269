"""The debug mode: ranks that are given different batches learn of it on every rank, with the first index."""

import runpy
from unittest import mock

import pytest
import torch
from torch import nn

import tp_ext
from tests.helpers import ranks
from tests.helpers.oracle import count_collectives_of
from tp_ext import debug
from tp_ext.common_generator import DrawObserver

pytestmark = pytest.mark.core


def _batch(rank, how):
    ids = torch.arange(10).view(2, 5)
    if rank == 1:
        if how == "values":
            ids[1, 2] = 9
            ids[1, 4] = 0
        if how == "order":
            ids = ids.flip(1)
        if how == "shape":
            ids = ids.view(5, 2)
        if how == "dims":
            ids = ids.flatten()
    return ids.int() if how == "int32" else ids


def _step(group, how, where, mode):
    torch.manual_seed(0)
    embedding = tp_ext.VocabParallelEmbedding(13, 4, group=group)
    head = tp_ext.VocabParallelLMHead(4, 13, group=group)
    right, mine = _batch(0, ""), _batch(group.rank(), how)
    ids, target = (mine, right) if where == "ids" else (right, mine)
    if mode == "with":
        with debug.compare_inputs():
            return head.loss(embedding(ids), target if where == "ids" else target.view_as(right).long())
    debug.compare_inputs(mode == "on")
    try:
        return head.loss(embedding(ids), target if where == "ids" else target.view_as(right).long())
    finally:
        debug.compare_inputs(False)


@pytest.mark.parametrize("where", ["ids", "target"])
@pytest.mark.parametrize(
    ("how", "match"),
    [
        ("values", r"ranks \[1\] differ from rank 0, rank 1 first at index \(1, 2\): 9, not 7, p = 3"),
        ("order", r"rank 1 first at index \(0, 0\): 4, not 0"),
        ("shape", r"the shapes are \[\[2, 5\], \[5, 2\], \[2, 5\]\]"),
        ("dims", r"the shapes are \[\[2, 5\], \[10\], \[2, 5\]\]"),
    ],
)
def test_another_batch_is_an_error_on_every_rank(how, where, match):
    if where == "ids" or how in ("values", "order"):
        for mode in ("on", "with"):
            messages = ranks.run_raises(_step, 3, ValueError, f"{where}: .*{match}", how, where, mode, in_turns=False)
            assert len(set(messages)) == 1
    assert ranks.run(_step, 3, "values", where, "off"), "off by default"


def _of_a_plan(group, table):
    torch.manual_seed(0)
    ids = _batch(0, "")
    model = nn.Sequential(table(13, 8), nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 8))
    tp_ext.auto.apply(tp_ext.auto.plan(model, (ids,), group.size()), model, group)
    model(ids)
    with debug.compare_inputs():
        model(ids)
        model(_batch(group.rank(), "values"))


@pytest.mark.parametrize("table", [nn.Embedding, nn.EmbeddingBag])
def test_tables_that_a_plan_shards_compare_their_indices(table):
    match = r"input: .*ranks \[1\] differ from rank 0, rank 1 first at index \(1, 2\): 9, not 7, p = 2"
    ranks.run_raises(_of_a_plan, 2, ValueError, match, table, in_turns=False)


def _healthy(group):
    tp_ext.debug.compare_inputs()
    try:
        embedding = tp_ext.VocabParallelEmbedding(13, 4, group=group)
        counted = count_collectives_of(lambda: embedding(_batch(group.rank(), "int32" if group.rank() else "")))
        compiled = torch.compile(embedding, fullgraph=True, backend="aot_eager")
        assert torch.equal(compiled(_batch(0, "")), embedding(_batch(0, "")))
        embedding(torch.zeros(0, 3, dtype=torch.long)), embedding(torch.tensor(3))
    finally:
        tp_ext.debug.compare_inputs(False)
    return counted, count_collectives_of(lambda: embedding(_batch(0, "")))


def test_the_same_batch_costs_one_exchange_and_no_mode_none():
    for on, off in ranks.run(_healthy, 2, timeout=120):
        assert sum(on.values()) == sum(off.values()) + 1
    assert ranks.run(_healthy, 1) == [({}, {})]


def test_the_environment_turns_it_on(monkeypatch):
    for value, on in (("1", True), ("0", False), ("", False)):
        monkeypatch.setenv("TP_EXT_DEBUG", value)
        with mock.patch.object(DrawObserver, "compare", DrawObserver.compare):  # which the file sets
            assert runpy.run_path(tp_ext.model.same_input.__file__)["DebugMode"].on is on
    assert not tp_ext.model.same_input.DebugMode.on


def test_the_old_name_warns():
    with pytest.warns(DeprecationWarning, match="use debug.compare_inputs"), tp_ext.debug.enable():
        assert tp_ext.model.same_input.DebugMode.on
    assert not tp_ext.model.same_input.DebugMode.on


# What check finds of a batch, of an optimizer, of a model's parts


def _checked(group, how, given):
    model = nn.Sequential(tp_ext.VocabParallelEmbedding(13, 4, group=group))
    ids = _batch(group.rank(), how)
    batch = {"tensor": ids, "dict": {"ids": ids, "lengths": (torch.ones(2), "text")}}[given]
    return debug.findings(model, batch=batch)


def test_check_compares_a_batch():
    (found, *_) = same = ranks.run(_checked, 3, "values", "dict")
    assert same == [found] * 3 and len(found) == 1
    assert found[0].startswith("batch['ids']: must be the same on ranks [0, 1, 2]; ranks [1] differ from [0, 2]")
    assert "first at index (1, 2): 9, not 7" in found[0]
    assert "torch.int64 (5, 2), not torch.int64 (2, 5)" in ranks.run(_checked, 3, "shape", "tensor")[0][0]
    assert ranks.run(_checked, 3, "", "dict") == [[]] * 3 and ranks.run(_checked, 1, "", "dict") == [[]]
