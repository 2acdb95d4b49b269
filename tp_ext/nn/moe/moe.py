"""The mixture-of-experts layer: a router, experts over two groups of ranks, shared experts.

Letters of shapes: T tokens of this rank, under SP of all ranks of ``group`` once they enter the experts; D hidden; K
the choices of a token, ``top_k``; E experts; R rows of the experts of this rank, one for each choice of them.
"""

from typing import Any, Self

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.autograd import forward_ad

from tp_ext import _ops
from tp_ext._checks import check_int, check_number, check_tensor, check_type
from tp_ext.group import NOT_GIVEN, Group, ParallelGroup, parallel_group
from tp_ext.invariance import refuse_in_blocks
from tp_ext.mesh import DataAxes, data_axes
from tp_ext.model.module import LayerOverData
from tp_ext.nn.float8 import Float8
from tp_ext.nn.mlp import ParallelMLP
from tp_ext.nn.moe.experts import ParallelExperts, can_overlap, routed_and_shared
from tp_ext.nn.moe.router import (
    AttachedLoss,
    Routed,
    Router,
    RouterConfig,
    RouterLosses,
    check_capacity,
    drop_over_capacity,
)
from tp_ext.nn.moe.token_exchange import plan_exchange
from tp_ext.random import Init


class ParallelMoE(LayerOverData):
    """Mixture of experts: y = sum over the top k experts i of a token of w_i FFN_i(x), + the shared experts' FFN(x).

    The choice and w are those of :class:`RouterConfig`; FFN_i is a block as :class:`ParallelMLP`. The experts are
    sharded over ``expert_group`` (expert parallelism, EP), the ffn features of each over ``group`` (TP). The ranks of
    ``expert_group`` are data-parallel to each other: each has tokens of its own. The ranks of ``group`` have the same
    tokens, or under SP shards of them.

    Shapes: x ``[.., hidden]`` -> y the same (SP: both ``[tokens_local, .., hidden]``). Any number of experts per rank,
    ranks and experts without tokens, and any number of tokens per rank work.

    Communicates, with T tokens of a rank of the expert group (under SP of the whole of ``group``), k choices:

    ========================  ==========================================  =================================
    over                      forward                                     backward
    ========================  ==========================================  =================================
    ``expert_group``          all-gather of num_experts integers;         two all-to-alls of at most k T
                              two all-to-alls of at most k T rows         rows
    ``group``                 one all-reduce of T rows                    one all-reduce of T rows and one
                                                                          of k T weights
    ``group``, SP             all-gather of T rows, and of 2 k T          reduce-scatter of each, an
                              numbers; reduce-scatter of T rows           all-gather of T rows
    ========================  ==========================================  =================================

    and what :class:`Router` (losses) and the capacity do. The host waits for the device once per forward, for the
    numbers of rows; ``torch.compile`` breaks the graph there. Shared experts need no collective of their own, except
    that SP sums the gradient of their output bias: their GEMMs run during the all-to-alls, forward and backward, and
    their y is part of the same sum over ``group``.

    Gradients are complete when ``backward()`` returns, as those of any layer of a data-parallel rank. The gradients of
    all but the experts are then combined over all data axes, ``expert_group`` among them, those of the experts over the
    other data axes: ``docs/guide/experts.md`` has the recipes.

    Args:
        hidden_size, ffn_hidden_size: of each expert, in full.
        num_experts: at least the ranks of ``expert_group``, over which they are sharded as by ``torch.tensor_split``.
        top_k: choices of a token.
        activation, bias: of the experts, as :class:`ParallelMLP`.
        group: process group, 1-D mesh, group name or None (unsharded).
        expert_group: the same; None: this rank has all experts.
        data_groups: the other ranks that have tokens of the same batch, over which the losses of the router and
            capacities are computed: a group, or several that are axes of one mesh, the outermost first.
        context_group: the ranks that have other tokens of the same sequences, as of :class:`ParallelAttention`; it is
            added to ``data_groups``. The balance loss of a sequence is then that of the whole sequence.
        router: a :class:`RouterConfig`.
        capacity: None: no token is dropped. A number f: an expert keeps at most ceil(f top_k T / num_experts) of the
            choices of the T tokens of the batch on all data ranks; a dropped choice adds nothing to y.
        drop_order: which it keeps: ``"token"``, those of the first tokens of the batch; ``"weight"``, those with the
            largest weights, which costs an all-gather of all choices. Neither depends on how the batch is distributed:
            its tokens are those of data rank 0, 1, .. one after the other, ``expert_group`` being the innermost axis;
            with ``context_group``, which divides sequences, the order does depend on it.
        shared_experts: the number of experts that every token has, computed as one :class:`ParallelMLP` of
            ``shared_experts * ffn_hidden_size`` features. With hooks on it or its linears, which all ranks of ``group``
            must have, or with LoRA, it is called after the others as any block, with its own collectives.
        sequence_parallel: x and y are sharded over ``group`` on dim 0.
        attach_loss: None: the loss of the router, :attr:`losses` ``.total``, has to be added to that of the model
            (:func:`router_loss`). A number s: backward adds the gradient of s times that loss by itself, whatever the
            loss of the model is, and ``losses`` have no gradient. It is for pipelines, whose other stages do not see
            the loss, and for reentrant checkpointing; s is the factor that the loss of the model has in the scalar
            that is differentiated, such as 1 / microbatches, or the scale of a gradient scaler.
        gradient_reduction: how data parallelism combines the gradients of ranks: ``"mean"`` (DDP, FSDP2) or ``"sum"``.
        grad_accumulation_fusion: backward adds the gradients of the weights of experts and shared experts to their
            ``main_grad``, as :class:`ColumnParallelLinear`; the router's is in ``.grad``.
        init: initialiser of the weights of router and experts, the latter of the stacked tensors.

    Attributes:
        losses: :class:`RouterLosses` of the last forward; None before, and without a loss.
        router, experts: :class:`Router`, :class:`ParallelExperts`.
        shared: :class:`ParallelMLP` or None.

    Raises:
        ValueError: fewer experts than ranks of ``expert_group``; ``group`` and ``expert_group`` that share several
            ranks; a number out of its range.

    Shazeer et al., "Outrageously large neural networks", arXiv:1701.06538; Lepikhin et al., "GShard", arXiv:2006.16668.
    """

    has_blocks = True

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_experts: int,
        top_k: int,
        *,
        activation: str = "swiglu",
        bias: bool = False,
        group: Group = NOT_GIVEN,
        expert_group: Group = None,
        data_groups: Group | list[Group] = None,
        context_group: Group = None,
        router: RouterConfig | None = None,
        capacity: float | None = None,
        drop_order: str = "token",
        shared_experts: int = 0,
        sequence_parallel: bool = False,
        attach_loss: float | None = None,
        gradient_reduction: str = "mean",
        grad_accumulation_fusion: bool = False,
        float8: Float8 | None = None,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, sequence_parallel=sequence_parallel)
        check_int(least=1, num_experts=num_experts, top_k=top_k)
        check_capacity(capacity, drop_order)
        check_int(least=0, shared_experts=shared_experts)
        check_number(or_none=True, attach_loss=attach_loss)
        refuse_in_blocks(self.invariant_blocks, capacity=capacity)
        ep = parallel_group(expert_group)
        shared_ranks = set(ep.ranks) & set(self.tp_group.ranks)
        # Their ranks have other tokens, those of group the same ones
        if len(shared_ranks) > 1:
            raise ValueError(
                f"expert_group: must share this rank only with group, as axes of one mesh, not {sorted(shared_ranks)}"
            )
        ranks = _data_axes(data_groups, parallel_group(context_group), ep)
        self.hidden_size, self.num_experts, self.top_k = hidden_size, num_experts, top_k
        self.capacity, self.drop_order, self.attach_loss = capacity, drop_order, attach_loss
        self.data_ranks, self.gradient_reduction = ranks, gradient_reduction
        config = RouterConfig() if router is None else router
        options: dict[str, Any] = {"group": group, "init": init, "device": device, "dtype": dtype}
        self.router = Router(
            hidden_size,
            num_experts,
            top_k,
            config,
            data_ranks=ranks,
            gradient_reduction=gradient_reduction,
            # In blocks every rank routes all tokens
            sequence_parallel=sequence_parallel and self.invariant_blocks is None,
            **options,
        )
        self.experts = ParallelExperts(
            hidden_size,
            ffn_hidden_size,
            num_experts,
            activation=activation,
            bias=bias,
            expert_group=expert_group,
            gradient_reduction=gradient_reduction,
            grad_accumulation_fusion=grad_accumulation_fusion,
            float8=float8,
            **options,
        )
        self.shared: ParallelMLP | None = None
        if shared_experts:
            self.shared = ParallelMLP(
                hidden_size,
                shared_experts * ffn_hidden_size,
                activation=activation,
                bias=bias,
                sequence_parallel=sequence_parallel,
                grad_accumulation_fusion=grad_accumulation_fusion,
                float8=float8,
                **options,
            )
        losses = config.balance_loss or config.z_loss or config.correction_bias
        # Else the layer never communicates over them, and parallelize need not compare them
        self.needs_data_ranks = bool(losses) or capacity is not None
        self._last = _LastLosses(None)

    @property
    def losses(self) -> RouterLosses | None:
        """The losses of the router in the last forward."""
        return self._last.losses

    def forward(self, x: Tensor, total_tokens: int | None = None, batch_size: int | None = None) -> Tensor:
        """Computes y from x.

        Args:
            x: ``[.., hidden]``.
            total_tokens: under SP, the length of dim 0 over all ranks, if p does not divide it.
            batch_size: of x ``[tokens, hidden]``, the number of its sequences (under SP of the whole of ``group``), for
                ``balance_over="sequence"``; default 1. Of x with more dims it is the product of all but the last two.
        """
        check_tensor(x=x)
        if x.dim() == 0 or x.shape[-1] != self.hidden_size:
            raise ValueError(f"x: shape {tuple(x.shape)} must end in hidden_size = {self.hidden_size}")
        _refuse_transforms(x)
        if isinstance(x, FakeTensor) and not torch.compiler.is_compiling():
            return x + self.router.weight.new_zeros(()).to(x.dtype)  # a pipeline asks for the shape; rows are data
        tokens = x.reshape(-1, self.hidden_size)  # [T, D]
        sizes, first, total = self._places(x, tokens.shape[0], total_tokens)
        sequences = self._sequences(x, batch_size, total)
        in_blocks, name = self.invariant_blocks is not None, self.tp_group.name
        if in_blocks and sizes is not None:
            # Gradients of gathered tokens are complete: the trees of the experts sum theirs, routers compute all of it
            tokens, first = _ops.gather_from_region(tokens, name, 0, sizes), 0
        routed = self.router(tokens, sequences, first, total)
        losses = routed.losses
        # Before x enters: backward reaches this node once on each rank, whatever experts its tokens have
        if losses is not None and self.attach_loss is not None:
            tokens = AttachedLoss.apply(tokens, losses.total, self.attach_loss)
            # Else adding it to the loss, too, would count it twice
            losses = losses._replace(total=losses.total.detach())
        self._last = _LastLosses(losses)  # a new one: copies on fake tensors, of a pipeline, share the old one
        if in_blocks:
            y = self._computed(tokens, routed.experts, routed.weights)
            y = y if sizes is None else _ops.scatter_to_region(y, name, 0, sizes)
            return y.view(x.shape) if self.shared is None else y.view(x.shape) + self.shared(x, total_tokens)
        experts, weights, entering = self._enter(tokens, routed, sizes)  # [T, K], [T, K], [T, D]
        if self.capacity is not None:
            experts = drop_over_capacity(
                experts, weights, self.num_experts, self.capacity, self.drop_order, self.data_ranks
            )
        y = self._computed(entering, experts, weights)  # [T, D]
        if self.sequence_parallel:
            y = _ops.reduce_scatter_region(y, name, 0, sizes)
        else:
            y = _ops.reduce_from_region(y, name)
        y = y.view(x.shape)
        if self.shared is None:
            return y
        # A block with hooks or adapters is called as a whole, with its own collectives
        if not can_overlap(self.shared):
            return y + self.shared(x, total_tokens)
        # After the sum over group, which would add it p times
        bias = self.shared.down.parameter("bias")
        return y if bias is None else y + bias.to(y.dtype)

    def _computed(self, x: Tensor, experts: Tensor, weights: Tensor) -> Tensor:
        """Returns this rank's part of the sum over ``group``, of all tokens."""
        exchange = plan_exchange(experts, self.experts.expert_counts, self.experts.expert_group)
        if self.shared is not None and self.invariant_blocks is None and can_overlap(self.shared):
            y = routed_and_shared(exchange, self.experts, self.shared, x, weights)
        else:
            rows, _ = exchange.dispatch(x)  # [R, D]
            y, _ = exchange.combine(self.experts(rows, exchange.counts), weights)
        return y.to(x.dtype)

    def _enter(self, x: Tensor, routed: Routed, sizes: list[int] | None) -> tuple[Tensor, Tensor, Tensor]:
        """Returns experts, weights and x of all tokens of ``group``, as they enter the sharded work."""
        name, k = self.tp_group.name, self.top_k
        if not self.sequence_parallel:
            # Each rank has partial gradients of x and of the weights, from its features of the experts
            weights = _ops.copy_to_region(routed.weights, name)
            return routed.experts, weights, _ops.copy_to_region(x, name)
        # Experts are exact in fp32 up to 2^24
        packed = torch.cat([routed.weights, routed.experts.to(routed.weights.dtype)], 1)  # [T, 2 K]
        packed = _ops.all_gather_region(packed, name, 0, sizes)
        weights, experts = packed[:, :k], packed[:, k:].detach().long()
        return experts, weights, _ops.all_gather_region(x, name, 0, sizes)

    def _places(self, x: Tensor, rows: int, total_tokens: int | None) -> tuple[list[int] | None, int, int]:
        """Returns the numbers of tokens of the ranks of ``group`` under SP, this rank's first one, and their sum."""
        p, rank = self.tp_group.size, self.tp_group.rank
        if not self.sequence_parallel or p == 1:
            return None, 0, rows
        if total_tokens is None and self.invariant_blocks is None and self.token_shares is None:
            return [rows] * p, rank * rows, p * rows
        # total_tokens counts along dim 0, and each of its entries has this many tokens
        inner = x.shape[1:-1].numel()
        token_sizes = self.token_sizes(total_tokens, x)
        assert token_sizes is not None
        sizes = [n * inner for n in token_sizes]
        return sizes, sum(sizes[:rank]), sum(sizes)

    def _sequences(self, x: Tensor, batch_size: int | None, tokens: int) -> int:
        if batch_size is not None:
            check_int(least=1, batch_size=batch_size)
            if tokens % batch_size:
                raise ValueError(f"batch_size: {batch_size} must divide the number of tokens, {tokens}")
            return batch_size
        # A shard of tokens does not show where sequences end
        if self.sequence_parallel or x.dim() < 3:
            return 1
        return max(x.shape[:-2].numel(), 1)

    def extra_repr(self) -> str:
        capacity = "" if self.capacity is None else f", capacity={self.capacity}, drop_order={self.drop_order!r}"
        return f"num_experts={self.num_experts}, top_k={self.top_k}{capacity}, {self.parallel_repr()}"


