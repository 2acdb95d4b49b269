"""The experts of an expert layer: feed-forward blocks of one shape, their weights stacked, sharded over two groups; and
the shared experts, whose GEMMs run while the tokens of the other experts are exchanged.

Letters of shapes: T tokens, K the choices of a token, D hidden, F the ffn features of this rank, R the rows
of its experts.
"""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from tp_ext import _ops
from tp_ext._checks import check_choice, check_flag, check_int
from tp_ext.group import Group, ParallelGroup, parallel_group
from tp_ext.invariance import blocks_of_ranks, refuse_compiled, refuse_in_blocks
from tp_ext.mesh import GRADIENT_REDUCTIONS
from tp_ext.model.fused_paths import is_plain
from tp_ext.model.module import ParallelModule
from tp_ext.nn.float8 import Float8, with_float8
from tp_ext.nn.forms import Form, ScaledGradient, Stacked, form_of_options, main_grad_of
from tp_ext.nn.mlp import ACTIVATIONS, GATED_ACTIVATIONS, ParallelMLP
from tp_ext.nn.moe.token_exchange import Linear, TokenExchange
from tp_ext.nn.parallel_linear import ParallelLinear, linear_sharding
from tp_ext.random import Init, torch_linear_init
from tp_ext.sharding import Layout, Sharding, split_sizes
from tp_ext.share_sizes import refuse_in_shares


