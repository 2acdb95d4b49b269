"""The recipe of linears whose products are of 8-bit floating point."""

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn

from tp_ext import _ops
from tp_ext._checks import check_bool, check_choice
from tp_ext.nn.forms import Form, FormedLinear, Stacked, WithBias, operands

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Float8(Form):
    """Recipe of the products y = x W^T, dx = dy W and dw = dy^T x in 8 bits (:func:`tp_ext.low_precision.float8`).

    Each operand is quantised from its own values: q = round(clamp(v scale)), scale = max / amax, with the largest
    number max of the format and amax of the finite elements of the full tensor, whatever the number of ranks. Sums are
    in fp32 (Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433). On a CPU a format for tests, 6.6
    times slower than bf16.

    Attributes:
        scaling: ``"tensor"``: amax is that of all elements; ``"row"``: of those that a product sums over, a row of x
            and W for y, a row of dy and an input of W for dx, an output of dy and an input of x for dw.
        forward: the format of x and W: ``"e4m3"`` (to 448) or ``"e5m2"`` (to 57344).
        gradient: the format of dy.
        communicate: gathers of sequence parallelism move 8 bits; False: the dtype of x, as without float8. The values
            are the same.

    Raises:
        ValueError: another scaling or format.
    """

    scaling: str = "tensor"
    forward: str = "e4m3"
    gradient: str = "e5m2"
    communicate: bool = True

    has_matrix: ClassVar[bool] = False  # in a product c is an operand as W is
    sums_products: ClassVar[bool] = False

    def __post_init__(self) -> None:
        check_choice(("tensor", "row"), scaling=self.scaling)
        check_choice(FORMATS, forward=self.forward)
        check_choice(FORMATS, gradient=self.gradient)
        check_bool(communicate=self.communicate)

    @property
    def recipe(self) -> object:
        return self

    @property
    def options(self) -> tuple[bool, torch.dtype, torch.dtype, bool]:
        """The last arguments of the operators."""
        return self.scaling == "row", FORMATS[self.forward], FORMATS[self.gradient], self.communicate

    def column(self, layer: FormedLinear, x: Tensor, weight: Tensor | None, total_tokens: int | None) -> WithBias:
        return self._column(layer, x, weight, total_tokens, True)

    def entered_column(self, layer: FormedLinear, x: Tensor, weight: Tensor | None) -> Tensor:
        return self._column(layer, x, weight, None, False)[0]

    def _column(
        self, layer: FormedLinear, x: Tensor, weight: Tensor | None, total_tokens: int | None, sum_input_grad: bool
    ) -> tuple[Tensor, Tensor | None]:
        weight, bias, _ = operands(layer, layer.__dict__, weight, layer._copied)
        where = layer.tp_group.name, layer.sequence_parallel, layer.token_sizes(total_tokens, x)
        options = (*where, *self.options, sum_input_grad)
        return _ops.float8_column_linear(x, weight, None if layer.skip_bias_add else bias, *options), bias

    def row(self, layer: FormedLinear, x: Tensor, weight: Tensor | None, total_tokens: int | None) -> Tensor:
        weight, bias, _ = operands(layer, layer.__dict__, weight, layer._coalesced)
        where = layer.tp_group.name, layer.sequence_parallel, layer.token_sizes(total_tokens, whole=x)
        options = (*where, *self.options, not layer._coalesced)
        return _ops.float8_row_linear(x, weight, None if layer.skip_bias_add else bias, *options)

    def row_of_tokens(
        self, layer: FormedLinear, x: Tensor, weight: Tensor | None, dim: int, sizes: list[int]
    ) -> Tensor:
        weight, bias, _ = operands(layer, layer.__dict__, weight, layer._coalesced)
        # The operator scatters dim 0; the order of tokens changes no scale
        y = _ops.float8_row_linear(x.transpose(0, dim), weight, bias, layer.tp_group.name, True, sizes, *self.options)
        return y.transpose(0, dim)

    def grouped(self, x: Tensor, experts: Stacked) -> Tensor:
        where = experts.group, experts.shards_inputs
        # Formats and scaling; nothing is gathered
        options = (*where, *self.options[:3], experts.scale)
        return _ops.float8_grouped_linear(x, experts.weight, experts.counts, *options)


def with_float8(form: Form, float8: object, dtype: torch.dtype | None, fused: bool) -> Form:
    """Returns the form of a layer whose other options choose ``form``: the recipe, if it is given.

    Args:
        dtype: of the weight; None: the default one.
        fused: whether the layer has ``grad_accumulation_fusion``.

    Raises:
        TypeError, ValueError: no recipe; an option or a dtype that its operators lack.
    """
    if float8 is None:
        return form
    if not isinstance(float8, Float8):
        raise TypeError(f"float8: {float8!r} must be a Float8")
    if fused or form.option:
        raise ValueError(f"float8: must not be combined with {'grad_accumulation_fusion' if fused else form.option}")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in DTYPES:
        raise ValueError(f"float8: dtype {dtype} must be one of float32, bfloat16, float16")
    return float8


class Float8Linear(nn.Linear):
    """An ``nn.Linear`` that :func:`tp_ext.low_precision.float8` has converted. Shapes: as ``nn.Linear``. Communicates
    nothing."""

    form: Float8

    @property
    def float8(self) -> Float8:
        """The recipe."""
        return self.form

    def forward(self, x: Tensor) -> Tensor:
        """Computes y = x W^T + b."""
        return _ops.float8_column_linear(x, self.weight, self.bias, "", False, None, *self.form.options)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, float8={self.float8.scaling}"