def _data_axes(data_groups: Group | list[Group], context: ParallelGroup, experts: ParallelGroup) -> DataAxes:
    """Returns the axes of the ranks that have other tokens, ``data_groups`` first."""
    given = data_axes(data_groups).axes
    axes = (*given, *(axis for axis in (context, experts) if axis.size > 1))
    # Its counts and losses would be summed twice over that axis
    if len({axis.torch_name for axis in axes}) < len(axes):
        shown = [axis.torch_name for axis in given]
        raise ValueError(
            f"data_groups: {shown} must not contain expert_group and context_group, which are added to them"
        )
    return DataAxes(axes, context)


def _refuse_transforms(x: Tensor) -> None:
    """Raises under transforms that have no rule for tokens whose number is data."""
    if torch.compiler.is_compiling():
        return
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(x).tangent is not None:
        raise NotImplementedError("tp_ext: ParallelMoE has no forward-mode derivative; use reverse mode")
    if torch._C._functorch.is_batchedtensor(x):
        raise NotImplementedError("tp_ext: ParallelMoE has no batching rule; pass the batch as a dim of x")


def router_loss(model: nn.Module) -> Tensor:
    """Returns the sum of ``losses.total`` of the last forward of all :class:`ParallelMoE` of the model, 0-d, to be
    added to its loss before backward; 0 if there is none. Communicates nothing.

    Raises:
        TypeError: ``model`` is no module.
    """
    check_type(nn.Module, "an nn.Module", model=model)
    layers = [module for module in model.modules() if isinstance(module, ParallelMoE)]
    totals = [layer.losses.total for layer in layers if layer.losses is not None]
    if totals:
        return torch.stack(totals).sum()
    return torch.zeros((), device=next((param.device for param in model.parameters()), None))


class _LastLosses:
    """The losses of the last forward; copies and pickles of a module begin without, since they are part of a graph."""

    def __init__(self, losses: RouterLosses | None) -> None:
        self.losses = losses

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        return type(self)(None)

    def __reduce__(self) -> tuple[type[Self], tuple[None]]:
        return type(self), (None,)
