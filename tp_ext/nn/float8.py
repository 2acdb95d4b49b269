"""The recipe of linears whose products are of 8-bit floating point."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from tp_ext import _ops
from tp_ext._checks import check_bool, check_choice

FORMATS = {"e4m3": torch.float8_e4m3fn, "e5m2": torch.float8_e5m2}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


@dataclass(frozen=True)
class Float8:
    """Recipe of the products y = x W^T, dx = dy W and dw = dy^T x in 8 bits (:func:`tp_ext.low_precision.float8`).

    Each operand is quantised from its own values: q = round(clamp(v scale)), scale = max / amax, with the largest
    number max of the format and amax of the finite elements of the full tensor, whatever the number of ranks. Sums are
    in fp32 (Micikevicius et al., "FP8 Formats for Deep Learning", arXiv:2209.05433).

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

    def __post_init__(self) -> None:
        check_choice(("tensor", "row"), scaling=self.scaling)
        check_choice(FORMATS, forward=self.forward)
        check_choice(FORMATS, gradient=self.gradient)
        check_bool(communicate=self.communicate)

    @property
    def options(self) -> tuple[bool, torch.dtype, torch.dtype, bool]:
        """The last arguments of the operators."""
        return self.scaling == "row", FORMATS[self.forward], FORMATS[self.gradient], self.communicate


def refuse_with_float8(float8: object, dtype: torch.dtype | None, **options: object) -> None:
    """Raises for a ``float8`` that is no recipe, or with one for a weight of another ``dtype`` (None: the default one)
    than its operators take, or for the first of the options that is set, those that they lack.

    Raises:
        TypeError, ValueError.
    """
    if float8 is None:
        return
    if not isinstance(float8, Float8):
        raise TypeError(f"float8: {float8!r} must be a Float8")
    for name, value in options.items():
        if value:
            raise ValueError(f"float8: must not be combined with {name}")
    dtype = torch.get_default_dtype() if dtype is None else dtype
    if dtype not in DTYPES:
        raise ValueError(f"float8: dtype {dtype} must be one of float32, bfloat16, float16")


class Float8Linear(nn.Linear):
    """An ``nn.Linear`` that :func:`tp_ext.low_precision.float8` has converted. Shapes: as ``nn.Linear``. Communicates
    nothing."""

    float8: Float8

    def forward(self, x: Tensor) -> Tensor:
        """Computes y = x W^T + b."""
        return _ops.float8_column_linear(x, self.weight, self.bias, "", False, None, *self.float8.options)

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, float8={self.float8.scaling}"
