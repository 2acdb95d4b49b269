"""The exchange of tokens between the ranks of an expert group: to the ranks that have their experts, and back.

::

    tokens [T, D]                           of this rank
      permute by expert                     [kept slots, D]: consecutive rows for each expert, so for each rank
      all-to-all                            [R, D]: from rank 0, 1, .., each part in the order of experts
      permute by expert                     [R, D]: consecutive rows for each expert of this rank
    experts
      the inverse of each step, the last one with the weights of the choices, summed for each token

Letters of shapes: T tokens of this rank, D hidden, K the choices of a token, E experts, R rows of this rank's experts.

The numbers of rows are data. Each rank needs them as Python integers, for the sizes of the all-to-all and of the GEMMs:
one all-gather of the counts and one copy to the host per forward, at which the host waits for the device.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from tp_ext import _ops
from tp_ext.group import ParallelGroup


class Linear(NamedTuple):
    """``x weight^T``, computed during an exchange; ``main_grad`` as in ``_ops.all_to_all_linear``."""

    x: Tensor
    weight: Tensor
    main_grad: Tensor | None


class TokenExchange(NamedTuple):
    """Destinations of the slots (token, choice) of this rank, and sizes of the rows from other ranks.

    Attributes:
        group: the expert group.
        rows: ``[T, K]``: the row of a slot in the order of experts, -1 for a dropped one.
        sent, received: numbers of rows to and from each rank.
        received_rows: ``[R, 1]``: where a received row goes in the order of this rank's experts; None at one rank,
            where all rows are in that order.
        counts: rows of each expert of this rank.
    """

    group: ParallelGroup
    rows: Tensor
    sent: list[int]
    received: list[int]
    received_rows: Tensor | None
    counts: list[int]

    def dispatch(self, x: Tensor, during: Linear | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns the rows of this rank's experts, in their order, from the tokens ``[T, D]``, and the result
        of the linear.

        Communicates: one all-to-all forward, one backward; both during the GEMMs of the linear.
        """
        rows, computed = self._exchanged(_ops.moe_permute(x, self.rows, sum(self.sent), None), True, during)
        if self.received_rows is not None:
            rows = _ops.moe_permute(rows, self.received_rows, sum(self.received), None)
        return rows, computed

    def combine(self, y: Tensor, weights: Tensor, during: Linear | None = None) -> tuple[Tensor, Tensor | None]:
        """Returns ``[T, D]``, the sum over a token's choices of weight times the expert's row of y, and the
        result of the linear.

        Communicates: as :meth:`dispatch`.
        """
        if self.received_rows is not None:
            y = _ops.moe_unpermute(y, self.received_rows, None)
        y, computed = self._exchanged(y, False, during)
        return _ops.moe_unpermute(y, self.rows, weights), computed

    def _exchanged(self, rows: Tensor, there: bool, during: Linear | None) -> tuple[Tensor, Tensor | None]:
        """Returns the rows after the exchange, to the experts or back, and the result of the linear."""
        name = self.group.name
        outgoing, incoming = (self.sent, self.received) if there else (self.received, self.sent)
        if during is not None:
            return _ops.all_to_all_linear(rows, name, outgoing, incoming, *during)
        return _ops.all_to_all_region(rows, name, 0, 0, outgoing, incoming), None


def plan_exchange(experts: Tensor, expert_counts: list[int], group: ParallelGroup) -> TokenExchange:
    """Returns the exchange of slots ``experts`` ``[T, K]``, with -1 for dropped ones.

    Args:
        expert_counts: the number of experts of each rank of the group.

    Communicates: one all-gather of the number of slots for each expert. The host waits for the device.
    """
    num_experts = sum(expert_counts)
    rows, counted = _ops.moe_sort(experts, num_experts)  # [T, K], [E]
    # moe_sort has the rows in the order of experts: nothing else to permute
    if group.size == 1:
        counts: list[int] = counted.tolist()
        return TokenExchange(group, rows, [sum(counts)], [sum(counts)], None, counts)
    # All counts to all: a rank needs what it sends, what it receives, and from whom
    table = _ops.all_gather_region(counted[None], group.name, 0, None)  # [ranks, E]
    first = sum(expert_counts[: group.rank])
    own_experts = slice(first, first + expert_counts[group.rank])
    # The one wait for the device; all sizes below are computed on the host
    on_host: list[list[int]] = table.tolist()
    sent = [sum(part) for part in _split(on_host[group.rank], expert_counts)]
    received = [sum(line[own_experts]) for line in on_host]
    counts = [sum(column) for column in zip(*(line[own_experts] for line in on_host), strict=True)]
    # Rows come from each rank in the order of experts, so the counts alone say which expert each row has
    local = torch.arange(len(counts), device=rows.device).repeat(group.size)
    of_row = local.repeat_interleave(table[:, own_experts].flatten(), output_size=sum(received))  # [R]
    received_rows, _ = _ops.moe_sort(of_row[:, None], len(counts))
    return TokenExchange(group, rows, sent, received, received_rows, counts)


def _split(values: list[int], lengths: list[int]) -> list[list[int]]:
    """Returns consecutive sections of these lengths."""
    ends = [sum(lengths[: i + 1]) for i in range(len(lengths))]
    return [values[end - length : end] for end, length in zip(ends, lengths, strict=True)]
