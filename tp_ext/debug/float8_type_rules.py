"""Rules of ``spmd_types`` for the linears of 8-bit floating point: those of the linears in high precision, as those of
:mod:`tp_ext.debug.type_rules`."""

from spmd_types import rules
from torch import Tensor

from tp_ext.debug.type_rules import Typed, alike, biased, column_type, row_type, rule, sharded


@rule
def float8_column_linear(
    *, x: Tensor, weight: Tensor, bias: Tensor | None, group: str, sequence_parallel: bool, sum_input_grad: bool
) -> Typed:
    if sum_input_grad:
        return column_type(x, weight, bias, group, "tokens" if sequence_parallel else "replicated")
    return biased(rules.einsum("...k,nk->...n", *alike(x, sharded(weight, group, 0))), bias)


@rule
def float8_row_linear(
    *, x: Tensor, weight: Tensor, bias: Tensor | None, group: str, sequence_parallel: bool, sum_bias_grad: bool
) -> Typed:
    return row_type(x, weight, bias, group, "tokens" if sequence_parallel else "replicated", sum_bias_grad)


@rule
def float8_grouped_linear(*, x: Tensor, weight: Tensor) -> Typed:
    return rules.einsum("ek,enk->en", *alike(x, weight))
