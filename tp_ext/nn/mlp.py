"""The feed-forward block: column linear, fused bias and activation, row linear."""

from typing import Any

import torch
from torch import Tensor

from tp_ext import _ops
from tp_ext._checks import check_choice, check_flag, check_int
from tp_ext.group import NOT_GIVEN, Group
from tp_ext.model.fused_paths import is_plain
from tp_ext.model.module import ParallelModule
from tp_ext.nn.float8 import Float8
from tp_ext.nn.linear import ColumnParallelLinear, RowParallelLinear, into_norm
from tp_ext.nn.norm import LayerNorm, RMSNorm
from tp_ext.random import Init

ACTIVATIONS = ("gelu", "gelu_tanh", "relu", "silu")
GATED_ACTIVATIONS = ("swiglu", "geglu")


class ParallelMLP(ParallelModule):
    """Feed-forward block y = act(x W_up^T + b_up) W_down^T + b_down.

    Gated: y = (act(x W_gate^T + b_gate) * (x W_up^T + b_up)) W_down^T + b_down.

    Shapes: x ``[.., hidden]`` -> y the same (SP: both ``[tokens_local, .., hidden]``). ``up.weight`` is
    ``[ffn_local, hidden]``, gated ``[2 ffn_local, hidden]`` (gate | up); ``down.weight`` ``[hidden, ffn_local]``.

    Communicates: one all-reduce forward, one backward; SP and ``activations="hidden"``: an all-gather and a
    reduce-scatter each way. ``weight_group`` as :class:`ColumnParallelLinear`.

    Args:
        hidden_size, ffn_hidden_size: of the full block.
        activation: ``gelu`` (exact, erf), ``gelu_tanh``, ``relu``, ``silu``; gated ``swiglu`` (silu) or ``geglu``
            (exact gelu; Shazeer, arXiv:2002.05202).
        bias: in both linears.
        group, sequence_parallel, weight_group, activations, grad_accumulation_fusion, overlap_chunks,
            reshard_after_forward, float8: as :class:`ColumnParallelLinear`; with ``activations="hidden"`` y is sharded
            as x.
        init: initialiser of both weights.

    Raises:
        ValueError: an unknown activation.
    """

    has_blocks = True

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        *,
        activation: str = "gelu",
        bias: bool = True,
        group: Group = NOT_GIVEN,
        sequence_parallel: bool = False,
        weight_group: Group = None,
        activations: str = "replicated",
        grad_accumulation_fusion: bool = False,
        overlap_chunks: int = 1,
        reshard_after_forward: bool = True,
        float8: Float8 | None = None,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, sequence_parallel=sequence_parallel, weight_group=weight_group, activations=activations)
        check_choice(ACTIVATIONS + GATED_ACTIVATIONS, activation=activation)
        check_int(least=1, hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size)
        check_flag(bias=bias)
        self.activation = activation
        self.gated = activation in GATED_ACTIVATIONS
        options: dict[str, Any] = {
            "group": group,
            "sequence_parallel": sequence_parallel,
            "weight_group": weight_group,
            "activations": activations,
            "grad_accumulation_fusion": grad_accumulation_fusion,
            "overlap_chunks": overlap_chunks,
            "reshard_after_forward": reshard_after_forward,
            "float8": float8,
            "init": init,
            "device": device,
            "dtype": dtype,
        }
        parts = (ffn_hidden_size,) * (2 if self.gated else 1)
        # skip_bias_add: the activation's kernel adds it in the same pass
        self.up = ColumnParallelLinear(hidden_size, sum(parts), bias, parts=parts, skip_bias_add=True, **options)
        self.down = RowParallelLinear(ffn_hidden_size, hidden_size, bias, **options)

    def forward(
        self,
        x: Tensor,
        total_tokens: int | None = None,
        *,
        residual: Tensor | None = None,
        norm: RMSNorm | LayerNorm | None = None,
    ) -> Any:
        """Computes y from x; returns y, or with ``residual`` and ``norm`` ``norm(y, residual)``.

        Args:
            x: ``[.., hidden]``.
            total_tokens: under SP, the length of dim 0 over all ranks, if p does not divide it.
            residual, norm: as :meth:`RowParallelLinear.forward`.
        """
        activate = _ops.gated_act if self.gated else _ops.bias_act
        h, bias = self.up(x, total_tokens)
        h = activate(h, bias, self.activation)
        return into_norm(self.down, h, total_tokens, residual, norm)

    def is_plain(self) -> bool:
        """Returns whether up and down are the original layers without hooks of their own, with weights that are not
        quantised: others may then call their operators."""
        kinds: dict[str, type] = {"up": ColumnParallelLinear, "down": RowParallelLinear}
        layers = {name: getattr(self, name) for name in kinds}
        return all(is_plain(layers[name], kind) and layers[name].form.uses_weight for name, kind in kinds.items())

    def extra_repr(self) -> str:
        return f"activation={self.activation}"
