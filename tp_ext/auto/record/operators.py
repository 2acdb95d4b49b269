"""Properties of torch's operators other than the dims of their tensors: a row for each, by its name.

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
        product: of matrices, by a kernel of its own.
        backward_reads: nothing but the gradient, or its result; else its inputs.
        is_sum: over dims, and what follows from the sum alone: a call may complete it over the ranks.
        reads_rows: as often as they occur in the result.
        free: it runs no kernel, though its result has memory of its own.
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
    product: bool = False
    backward_reads: Literal["inputs", "nothing", "result"] = "inputs"
    is_sum: bool = False
    reads_rows: bool = False
    free: bool = False


def _rows(names: str, **properties: Any) -> Iterable[tuple[str, OperatorRow]]:
    row = OperatorRow(**properties)
    return ((name, row) for name in names.split())


# Measured in fp32, fp64 and bf16, forward and backward, on slices of rows: torch's kernels gave the same bits for those
# that are exact, and others for sigmoid, SiLU, both GELUs, ELU, softplus, mish, and rsqrt in bf16; with alpha the last
# elements of sums are rounded otherwise in bf16
ROWS = [
    *_rows("_to_copy clone", view=True, linear="first", exact="moved", backward_reads="nothing"),
    *_rows("repeat", view=True, linear="first", backward_reads="nothing"),
    *_rows("reshape", view=True, linear="first"),
    *_rows(
        "chunk slice split split_with_sizes",
        shares_memory=True,
        view=True,
        splits=True,
        linear="first",
        exact="moved",
    ),
    *_rows("alias expand", shares_memory=True, view=True, linear="first", exact="moved", backward_reads="nothing"),
    *_rows(
        "_reshape_alias _unsafe_view permute select squeeze t transpose unbind unsqueeze view",
        shares_memory=True,
        view=True,
        linear="first",
        exact="moved",
    ),
    *_rows("detach", shares_memory=True, linear="first", gradient=False, exact="moved"),
    *_rows("diagonal unfold view_as_complex view_as_real", shares_memory=True, linear="first", exact="moved"),
    *_rows("as_strided", shares_memory=True, exact="moved"),
    *_rows("embedding", looks_up=True, backward_reads="nothing"),
    *_rows("_embedding_bag _embedding_bag_forward_only", looks_up=True),
    *_rows("copy", linear="source", source=1, most_arguments=3, exact="moved", backward_reads="nothing"),
    *_rows("index_add scatter_add", linear="source", source=3, backward_reads="nothing"),
    *_rows("index_put", linear="source", source=2, backward_reads="nothing"),
    *_rows("index_copy scatter", linear="source", source=3),
    *_rows("select_scatter", linear="source", source=1),
    *_rows("slice_scatter", linear="source", source=1, most_arguments=6),
    *_rows("flip roll", linear="first", exact="moved", backward_reads="nothing"),
    *_rows("neg", linear="first", exact="pointwise", backward_reads="nothing"),
    *_rows("contiguous narrow tril triu", linear="first", exact="moved"),
    *_rows("mul", linear="factors", exact="pointwise"),
    *_rows("addmm baddbmm", linear="added", product=True),
    *_rows("bmm mm", linear="factors", product=True),
    *_rows("gather index index_select", linear="first", backward_reads="nothing", reads_rows=True),
    *_rows("mean sum", linear="first", backward_reads="nothing", is_sum=True),
    *_rows("_fused_rms_norm native_layer_norm", is_sum=True),
    *_rows("_conj cumsum positive repeat_interleave", linear="first"),
    *_rows("addbmm", linear="added"),
    *_rows("dot mv", linear="factors"),
    *_rows("zeros", zeros=True, uniform=True),
    *_rows("new_zeros", zeros=True, gradient=False, exact="moved", uniform=True),
    *_rows("zeros_like", zeros=True, gradient=False, exact="moved", backward_reads="nothing", uniform=True),
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
    *_rows("add rsub sub", exact="scaled", backward_reads="nothing"),
    *_rows("cat constant_pad_nd stack", exact="moved", backward_reads="nothing"),
    *_rows("dropout masked_fill where", exact="pointwise", backward_reads="nothing"),
    *_rows("exp reciprocal relu sqrt tanh", exact="pointwise", backward_reads="result"),
    *_rows(
        "abs bitwise_and bitwise_not clamp clamp_max clamp_min cos div eq erf ge gt hardswish hardtanh le "
        "leaky_relu log log1p logical_and logical_not lt maximum minimum ne pow sign sin square threshold",
        exact="pointwise",
    ),
    *_rows("fill flatten movedim to unflatten", exact="moved"),
    *_rows("_grouped_mm convolution linear", product=True),
    *_rows("_log_softmax _softmax rsqrt sigmoid", backward_reads="result"),
    *_rows("sort topk", backward_reads="nothing"),
    *_rows("lift_fresh", free=True, exact="moved"),
    *_rows("squeeze_ unsqueeze_", free=True),
]
OPERATORS: dict[str, OperatorRow] = dict(ROWS)
_DEFAULT = OperatorRow()


def row_of(name: str) -> OperatorRow:
    """Returns what is known of an operator."""
    return OPERATORS.get(name, _DEFAULT)
