"""The layer of docs/develop/add_a_layer.md: its code is taken from the page and compared with torch for every p."""

import re

import pytest
import torch

import tp_ext
from tests.helpers import ranks
from tests.helpers.on_ranks import on_ranks
from tests.helpers.oracle import count_collectives_of
from tests.helpers.paths import ROOT

PAGE = ROOT / "docs" / "develop" / "add_a_layer.md"


def _code():
    """The names that the page defines, without its last block, which runs the comparison."""
    names = {"__name__": "add_a_layer"}
    for block in re.findall(r"^```python\n(.*?)^```$", PAGE.read_text(), re.M | re.S)[:-1]:
        exec(compile(block, str(PAGE), "exec"), names)
    return names


@pytest.mark.parametrize("sp", [False, True])
@pytest.mark.parametrize("p", [1, 2, 3, 4])
@on_ranks(backend="gloo")
def test_own_layer_is_the_unsharded_module(group, sp):
    names = _code()
    names["compare_with_torch"](names["GatedMLP"], group, sp)


def _read_raw(group, sp):
    names = _code()

    class Raw(names["GatedMLP"]):
        def parameter(self, name, given=None, **options):
            return getattr(self, name)

    try:
        names["compare_with_torch"](Raw, group, sp)
    except AssertionError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("sp", [False, True])
def test_own_layer_that_reads_the_raw_parameter_is_found_under_sp(sp):
    """Without SP the region in front of the linear completes the gradient of the scale."""
    assert ["not close" in message for message in ranks.run(_read_raw, 2, sp)] == [sp] * 2


@on_ranks(2, backend="gloo")
def test_own_layers_are_coalesced(group):
    """The sums of the two scales become one; that of the parameter which coalescing does not know remains."""
    own_layer = _code()["GatedMLP"]
    block = torch.nn.Sequential(*(own_layer(6, 10, group=group, sequence_parallel=True) for _ in range(2)))
    block[1].extra = torch.nn.Parameter(torch.ones(2))  # not by add_parameter: read as replicated
    x = torch.full((2, 6), group.rank() + 1.0)

    def step():
        block.zero_grad()
        (block(x).sum() + group.rank() * block[1].parameter("extra").sum()).backward()

    sums = [count_collectives_of(step)["all_reduce"]]
    grads = [layer.scale.grad for layer in block]
    tp_ext.coalesce_gradients(block)
    sums.append(count_collectives_of(step)["all_reduce"])
    torch.testing.assert_close([layer.scale.grad for layer in block], grads)
    assert sums == [3, 2]
    assert block[1].extra.grad.tolist() == [1.0, 1.0]
