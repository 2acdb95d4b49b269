"""The rows of operators: each names an operator of torch and says what torch says of it, and what it computes; no other
file holds a table of names."""

import ast
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.helpers.paths import ROOT
from tp_ext.auto.record import torch_rules as torch_rules
from tp_ext.auto.record.operators import OPERATORS, ROWS, row_of
from tp_ext.auto.record.rules import RULES, parsed

ATEN = torch.ops.aten


def overloads(name: str) -> list[Any]:
    """Those of an operator, or of its form that writes in place."""
    packet = getattr(ATEN, name, None) or getattr(ATEN, f"{name}_")
    return [getattr(packet, overload) for overload in packet.overloads()]


def test_each_row_is_of_one_operator_of_torch() -> None:
    names = [name for name, _ in ROWS]
    assert len(set(names)) == len(names)
    assert all(overloads(name) for name in names)


@pytest.mark.parametrize("name", OPERATORS)
def test_results_share_memory_as_torch_says(name: str) -> None:
    results = [r.alias_info for op in overloads(name) for r in op._schema.returns]
    shares = any(alias is not None and not alias.is_write for alias in results)
    if name not in CONDITIONAL:
        assert row_of(name).shares_memory == shares


@pytest.mark.parametrize("name", OPERATORS)
def test_random_numbers_are_drawn_as_torch_says(name: str) -> None:
    draws = any(torch.Tag.nondeterministic_seeded in op.tags for op in overloads(name))
    masked = name in ("dropout", "scaled_dot_product_attention")  # whose masks a plan draws
    assert row_of(name).draws == (draws and not masked)


@pytest.mark.parametrize("name", [name for name, row in OPERATORS.items() if row.dims])
def test_dims_are_a_rule_or_a_line_of_notation(name: str) -> None:
    dims = row_of(name).dims
    assert name not in RULES or "->" in dims, "it has a rule of its own"
    if dims not in RULES:
        parsed(dims)


@pytest.mark.parametrize("name", [name for name, row in OPERATORS.items() if row.sizes])
def test_sizes_have_the_place_that_torch_gives_them(name: str) -> None:
    names = {"size", "shape", "sizes", "split_size", "split_sizes", "split_size_or_sections", "normalized_shape"}
    of_tensors = [op._schema.arguments for op in overloads(name) if str(op._schema.arguments[0].type) == "Tensor"]
    assert any(arguments[row_of(name).sizes].name in names for arguments in of_tensors)


# They give their argument itself where nothing is to be done, or come apart into other operators, which a trace shows
CONDITIONAL = {"contiguous", "reshape", "to", "narrow", "flatten", "unflatten", "movedim", "positive", "_conj"}
CONDITIONAL |= {"lift_fresh", "_unsafe_view"}  # nothing uses the argument of the second again

X, Y = (torch.randn(3, 4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(i)) for i in range(2))
INDEX = torch.tensor([2, 0])
# The arguments after the first tensor, where there are some; {} for what has another first argument
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "_reshape_alias": ([24], [1]), "_unsafe_view": ([24],), "view": ([6, 4],), "reshape": ([4, 6],),
    "expand": ([3, 4, 2],),
    "permute": ([2, 0, 1],), "select": (1, 2), "squeeze": (), "transpose": (0, 2), "unbind": (), "unsqueeze": (1,),
    "chunk": (2, 1), "slice": (1, 1, 3), "split": (2, 1), "split_with_sizes": ([1, 3], 1), "repeat": ([2, 1, 1],),
    "diagonal": (), "unfold": (1, 2, 1), "cumsum": (1,), "flip": ([1],), "gather": (0, torch.zeros(1, 4, 2).long()),
    "index": ([None, INDEX],), "index_select": (1, INDEX), "narrow": (1, 1, 2), "repeat_interleave": (2,),
    "roll": ([1], [1]),
}  # fmt: skip
SHAPES = {"t": (3, 4), "mm": (4, 4), "dot": (4,), "bmm": (2, 3, 3)}
LINEAR = [
    name
    for name, row in OPERATORS.items()
    if row.linear in ("first", "factors") and name not in ("mv", "view_as_complex")
]


def _sum(result: Any) -> list[Tensor]:
    return list(result) if isinstance(result, list | tuple) else [result]


@pytest.mark.parametrize("name", sorted(LINEAR))
def test_it_is_linear_as_its_row_says(name: str) -> None:
    shape = SHAPES.get(name)
    x, y, factor = (
        t if shape is None else t.flatten()[: torch.Size(shape).numel()].reshape(shape) for t in (X, Y, X.cos())
    )
    if name in ("view_as_real", "_conj"):
        x, y = torch.complex(x, y), torch.complex(y, x)
    more = ARGUMENTS.get(name, ()) if row_of(name).linear == "first" else (factor,)
    function = getattr(ATEN, name)
    results = [_sum(function(t, *more)) for t in (x, y, 2 * x - 3 * y)]
    for of_x, of_y, of_both in zip(*results, strict=True):
        torch.testing.assert_close(of_both, 2 * of_x - 3 * of_y)


@pytest.mark.parametrize("name", [name for name, row in OPERATORS.items() if row.view and name != "_to_copy"])
def test_a_view_has_the_elements_of_its_argument(name: str) -> None:
    x = X[0].clone() if name == "t" else X.clone()
    for result in _sum(getattr(ATEN, name)(x, *ARGUMENTS.get(name, ()))):
        assert torch.isin(result, x).all()


TABLES = 3
"""Literals of at least four names of operators in files other than that of the rows: the number may only fall."""


def tables() -> list[str]:
    found = []
    for folder in ("auto", "planner"):
        for file in sorted((ROOT / "tp_ext" / folder).rglob("*.py")):
            for node in ast.walk(ast.parse(file.read_text())):
                if not isinstance(node, ast.Dict | ast.Set | ast.List | ast.Tuple):
                    continue
                items = node.keys if isinstance(node, ast.Dict) else node.elts
                names = [item.value for item in items if isinstance(item, ast.Constant) and isinstance(item.value, str)]
                known = [name for name in names if hasattr(ATEN, name.removesuffix("_"))]
                if len(known) >= 4 and 2 * len(known) > len(names):
                    found.append(f"{file.relative_to(ROOT)}:{node.lineno}")
    return found


def test_tables_of_names_are_in_the_rows() -> None:
    assert len(tables()) == TABLES, tables()
