"""Column-parallel and row-parallel linear. Together they form a block with one collective forward, one backward:

::

    x [.., in]  replicated    -> Column: y_local = x @ W_local^T + b_local    [.., out_local]
    y_local                   -> anything elementwise
    y_local     [.., out_local] -> Row:  z = sum over ranks of y_local @ V_local^T, + c   [.., out] replicated

Under sequence parallelism (SP) x and z are sharded on dim 0, the tokens: Column gathers, Row reduce-scatters.

Shoeybi et al., "Megatron-LM" (arXiv:1909.08053), figure 3; Korthikanti et al. (arXiv:2205.05198) for SP.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from tp_ext import _ops
from tp_ext._checks import check_flag, check_int
from tp_ext.group import NOT_GIVEN, Group
from tp_ext.nn.float8 import Float8
from tp_ext.nn.norm import LayerNorm, RMSNorm
from tp_ext.nn.parallel_linear import ParallelLinear, linear_sharding
from tp_ext.random import Init
from tp_ext.sharding import Part, Sharding


# [Note: each layer spells its options out]
class ColumnParallelLinear(ParallelLinear):
    """Linear layer y_local = x W_local^T + b_local with sharded output features.

    Shapes: x ``[.., in]`` replicated (SP: ``[tokens_local, .., in]``) -> y ``[.., out_local]`` (with
    ``gather_output``: ``[.., out]``). weight ``[out_local, in]``, bias ``[out_local]``.

    Communicates: backward, one all-reduce of dx, under the GEMM of dw. SP: forward, one all-gather of x; backward, one
    reduce-scatter of dx and one all-gather of x, each under a GEMM. ``activations="hidden"``: the same, on the last
    dim. ``weight_group``: forward an all-gather of the weight, backward one and a reduce-scatter of its gradient; of
    the bias one of each.

    Args:
        in_features, out_features, bias: as ``nn.Linear``, of the full layer.
        group: process group, 1-D mesh, group name or None (unsharded). Omitting it in a job of several ranks warns.
        parts: the output features as consecutive parts, each sharded on its own (q | k | v, gate | up);
            :class:`Part` or int, their sum ``out_features``.
        unit: without ``parts``, output features that stay together.
        gather_output: returns all output features, in the order of the unsharded layer.
        sequence_parallel: x is sharded on dim 0.
        weight_group: a second group, over which the weight is sharded on its other dim, and the bias once more. Its
            ranks have different rows of a batch (another data axis); the weight is all-gathered for use, the next one
            during the GEMM of the present one, and backward reduce-scatters the gradient, a sum over the ranks.
        activations: ``"hidden"``: x is ``[.., in_local]``, sharded over ``group`` on its last dim as by
            ``torch.tensor_split``; gathered here.
        skip_bias_add: returns ``(y, bias)`` and leaves the addition to the caller.
        grad_accumulation_fusion: backward adds the gradient of the weight to ``weight.main_grad``, in its dtype, by a
            GEMM that accumulates; ``weight.grad`` stays None and hooks on the weight are not called. Where
            ``torch.autograd.grad`` asks for the gradient, as pipeline schedules that split the backward do, it gets
            zeros.
        overlap_chunks: under SP, the number of blocks in which x is all-gathered, each overlapping the GEMM of another;
            for thousands of tokens, see docs/reference/performance.md. A single block is used where operators are
            traced, or where a block would have fewer than 64 tokens.
        reshard_after_forward: False: what ``weight_group`` and ``activations="hidden"`` gather in forward is kept for
            backward, which does not gather it again: less communication, more memory (docs/guide/mesh.md).
        float8: the three products are of 8-bit floating point, by this recipe (:class:`tp_ext.low_precision.Float8`,
            :func:`tp_ext.low_precision.float8`).
        init: initialiser of the weight (:mod:`tp_ext.random`, or a callable on the full tensor); default and bias as
            ``nn.Linear``.

    Raises:
        ValueError: parts that do not make up ``out_features``; ``skip_bias_add`` with ``gather_output``;
            ``grad_accumulation_fusion``, ``overlap_chunks`` or ``float8`` with ``weight_group`` or
            ``activations="hidden"``; ``float8`` with ``grad_accumulation_fusion``.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group = NOT_GIVEN,
        parts: Iterable[Part | int] | None = None,
        unit: int = 1,
        gather_output: bool = False,
        sequence_parallel: bool = False,
        weight_group: Group = None,
        activations: str = "replicated",
        skip_bias_add: bool = False,
        grad_accumulation_fusion: bool = False,
        overlap_chunks: int = 1,
        reshard_after_forward: bool = True,
        float8: Float8 | None = None,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_int(least=1, in_features=in_features, out_features=out_features, overlap_chunks=overlap_chunks)
        check_flag(gather_output=gather_output)
        if skip_bias_add and gather_output:
            raise ValueError(
                "skip_bias_add: True must not be combined with gather_output=True: the bias returned would be a shard"
            )
        sharding = linear_sharding(0, out_features, parts, unit, "out_features")
        super().__init__(
            in_features,
            out_features,
            sharding,
            sharding,
            bias=bias,
            group=group,
            sequence_parallel=sequence_parallel,
            weight_group=weight_group,
            activations=activations,
            skip_bias_add=skip_bias_add,
            grad_accumulation_fusion=grad_accumulation_fusion,
            overlap_chunks=overlap_chunks,
            reshard_after_forward=reshard_after_forward,
            float8=float8,
            init=init,
            device=device,
            dtype=dtype,
        )
        self.gather_output = gather_output

    def forward(self, x: Tensor, total_tokens: int | None = None, *, weight: Tensor | None = None) -> Any:
        """Computes y; returns a tensor, or with ``skip_bias_add`` ``(y, bias)``.

        Args:
            x: ``[.., in]``.
            total_tokens: under SP, the length of dim 0 over all ranks, if p does not divide it.
            weight: used instead of the layer's own, ``[out_local, in]``.
        """
        attributes = self.__dict__  # faster, see operands()
        y, bias = attributes["form"].column(self, x, weight, total_tokens)
        # One rank, too, has padding, which the unsharded layer does not have
        if attributes["gather_output"] and (self.tp_group.size > 1 or self.weight_layout.has_padding):
            y = self.gathered(y)
        return (y, bias) if attributes["skip_bias_add"] else y

    def gathered(self, y: Tensor) -> Tensor:
        """Returns all output features of ``[.., out_local]``, in the order of the unsharded layer."""
        sharding = self.weight_layout[0][0]
        sizes = sharding.local_sizes(self.tp_group.size)
        full = _ops.gather_from_region(y, self.tp_group.name, -1, sizes)
        if len(sharding.parts) == 1 and not sharding.parts[0].has_copies and not self.weight_layout.has_padding:
            return full
        return Sharding(-1, sharding.parts).unshard(full.split(sizes, -1))


