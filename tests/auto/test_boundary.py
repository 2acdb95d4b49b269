"""The order of what a plan does around a forward, between hooks of users."""

import copy
import pickle
import random

import pytest
from torch import nn

from tp_ext.auto.record.boundary import Edit, EditPlace, edits_at, install

notes: list[str] = []


class Noted(Edit):
    """Notes when it runs, and adds 1 to the first argument, 10 to the result."""

    def __init__(self, place: EditPlace, raises: bool = False) -> None:
        self.place, self.raises = place, raises

    def before(self, module, args, kwargs):
        notes.append(f"before {self.place.name}")
        if self.raises:
            raise ValueError(self.place.name)
        return (args[0] + 1,), kwargs

    def after(self, module, output):
        notes.append(f"after {self.place.name}")
        return output + 10

    def end(self, module, output):
        notes.append(f"end {self.place.name} {output}")


class Silent(Edit):
    """Changes no argument, and has nothing to do after forward."""

    place = EditPlace.SUM

    def before(self, module, args, kwargs):
        notes.append("silent")


def noted(name):
    return lambda module, *_: notes.append(name)


PLACES = [place for place in EditPlace if place != EditPlace.USERS]


def test_the_order_is_that_of_places_around_hooks_of_users():
    module = nn.Identity()
    module.register_forward_pre_hook(noted("pre-hook"))
    module.register_forward_hook(noted("hook"))
    install(module, random.Random(0).sample([*map(Noted, PLACES)], len(PLACES)))
    module.register_forward_pre_hook(noted("later pre-hook"))
    module.register_forward_hook(noted("later hook"))
    outer = [place for place in PLACES if place < EditPlace.USERS]
    inner = [place for place in PLACES if place > EditPlace.USERS]
    result = 11 * len(PLACES)
    expected = [
        *(f"before {place.name}" for place in outer),
        "pre-hook",
        *(f"before {place.name}" for place in inner),
        "later pre-hook",
        "hook",
        *(f"after {place.name}" for place in reversed(PLACES)),
        *(f"end {place.name} {result}" for place in reversed(PLACES)),
        "later hook",
    ]
    for each in (module, copy.deepcopy(module)):
        notes.clear()
        assert each(0) == result
        assert notes == expected


def test_edits_of_one_place_run_as_they_are_given_and_may_leave_arguments():
    module = nn.Identity()
    edits = [Noted(EditPlace.SUM), Silent(), Noted(EditPlace.SUM)]
    install(module, edits)
    notes.clear()
    assert module(0) == 22
    assert notes == ["before SUM", "silent", "before SUM", *["after SUM"] * 2, *["end SUM 22"] * 2]
    assert [*edits_at(module, Silent)] == [edits[1]] and [*edits_at(module, Noted)] == [edits[0], edits[2]]
    assert len(module._forward_pre_hooks) == 1 and len(module._forward_hooks) == 2


@pytest.mark.parametrize("place", [EditPlace.CALL, EditPlace.PARAMETERS])
def test_an_exception_ends_the_edits(place):
    module = nn.Identity()
    install(module, [Noted(EditPlace.DRAWS), Noted(place, raises=True)])
    notes.clear()
    with pytest.raises(ValueError, match=place.name):
        module(0)
    assert not any(line.startswith("after") for line in notes)
    assert {"end DRAWS None", f"end {place.name} None"} <= set(notes)


def test_a_pipeline_and_adapters_ask_the_hooks():
    module, needed = nn.Identity(), Noted(EditPlace.SUM)
    needed.is_needed_in_stages = needed.is_of_input = True
    install(module, [Noted(EditPlace.DRAWS), needed, Noted(EditPlace.PARAMETERS)])
    outer, inner = pickle.loads(pickle.dumps(module))._forward_pre_hooks.values()
    assert not outer.is_needed_in_stages and not outer.is_of_input
    assert inner.is_needed_in_stages and inner.is_of_input
