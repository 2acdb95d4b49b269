"""Forty errors in six models: all of them are found, each at its module and tensor, with its cause."""

import contextlib

import pytest

import tp_ext
from tests.verify.injected import ERRORS
from tests.verify.models import MODELS


@pytest.mark.parametrize("model", MODELS)
def test_a_right_model_is_right(model):
    make, example = MODELS[model]
    report = tp_ext.verify(make, example)
    assert report.ok, report
    assert list(report.rows) == [1, 2, 3]


@pytest.mark.parametrize("name", ERRORS)
def test_an_error_is_found_and_named(name):
    error = ERRORS[name]
    make, example = MODELS[error.model]

    def wrong(group):
        model = make(group)
        if error.put is not None and group.size() > 1:
            error.put(model, group)
        return model

    with (error.patch or contextlib.nullcontext)():
        report = tp_ext.verify(wrong, example, p=(2,))
    assert not report.ok
    first = report.findings[0]
    assert (first.p, first.module, first.tensor) == (2, error.module, error.tensor), report
    assert error.word in first.cause, report
