"""The router of an expert layer: scores of the experts for each token, the top k of them with weights, losses that
balance the experts, and the slots (token, choice) that are dropped where an expert has more than its capacity.

Letters of shapes: T tokens of this rank, E experts, K the choices of a token, G groups of experts, S sequences.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import Tensor

from tp_ext import _ops
from tp_ext._checks import check_choice, check_flag, check_int, check_number
from tp_ext.group import Group
from tp_ext.invariance import one_thread, refuse_compiled
from tp_ext.mesh import GRADIENT_REDUCTIONS, DataAxes, sum_of_constants
from tp_ext.model.module import ParallelModule
from tp_ext.random import Init, torch_linear_init

SCORES = ("softmax", "sigmoid")
BALANCE_OVER = ("batch", "sequence")
DROP_ORDERS = ("token", "weight")


@dataclass(frozen=True)
class RouterConfig:
    """The rule by which tokens choose experts. With logits l = x W^T of a token, in fp32 (fp64 of an fp64 layer):

    ::

        s = softmax(l) or sigmoid(l)               scores
        I = the top_k experts of largest s + b     b: correction bias, 0 without it
        w_i = scaling * s_i / sum of s over I      for i in I; without normalize w_i = scaling * s_i

    Of equal s + b the expert with the lower index comes first. With ``num_groups`` > 1 the experts are that many
    consecutive groups of equal size; a token chooses among those of its ``top_groups`` groups whose two largest s + b
    have the largest sum (DeepSeek-AI, "DeepSeek-V3", arXiv:2412.19437, section 2.1.2). Mixtral and Qwen3-MoE are the
    defaults; DeepSeek-V3 is ``RouterConfig("sigmoid", scaling=2.5, num_groups=8, top_groups=4, correction_bias=True)``.

    The losses, with P_te = s_te / sum over e of s_te, T tokens, E experts, and f_e the share of the T top_k choices
    that fell on e, a number without gradient:

    ::

        balance = E * sum over e of f_e * mean over t of P_te     (Fedus et al., "Switch", arXiv:2101.03961, eq. 4)
        z       = mean over t of logsumexp(l_t)^2                 (Zoph et al., "ST-MoE", arXiv:2202.08906, eq. 5)

    The T tokens are the batch on all data ranks: f_e and the mean are global, not means of the ranks' losses. With
    ``balance_over="sequence"`` the balance loss is the mean of the losses of the sequences (DeepSeek-V3, eq. 17). It is
    1 for experts that are used equally. ``load_balancing_loss_func`` of transformers is top_k times it.

    Attributes:
        scores: ``"softmax"`` or ``"sigmoid"``.
        normalize: weights of a token sum to ``scaling``.
        scaling: factor of the weights.
        num_groups, top_groups: groups of experts, and of how many of them a token chooses.
        correction_bias: adds the buffer ``e_score_correction_bias`` to the scores for the choice alone; it is not
            trained by gradient but by :meth:`Router.update_correction_bias`.
        balance_loss, z_loss: coefficients of the losses; a loss with coefficient 0 is not computed.
        balance_over: ``"batch"`` or ``"sequence"``.

    Raises:
        ValueError: a name that is none of those, a number out of its range.
    """

    scores: str = "softmax"
    normalize: bool = True
    scaling: float = 1.0
    num_groups: int = 1
    top_groups: int = 1
    correction_bias: bool = False
    balance_loss: float = 0.0
    z_loss: float = 0.0
    balance_over: str = "batch"

    def __post_init__(self) -> None:
        check_choice(SCORES, scores=self.scores)
        check_choice(BALANCE_OVER, balance_over=self.balance_over)
        check_flag(normalize=self.normalize, correction_bias=self.correction_bias)
        check_int(least=1, num_groups=self.num_groups, top_groups=self.top_groups)
        check_number(least=0, scaling=self.scaling, balance_loss=self.balance_loss, z_loss=self.z_loss)
        if self.top_groups > self.num_groups:
            raise ValueError(f"top_groups: {self.top_groups} must be at most num_groups = {self.num_groups}")


class RouterLosses(NamedTuple):
    """The losses of a router, 0-d, the same on all ranks.

    Attributes:
        total: the sum of the losses times their coefficients, to be added to the loss of the model.
        balance, z: the losses themselves, without gradient; None if the coefficient is 0.
    """

    total: Tensor
    balance: Tensor | None
    z: Tensor | None


class Routed(NamedTuple):
    """The choices of the tokens.

    Attributes:
        experts: ``[tokens, top_k]``, int64, in order of s + b.
        weights: ``[tokens, top_k]``.
        losses: None if all coefficients are 0.
    """

    experts: Tensor
    weights: Tensor
    losses: RouterLosses | None


class Router(ParallelModule):
    """Chooses ``top_k`` of ``num_experts`` experts for each token, by a :class:`RouterConfig`.

    Shapes: x ``[tokens, hidden]`` -> :class:`Routed`. ``weight`` ``[num_experts, hidden]``, replicated over all ranks.

    Communicates: with a loss, one all-reduce of 2 num_experts + 2 numbers over each axis of the data ranks, forward
    (``balance_over="sequence"``: of a few numbers). SP: also over ``group``, and backward sums the gradient of
    ``weight`` over it.

    Attributes:
        tokens_per_expert: ``[num_experts]``, int64, this rank's choices in training forwards since the last
            :meth:`update_correction_bias`. No buffer, since it differs on ranks and DDP broadcasts buffers. A
            recomputed forward counts once more.
    """

    has_blocks = True
    weight: torch.nn.Parameter
    e_score_correction_bias: Tensor | None

    def __init__(
        self,
        hidden_size: int,
        num_experts: int,
        top_k: int,
        config: RouterConfig,
        *,
        group: Group,
        data_ranks: DataAxes,
        gradient_reduction: str = "mean",
        sequence_parallel: bool = False,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(group, sequence_parallel=sequence_parallel)
        check_int(least=1, hidden_size=hidden_size, num_experts=num_experts, top_k=top_k)
        if not isinstance(config, RouterConfig):
            raise TypeError(f"router: {config!r} must be a RouterConfig")
        check_choice(GRADIENT_REDUCTIONS, gradient_reduction=gradient_reduction)
        if num_experts % config.num_groups:
            raise ValueError(f"num_groups: {config.num_groups} must divide num_experts = {num_experts}")
        choices = num_experts // config.num_groups * config.top_groups
        if top_k > choices:
            raise ValueError(f"top_k: {top_k} must be at most the {choices} experts that a token chooses from")
        self.num_experts, self.top_k, self.config = num_experts, top_k, config
        self.data_ranks, self.gradient_reduction = data_ranks, gradient_reduction
        init = torch_linear_init(hidden_size) if init is None else init
        self.add_parameter("weight", (num_experts, hidden_size), init, device=device, dtype=dtype)
        # On the CPU, also if the layer is made on meta: this tensor is no buffer that a later init would fill
        self.tokens_per_expert = torch.zeros(num_experts, dtype=torch.int64, device="cpu")
        bias = torch.zeros(num_experts, dtype=torch.float32, device=device) if config.correction_bias else None
        self.register_buffer("e_score_correction_bias", bias)

    def forward(self, x: Tensor, sequences: int = 1, first_token: int = 0, total_tokens: int | None = None) -> Routed:
        """Routes tokens.

        Args:
            x: ``[tokens, hidden]``.
            sequences: the number of sequences, of equal length, for ``balance_over="sequence"``.
            first_token, total_tokens: under SP, the index of this rank's first token, and the number of all.
        """
        config = self.config
        # In bf16, 8 bits, many scores would be equal, and the choice that of the lower index
        with torch.autocast(x.device.type, enabled=False):
            wide = torch.promote_types(x.dtype, torch.float32)
            logits, scores = self._scores(x.to(wide), self.parameter("weight").to(wide))  # [T, E]
            experts = self._choose(scores.detach())  # [T, K]
            weights = scores.gather(-1, experts)  # [T, K]
            if config.normalize:
                # Sigmoids may all be 0; 1e-20 as DeepSeek-V3
                weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
            if config.scaling != 1:
                weights = weights * config.scaling
            if self.training:
                self.tokens_per_expert = self.tokens_per_expert.to(x.device) + self._count(experts)
            losses = None
            if config.balance_loss or config.z_loss:
                total_tokens = x.shape[0] if total_tokens is None else total_tokens
                losses = self._losses(logits, scores, experts, sequences, first_token, total_tokens)
        return Routed(experts, weights, losses)

    def _scores(self, x: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Returns the logits and the scores."""
        softmax = self.config.scores == "softmax"
        if self.invariant_blocks is None:
            logits = F.linear(x, weight)
            return logits, logits.softmax(-1) if softmax else logits.sigmoid()
        refuse_compiled()
        # One product, on one thread; torch's sigmoid rounds the last elements of each thread in another way
        logits = _ops.block_column_linear(x, weight, None, "", False, None, [1], [0, 0, weight.shape[0]])
        if softmax:
            return logits, _ops.block_softmax(logits[None], False)[0]
        with one_thread():
            return logits, logits.sigmoid()

    def _lse(self, logits: Tensor, scores: Tensor) -> Tensor:
        """Returns the logarithm of the sum of exponentials of each token's logits."""
        if self.invariant_blocks is None:
            return logits.logsumexp(-1)
        # Its gradient is the softmax: as that of torch's function it would depend on the threads
        if self.config.scores != "softmax":
            scores = _ops.block_softmax(logits.detach()[None], False)[0]
        with one_thread():
            value = logits.detach().logsumexp(-1)
        return value + (scores.detach() * (logits - logits.detach())).sum(-1)

    def _choose(self, scores: Tensor) -> Tensor:
        """Returns the chosen experts; by a stable sort, since ties must not depend on other tokens or the device."""
        config, choice = self.config, scores
        if self.e_score_correction_bias is not None:
            choice = choice + self.e_score_correction_bias.to(scores.dtype)
        if config.top_groups < config.num_groups:
            grouped = choice.unflatten(-1, (config.num_groups, -1))  # [T, G, E / G]
            largest = grouped.sort(-1, descending=True).values[..., :2].sum(-1)  # [T, G]
            best = largest.sort(dim=-1, descending=True, stable=True).indices[..., : config.top_groups]
            allowed = torch.zeros_like(largest, dtype=torch.bool).scatter_(-1, best, True)
            # -inf, not 0: with a negative correction bias 0 could win
            choice = grouped.masked_fill(~allowed[..., None], float("-inf")).flatten(-2)
        return choice.sort(dim=-1, descending=True, stable=True).indices[..., : self.top_k].contiguous()

    def _count(self, experts: Tensor) -> Tensor:
        """Returns the number of choices of each expert; integers, which may be added in any order."""
        counts = torch.zeros(self.num_experts, dtype=torch.int64, device=experts.device)
        return counts.scatter_add(0, experts.flatten(), torch.ones_like(experts.flatten()))

    def _losses(
        self, logits: Tensor, scores: Tensor, experts: Tensor, sequences: int, first_token: int, tokens: int
    ) -> RouterLosses:
        """Computes the losses in fp64. Each is a sum over tokens with coefficients that are known to all ranks; a rank
        differentiates its own terms."""
        config, n = self.config, self.num_experts
        zeros = scores.new_zeros(2, dtype=torch.float64)
        # Sigmoids do not sum to 1
        probability = scores if config.scores == "softmax" else scores / scores.sum(-1, keepdim=True)
        squares = self._sum(self._lse(logits, scores).double().square()) if config.z_loss else zeros[1]
        if config.balance_over == "sequence" and config.balance_loss:
            length = tokens // sequences  # of this rank's part of each, under context parallelism
            index = (first_token + torch.arange(experts.shape[0], device=experts.device)) // max(length, 1)
            slots = (index[:, None] * n + experts).flatten()  # [T K], in [0, S E)
            counts = zeros.new_zeros(sequences * n).scatter_add(0, slots, torch.ones_like(slots, dtype=zeros.dtype))
            # The length goes along: over a context group a sequence is the sum of its parts
            counts = torch.cat([self._over_tp(counts), zeros[:1] + length])
            counts = self.data_ranks.sum_over_context(counts)
            # Without tokens the loss is 0, not NaN
            whole = counts[-1].clamp(min=1)
            share = counts[:-1].view(sequences, n) / (whole * self.top_k)  # [S, E]
            balance = n / whole * self._sum(probability.double() * share[index])
            # Ranks that share sequences count them once
            first = self.data_ranks.context.rank == 0 and (self.tp_group.rank == 0 or not self.sequence_parallel)
            sequences_here = sequences if first else 0
            here = [balance.detach(), squares.detach(), zeros[0] + experts.shape[0], zeros[0] + sequences_here]
            known = self._over_all(torch.stack(here))
            everyone, balances = known[2].clamp(min=1), known[3]
            return self._combined(balance / balances, squares / everyone, known[0] / balances, known[1] / everyone)
        sums = probability.double().sum(0)  # [E]
        counted = self._count(experts).double()  # [E]
        tokens_here = zeros[:1] + experts.shape[0]
        # One all-reduce for all terms
        known = self._over_all(torch.cat([counted, sums.detach(), squares.detach()[None], tokens_here]))
        everyone = known[-1].clamp(min=1)
        # f_e of all ranks, a number: only P has a gradient, of this rank's tokens
        factor = n / self.top_k / everyone.square() * known[:n]
        return self._combined(
            (factor * sums).sum(), squares / everyone, (factor * known[n : 2 * n]).sum(), known[-2] / everyone
        )

    def _sum(self, x: Tensor) -> Tensor:
        """Returns the sum of all elements of fp64 numbers."""
        if self.invariant_blocks is None:
            return x.sum()
        with one_thread():
            return x.sum()

    def _combined(self, balance: Tensor, z: Tensor, balance_value: Tensor, z_value: Tensor) -> RouterLosses:
        """Returns losses with these values and the gradients of this rank's terms."""
        config = self.config
        # A later mean over the ranks divides by it
        ranks = self.data_ranks.size if self.gradient_reduction == "mean" else 1
        terms = ranks * (config.balance_loss * balance + config.z_loss * z)
        value = config.balance_loss * balance_value + config.z_loss * z_value
        tokens = self.tp_group.name if self.sequence_parallel else ""
        total = SumWithGradient.apply(value, terms, tokens).to(torch.promote_types(self.weight.dtype, torch.float32))
        return RouterLosses(
            total,
            balance_value.detach() if config.balance_loss else None,
            z_value.detach() if config.z_loss else None,
        )

    def _over_tp(self, x: Tensor) -> Tensor:
        """Returns the sum over the ranks that have other tokens of the same sequences; without a gradient."""
        # Without SP the ranks of group have the same tokens
        return sum_of_constants(x, self.tp_group) if self.sequence_parallel else x

    def _over_all(self, x: Tensor) -> Tensor:
        return self.data_ranks.sum(self._over_tp(x))

    @torch.no_grad()
    def update_correction_bias(self, rate: float) -> None:
        """Adds ``rate`` to the bias of experts that had fewer choices than the mean since the last update, and
        subtracts it from that of experts that had more (Wang et al., "Auxiliary-loss-free load balancing",
        arXiv:2408.15664, algorithm 1). To be called after each optimizer step, by all ranks.

        Communicates: one all-reduce of num_experts numbers over each axis of the data ranks; under SP over ``group``.

        Raises:
            ValueError: the router has no correction bias; ``rate`` is not finite. TypeError: it is no number.
        """
        check_number(rate=rate)
        if self.e_score_correction_bias is None:
            raise ValueError("update_correction_bias: the router must have RouterConfig(correction_bias=True)")
        counts = self._over_all(self.tokens_per_expert.to(self.e_score_correction_bias.device).double())
        # The same counts on all ranks, so the bias stays the same without being sent
        self.e_score_correction_bias += rate * (counts.mean() - counts).sign().to(self.e_score_correction_bias.dtype)
        self.tokens_per_expert = torch.zeros_like(self.tokens_per_expert)

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
        """Moves or casts the layer; the correction bias stays in fp32: a step of 0.001 is less than half precision
        resolves."""
        wide = self.e_score_correction_bias
        super()._apply(fn, recurse)
        if wide is not None and (moved := self.e_score_correction_bias) is not None and moved.itemsize < wide.itemsize:
            self.e_score_correction_bias = wide.to(moved.device)
        return self

    def extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, top_k={self.top_k}, {self.config}"


