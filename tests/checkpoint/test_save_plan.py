"""The metadata of a checkpoint's plan, whose file a second save with the same places takes from the first."""

import pickle
from array import array

import pytest
import torch

from tp_ext.checkpoint.save_plan import GlobalPlan, PlannedChunk, PlannedValues, RankPlan

FILES = ["__0_0.distcp", "__1_0.distcp"]


def plan():
    halves = [PlannedChunk("weight", (offset, 0), (2, 3), (4, 3), torch.float32) for offset in (0, 2)]
    ranks = [[halves[0], "lr"], [halves[1]]]
    return GlobalPlan([RankPlan(entries, {}, [], 0) for entries in ranks])


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


def test_options_of_a_parameter_may_differ_between_ranks():
    """Every key is in the metadata, those that all ranks have once; equal ones are written by one of the ranks."""
    both, alone = PlannedValues("groups.b.", ("lr",)), [PlannedValues("groups.a.", ("lr", name)) for name in ("x", "y")]
    of = GlobalPlan([RankPlan([both, mine], {}, [], 0) for mine in alone])
    assert sorted(map(len, of.assigned)) == [1, 2]
    written = [array("q", range(2 * sum(2 if index else 1 for index in indices))) for indices in of.assigned]
    found = contents(written, of)
    keys = {"groups.a.lr", "groups.a.x", "groups.a.y", "groups.b.lr"}
    assert found["state_dict_metadata"].keys() == {at.fqn for at in found["storage_data"]} == keys
    assert found["planner_data"]["groups.a.x"] == ("groups", "a.x")


@pytest.mark.parametrize("value_first", [False, True])
def test_a_value_of_a_tensors_name_on_another_rank_is_refused(value_first):
    tensor, value = PlannedChunk("a.lr", (0,), (2,), (2,), torch.float32), PlannedValues("a.", ("lr",))
    ranks = [[value], [tensor]] if value_first else [[tensor], [value]]
    with pytest.raises(ValueError, match=r"module: 'a.lr' is a tensor on one rank"):
        GlobalPlan([RankPlan(entries, {}, [], 0) for entries in ranks])
