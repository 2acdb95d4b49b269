"""What is known of the operators of torch next to the dims of their tensors: a row for each, by its name.

An operator that writes in place has the row of the name without the underscore, where code asks by that name."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True)
class OperatorRow:
    """The properties of an operator; those of one without a row are the defaults.

    Attributes:
        view: its results have the elements of its first tensor, which it moves or copies.
        shares_memory: in the memory of that tensor.
        splits: a result is a span of one of its dims.
        looks_up: rows of a table.
        linear: in the ``"first"`` tensor, whatever the others are; in each of two ``"factors"``; likewise, with
            the first tensor ``"added"``; in the ``"source"`` that is written into the first one.
        source: the place of that argument.
        most_arguments: with more of them it reduces.
        zeros: all numbers of the result are zero.
        uniform: they are equal.
        gradient: whether the result has one.
    """

    view: bool = False
    shares_memory: bool = False
    splits: bool = False
    looks_up: bool = False
    linear: Literal["", "first", "factors", "added", "source"] = ""
    source: int = 0
    most_arguments: int = 4
    zeros: bool = False
    uniform: bool = False
    gradient: bool = True


def _rows(names: str, **properties: Any) -> Iterable[tuple[str, OperatorRow]]:
    row = OperatorRow(**properties)
    return ((name, row) for name in names.split())


ROWS = [
    *_rows("_to_copy clone repeat reshape", view=True, linear="first"),
    *_rows("chunk slice split split_with_sizes", shares_memory=True, view=True, splits=True, linear="first"),
    *_rows(
        "_reshape_alias _unsafe_view alias expand permute select squeeze t transpose unbind unsqueeze view",
        shares_memory=True,
        view=True,
        linear="first",
    ),
    *_rows("detach", shares_memory=True, linear="first", gradient=False),
    *_rows("diagonal unfold view_as_complex view_as_real", shares_memory=True, linear="first"),
    *_rows("as_strided", shares_memory=True),
    *_rows("_embedding_bag _embedding_bag_forward_only embedding", looks_up=True),
    *_rows("copy", linear="source", source=1, most_arguments=3),
    *_rows("index_add index_copy scatter scatter_add", linear="source", source=3),
    *_rows("index_put", linear="source", source=2),
    *_rows("select_scatter", linear="source", source=1),
    *_rows("slice_scatter", linear="source", source=1, most_arguments=6),
    *_rows(
        "_conj contiguous cumsum flip gather index index_select mean narrow neg positive repeat_interleave "
        "roll sum tril triu",
        linear="first",
    ),
    *_rows("addbmm addmm baddbmm", linear="added"),
    *_rows("bmm dot mm mul mv", linear="factors"),
    *_rows("zeros", zeros=True, uniform=True),
    *_rows("new_zeros zeros_like", zeros=True, gradient=False, uniform=True),
    *_rows("zero", zeros=True),
    *_rows("empty empty_strided full ones scalar_tensor", uniform=True),
    *_rows(
        "empty_like full_like new_empty new_empty_strided new_full new_ones ones_like",
        gradient=False,
        uniform=True,
    ),
    *_rows("argmax argmin argsort", gradient=False),
]
OPERATORS: dict[str, OperatorRow] = dict(ROWS)
_DEFAULT = OperatorRow()


def row_of(name: str) -> OperatorRow:
    """Returns what is known of an operator."""
    return OPERATORS.get(name, _DEFAULT)
