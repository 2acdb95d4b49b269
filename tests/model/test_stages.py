"""Several stages of one rank as one module with the names of the whole model."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import tp_ext
from tp_ext.model.census import census
from tp_ext.model.stages import joined

pytestmark = pytest.mark.core


def test_names_are_those_of_each_stage():
    shared = nn.Linear(2, 2)
    first = nn.ModuleDict({"0": checkpoint_wrapper(nn.Linear(2, 3)), "s": shared})
    last = nn.ModuleDict({"3": nn.BatchNorm1d(3), "s": shared})
    both = joined([first, last])
    names = ["0.weight", "0.bias", "s.weight", "s.bias", "3.weight", "3.bias"]
    assert [name.replace("_checkpoint_wrapped_module.", "") for name, _ in both.named_parameters()] == names
    assert [name for name, _ in both.named_buffers()] == [f"3.{b}" for b, _ in last["3"].named_buffers()]
    assert [*both.state_dict()] == [*names, *(f"3.{b}" for b, _ in last["3"].named_buffers())]
    assert both.get_parameter("3.bias") is last["3"].bias
    assert set(both.modules()) == {*first.modules(), *last.modules()}
    state = tp_ext.full_state_dict([first, last])
    assert [*state] == [*both.state_dict()] and torch.equal(state["0.weight"], first["0"].weight)
    assert joined([first]) is first and joined(first) is first


def test_two_tensors_of_one_name_are_refused():
    with pytest.raises(
        ValueError, match=r"module: '0.weight' is in the stages 0 and 1 of this rank, and must be in one"
    ):
        joined([nn.Sequential(nn.Linear(2, 2)), nn.Sequential(nn.Linear(2, 2))])


def test_a_stage_that_holds_both_ends_has_the_original():
    model = nn.ModuleDict({"embedding": nn.Embedding(4, 2), "head": nn.Linear(2, 4, bias=False)})
    tp_ext.declare_tied(model, {"head.weight": "embedding.weight"})
    assert census(model).copies == {id(model["head"].weight): "embedding.weight"}
    model["head"].weight = model["embedding"].weight
    assert census(model).copies == {}
