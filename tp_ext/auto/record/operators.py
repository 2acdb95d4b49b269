"""Properties of torch's operators: a row for each, by its name.

An operator that writes in place has the row of the name without the underscore, where code asks by that name."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor


@dataclass(frozen=True)
class OperatorRow:
    """The properties of an operator; those of one without a row are the defaults.

    Attributes:
        dims: how those of its tensors are related: a line of notation, or the name of a rule of several operators
            (:mod:`tp_ext.auto.record.rules`).
        view: its results have the elements of its first tensor, which it moves or copies.
        shares_memory: in the memory of that tensor.
        splits: a result is a span of one of its dims.
        looks_up: rows of a table.
        linear: in the ``"first"`` tensor, whatever the others are, or, if it does not round, in the ``"dividend"``; in
            each of two ``"factors"``; likewise, with the first tensor ``"added"``; in the ``"source"`` that is written
            into the first one; in the first one ``"filled"`` with zeros; in all that are ``"joined"``; in ``"terms"``.
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
        completed: a plan completes the sums of calls of the functions with this name.
        replaced: names of the functions that run it and that ``invariant_blocks`` replaces, since its result depends on
            the shard or on the number of threads.
        numeric: a number among its arguments is one of a tensor: none but that it is zero matters for a plan.
        sizes: the place of the sizes among the arguments of the function with this name.
        reads_rows: as often as they occur in the result.
        free: it runs no kernel, though its result has memory of its own.
    """

    dims: str = ""
    view: bool = False
    shares_memory: bool = False
    splits: bool = False
    looks_up: bool = False
    linear: Literal["", "first", "dividend", "factors", "added", "source", "filled", "joined", "terms"] = ""
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
    completed: bool = False
    replaced: str = ""
    numeric: bool = False
    sizes: int = 0
    reads_rows: bool = False
    free: bool = False


def _rows(names: str, **properties: Any) -> Iterable[tuple[str, OperatorRow]]:
    row = OperatorRow(**properties)
    return ((name, row) for name in names.split())


VIEW: dict[str, Any] = {"view": True, "shares_memory": True, "linear": "first", "exact": "moved"}
# Measured in fp32, fp64 and bf16, forward and backward, on slices of rows: torch's kernels gave the same bits for those
# that are exact, and others for sigmoid, SiLU, both GELUs, ELU, softplus, mish, and rsqrt in bf16; with alpha the last
# elements of sums are rounded otherwise in bf16
ROWS = [
    *_rows("_to_copy clone", dims="pointwise", view=True, linear="first", exact="moved", backward_reads="nothing"),
    *_rows("repeat", view=True, linear="first", backward_reads="nothing"),
    *_rows("reshape", view=True, linear="first", sizes=1),
    *_rows("chunk slice", **VIEW, splits=True),
    *_rows("split split_with_sizes", **VIEW, splits=True, sizes=1),
    *_rows("alias", dims="pointwise", **VIEW, backward_reads="nothing"),
    *_rows("expand", **VIEW, backward_reads="nothing", sizes=1, replaced="expand"),
    *_rows("_reshape_alias _unsafe_view permute select squeeze t transpose unbind unsqueeze", **VIEW),
    *_rows("view", **VIEW, sizes=1),
    *_rows("detach", dims="pointwise", shares_memory=True, linear="first", gradient=False, exact="moved"),
    *_rows("diagonal unfold view_as_real", shares_memory=True, linear="first", exact="moved"),
    *_rows("view_as_complex", dims="* n^ -> *", shares_memory=True, linear="first", exact="moved"),
    *_rows("as_strided", shares_memory=True, exact="moved"),
    *_rows("embedding", looks_up=True, backward_reads="nothing"),
    *_rows("_embedding_bag _embedding_bag_forward_only", looks_up=True),
    *_rows(
        "copy",
        dims="pointwise",
        linear="source",
        source=1,
        most_arguments=3,
        exact="moved",
        backward_reads="nothing",
    ),
    *_rows("index_add scatter_add", dims="written by index", linear="source", source=3, backward_reads="nothing"),
    *_rows("index_put", linear="source", source=2, backward_reads="nothing"),
    *_rows("index_copy scatter", dims="written by index", linear="source", source=3),
    *_rows("select_scatter", dims="written by index", linear="source", source=1),
    *_rows("slice_scatter", dims="written by index", linear="source", source=1, most_arguments=6),
    *_rows("flip roll", dims="reduction", linear="first", exact="moved", backward_reads="nothing"),
    *_rows("neg", linear="first", exact="pointwise", backward_reads="nothing"),
    *_rows("contiguous", dims="pointwise", linear="first", exact="moved"),
    *_rows("narrow", linear="first", exact="moved"),
    *_rows("tril triu", dims="* m^ n^ -> * m^ n^", linear="first", exact="moved"),
    *_rows("mul", linear="factors", exact="pointwise", numeric=True),
    *_rows("addmm baddbmm", linear="added", product=True),
    *_rows("bmm", dims="b m k+, b k+ n -> b m n", linear="factors", product=True, replaced="bmm matmul __matmul__"),
    *_rows("mm", dims="m k+, k+ n -> m n", linear="factors", product=True),
    *_rows("gather index index_select", linear="first", backward_reads="nothing", reads_rows=True),
    *_rows("mean sum", dims="reduction", linear="first", backward_reads="nothing", is_sum=True, completed=True),
    *_rows("_fused_rms_norm native_layer_norm", is_sum=True),
    *_rows("_conj positive", dims="pointwise", linear="first"),
    *_rows("cumsum", dims="reduction", linear="first"),
    *_rows("repeat_interleave", linear="first"),
    *_rows("addbmm", linear="added"),
    *_rows("dot", dims="k+, k+ ->", linear="factors"),
    *_rows("mv", dims="m k+, k+ -> m", linear="factors"),
    *_rows("zeros", zeros=True, uniform=True),
    *_rows("new_zeros", zeros=True, uniform=True, gradient=False, exact="moved"),
    *_rows("zeros_like", zeros=True, uniform=True, gradient=False, exact="moved", backward_reads="nothing"),
    *_rows("zero", dims="pointwise", zeros=True, exact="moved"),
    *_rows("empty empty_strided ones", uniform=True),
    *_rows("full scalar_tensor", uniform=True, numeric=True),
    *_rows("new_empty_strided", uniform=True, gradient=False),
    *_rows("empty_like new_empty new_ones ones_like", uniform=True, gradient=False, exact="moved"),
    *_rows("full_like new_full", uniform=True, gradient=False, exact="moved", numeric=True),
    *_rows("argmax argmin argsort", dims="reduction", gradient=False),
    *_rows(
        "bernoulli bernoulli_ binomial cauchy_ exponential_ geometric_ log_normal_ multinomial native_dropout "
        "normal normal_ poisson rand_like randint_like randn_like random_ rrelu_with_noise rrelu_with_noise_ "
        "uniform_",
        draws=True,
    ),
    *_rows("add rsub sub", linear="terms", exact="scaled", backward_reads="nothing", numeric=True),
    *_rows("constant_pad_nd", linear="filled", exact="moved", backward_reads="nothing"),
    *_rows("cat stack", linear="joined", exact="moved", backward_reads="nothing"),
    *_rows("where", exact="pointwise", backward_reads="nothing"),
    *_rows("dropout", exact="pointwise", backward_reads="nothing", numeric=True),
    *_rows("masked_fill", dims="pointwise", linear="filled", exact="pointwise", backward_reads="nothing", numeric=True),
    *_rows("exp reciprocal relu sqrt tanh", exact="pointwise", backward_reads="result"),
    *_rows(
        "abs bitwise_and bitwise_not cos erf hardtanh leaky_relu log log1p logical_and logical_not maximum minimum "
        "pow sign sin square threshold",
        exact="pointwise",
    ),
    *_rows("clamp clamp_max clamp_min clip eq ge gt le lt ne", exact="pointwise", numeric=True),
    *_rows("div true_divide", linear="dividend", exact="pointwise", numeric=True),
    *_rows("hardswish", dims="pointwise", exact="pointwise"),
    *_rows("to", dims="pointwise", exact="moved"),
    *_rows("fill", dims="pointwise", exact="moved", numeric=True),
    *_rows("flatten movedim", exact="moved"),
    *_rows("unflatten", exact="moved", sizes=2),
    *_rows("_grouped_mm convolution linear", product=True),
    *_rows("_log_softmax", dims="reduction", backward_reads="result"),
    *_rows("_softmax", dims="reduction", backward_reads="result", replaced="softmax"),
    *_rows("rsqrt", backward_reads="result"),
    *_rows("sigmoid", backward_reads="result", replaced="sigmoid"),
    *_rows("gelu", replaced="gelu"),
    *_rows("silu", replaced="silu"),
    *_rows("scaled_dot_product_attention", replaced="scaled_dot_product_attention"),
    *_rows("sort topk", dims="reduction", backward_reads="nothing"),
    *_rows("lift_fresh", dims="pointwise", exact="moved", free=True),
    *_rows("squeeze_ unsqueeze_", free=True),
    *_rows(
        "_safe_softmax softmax amax amin var std any all cumprod logsumexp max min prod median kthvalue "
        "linalg_vector_norm norm var_mean logcumsumexp cummax count_nonzero",
        dims="reduction",
    ),
    *_rows("index_fill scatter_reduce", dims="written by index"),
    *_rows("lift_fresh_copy lift _prelu_kernel", dims="pointwise"),
    *_rows(
        "native_batch_norm _native_batch_norm_legit _native_batch_norm_legit_no_training "
        "_native_batch_norm_legit_functional _batch_norm_with_update _batch_norm_no_update cudnn_batch_norm "
        "miopen_batch_norm",
        dims="batch norm",
    ),
    *_rows(
        "max_pool1d max_pool2d max_pool3d avg_pool1d avg_pool2d avg_pool3d max_pool2d_with_indices "
        "max_pool3d_with_indices adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d adaptive_avg_pool1d "
        "adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d _adaptive_avg_pool3d upsample_nearest1d "
        "upsample_nearest2d upsample_nearest3d _upsample_nearest_exact1d _upsample_nearest_exact2d "
        "_upsample_nearest_exact3d upsample_linear1d upsample_bilinear2d upsample_bicubic2d upsample_trilinear3d "
        "_upsample_bilinear2d_aa _upsample_bicubic2d_aa reflection_pad1d reflection_pad2d reflection_pad3d "
        "replication_pad1d replication_pad2d replication_pad3d",
        dims="resampled",
    ),
    *_rows("vdot", dims="k+, k+ ->"),
    *_rows("layer_norm rms_norm", sizes=1, completed=True),
]
OPERATORS: dict[str, OperatorRow] = dict(ROWS)
_DEFAULT = OperatorRow()


def row_of(name: str) -> OperatorRow:
    """Returns what is known of an operator."""
    return OPERATORS.get(name, _DEFAULT)


def operator_of(function: Any) -> str:
    """Returns the name of the operator that a function of torch, or a method for a sign of Python, is named after."""
    name = getattr(function, "__name__", "").removesuffix("_")
    if method := re.fullmatch(r"__[ir]?(\w+)_", name):
        return method[1].removeprefix("true")
    return name


def functions(names: str) -> set[Any]:
    """Returns the functions and methods of torch with these names."""
    return {getattr(where, name) for where in (torch, F, Tensor) for name in names.split() if hasattr(where, name)}


SUMMED_CALLS = {f: name for name, row in OPERATORS.items() if row.completed for f in functions(name)}
"""Functions whose sums over a sharded dim a plan completes inside of the call -> their name."""
