"""Weights the loss of each microbatch so that the gradients of a step sum to the batch's gradient."""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.utils._pytree import tree_map_only

from tp_ext._checks import check_choice
from tp_ext.group import Group
from tp_ext.mesh import GRADIENT_REDUCTIONS, data_axes


class StepLoss:
    """The loss function of a schedule: it scales each loss, so that gradients need no scaling after the step.

    Args:
        loss, microbatches, count, mean_over, gradient_reduction: see :func:`tp_ext.parallel.pipeline_stages`.

    With ``count`` of one dim, ``[m]``, the loss has m sums, each divided by its own number of tokens; the loss of the
    step is the sum of the quotients.

    Raises:
        ValueError: ``mean_over`` without ``count``, an unknown ``gradient_reduction``, ``"sum"`` without ``count``.
        TypeError: no function.
    """

    def __init__(
        self,
        loss: Callable[..., Tensor],
        microbatches: int,
        count: Callable[[Tensor], Tensor | int] | None,
        mean_over: Group | list[Group],
        gradient_reduction: str,
    ) -> None:
        if not callable(loss):
            raise TypeError(f"loss: {loss!r} must be a function of the output of the model and the target")
        if count is not None and not callable(count):
            raise TypeError(f"count: {count!r} must be a function of the target, or None")
        check_choice(GRADIENT_REDUCTIONS, gradient_reduction=gradient_reduction)
        self._data = data_axes(mean_over)
        if self._data.axes and count is None:
            raise ValueError("mean_over: must be given with count, the number of tokens that loss sums over")
        if gradient_reduction == "sum" and count is None:
            raise ValueError(
                "gradient_reduction: 'sum' must be given with count and mean_over; the sum over data ranks of "
                "gradients of means is not that of the mean"
            )
        self.values: list[Tensor] = []
        self.total: Tensor | None = None
        self.misread = ""  # a sentence, if the loss has read a parameter that it must not
        self._loss, self._count, self._microbatches = loss, count, microbatches
        self._ranks = self._data.size if gradient_reduction == "mean" else 1

    def begin(self, targets: Sequence[Tensor] | None, device: torch.device) -> None:
        """Begins a step: counts the tokens of its targets, on the ranks of the last stage; None if it has no targets.

        Communicates: one all-reduce of a number over each axis of ``mean_over``.
        """
        self.values, self.total = [], None
        # fp64: fp32 counts exactly to 2^24 only. At least 1: the loss of no tokens is 0, not NaN
        if self._count is not None and targets is not None:
            counts = [_checked_count(self._count(target)).to(device, torch.float64) for target in targets]
            self.total = self._data.sum(torch.stack(counts).sum(0)).clamp(min=1)

    def __call__(self, output: Any, target: Any, **options: Any) -> Tensor:
        value = loss_terms(self._loss(output, target, **options), self.total)
        # Detached: the list would keep the graphs of all microbatches alive
        self.values.append(value.detach())
        if self.total is None:
            return value / self._microbatches
        # Data parallelism divides by its ranks, which total has counted already. The cast: both factors may be
        # 0-d, so their product would be fp64
        scaled = value * (self._ranks / self.total).to(value.dtype)
        return scaled.sum() if self.total.dim() else scaled

    def losses(self) -> Tensor:
        """Returns the loss of each microbatch as ``loss`` returned it, in fp64; of several sums their sum."""
        return torch.stack([value.double().sum() for value in self._of_step()])

    def mean(self) -> Tensor:
        """Returns the loss of the step. Communicates: one all-reduce over each axis of ``mean_over``."""
        values = self.terms()
        if self.total is None:
            return values.mean()
        return self.of_sums(self._data.sum(values.sum(0)))

    def terms(self) -> Tensor:
        """Returns the sums of each microbatch, in fp64: one number, or as many as there are counts."""
        return torch.stack([value.double() for value in self._of_step()])

    def of_sums(self, sums: Tensor) -> Tensor:
        """Returns the loss of the step from the sums over all data ranks."""
        assert self.total is not None
        return (sums.reshape(self.total.shape) / self.total).sum()

    def _of_step(self) -> list[Tensor]:
        return self.values[-self._microbatches :]  # torch's inference of shapes may have called it once more


def loss_terms(value: Any, count: Tensor | None) -> Tensor:
    """Returns the result of a loss: one element, or as many as ``count`` has, in one dim.

    Raises:
        TypeError: no tensor. ValueError: another number of elements.
    """
    several = count is not None and count.dim() > 0
    rule = f"a tensor of shape {tuple(count.shape)}, as the counts" if several and count is not None else ""
    rule = rule or "a tensor with one element"
    if not isinstance(value, Tensor):
        raise TypeError(f"loss: its result, a {type(value).__name__}, must be {rule}")
    if value.shape != count.shape if several and count is not None else value.numel() != 1:
        raise ValueError(f"loss: its result of shape {tuple(value.shape)} must be {rule}")
    return value


def loss_of_gathered(loss: Callable[..., Tensor], output: Any, target: Any) -> Tensor:
    """Returns the loss of parameters that FSDP2 has gathered, if it reads any.

    Raises:
        ValueError: it reads one that FSDP2 has freed after the forward of its block.
    """
    try:
        value = loss(output, target)
    except RuntimeError as error:
        if "got mixed torch.Tensor and DTensor" not in str(error):
            raise
        raise ValueError(_FREED) from error
    if isinstance(value, DTensor):
        raise ValueError(_FREED)
    return value


_FREED = (
    "loss: must not read a parameter of a block, which zero = 3 frees after the block's forward; take zero = 2, or "
    "compute this term within forward. Parameters outside of the blocks, such as the head's, may be read"
)


def zero_of_loss(loss: Callable[..., Tensor], output: Any, target: Any) -> Tensor | int:
    """Returns the zero by which a rank without rows has gradients of the parameters that ``loss`` reads, as the other
    data ranks have, which wait for them."""
    if not torch.is_grad_enabled():
        return 0
    try:  # of detached outputs: what reaches them is NaN times nothing, and some of them may have no rows
        value = loss_of_gathered(loss, tree_map_only(Tensor, Tensor.detach, output), target)
    except (RuntimeError, ValueError, IndexError) as error:
        if str(error) == _FREED:  # all data ranks raise this
            raise
        return 0  # it takes no empty batch
    return value.nan_to_num().sum() * 0 if isinstance(value, Tensor) and value.requires_grad else 0


def _checked_count(count: Any) -> Tensor:
    """Returns what ``count`` returned as a tensor.

    Raises:
        ValueError: it has more than one dim.
    """
    result = torch.as_tensor(count)
    if result.dim() > 1:
        raise ValueError(f"count: its result of shape {tuple(result.shape)} must be a number, or of one dim")
    return result
