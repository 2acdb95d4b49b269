"""The ranks that have other tokens of the same batch: sums and concatenations over them, for what an expert layer
computes from all tokens of a batch (losses of the router, capacities of the experts)."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor

from tp_ext import _ops
from tp_ext.group import ALONE, Group, ParallelGroup, check_place
from tp_ext.mesh import data_axes
from tp_ext.model.module import ParallelModule


class LayerOverData(ParallelModule):
    """The base of a layer that routes the tokens of all data ranks to experts.

    Attributes:
        data_ranks: the ranks that have these tokens.
        needs_data_ranks: whether forward computes something from the tokens of all of them.
        gradient_reduction: how data parallelism combines the gradients of ranks, ``"mean"`` or ``"sum"``.
        attach_loss: None, or the factor of the layer's own losses whose gradient backward adds.
    """

    data_ranks: "DataRanks"
    needs_data_ranks: bool
    gradient_reduction: str
    attach_loss: float | None


def sum_of_constants(x: Tensor, axis: ParallelGroup) -> Tensor:
    """Returns the sum over the ranks of an axis, without a gradient, for the computation of each rank. Communicates one
    all-reduce."""
    return _ops.copy_to_region(_ops.reduce_from_region(x.detach(), axis.name), axis.name)


class DataRanks:
    """The ranks over which a batch is distributed, as axes of one mesh, the outermost first.

    Their order is that of the tokens in the batch of one process: those of the last axis's ranks follow one another.

    Attributes:
        axes: all axes of several ranks.
        context: the one whose ranks have other tokens of the same sequences.
    """

    def __init__(
        self, data_groups: Group | list[Group], expert_group: ParallelGroup, context: ParallelGroup = ALONE
    ) -> None:
        given, self.context = data_axes(data_groups), context
        self.axes = [*given, *(axis for axis in (context, expert_group) if axis.size > 1)]
        names = [axis.torch_name for axis in self.axes]
        if len(set(names)) < len(names):
            shown = [axis.torch_name for axis in given]
            raise ValueError(
                f"data_groups: {shown} must not contain expert_group and context_group, which are added to them"
            )

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        for axis in self.axes:
            check_place(axis)

    @property
    def size(self) -> int:
        """The number of ranks."""
        return math.prod(axis.size for axis in self.axes)

    @property
    def rank(self) -> int:
        """The index of this rank's tokens."""
        index = 0
        for axis in self.axes:
            index = index * axis.size + axis.rank
        return index

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum over the ranks; without a gradient. Communicates one all-reduce per axis."""
        for axis in self.axes:
            x = sum_of_constants(x, axis)
        return x.detach()

    def sum_over_context(self, x: Tensor) -> Tensor:
        """Returns the sum over the ranks that have the same sequences. Communicates one all-reduce."""
        return sum_of_constants(x, self.context) if self.context.size > 1 else x

    def stack(self, x: Tensor) -> Tensor:
        """Returns ``[ranks, ..]``, the ranks' x of one shape. Communicates one all-gather per axis."""
        x = x.detach()[None]
        for axis in reversed(self.axes):
            x = _ops.all_gather_region(x, axis.name, 0, None)
        return x

    def concatenate(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        """Returns the ranks' x, of these lengths, along dim 0. Communicates one all-gather per axis."""
        own, x = self.rank, x.detach()
        span = 1  # ranks whose x this rank already has
        for axis in reversed(self.axes):
            first = own - own % (span * axis.size)
            sizes = [sum(lengths[first + i * span : first + (i + 1) * span]) for i in range(axis.size)]
            x = _ops.all_gather_region(x, axis.name, 0, sizes)
            span *= axis.size
        return x
