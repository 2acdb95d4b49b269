"""The feed-forward block: column linear, fused bias and activation, row linear."""

from typing import Any

import torch
from torch import Tensor

from tp_ext import _ops
from tp_ext.group import Group
from tp_ext.linear import ColumnParallelLinear, RowParallelLinear
from tp_ext.module import ParallelModule, check_positive
from tp_ext.random import Init

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")
GATED_ACTIVATIONS = ("swiglu", "geglu")


class ParallelMLP(ParallelModule):
    """y = act(x W_up^T + b_up) W_down^T + b_down.

    Gated: y = (act(x W_gate^T + b_gate) * (x W_up^T + b_up)) W_down^T + b_down.

    Shapes: x ``[.., hidden]`` -> y the same (SP: both ``[tokens_local, .., hidden]``). ``up.weight`` is
    ``[ffn_local, hidden]``, gated ``[2 ffn_local, hidden]`` (gate | up); ``down.weight`` ``[hidden, ffn_local]``.

    Communicates: one all-reduce forward, one backward; SP: an all-gather and a reduce-scatter each way.

    Args:
        hidden_size, ffn_hidden_size: of the full block.
        activation: ``gelu`` (exact, erf), ``gelu_tanh``, ``relu``, ``silu``; gated ``swiglu`` (silu) or ``geglu``
            (exact gelu; Shazeer, arXiv:2002.05202).
        bias: in both linears.
        group, sequence_parallel, grad_accumulation_fusion, overlap_chunks: as :class:`ColumnParallelLinear`.
        init: initialiser of both weights.

    Raises:
        ValueError: an unknown activation.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        activation: str = "gelu",
        bias: bool = True,
        group: Group = None,
        sequence_parallel: bool = False,
        grad_accumulation_fusion: bool = False,
        overlap_chunks: int = 1,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, sequence_parallel=sequence_parallel)
        if activation not in ACTIVATIONS + GATED_ACTIVATIONS:
            raise ValueError(f"activation: {activation!r} must be one of {ACTIVATIONS + GATED_ACTIVATIONS}")
        check_positive(hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        self.activation = activation
        self.gated = activation in GATED_ACTIVATIONS
        options: dict[str, Any] = {
            "group": group,
            "sequence_parallel": sequence_parallel,
            "grad_accumulation_fusion": grad_accumulation_fusion,
            "overlap_chunks": overlap_chunks,
            "init": init,
            "device": device,
            "dtype": dtype,
        }
        parts = (ffn_hidden_size,) * (2 if self.gated else 1)
        self.up = ColumnParallelLinear(hidden_size, sum(parts), bias, parts=parts, skip_bias_add=True, **options)
        self.down = RowParallelLinear(ffn_hidden_size, hidden_size, bias, **options)

    def forward(self, x: Tensor, total_tokens: int | None = None) -> Tensor:
        """
        Args:
            x: ``[.., hidden]``.
            total_tokens: under SP, the length of dim 0 over all ranks, if p does not divide it.
        """
        activate = _ops.gated_act if self.gated else _ops.bias_act
        h, bias = self.up(x, total_tokens)
        y: Tensor = self.down(activate(h, bias, self.activation), total_tokens)
        return y

    def extra_repr(self) -> str:
        return f"activation={self.activation}"