class SumWithGradient(torch.autograd.Function):
    """``value``, a sum of terms of several ranks, with the gradient of this rank's ``terms``. ``group``: the ranks
    that differentiate the same sum; they add up the gradients of what they share."""

    @staticmethod
    def forward(value: Tensor, terms: Tensor, group: str) -> Tensor:  # group: read by the rule of debug.typecheck
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


@torch.no_grad()
def drop_over_capacity(
    experts: Tensor, weights: Tensor, num_experts: int, factor: float, order: str, ranks: DataAxes
) -> Tensor:
    """Returns ``experts`` ``[tokens, top_k]`` with -1 for the slots over capacity.

    An expert keeps ceil(factor * top_k * T / num_experts) slots of the T tokens on all data ranks: order ``"token"``
    keeps the first tokens of the batch, ``"weight"`` the largest weights, and of equal weights the first tokens. The
    batch has the tokens of data rank 0, 1, .. one after the other, so the same tokens are dropped for every number of
    ranks.

    Communicates, over each axis of the data ranks: one all-gather of num_experts numbers; ``"weight"``: one of experts
    and weights of all tokens, too, for which the host waits for the device.
    """
    tokens, top_k = experts.shape
    flat = experts.flatten()
    one_each = torch.ones_like(flat)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device).scatter_add(0, flat, one_each)
    table = ranks.stack(counts)  # [data ranks, E]
    # Of all tokens: a capacity of this rank's would depend on the number of ranks
    capacity = _capacity(factor, table.sum().double(), num_experts)
    if order == "token":
        # Slots of earlier ranks come first
        position = _positions(flat, num_experts) + table[: ranks.rank].sum(0)[flat]
    else:
        # Every token has top_k choices, so the counts give the number of tokens
        lengths = [n // top_k for n in table.sum(1).tolist()]
        slots = torch.cat([experts.double(), weights.double()], 1)  # [T, 2 K]; experts are exact in fp64
        everyone = ranks.concatenate(slots, lengths)
        all_experts, all_weights = everyone[:, :top_k].long().flatten(), everyone[:, top_k:].flatten()
        # Stable: of equal weights the first token
        by_weight = all_weights.sort(descending=True, stable=True).indices
        all_positions = torch.empty_like(all_experts)
        all_positions[by_weight] = _positions(all_experts[by_weight], num_experts)
        first = sum(lengths[: ranks.rank]) * top_k
        position = all_positions[first : first + tokens * top_k]
    return torch.where(position < capacity, flat, -1).view_as(experts)


def _capacity(factor: float, slots: Tensor, num_experts: int) -> Tensor:
    """Returns the number of slots of an expert, 0-d."""
    # Slots are top_k T: the capacity is ceil(factor top_k T / E)
    return (slots * factor / num_experts).ceil()


def _positions(experts: Tensor, num_experts: int) -> Tensor:
    """Returns the position of each slot among its expert's slots, in their order."""
    order = experts.sort(stable=True).indices
    counts = torch.zeros(num_experts, dtype=torch.int64, device=experts.device)
    counts = counts.scatter_add(0, experts, torch.ones_like(experts))
    starts = counts.cumsum(0) - counts
    position = torch.empty_like(experts)
    position[order] = torch.arange(experts.numel(), device=experts.device) - starts[experts[order]]
    return position


def check_capacity(capacity: float | None, drop_order: str) -> None:
    """Raises unless the arguments of that name are valid."""
    check_number(above=0, or_none=True, capacity=capacity)
    check_choice(DROP_ORDERS, drop_order=drop_order)