class ParallelExperts(ParallelModule):
    """Feed-forward blocks y = act(x W_up,e^T + b_up,e) W_down,e^T + b_down,e, of which each row of x has one, e.

    Gated: y = (act(x W_gate,e^T) * (x W_up,e^T)) W_down,e^T, with biases as :class:`ParallelMLP`. The experts are
    sharded over ``expert_group`` as by ``torch.tensor_split``, the ffn features of each over ``group``.

    Shapes: x ``[rows, hidden]``, in the order of this rank's experts -> y the same, partial sums over ``group``.
    ``up_weight`` ``[experts_local, ffn_local, hidden]``, gated ``[experts_local, 2 ffn_local, hidden]`` (gate | up);
    ``down_weight`` ``[experts_local, hidden, ffn_local]``; with bias ``up_bias`` ``[experts_local, ffn_local]`` and
    ``down_bias`` ``[experts_local, hidden]``, which the first rank of ``group`` adds.

    Communicates nothing; with ``float8`` one max-reduce of scales over ``group`` for each linear, in forward and in
    backward. The gradient of an expert without rows is zero.

    Args:
        gradient_reduction: how data parallelism combines the gradients of the ranks of ``expert_group`` for the
            parameters that they share. An expert's gradient is here the sum over those ranks, whose tokens it saw;
            with ``"mean"`` it is divided by their number, so that it is the mean like all the others.
        grad_accumulation_fusion: backward adds the gradients of both weights to their ``main_grad``, as
            :class:`tp_ext.ColumnParallelLinear`; those of experts without rows are left as they are.
        float8: the products of each expert are of 8-bit floating point, with scales of its own.
        others: as :class:`tp_ext.ParallelMoE`.
    """

    has_blocks = True
    output_is_partial = True
    expert_group: ParallelGroup
    up_bias: torch.nn.Parameter | None
    down_bias: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        expert_group: Group = None,
        group: Group,
        gradient_reduction: str = "mean",
        grad_accumulation_fusion: bool = False,
        float8: Float8 | None = None,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group)
        check_int(least=1, hidden_size=hidden_size, ffn_hidden_size=ffn_hidden_size, num_experts=num_experts)
        check_flag(bias=bias, grad_accumulation_fusion=grad_accumulation_fusion)
        self.grad_accumulation_fusion = grad_accumulation_fusion
        check_choice(ACTIVATIONS + GATED_ACTIVATIONS, activation=activation)
        check_choice(GRADIENT_REDUCTIONS, gradient_reduction=gradient_reduction)
        self.expert_group = parallel_group(expert_group)
        ep = self.expert_group
        refuse_in_blocks(
            self.invariant_blocks,
            expert_group=ep.size > 1 and ep.torch_name,
            grad_accumulation_fusion=bool(grad_accumulation_fusion),
        )
        self.form: Form = with_float8(form_of_options(self), float8, dtype, grad_accumulation_fusion)
        if num_experts < ep.size:
            raise ValueError(f"num_experts: {num_experts} must be at least the {ep.size} ranks of expert_group")
        self.num_experts, self.activation, self.gated = num_experts, activation, activation in GATED_ACTIVATIONS
        self.expert_counts = split_sizes(num_experts, ep.size)
        # Its gradients are sums over the tokens of all ep ranks, where those of other parameters become means
        self.gradient_scale = 1 / ep.size if gradient_reduction == "mean" else 1.0
        parts = (ffn_hidden_size,) * (2 if self.gated else 1)
        # Experts first: ffn features are cut within the experts that are left on this rank
        experts, features = (Sharding(0, (num_experts,)), ep), self.tp_group
        up, down = torch_linear_init(hidden_size), torch_linear_init(ffn_hidden_size)

        def add(name: str, shape: tuple[int, ...], default: Init, *sharded: Any) -> None:
            layout = Layout(experts, *sharded)
            chosen = init if init is not None and name.endswith("weight") else default
            self.add_parameter(name, (num_experts, *shape), chosen, sharding=layout, device=device, dtype=dtype)

        if self.shares is not None:
            refuse_in_shares(expert_group=ep.size > 1 and f"{ep.size} ranks")
        of_up = linear_sharding(1, sum(parts), parts, 1, "ffn_hidden_size").in_shares(self.shares)
        of_down = linear_sharding(2, ffn_hidden_size, None, 1, "ffn_hidden_size").in_shares(self.shares)
        if self.invariant_blocks is not None:
            _, p, rank = features
            self._segments = of_up.segments(rank, p), of_down.segments(rank, p)
        add("up_weight", (sum(parts), hidden_size), up, (of_up, features))
        add("down_weight", (hidden_size, ffn_hidden_size), down, (of_down, features))
        if bias:
            add("up_bias", (sum(parts),), up, (of_up, features))
            add("down_bias", (hidden_size,), down)
        else:
            self.register_parameter("up_bias", None)
            self.register_parameter("down_bias", None)

    def forward(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Computes y of the rows of this rank's experts, ``counts[e]`` consecutive ones for each.

        Raises:
            ValueError: a parameter is not of the shape of this rank's shard.
        """
        try:
            return self.form.experts(self, x, counts)
        except (RuntimeError, ValueError):
            self._check_shapes()  # names the parameter that does not fit, if it is one
            raise

    def of_rows(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Computes y of rows, partial sums over ``group``, by the grouped products of the form."""
        up_bias, down_bias = self._bias("up_bias"), self._bias("down_bias")
        if up_bias is not None and not up_bias.size(0) == down_bias.size(0) == len(counts):
            self._check_shapes()  # rows of all experts would be taken for those of this rank's
        activate = _ops.gated_act if self.gated else _ops.bias_act
        h = self._linear(x, "up_weight", counts)  # [R, F], gated [R, 2 F]
        of_row = _experts_of_rows(counts, x.device) if up_bias is not None else None
        if up_bias is not None:
            h = h + up_bias[of_row].to(h.dtype)
        y = self._linear(activate(h, None, self.activation), "down_weight", counts)  # [R, D]
        if down_bias is not None:
            # y is partial over group: the bias of each rank would count p times
            y = AddedOnce.apply(y, down_bias[of_row].to(y.dtype), self.tp_group.rank == 0)
        return y

    def in_blocks(self, x: Tensor, counts: Sequence[int]) -> Tensor:
        """Computes y, complete on each rank of ``group``, as built in :func:`tp_ext.tp_invariant`.

        Communicates: for each expert as a column and a row linear.
        """
        refuse_compiled()
        self._check_shapes()
        names = "up_weight", "up_bias", "down_weight", "down_bias"
        # unbind, whose backward is one stack: that of an index makes a tensor of all experts for each
        params = [[None] * len(counts) if p is None else p.unbind(0) for p in map(self.parameter, names)]
        activate = _ops.gated_act if self.gated else _ops.bias_act
        assert self.invariant_blocks is not None
        group, (up_segments, down_segments) = self.tp_group.name, self._segments
        blocks = blocks_of_ranks(self.invariant_blocks, self.tp_group.size)
        results = []
        for rows, up, up_bias, down, down_bias in zip(x.split(list(counts)), *params, strict=True):
            h = _ops.block_column_linear(rows, up, None, group, False, None, blocks, up_segments)
            h = activate(h, up_bias, self.activation)
            results.append(_ops.block_row_linear(h, down, down_bias, group, False, blocks, down_segments))
        return torch.cat(results)

    def _check_shapes(self) -> None:
        for name in self.tp_layouts:
            shape, local_shape = self.parameter(name).shape, self.local_shape(name)
            if shape != local_shape:
                raise ValueError(f"{name}: shape {tuple(shape)} must be {tuple(local_shape)}, this rank's shard")

    def _linear(self, x: Tensor, name: str, counts: Sequence[int]) -> Tensor:
        weight = self.parameter(name)
        main_grad = main_grad_of(weight) if self.grad_accumulation_fusion else None
        shards_inputs = name == "down_weight"
        of_group = self.gradient_scale, self.tp_group.name, shards_inputs
        return self.form.grouped(x, Stacked(weight, counts, main_grad, *of_group))

    def _bias(self, name: str) -> Any:
        value = self.parameter(name)
        # grouped_linear scales the gradients of weights itself
        if value is None or self.gradient_scale == 1 or not (torch.is_grad_enabled() and value.requires_grad):
            return value
        return ScaledGradient.apply(value, self.gradient_scale)

    def extra_repr(self) -> str:
        ep = self.expert_group
        return f"num_experts={self.num_experts}, ep={ep.size}, ep_rank={ep.rank}, {self.parallel_repr()}"


def _experts_of_rows(counts: Sequence[int], device: torch.device) -> Tensor:
    """Returns the expert of each row."""
    # output_size: without it the host would wait for the sum of the repeats
    return torch.arange(len(counts), device=device).repeat_interleave(
        torch.tensor(counts, device=device), output_size=sum(counts)
    )


class AddedOnce(torch.autograd.Function):
    """y + added on the first rank of a group over which y is summed, y on the others. All ranks have the gradient of
    the sum, and it is that of ``added``."""

    @staticmethod
    def forward(y: Tensor, added: Tensor, first: bool) -> Tensor:
        # A Function must not return its input
        return y + added if first else y.view_as(y)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is saved."""

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:
        return dy, dy, None


def can_overlap(shared: torch.nn.Module) -> bool:
    """Returns whether the block and its linears are the original ones without hooks: others (LoRA, FSDP2 on the block
    alone) are called as they are, with collectives of their own. It must be the same on all ranks of ``group``; global
    hooks, which profilers have on one rank, do not matter.
    """
    return isinstance(shared, ParallelMLP) and is_plain(shared, ParallelMLP) and shared.is_plain()


def routed_and_shared(
    exchange: TokenExchange, experts: ParallelExperts, shared: ParallelMLP, x: Tensor, weights: Tensor
) -> Tensor:
    """Returns y of both blocks, without the bias of ``shared.down``; partial sums over ``group``.

    ::

        exchange of the tokens     during   h = x W_up^T
        experts; activation of h
        exchange of the results    during   z = act(h) W_down^T
        y = weighted sum of the results + z, a partial sum over the tensor-parallel group

    In backward each exchange runs during the GEMMs of the gradients of the same linear. Both blocks have the same x and
    add to the same sum, so the shared one needs no collective of its own.

    Args:
        x: ``[T, D]``, all tokens of ``group``, as they enter the sharded work.
        weights: ``[T, K]``.

    Communicates: the two all-to-alls of the exchange.
    """
    rows, h = exchange.dispatch(x, _linear(shared.up, x))  # [R, D], [T, F]
    rows = experts(rows, exchange.counts)
    assert h is not None
    activate = _ops.gated_act if shared.gated else _ops.bias_act
    h = activate(h, shared.up.parameter("bias"), shared.activation)
    y, z = exchange.combine(rows, weights, _linear(shared.down, h))  # [T, D] both
    assert z is not None
    return y + z


def _linear(layer: ParallelLinear, x: Tensor) -> Linear:
    weight = layer.parameter("weight")
    # The layer's own forward, which checks, is not called
    layer.check_shape(weight)
    return Linear(x, weight, main_grad_of(weight) if layer.grad_accumulation_fusion else None)
