"""A profile says which module an operator and a collective belong to."""

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import tp_ext
from tests.helpers.on_ranks import on_ranks
from tp_ext import debug

pytestmark = pytest.mark.core


class Failing(nn.Module):
    def forward(self, x):
        raise ArithmeticError


@on_ranks(2, backend="gloo")
def test_operators_and_collectives_lie_in_the_range_of_their_module(group):
    model = nn.Sequential(tp_ext.RMSNorm(4, group=group), nn.Sequential(tp_ext.ParallelMLP(4, 8, group=group)))
    x = torch.ones(3, 4)
    want = model(x)
    with debug.annotate(model), profile(activities=[ProfilerActivity.CPU]) as recorded:
        assert torch.equal(model(x), want)
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
    paths = {}
    for event in recorded.events():
        above, path = event.cpu_parent, [event.name]
        while above is not None:
            path.insert(0, above.name)
            above = above.cpu_parent
        paths.setdefault(event.name, path)
    down = ["Sequential", "1 (Sequential)", "1.0 (ParallelMLP)", "1.0.down (RowParallelLinear)"]
    assert paths["1.0.down (RowParallelLinear)"] == down
    assert paths["c10d::allreduce_"][: len(down)] == down
    assert paths["tp_ext::_rms_norm_fwd"][:2] == ["Sequential", "0 (RMSNorm)"]


def test_a_forward_that_raises_ends_its_range():
    model = nn.Sequential(nn.Identity(), Failing())
    with profile(activities=[ProfilerActivity.CPU]) as recorded, debug.annotate(model):
        for _ in range(2):
            with pytest.raises(ArithmeticError):
                model(torch.ones(1))
    parents = [event.cpu_parent for event in recorded.events() if event.name == "Sequential"]
    assert parents == [None, None]
