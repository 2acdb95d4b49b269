"""Results of operators on fakes that are known of an equal call: they are those that torch would have made."""

from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from tp_ext.auto.record import known_results
from tp_ext.auto.record.known_results import KnownResults

aten = torch.ops.aten
CALLS: dict[str, tuple[Callable[..., Any], Callable[[Tensor], tuple[Any, ...]], bool]] = {
    "sum of two": (aten.add.Tensor, lambda x: (x, x), True),
    "integer and number": (aten.add.Tensor, lambda x: (x.long(), 1.5), True),
    "matrix product": (aten.mm.default, lambda x: (x, x.t()), True),
    "joined": (aten.cat.default, lambda x: ([x, x], 1), True),
    "another type": (aten._to_copy.default, lambda x: (x,), True),
    "two results": (aten.native_layer_norm.default, lambda x: (x, [6], None, None, 1e-5), True),
    "view": (aten.view.default, lambda x: (x, [2, 12]), True),
    "view with an offset": (aten.t.default, lambda x: (x[1:],), True),
    "strides": (aten.add.Tensor, lambda x: (x.t(), x.t()), True),
    "in place": (aten.add_.Tensor, lambda x: (x, 1), False),
    "several views": (aten.split.Tensor, lambda x: (x, 2), False),
    "as strided": (aten.as_strided.default, lambda x: (x, [2], [1]), False),
}


def _described(result: Any, x: Tensor) -> list[tuple[Any, ...]]:
    results = result if isinstance(result, tuple | list) else [result]
    mine = x.untyped_storage()._cdata
    return [
        (type(y), y.shape, y.stride(), y.dtype, y.device, y.storage_offset(), y.untyped_storage()._cdata == mine)
        for y in results
    ]


@pytest.mark.parametrize("name", CALLS)
def test_they_are_those_of_torch(name: str) -> None:
    func, arguments_of, is_known = CALLS[name]
    fakes = FakeTensorMode()
    x = fakes.from_tensor(torch.randn(4, 6))
    with mock.patch.dict(known_results._known, clear=True), fakes:
        known = KnownResults(fakes)
        args = arguments_of(x)
        expected = _described(func(*args), x)
        assert _described(known(func, args, {}), x) == expected
        assert bool(known_results._known) == is_known
        assert _described(known(func, args, {}), x) == expected
        # Of another default type, or other strides, nothing is known
        before = len(known_results._known)
        torch.set_default_dtype(torch.float64)
        try:
            assert _described(known(func, args, {}), x) == _described(func(*args), x)
        finally:
            torch.set_default_dtype(torch.float32)
        assert len(known_results._known) == 2 * before


def test_constants_are_left_to_torch() -> None:
    fakes = FakeTensorMode()
    with mock.patch.dict(known_results._known, clear=True), fakes:
        x = torch.tensor(3)
        KnownResults(fakes)(aten.add.Tensor, (x, 1), {})
        assert x.constant is not None and not known_results._known  # type: ignore[attr-defined]
