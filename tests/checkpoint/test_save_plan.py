"""The metadata of a checkpoint's plan, whose file a second save with the same places takes from the first."""

import pickle
from array import array

import torch

from tp_ext.checkpoint.save_plan import GlobalPlan, PlannedChunk, RankPlan

FILES = ["__0_0.distcp", "__1_0.distcp"]


def plan():
    halves = [PlannedChunk("weight", (offset, 0), (2, 3), (4, 3), torch.float32) for offset in (0, 2)]
    ranks = [[halves[0], "lr"], [halves[1]]]
    return GlobalPlan([RankPlan(entries, {"weight": ("weight",), "lr": ("lr",)}, [], 0) for entries in ranks])


def contents(written, of):
    return vars(pickle.loads(of.metadata(written, FILES)))


def without_id(found):
    return {name: value for name, value in found.items() if name != "storage_meta"}


def test_each_save_has_an_id_of_its_own_and_its_own_places():
    reused, first = plan(), [array("q", [0, 50, 50, 9]), array("q", [0, 50])]
    other = [array("q", [0, 60, 60, 9]), array("q", [0, 50])]
    ids = set()
    for written in (first, [array("q", places) for places in first], other, first):
        found = contents(written, reused)
        assert without_id(found) == without_id(contents(written, plan()))
        ids.add(found["storage_meta"].save_id)
    assert len(ids) == 4
