"""Linear layers: the operators of :mod:`tp_ext.nn.linear`.

C++: csrc/autograd/linear.cpp, linear_2d.cpp, all_to_all_linear.cpp, grouped_linear.cpp and main_grad.cpp; formulas,
saved tensors and overlap are at the top of each.
"""

from collections.abc import Sequence

from torch import Tensor

from tp_ext._ops.binding import Sizes, direct_operator, operator, primitive


@direct_operator
def column_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: str,
    sequence_parallel: bool = False,
    sizes: Sizes = None,
    main_grad: Tensor | None = None,
    overlap_chunks: int = 1,
) -> Tensor:
    """Returns ``x weight^T + bias``, ``[.., out_local]``; dx is summed over the ranks.

    Args:
        x: ``[.., in]``; under SP this rank's shard of dim 0, and the result has all of it.
        weight, bias: ``[out_local, in]`` and ``[out_local]``.
        sizes: under SP, the lengths of dim 0 of the ranks; default all equal.
        main_grad: the gradient of ``weight`` is added to it; ``weight`` gets none.
        overlap_chunks: number of chunks in which communication without a GEMM to overlap with is issued.

    Communicates: backward, one all-reduce of x; under SP, forward an all-gather of x, backward an all-gather of x and a
    reduce-scatter of dx.
    """


@direct_operator
def row_parallel_linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: str,
    sequence_parallel: bool = False,
    sizes: Sizes = None,
    main_grad: Tensor | None = None,
    overlap_chunks: int = 1,
    sum_bias_grad: bool = True,
) -> Tensor:
    """Returns the sum over ranks of ``x weight^T``, plus ``bias``: ``[.., out]``.

    Args:
        x: ``[.., in_local]``.
        weight, bias: ``[out, in_local]`` and ``[out]``, the bias replicated.
        sizes: under SP the result is this rank's shard of dim 0, whose lengths these are; default as
            ``torch.tensor_split``.
        main_grad, overlap_chunks: as in :func:`column_parallel_linear`.
        sum_bias_grad: False leaves the gradient of ``bias`` under SP partial, for the caller to sum.

    Communicates: forward, one all-reduce of the result; under SP, forward a reduce-scatter, backward an all-gather of
    dy and an all-reduce of the bias gradient.
    """


@operator
def linear_2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    group: str,
    weight_group: str,
    weight_size: int,
    row: bool,
    activations: str,
    sizes: Sizes = None,
    reshard_after_forward: bool = True,
) -> Tensor:
    """Returns a column or row linear of x, with the weight sharded on both dims and gathered over ``weight_group``.

    Args:
        x: column: ``[.., in]``, with "tokens" this rank's shard of dim 0, with "hidden" of the last dim; row: ``[..,
            in_local]``.
        weight: column: ``[out_local, in / x]``; row: ``[out / x, in_local]``.
        bias: this rank's shard over ``weight_group`` of the bias of its result: of ``[out_local]`` (column), ``[out]``
            (row), ``[out / y]`` (row, "hidden"). Its gradient is that of the rows of all these ranks.
        weight_size: full length of the dim of ``weight`` that is sharded over ``weight_group``.
        activations: "replicated", "tokens" or "hidden": how x (column) or the result (row) is sharded over ``group``.
        sizes: with "tokens", the lengths of dim 0 of the ranks; default as the two linears above.
        reshard_after_forward: False: the gathered weight and x are kept, and backward does not gather them.

    Communicates: forward, an all-gather of ``weight``, one of ``bias``, and one of x (column) or the sum of the result
    (row); backward, an all-gather and a reduce-scatter of ``weight``, a reduce-scatter of ``bias``, and what the other
    linears do for dx.
    """


@operator
def all_to_all_linear(
    rows: Tensor,
    group: str,
    split_sizes: Sizes,
    concat_sizes: Sizes,
    x: Tensor,
    weight: Tensor,
    main_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Returns the rows that the other ranks send to this one, and ``x weight^T``, which is computed meanwhile.

    In backward, too, the exchange of the rows' gradient runs during the GEMMs of dx and of the weight's gradient. The
    linear communicates nothing.

    Args:
        rows: ``[rows, ..]``, of which ``split_sizes[k]`` consecutive ones go to rank k.
        concat_sizes: numbers of rows from each rank.
        x, weight: ``[.., in]`` and ``[out, in]``.
        main_grad: as in :func:`column_parallel_linear`.

    Communicates: one all-to-all forward, one backward.
    """


@operator
def grouped_linear(
    x: Tensor,
    weight: Tensor,
    counts: Sequence[int],
    main_grad: Tensor | None = None,
    grad_scale: float = 1.0,
    grouped_gemm: bool | None = None,
) -> Tensor:
    """Returns y with ``y[r] = weight[e] x[r]`` for the rows r of expert e: the first ``counts[0]`` are expert 0's, and
    so on. The gradient of an expert without rows is zero. Derivatives of any order.

    Args:
        x: ``[rows, in]``.
        weight: ``[experts, out, in]``.
        main_grad: as in :func:`column_parallel_linear`.
        grad_scale: factor of the gradient of ``weight``.
        grouped_gemm: by ``torch._grouped_mm``, or by a GEMM for each expert that has rows; default: the former where
            torch supports it, on CUDA in bf16, with features that are multiples of 8.
    """


@primitive("_add_weight_grad_")
def add_weight_grad_(main_grad: Tensor, dy: Tensor, x: Tensor) -> None:
    """Adds ``dy^T x`` to ``main_grad``, ``[out, in]``; dy ``[.., out]``, x ``[.., in]``."""


@operator
def accumulate_grad_into(x: Tensor, main_grad: Tensor) -> Tensor:
    """Returns x; backward adds dy to ``main_grad``, and x gets no gradient."""
