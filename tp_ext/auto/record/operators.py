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
        draws: random numbers, of the generator of torch.
        exact: on a slice it has the bits of the whole: ``"moved"``, it computes nothing; ``"pointwise"``; or
            ``"scaled"``, without ``alpha`` alone.
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
    draws: bool = False
    exact: Literal["", "moved", "pointwise", "scaled"] = ""


def _rows(names: str, **properties: Any) -> Iterable[tuple[str, OperatorRow]]:
    row = OperatorRow(**properties)
    return ((name, row) for name in names.split())


# Measured in fp32, fp64 and bf16, forward and backward, on slices of rows: torch's kernels gave the same bits for those
# that are exact, and others for sigmoid, SiLU, both GELUs, ELU, softplus, mish, and rsqrt in bf16; with alpha the last
# elements of sums are rounded otherwise in bf16
ROWS = [
    *_rows("_to_copy clone", view=True, linear="first", exact="moved"),
    *_rows("repeat reshape", view=True, linear="first"),
    *_rows(
        "chunk slice split split_with_sizes",
        shares_memory=True,
        view=True,
        splits=True,
        linear="first",
        exact="moved",
    ),
    *_rows(
        "_reshape_alias _unsafe_view alias expand permute select squeeze t transpose unbind unsqueeze view",
        shares_memory=True,
        view=True,
        linear="first",
        exact="moved",
    ),
    *_rows("detach", shares_memory=True, linear="first", gradient=False, exact="moved"),
    *_rows("diagonal unfold view_as_complex view_as_real", shares_memory=True, linear="first", exact="moved"),
    *_rows("as_strided", shares_memory=True, exact="moved"),
    *_rows("_embedding_bag _embedding_bag_forward_only embedding", looks_up=True),
    *_rows("copy", linear="source", source=1, most_arguments=3, exact="moved"),
    *_rows("index_add index_copy scatter scatter_add", linear="source", source=3),
    *_rows("index_put", linear="source", source=2),
    *_rows("select_scatter", linear="source", source=1),
    *_rows("slice_scatter", linear="source", source=1, most_arguments=6),
    *_rows("contiguous flip narrow roll tril triu", linear="first", exact="moved"),
    *_rows("mul", linear="factors", exact="pointwise"),
    *_rows("neg", linear="first", exact="pointwise"),
    *_rows("_conj cumsum gather index index_select mean positive repeat_interleave sum", linear="first"),
    *_rows("addbmm addmm baddbmm", linear="added"),
    *_rows("bmm dot mm mv", linear="factors"),
    *_rows("zeros", zeros=True, uniform=True),
    *_rows("new_zeros zeros_like", zeros=True, gradient=False, exact="moved", uniform=True),
    *_rows("zero", zeros=True, exact="moved"),
    *_rows("empty empty_strided full ones scalar_tensor", uniform=True),
    *_rows("new_empty_strided", gradient=False, uniform=True),
    *_rows("empty_like full_like new_empty new_full new_ones ones_like", gradient=False, exact="moved", uniform=True),
    *_rows("argmax argmin argsort", gradient=False),
    *_rows(
        "bernoulli bernoulli_ binomial cauchy_ exponential_ geometric_ log_normal_ multinomial native_dropout normal "
        "normal_ poisson rand_like randint_like randn_like random_ rrelu_with_noise rrelu_with_noise_ uniform_",
        draws=True,
    ),
    *_rows(
        "abs bitwise_and bitwise_not clamp clamp_max clamp_min cos div dropout eq erf exp ge gt hardswish "
        "hardtanh le leaky_relu log log1p logical_and logical_not lt masked_fill maximum minimum ne pow "
        "reciprocal relu sign sin sqrt square tanh threshold where",
        exact="pointwise",
    ),
    *_rows("add rsub sub", exact="scaled"),
    *_rows("cat constant_pad_nd fill flatten lift_fresh movedim stack to unflatten", exact="moved"),
]
OPERATORS: dict[str, OperatorRow] = dict(ROWS)
_DEFAULT = OperatorRow()


def row_of(name: str) -> OperatorRow:
    """Returns what is known of an operator."""
    return OPERATORS.get(name, _DEFAULT)