class RowParallelLinear(ParallelLinear):
    """Linear layer y = sum over ranks of x_local W_local^T, + b, with sharded input features.

    Shapes: x ``[.., in_local]`` -> y ``[.., out]`` replicated (SP: ``[tokens_local, .., out]``).
    weight ``[out, in_local]``; bias ``[out]``, replicated, added once, after the sum.

    Communicates: forward, one all-reduce of y. SP: forward, one reduce-scatter of y; backward, one all-gather of dy and
    one all-reduce of db. ``activations="hidden"``: a reduce-scatter and an all-gather on the last dim. ``weight_group``
    as :class:`ColumnParallelLinear`.

    Args:
        in_features, out_features, bias: as ``nn.Linear``, of the full layer.
        group, skip_bias_add, grad_accumulation_fusion, float8, init: as :class:`ColumnParallelLinear`.
        parts, unit: as there, for the input features.
        input_is_parallel: x is this rank's slice of the features; False: x is replicated and sliced here.
        sequence_parallel: y is sharded on dim 0.
        weight_group, reshard_after_forward: as there; the output features of the weight are sharded over it.
        activations: ``"hidden"``: y is ``[.., out_local]`` and the bias ``[out_local]``, sharded over ``group`` as by
            ``torch.tensor_split``; y is reduce-scattered here.
        overlap_chunks: the number of blocks in which y is computed and summed, the sum of one overlapping the GEMM of
            the next; under SP also for the all-gather of dy, overlapping the GEMM of dx. Exceptions as
            :class:`ColumnParallelLinear`.

    Raises:
        ValueError: parts that do not make up ``in_features``; ``input_is_parallel=False`` with SP or
            ``activations="hidden"``; options as :class:`ColumnParallelLinear`.
    """

    operator_sums_bias = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        group: Group = NOT_GIVEN,
        parts: Iterable[Part | int] | None = None,
        unit: int = 1,
        input_is_parallel: bool = True,
        sequence_parallel: bool = False,
        weight_group: Group = None,
        activations: str = "replicated",
        skip_bias_add: bool = False,
        grad_accumulation_fusion: bool = False,
        overlap_chunks: int = 1,
        reshard_after_forward: bool = True,
        float8: Float8 | None = None,
        init: Init | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_int(least=1, in_features=in_features, out_features=out_features, overlap_chunks=overlap_chunks)
        check_flag(input_is_parallel=input_is_parallel)
        if not input_is_parallel and (sequence_parallel or activations == "hidden"):
            option = "sequence_parallel=True: the tokens" if sequence_parallel else "activations='hidden': the features"
            raise ValueError(f"input_is_parallel: False must not be combined with {option} are sharded")
        sharding = linear_sharding(1, in_features, parts, unit, "in_features")
        if any(part.has_copies for part in sharding.parts):
            raise ValueError(f"parts: {sharding.parts} must not have copies: the sum would count them twice")
        super().__init__(
            in_features,
            out_features,
            sharding,
            Sharding(0, (out_features,)) if activations == "hidden" else None,
            bias=bias,
            group=group,
            sequence_parallel=sequence_parallel,
            weight_group=weight_group,
            activations=activations,
            skip_bias_add=skip_bias_add,
            grad_accumulation_fusion=grad_accumulation_fusion,
            overlap_chunks=overlap_chunks,
            reshard_after_forward=reshard_after_forward,
            float8=float8,
            init=init,
            device=device,
            dtype=dtype,
        )
        self.input_is_parallel = input_is_parallel

    def forward(
        self,
        x: Tensor,
        total_tokens: int | None = None,
        *,
        weight: Tensor | None = None,
        residual: Tensor | None = None,
        norm: RMSNorm | LayerNorm | None = None,
    ) -> Any:
        """Computes y; returns a tensor, or with ``skip_bias_add`` ``(y, bias)``, or with ``norm``
        ``norm(y, residual)``: the norm of total = y + residual, and total.

        Args:
            x: ``[.., in_local]``.
            total_tokens: accepted as by the column layer; x holds all tokens, so it is only checked.
            weight: used instead of the layer's own, ``[out, in_local]``.
            residual: the residual stream, of y's shape; only with ``norm``.
            norm: the norm of the next sublayer. The bits are those of the two calls; an :class:`RMSNorm` where no
                gradients are recorded, as in decoding, runs in one operator with the all-reduce (without a bias, SP,
                float8, ``overlap_chunks``, ``weight_group``, autocast and :func:`tp_ext.tp_invariant`).

        Raises:
            ValueError: one of ``residual`` and ``norm`` without the other, or with ``skip_bias_add``.
            TypeError: ``norm`` is no norm of this package.
        """
        if residual is not None or norm is not None:
            return self._into_norm(x, total_tokens, weight, residual, norm)
        attributes = self.__dict__  # faster, see operands()
        if not attributes["input_is_parallel"] and (self.tp_group.size > 1 or self.weight_layout.has_padding):
            x = self.scattered(x)
        y = attributes["form"].row(self, x, weight, total_tokens)
        return (y, self.parameter("bias")) if attributes["skip_bias_add"] else y

    def _into_norm(
        self,
        x: Tensor,
        total_tokens: int | None,
        weight: Tensor | None,
        residual: Tensor | None,
        norm: RMSNorm | LayerNorm | None,
    ) -> tuple[Tensor, Tensor]:
        """Returns ``norm(y, residual)``; see :meth:`forward`."""
        residual, norm = checked_ending(residual, norm)
        if self.skip_bias_add:
            raise ValueError("norm: must not be given to a layer with skip_bias_add, whose bias is not in y")
        shape = (*x.shape[:-1], self.out_features)
        if not self.sequence_parallel and self.activations != "hidden" and residual.shape != shape:
            raise ValueError(f"residual: shape {tuple(residual.shape)} must be that of y, {shape}")
        # If y is only the sum of the partial products, one operator can compute the sum, the residual and the norm
        adds_more = self.sequence_parallel or self.bias is not None or self.overlap_chunks > 1
        recorded = torch.is_grad_enabled() or torch.is_autocast_enabled(x.device.type)
        plain = self.input_is_parallel and self.form.sums_products and not (adds_more or recorded)
        if plain and isinstance(norm, RMSNorm) and norm.is_one_kernel():
            return norm.after_sum(self.form.product(self, x, weight), residual, self.tp_group.name)
        return norm(self.forward(x, total_tokens, weight=weight), residual)

    def scattered(self, x: Tensor) -> Tensor:
        """Returns this rank's slice ``[.., in_local]`` of the replicated ``[.., in]``."""
        sharding = self.weight_layout[0][0]
        if x.dim() == 0 or x.shape[-1] != self.in_features:
            raise ValueError(f"x: shape {tuple(x.shape)} must end in in_features = {self.in_features}")
        p = self.tp_group.size
        if len(sharding.parts) > 1 or self.weight_layout.has_padding:  # in rank order, with zeros for padding
            last = Sharding(-1, sharding.parts)
            x = torch.cat([last.shard(x, rank, p) for rank in range(p)], -1)
        return _ops.scatter_to_region(x, self.tp_group.name, -1, sharding.local_sizes(p))


def into_norm(
    row: nn.Module,
    x: Tensor,
    total_tokens: int | None,
    residual: Tensor | None,
    norm: RMSNorm | LayerNorm | None,
) -> Any:
    """Returns row(x), or with ``residual`` and ``norm`` ``norm(row(x), residual)``; row: a :class:`RowParallelLinear`,
    or what has replaced it (LoRA)."""
    if residual is None and norm is None:
        return row(x, total_tokens)
    if isinstance(row, RowParallelLinear):
        return row(x, total_tokens, residual=residual, norm=norm)
    residual, norm = checked_ending(residual, norm)
    return norm(row(x, total_tokens), residual)


def checked_ending(residual: Tensor | None, norm: RMSNorm | LayerNorm | None) -> tuple[Tensor, RMSNorm | LayerNorm]:
    if residual is None or norm is None:
        missing, other = ("norm", "residual") if norm is None else ("residual", "norm")
        raise ValueError(f"{missing}: None must be given with {other}")
    if not isinstance(norm, RMSNorm | LayerNorm):
        raise TypeError(f"norm: {norm!r} must be an RMSNorm or LayerNorm of tp_ext")
    return residual, norm
