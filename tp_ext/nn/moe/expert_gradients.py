"""Functions of an expert layer whose values are one thing and whose gradients another."""

from typing import Any

import torch
from torch import Tensor


class AddedOnce(torch.autograd.Function):
    """y + added on the first rank of a group over which y is summed, y on the others. All ranks have the gradient of
    the sum, and it is that of ``added``."""

    @staticmethod
    def forward(y: Tensor, added: Tensor, first: bool) -> Tensor:
        return y + added if first else y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        return dy, dy, None


class ScaledGradient(torch.autograd.Function):
    """The identity, whose gradient is multiplied by a number."""

    @staticmethod
    def forward(x: Tensor, scale: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.scale = inputs[1]

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, None]:
        return dy * ctx.scale, None


class SumWithGradient(torch.autograd.Function):
    """``value``, a sum of terms of several ranks, with the gradient of this rank's terms ``own``. ``group``: the ranks
    that differentiate the same sum; they add up the gradients of what they share."""

    @staticmethod
    def forward(value: Tensor, own: Tensor, group: str) -> Tensor:  # group: read by the rule of debug.typecheck
        return value.view_as(value)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[None, Tensor, None]:
        return None, dy, None


class AttachedLoss(torch.autograd.Function):
    """The identity of x; backward gives ``loss`` the gradient ``scale``."""

    @staticmethod
    def forward(x: Tensor, loss: Tensor, scale: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        _, loss, ctx.scale = inputs
        ctx.dtype, ctx.device = loss.dtype, loss.device

    @staticmethod
    def backward(ctx: Any, dx: Tensor) -> tuple[Tensor, Tensor, None]:
        return dx, torch.full((), ctx.scale, dtype=ctx.dtype, device=ctx.device), None
