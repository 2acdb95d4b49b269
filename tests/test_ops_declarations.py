"""tp_ext/_ops declares each operator once, as csrc/library.cpp does: names, order, defaults and types."""

import inspect
from collections.abc import Sequence
from typing import get_type_hints

import pytest
import torch
from torch import Tensor

from tp_ext import _ops
from tp_ext._ops.binding import declarations

NAMES = [name.removeprefix("tp_ext::") for name in torch._C._dispatch_get_all_op_names() if name.startswith("tp_ext::")]

TYPES = {
    "Tensor": Tensor,
    "Optional[Tensor]": Tensor | None,
    "List[Tensor]": Sequence[Tensor],
    "str": str,
    "bool": bool,
    "Optional[bool]": bool | None,
    "int": int,
    "float": float,
    "Optional[int]": int | None,
    "Optional[float]": float | None,
    "List[int]": Sequence[int],
    "Optional[List[int]]": Sequence[int] | None,
    "Optional[List[float]]": Sequence[float] | None,
    "List[bool]": Sequence[bool],
}
RESULTS = {"Tensor": Tensor, "List[Tensor]": list[Tensor]}
NO_DEFAULT = inspect.Parameter.empty


def parameters_of_schema(schema):
    """(name, type, default) of each; a dtype, which a schema stores as a number, by its name in the text."""
    for argument in schema.arguments:
        dtypes = {f"ScalarType {argument.name}": torch.dtype, f"ScalarType? {argument.name}": torch.dtype | None}
        dtype = next((dtype for text, dtype in dtypes.items() if text in str(schema)), None)
        default = argument.default_value if argument.has_default_value() else NO_DEFAULT
        yield argument.name, dtype or TYPES[str(argument.type)], default


def parameters_of(function):
    hints = get_type_hints(function)
    for parameter in inspect.signature(function).parameters.values():
        default = list(parameter.default) if isinstance(parameter.default, tuple) else parameter.default
        assert parameter.kind is parameter.POSITIONAL_OR_KEYWORD
        yield parameter.name, hints[parameter.name], default


def result_of_schema(schema):
    results = [RESULTS[str(result.type)] for result in schema.returns]
    return type(None) if not results else results[0] if len(results) == 1 else tuple[*results]


@pytest.mark.parametrize("name", NAMES)
def test_declared_as_in_the_schema(name):
    schema, function = getattr(torch.ops.tp_ext, name).default._schema, declarations[name]
    assert list(parameters_of(function)) == list(parameters_of_schema(schema))
    assert get_type_hints(function)["return"] == result_of_schema(schema)
    assert function.__doc__


@pytest.mark.parametrize("name", NAMES)
def test_bound_without_a_python_frame(name):
    """_ops has the operator itself, or a function of the compiled library, under the name of its declaration."""
    bound = getattr(_ops, declarations[name].__name__)
    overload = getattr(torch.ops.tp_ext, name).default
    assert bound is overload or (inspect.isbuiltin(bound) and bound.__name__ == name)
