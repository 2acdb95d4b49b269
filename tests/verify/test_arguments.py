"""Wrong arguments are errors that name the argument, before anything runs."""

import pytest
import torch
from torch import nn

import tp_ext

X = (torch.ones(2, 3),)


def never(group):
    pytest.fail("must not be called")


def without_group():
    never(None)


def of_two(group, size):
    never(group)


@pytest.mark.parametrize(
    ("make", "example", "options", "error", "text"),
    [
        (3, X, {}, TypeError, "make_model: int must be a function"),
        (without_group, X, {}, TypeError, r"make_model: without_group\(\) must take one argument, the group"),
        (of_two, X, {}, TypeError, r"make_model: of_two\(group, size\) must take one argument"),
        (never, X[0], {}, TypeError, "example: a Tensor must be a tuple"),
        (never, [X[0]], {}, TypeError, "example: a list must be a tuple"),
        (never, {1: X[0]}, {}, TypeError, "example: a dict must be a tuple"),
        (never, lambda: X[0], {}, TypeError, "example: a Tensor that a function returned"),
        (never, of_two, {}, TypeError, "example: of_two must be callable without arguments"),
        (never, X, {"p": 2}, TypeError, "p: 2 must be a tuple"),
        (never, X, {"p": ()}, ValueError, "p: .* at least one"),
        (never, X, {"p": (1, 0)}, ValueError, "p: 0 must be an integer of at least 1"),
        (never, X, {"p": (True,)}, TypeError, "p: True must be an integer"),
        (never, X, {"p": (2.0,)}, TypeError, "p: 2.0 must be an integer"),
        (never, X, {"seed": None}, TypeError, "seed: None must be an integer"),
    ],
)
def test_wrong_arguments(make, example, options, error, text):
    with pytest.raises(error, match=text):
        tp_ext.verify(make, example, **options)


def test_a_function_that_makes_no_new_model_is_refused():
    with pytest.raises(TypeError, match=r"make_model: returned int and must return an nn.Module"):
        tp_ext.verify(lambda group: 3, X)
    same = nn.Linear(3, 3)
    with pytest.raises(TypeError, match=r"make_model: '0.weight' belongs to a model that it returned before"):
        tp_ext.verify(lambda group: nn.Sequential(same), X)
